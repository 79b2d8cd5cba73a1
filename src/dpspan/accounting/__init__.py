"""What a run costs, and the books: events, ε, the ledger and the certificate."""

import lazy_loader

# As in 0.1, where this room was a module.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"promises": ["Budget"], "calibration": ["calibrate"]}
)
