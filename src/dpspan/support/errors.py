"""The errors dpspan raises; every message names the thing and says what to do."""


class DPSpanError(Exception):
    """Base of all errors that dpspan defines."""


class BudgetExceeded(DPSpanError):
    """A release was refused because it would spend more than the privacy budget."""


class CaptureError(DPSpanError, RuntimeError):
    """Per-sample gradients could not be recorded exactly, so nothing is released."""


class UnsupportedModule(DPSpanError, ValueError):
    """A module mixes samples or otherwise cannot be trained privately as it is."""
