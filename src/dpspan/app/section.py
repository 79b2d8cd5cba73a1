"""A section of a configuration file: frozen, strict, and with no key that nobody reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

import dpspan
from dpspan.support.checks import near


class Section(BaseModel):
    """Base of all sections. Values are taken as they are written: '3' is not a number."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        """Before anything else: a misspelt key is why another one is missing."""
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                raise PydanticCustomError(
                    "unknown_key",
                    "Unknown key{hint}. Allowed here: {allowed}.",
                    {
                        "key": str(key),
                        "hint": near(str(key), cls.model_fields),
                        "allowed": ", ".join(cls.model_fields),
                    },
                )
        return values


class BuiltSection(Section):
    """Keys that are arguments of something public in dpspan: `XSection` builds `dpspan.X`.

    It is imported when it is built: a mistake in a configuration does not wait for torch. So keys
    and defaults are stated here once more; a test compares them with the original.
    """

    def arguments(self) -> dict[str, Any]:
        """The keys with their values, without the name that chose the section."""
        return {key: getattr(self, key) for key in type(self).model_fields if key != "name"}

    def built(self, **more: Any) -> Any:
        """What the section describes, with more arguments, or others."""
        original = getattr(dpspan, type(self).__name__.removesuffix("Section"))
        return original(**{**self.arguments(), **more})


# YAML has lists and texts only; strict sections would refuse them.
File = Annotated[Path, Field(strict=False)]
Texts = Annotated[tuple[str, ...], Field(strict=False)]
Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)]
Numbers = Annotated[tuple[float, ...], Field(strict=False)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
