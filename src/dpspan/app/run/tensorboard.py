"""Metrics for TensorBoard (the extra `tensorboard`): the same numbers as in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class Scalars:
    """Writes the numbers of a line of metrics; after the ledger, like everything else."""

    def __init__(self, folder: Path) -> None:
        if find_spec("tensorboard") is None:
            raise ModuleNotFoundError(
                "output.tensorboard needs the package tensorboard: pip install "
                "'dpspan[tensorboard]', or set it to false."
            )
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, line: Mapping[str, Any]) -> None:
        """Everything but the step itself, and not when: steps take longer with more records."""
        for name, value in line.items():
            if name != "step":
                self._writer.add_scalar(name, value, line["step"], walltime=0.0)
        self._writer.flush()

    def close(self) -> None:
        """Let go of the file."""
        self._writer.close()
