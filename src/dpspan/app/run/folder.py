"""The folder of a run; docs/run-folder.md describes every file.

What is *released* is what has left the process: a checkpoint, a line of metrics, a model, be it a
file half written by a process that was killed. Steps that only ever were in the memory of a
process that died were seen by nobody, and cost nothing.

The rule that follows: `ledger.json` is on the disk first. It names at least the steps behind
everything else in the folder, at every moment. A run that goes on starts from the checkpoint's
weights and from the ledger's record; where the record is longer, those steps stay charged.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from dpspan.accounting.certificate import write_certificate
from dpspan.accounting.ledger import Ledger, steps_beyond
from dpspan.accounting.promises import Budget
from dpspan.app.config import ReportSection
from dpspan.app.preprocessing import Preprocessing
from dpspan.app.run.task import FixedNoise
from dpspan.engine.checkpoint import load_file
from dpspan.support.files import locked, replacing
from dpspan.support.moved import without_retired_options
from dpspan.support.strict_json import plain

FORMAT, VERSION = "dpspan.run", 2  # 0.1's run.json, which has neither, is version 1
CHECKPOINT = {"engine", "module", "optimizer", "checkpoint_dict"}
ANEW = "Restore it, or train anew in another folder."
_REFUSED = object()  # what a missing file is, unless it stands for something


def is_comparison(path: Path) -> bool:
    """Whether a comparison has begun there; a run of it may be half written."""
    runs = path.glob("*/seed-*/run.json")  # some may be of `train`, which leaves a config.yaml
    compared = any(not run.with_name("config.yaml").exists() for run in runs)
    return compared or any(path.glob("*/.seed-*")) or (path / "comparison.json").exists()


class RunFolder:
    """Names and writes the files of one run; of several processes one `writes`."""

    def __init__(self, path: str | Path, *, writes: bool = True) -> None:
        self.path, self.writes = (path := Path(path)), writes
        self.config, self.run = path / "config.yaml", path / "run.json"
        self.ledger, self.certificate = path / "ledger.json", path / "certificate.json"
        self.choice, self.audit = path / "choice.json", path / "audit.json"
        self.metrics, self.diagnostics = path / "metrics.jsonl", path / "diagnostics.jsonl"
        self.checkpoint, self.model = path / "checkpoint.safetensors", path / "model.safetensors"
        self.features, self.evaluation = path / "features.safetensors", path / "evaluation.json"
        self.preprocessing, self.about = path / "preprocessing.json", path / "about.json"

    @property
    def is_run(self) -> bool:
        return any(path.exists() for path in (self.config, self.checkpoint, self.model))

    @property
    def certified(self) -> bool:
        """Whether something is here that a choice made now would be missing from."""
        files = (self.checkpoint, self.metrics, self.certificate, self.model)
        return any(path.exists() for path in files)

    @property
    def facts(self) -> dict[str, Any] | None:
        """`run.json`: None before the run, and in the folder that 0.1's `train` left."""
        facts: dict[str, Any] | None = read_json(self.run, None)
        version = 1 if facts is None else facts.get("version", 1)
        if version not in (1, VERSION):
            known = f"version {version} of the folder; this one knows {VERSION}"
            cure = "Go on with that one, or choose another folder"
            raise ValueError(f"{self.path} was written by another dpspan ({known}). {cure}.")
        return facts

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train; 0.1 wrote a run.json at the end only."""
        facts = self.facts
        return facts is not None and facts.get("status", "finished") is not None

    @property
    def untrained(self) -> bool:
        """Whether no private step is behind the checkpoint, nor after it: a choice at the most."""
        if self.metrics.exists() or self.model.exists():
            return False
        try:
            engine = load_file(self.checkpoint, CHECKPOINT)["engine"]
            lost = steps_beyond(engine["ledger"], read_json(self.ledger))
        except (ValueError, OSError):  # damaged, or lost: nobody knows
            return False
        return lost == 0 and engine["loader"]["epoch"] == engine["loader"]["position"] == 0

    @property
    def kept_features(self) -> Path:
        """The frozen layer of a run that has begun; an error if it was lost."""
        if not self.features.exists():
            lost = f"{self.features} is missing, without which the model means nothing"
            raise FileNotFoundError(f"{lost}. {ANEW}")
        return self.features

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One run at a time; ValueError, and nothing touched, in a comparison's folder."""
        with locked(self.path) if self.writes else contextlib.nullcontext():
            if is_comparison(self.path):
                held = f"{self.path} holds a comparison, whose certificate would be replaced"
                raise ValueError(f"{held}. Choose another output folder.")
            yield

    def begin_anew(self) -> None:
        """Remove a checkpoint of public things only; ValueError if there is more behind it."""
        if not self.untrained:
            cure = "Go on with it by --resume (resume=True), or choose another output folder"
            raise ValueError(f"{self.path} holds a run already. {cure}.")
        self.remove(self.certificate, self.checkpoint, self.run)  # the ledger stays

    def remove(self, *paths: Path) -> None:
        for path in paths if self.writes else ():
            path.unlink(missing_ok=True)

    def read_checkpoint(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """None if there is none; ValueError if it is of a run with other settings."""
        if not self.checkpoint.exists():
            return None
        saved, facts = load_file(self.checkpoint, CHECKPOINT), self.facts
        there = saved["checkpoint_dict"]["config"] if facts is None else facts["settings"]
        self.refuse_other_settings(settings, there)
        return saved

    def refuse_other_settings(self, here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
        """ValueError unless the run that is here has these settings."""
        method = there.get("method")
        if isinstance(method, Mapping):  # 0.1 wrote down options that are gone
            there = {**there, "method": without_retired_options(method)}
        # Some stand there only where they are used, so one that is missing here tells as much.
        key = next((key for key in {**here, **there} if there.get(key) != here.get(key)), None)
        if key is not None:
            raise ValueError(
                f"{self.path} holds a run with other settings ({key} is {there.get(key)!r} there, "
                f"{here.get(key)!r} here). {self.way_out}"
            )

    @property
    def way_out(self) -> str:
        """What to do about a run that does not fit the one that is here."""
        if self.untrained:
            return "No private step was taken yet: train without --resume to begin anew."
        return "Put them back, or choose another folder: what was released stays released."

    def refuse_lost_ledger(self) -> None:
        """ValueError if something is here that was paid for, and the record of its price is not."""
        if not self.ledger.exists() and (self.certified or self.choice.exists()):
            unknown = f"nobody knows what the other files in {self.path} have cost"
            raise ValueError(f"{self.ledger} is missing, so {unknown}. {ANEW}")

    def open_ledger(
        self,
        accountant: str,
        budget: Budget | FixedNoise | None,
        paid: Mapping[str, Any] | None = None,
    ) -> Ledger:
        """With what was spent before the run, here or as `paid`; one that goes on loads later."""
        self.refuse_lost_ledger()
        ledger = Ledger(accountant=accountant)
        spent = read_json(self.ledger, paid)
        if spent is not None and not self.checkpoint.exists():
            ledger.load_state_dict(spent)
        ledger.budget = budget if isinstance(budget, Budget) else None
        return ledger

    def write_ledger(self, ledger: Ledger) -> None:
        """The record so far; ValueError if the one on the disk tells more."""
        if (
            self.writes
            and self.ledger.exists()
            and not ledger.covers(Ledger.from_state(read_json(self.ledger)))
        ):
            kept = "tells of releases that this process does not know, and is kept"
            raise ValueError(f"{self.ledger} {kept}. Train in another folder.")
        self.write_json(self.ledger, ledger.state_dict())

    def warn(self, message: str) -> None:
        """Put a warning on record, before training or after: the ledger first; runs may go on."""
        self.refuse_lost_ledger()
        if not self.ledger.exists():
            self.write_json(self.ledger, Ledger().state_dict())
        for path in filter(Path.exists, (self.ledger, self.certificate)):
            document = read_json(path)
            if message not in document["warnings"]:
                document["warnings"].append(message)
                self.write_json(path, document)

    def write_certificate(self, document: Mapping[str, Any]) -> None:
        """With what an audit of the same settings and the same noise has measured."""
        found = read_json(self.audit, {}).get("canaries")
        if found is not None and found["of"] == identity(document):
            document = {**document, "audit": found}
        if self.writes:
            write_certificate(self.certificate, document)

    def write_audit(self, **found: Any) -> None:
        """Beside what other audits found; on the certificate too, if there is one."""
        self.write_json(self.audit, plain({**read_json(self.audit, {}), **found}))
        if self.certificate.exists():
            self.write_certificate(read_json(self.certificate))

    def keep_columns(self, columns: Preprocessing | None) -> None:
        if columns is not None:
            self.write_json(self.preprocessing, columns.document())

    def write_about(self, report: ReportSection | None) -> None:
        """What the report tells about a run, besides what happened."""
        if report is not None:
            self.write_json(self.about, report.model_dump(exclude_none=True))

    def write_facts(self, **facts: Any) -> None:
        """`run.json`; `status` is None until the run has ended."""
        self.write_json(self.run, {"format": FORMAT, "version": VERSION, **facts})

    def write_json(self, path: Path, document: Mapping[str, Any]) -> None:
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
        self.write_text(path, text + "\n")

    def write_text(self, path: Path, text: str) -> None:
        """Whole or not at all, and on the disk when this returns."""
        if not self.writes:
            return
        with replacing(path, what=f"the file {path.name}") as temporary:
            temporary.write_text(text, encoding="utf-8")

    def write_model(self, model: nn.Module) -> None:
        if not self.writes:
            return
        with replacing(self.model, what="the model") as temporary:
            safetensors.torch.save_model(model, str(temporary))

    def append(self, path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
        if not lines or not self.writes:
            return
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(_text(lines))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(f"Cannot write to {path}: {error.strerror or error}.") from error

    def keep_until(self, path: Path, step: int) -> None:
        """Take off lines of later steps, and a last one that was not finished."""
        self.write_text(path, _text([line for line in read_lines(path) if line["step"] <= step]))


def identity(certificate: Mapping[str, Any]) -> list[Any]:
    """What an audit must have in common with a run to be about it."""
    digests, training = certificate.get("digests") or {}, certificate.get("training", {})
    return [digests.get("configuration"), training.get("noise_multiplier")]


def _text(lines: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(plain(line), ensure_ascii=False) + "\n" for line in lines)


def read_json(path: Path, missing: Any = _REFUSED) -> Any:
    """The document in a file, or what stands for a `missing` one; ValueError if it holds none."""
    if missing is not _REFUSED and not path.exists():
        return missing
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path} is damaged: it is not JSON. Restore it from a copy.") from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of JSON in a file, without a last one that was not finished."""
    read: list[dict[str, Any]] = []
    with contextlib.suppress(ValueError, FileNotFoundError):
        read.extend(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    return read
