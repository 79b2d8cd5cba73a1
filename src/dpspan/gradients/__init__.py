"""Per-sample gradients as an operator: captured once, never materialised where that costs more."""

import lazy_loader

# As in 0.1, where this room was a module.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"operator": ["PerSampleGradients"]}
)
