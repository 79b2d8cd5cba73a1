"""A section of a configuration file: frozen, strict, and with no key that nobody reads."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Base of all sections. Values are taken as they are written: '3' is no number."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        """Before anything else: a misspelt key is why another one is missing."""
        if not isinstance(values, dict):
            return values
        allowed = [field.alias or name for name, field in cls.model_fields.items()]
        for key in values:
            if key in allowed:
                continue
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise PydanticCustomError(
                "unknown_key",
                "Unknown key{hint}. Allowed here: {allowed}.",
                {"key": str(key), "hint": hint, "allowed": ", ".join(allowed)},
            )
        return values


# YAML has lists and texts only; strict sections would refuse them.
File = Annotated[Path, Field(strict=False)]
Texts = Annotated[tuple[str, ...], Field(strict=False)]
Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)]
Numbers = Annotated[tuple[float, ...], Field(strict=False)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
