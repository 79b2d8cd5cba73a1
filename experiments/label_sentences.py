"""A linear head that starts at what sentences say that describe the classes, for no ε.

z_c   class c's sentences, encoded and prepared as a record is, on average (`sentences`)
θ_0 = s(z_1/‖z_1‖ − z_0/‖z_0‖)   the second class against the first, and no constant
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpspan.app.section import Numbers, Section, Texts
from dpspan.convex import GradientDescent, NoisyAdaGrad
from dpspan.convex.fitting import Fit
from experiments.tables import Split

LABELS_ONLY = "label sentences only"


class LabelsSection(Section):
    """The wordings, of which the search takes one for all, and the scales s that it begins with."""

    wordings: Texts
    scales: Numbers


def direction(folder: Path, table: str, wording: str, split: Split) -> np.ndarray:
    """θ_0 / s without its constant, (p,)."""
    with np.load(folder / f"{table}.npz") as file:
        encoded = file[f"labels_{wording}"].astype(float)
    classes = [split.preparation.apply(each).mean(0) for each in encoded]
    first, second = (each / np.linalg.norm(each) for each in classes)
    return np.asarray(second - first)


@dataclass(frozen=True, kw_only=True)
class DescentFrom(GradientDescent):
    """Gradient descent from a public point."""

    weights: Any

    def minimise(self, fit: Fit) -> np.ndarray:
        """From there instead of from zero."""
        return super().minimise(replace(fit, start=np.append(self.weights, 0.0)))


@dataclass(frozen=True, kw_only=True)
class AdaGradFrom(NoisyAdaGrad):
    """Noisy AdaGrad from a public point."""

    weights: Any

    def minimise(self, fit: Fit) -> np.ndarray:
        """From there instead of from zero."""
        return super().minimise(replace(fit, start=np.append(self.weights, 0.0)))


STARTED = {"DP-GD, label sentences": DescentFrom, "AdaGrad, label sentences": AdaGradFrom}
