"""What an audit of a step found: checks with what was measured and what was declared."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dpspan.support.strict_json import plain

# A sound step is accused by a check about once in a million audits.
RARE = 1e-6


@dataclass(frozen=True)
class Check:
    """One thing that was measured. `part` is 'sensitivity', 'noise' or 'sampler'."""

    part: str
    name: str
    measured: float
    declared: str
    passed: bool

    def __str__(self) -> str:
        told = f"{self.part:<11} {self.name}: {self.measured:.4g} (declared: {self.declared})"
        return f"{'ok  ' if self.passed else 'FAIL'} {told}"


@dataclass(frozen=True, kw_only=True)
class StepAudit:
    """The outcome of `audit_step`. A bug that is found is certain; none found proves nothing.

    Whether a check passed may depend on private records: this is for the operator to read.
    """

    checks: tuple[Check, ...]
    notes: tuple[str, ...]  # what could not be looked at

    @property
    def passed(self) -> bool:
        return not self.findings

    @property
    def findings(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)

    def describe(self) -> dict[str, Any]:
        """As plain data, None for what is not finite; tagged as not private."""
        checks = [plain(asdict(check)) for check in self.checks]
        return {"passed": self.passed, "checks": checks, "notes": [*self.notes], "unprivate": True}

    def __str__(self) -> str:
        return "\n".join([*map(str, self.checks), *(f"note {note}" for note in self.notes)])


def rare(law: Any, value: float, among: int = 1) -> bool:
    """Whether a number of this law, the most extreme of so many, is as extreme too seldom."""
    tail = min(law.sf(np.nextafter(value, -np.inf)), law.cdf(value))  # itself counts on both sides
    return not math.isfinite(value) or bool(2 * tail * among < RARE)
