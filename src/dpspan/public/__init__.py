"""Public data: what is declared public, its gradients, warm starts, and layers learnt from it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "data": ["PublicData"],
        "gradients": ["PublicGradients", "RandomLabels", "RealLabels"],
        "warm_start": ["WarmStart"],
    },
)
