"""Values for JSON as the standard has it."""

import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """The value with null for what is not finite: strict JSON has no word for that."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
