"""What a run costs, and the books: events, ε, the ledger and the certificate."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "calibration": ["calibrate", "calibrate_event"],
        "epsilon": ["Budget", "account"],
        "ledger": ["Ledger"],
        "certificate": ["certificate", "write_certificate"],
    },
)
