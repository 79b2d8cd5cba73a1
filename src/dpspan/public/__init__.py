"""Public data: what is declared public, its gradients, warm starts, and layers learnt from it."""

import lazy_loader

# As in 0.1, where this room was a module.
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs={"data": ["PublicData"]})
