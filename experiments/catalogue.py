"""The experiments by name: their YAML files, checked by the schema of their kind."""

from __future__ import annotations

from pathlib import Path

import yaml

from dpspan.app.section import parse
from experiments.dimension import DimensionExperiment
from experiments.distances import ChoosingExperiment
from experiments.image_regimes import ImageRegimesExperiment
from experiments.pate_table import PateExperiment
from experiments.regimes import RegimesExperiment
from experiments.schema import TrainingExperiment
from experiments.spectra import SpectraExperiment
from experiments.tables import TablesExperiment

FOLDER = Path(__file__).parent

Experiment = (
    TrainingExperiment
    | ChoosingExperiment
    | TablesExperiment
    | DimensionExperiment
    | SpectraExperiment
    | RegimesExperiment
    | ImageRegimesExperiment
    | PateExperiment
)
KINDS: dict[str, type[Experiment]] = {
    "training": TrainingExperiment,
    "choosing": ChoosingExperiment,
    "tables": TablesExperiment,
    "dimension": DimensionExperiment,
    "spectra": SpectraExperiment,
    "regimes": RegimesExperiment,
    "image regimes": ImageRegimesExperiment,
    "pate": PateExperiment,
}


def names() -> list[str]:
    """Of all experiments."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Experiment:
    """The experiment in NAME.yaml; ConfigError, with lines, if it cannot be used."""
    path = FOLDER / f"{name}.yaml"
    text = path.read_text(encoding="utf-8")
    kind = (yaml.safe_load(text) or {}).get("kind", "training")
    return parse(text, KINDS.get(kind, TrainingExperiment), name=str(path))
