"""What a run costs, and the books: events, ε, the ledger and the certificate."""

import lazy_loader

# `dpspan.accounting` was one module in 0.1; its public names are still found here.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={"calibration": ["calibrate"], "epsilon": ["Budget", "Spending", "account"]},
)
