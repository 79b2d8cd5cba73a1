"""The front door: one private run, its sampling, its step and its checkpoints."""

import lazy_loader

# As in 0.1, where this room was a module.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"engine": ["PrivacyEngine"]}
)
