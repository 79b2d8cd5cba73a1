"""The folder of a run: its files, and the order in which they may be written.

What is *released* is what has left the process: a checkpoint, a line of metrics, a model, be it a
file half written by a process that was killed. Steps that only ever were in the memory of a
process that died were seen by nobody, and cost nothing.

The rule that follows: `ledger.json` is on the disk first. It names at least the steps behind
everything else in the folder, at every moment. A run that goes on starts from the checkpoint's
weights and from the ledger's record. Where the record is longer, the process died on the way from
the one to the other, somebody may have seen what it was writing, and those steps stay charged.
Noise and batches are drawn afresh by every process (their generators are never saved), so a step
that is taken again is another release, and is charged as one.

Two copies of a folder that both go on are two runs: add their ε.

A folder is of a run or of a comparison, never of both: each has a `certificate.json` of its own,
and would replace the other's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
from filelock import FileLock, Timeout
from torch import nn

from dpspan.accounting.ledger import Ledger
from dpspan.support.files import replacing
from dpspan.support.strict_json import plain


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time: two would each leave out the other's releases.

    The lock ends with the process, however that ends.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / ".lock")
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RuntimeError(
            f"Another process is training in {path}. Wait for it, or choose another folder."
        ) from error
    except OSError as error:
        raise OSError(
            f"Cannot write to the folder {path}: {error.strerror or error}. Choose another output "
            "folder."
        ) from error
    try:
        for left_behind in path.glob(".*.tmp"):
            left_behind.unlink()
        yield
    finally:
        lock.release()


def is_comparison(path: Path) -> bool:
    """Whether a comparison has begun there; a run of it may be half written."""
    runs = (*path.glob("*/seed-*/run.json"), *path.glob("*/.seed-*"))
    return bool(runs) or (path / "comparison.json").exists()


class RunFolder:
    """Names and writes the files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.ledger = self.path / "ledger.json"
        self.choice = self.path / "choice.json"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.metrics = self.path / "metrics.jsonl"
        self.diagnostics = self.path / "diagnostics.jsonl"
        self.certificate = self.path / "certificate.json"
        self.model = self.path / "model.safetensors"
        self.features = self.path / "features.safetensors"
        self.audit = self.path / "audit.json"

    @property
    def is_run(self) -> bool:
        """Whether a run has begun here."""
        return any(path.exists() for path in (self.config, self.checkpoint, self.model))

    @property
    def certified(self) -> bool:
        """Whether something is here that a choice made now would be missing from."""
        files = (self.checkpoint, self.metrics, self.certificate, self.model)
        return any(path.exists() for path in files)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; ValueError, and nothing touched, in a comparison's folder."""
        with locked(self.path):
            if is_comparison(self.path):
                raise ValueError(
                    f"{self.path} holds a comparison, whose certificate would be replaced. Choose "
                    "another output folder."
                )
            yield

    def refuse_lost_ledger(self) -> None:
        """ValueError if something is here that was paid for, and the record of its price is not."""
        if not self.ledger.exists() and (self.certified or self.choice.exists()):
            raise ValueError(
                f"{self.ledger} is missing, so nobody knows what the other files in {self.path} "
                "have cost. Restore it, or train anew in another folder."
            )

    def write_ledger(self, ledger: Ledger) -> None:
        """The record so far; ValueError if the one on the disk tells more."""
        if self.ledger.exists() and not ledger.covers(Ledger.from_state(read_json(self.ledger))):
            raise ValueError(
                f"{self.ledger} tells of releases that this process does not know, and is kept. "
                "Train in another folder."
            )
        self.write_json(self.ledger, ledger.state_dict())

    def write_json(self, path: Path, document: Mapping[str, Any]) -> None:
        """Whole or not at all, and on the disk when this returns."""
        self.write_text(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, path: Path, text: str) -> None:
        """Likewise."""
        with replacing(path, what=f"the file {path.name}") as temporary:
            temporary.write_text(text, encoding="utf-8")

    def warn(self, message: str) -> None:
        """Put a warning on record, before training or after: the ledger first; runs may go on."""
        self.refuse_lost_ledger()
        if not self.ledger.exists():
            self.write_json(self.ledger, Ledger().state_dict())
        for path in (self.ledger, self.certificate):
            document = read_json(path) if path.exists() else None
            if document is not None and message not in document["warnings"]:
                self.write_json(path, {**document, "warnings": [*document["warnings"], message]})

    def kept_features(self, wanted: bool) -> Path | None:
        """The layer of a run that has begun; None if it has none, an error if it was lost."""
        if not wanted:
            return None
        if not self.features.exists():
            raise FileNotFoundError(
                f"{self.features} is missing, without which the model means nothing. Restore it, "
                "or train anew in another folder."
            )
        return self.features

    def write_model(self, model: nn.Module) -> None:
        """The weights, for any program that reads safetensors."""
        with replacing(self.model, what="the model") as temporary:
            safetensors.torch.save_model(model, str(temporary))

    def append(self, path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add lines of JSON."""
        if not lines:
            return
        text = "".join(json.dumps(plain(line), ensure_ascii=False) + "\n" for line in lines)
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(f"Cannot write to {path}: {error.strerror or error}.") from error

    def keep_until(self, path: Path, step: int) -> None:
        """Take off lines of later steps, and a last one that was not finished."""
        kept = [line for line in read_lines(path) if line["step"] <= step]
        self.write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))


def read_json(path: Path) -> Any:
    """The document in a file; ValueError if it holds none."""
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path} is damaged: it is no JSON. Restore it from a copy.") from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of JSON in a file, without a last one that was not finished."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    read = []
    for line in lines:
        try:
            read.append(json.loads(line))
        except ValueError:
            break
    return read
