"""What all frameworks share: the settings, and a private run inside somebody else's loop.

A framework's loop takes one optimizer step for each batch that it counts. So it counts steps, and
the records are drawn when a step is taken: as many pieces as the draw needs, none ahead of its
time. What was released is in `ledger.json`, step by step, since callbacks may look at the model
after any of them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from dpspan.accounting.calibration import calibrate_event
from dpspan.accounting.certificate import write_certificate
from dpspan.accounting.ledger import Ledger, steps_beyond
from dpspan.accounting.promises import Budget, warn_of_weaknesses, weaknesses
from dpspan.engine.checkpoint import load_file, save_file
from dpspan.engine.engine import PrivacyEngine
from dpspan.engine.plan import plan_sampling, units_of
from dpspan.mechanisms import DPSGD, Method
from dpspan.public.data import PublicData
from dpspan.public.overlap import refuse_overlap
from dpspan.support.errors import BudgetExceeded
from dpspan.support.files import locked, replacing
from dpspan.support.processes import refuse_several_processes
from dpspan.support.units import RECORDS_PER_UNIT, Ids

_STATE, _KEYS = "privacy.safetensors", {"format", "run", "ledger", "loader", "mechanism"}
_PUBLIC_NAMES = ("learning_rate", "epoch", "epsilon")  # of what a loop logs while it trains
_LOST = (
    "{} steps were charged that the model was not trained by: the process ended before the next "
    "checkpoint"
)
_UNCOMPARED = (
    "evaluation data were declared public that could not be read before training: nobody compared "
    "them with the private records"
)
_LOOKED = "results on evaluation data not declared public were logged"


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """What makes a framework's training private.

    Args:
        epsilon: of the whole training, which never spends more.
        delta: well below 1 / number of records.
        method: how a step uses the gradients; DP-SGD by default.
        records: about how many private records there are, as a public number: the sampling rate is
            batch size / records. Without it the exact number is used, and certificates tell it.
            With `unit`, about how many units.
        unit: one id for each record of the training data, or a function of a record, where a person
            may have several; then all records of one id are protected together.
        records_per_unit: most records of one unit in a step.
        eval_is_public: declares that evaluation data are nobody's secret; copies of private records
            among them are refused. Otherwise every number measured on them is logged as
            `unprivate_…`, and nothing may be chosen by it.
        unprivate_metrics: log what is measured on private batches, as `unprivate_…`; never publish
            that. Otherwise it is logged nowhere.
        criterion: the loss of public samples, for methods that use their gradients.
        accountant: "pld" or "rdp".
        secure_mode: as for `PrivacyEngine`.
    """

    epsilon: float
    delta: float
    method: Method = field(default_factory=DPSGD)
    records: int | None = None
    unit: Ids | None = None
    records_per_unit: int = RECORDS_PER_UNIT
    eval_is_public: bool = False
    unprivate_metrics: bool = False
    criterion: nn.Module | None = None
    accountant: str = "pld"
    secure_mode: bool = False

    def logged_as(self, name: str, *, evaluating: bool) -> str | None:
        """The name under which a number may be logged; None if it may not."""
        if name in _PUBLIC_NAMES or (evaluating and self.eval_is_public):
            return name
        return f"unprivate_{name}" if evaluating or self.unprivate_metrics else None


def refuse(who: str, problems: Iterable[str]) -> None:
    """ValueError if there are any; each says what to do instead."""
    if said := [f"\n  - {problem}." for problem in problems]:
        raise ValueError(f"{who} cannot train privately like this:{''.join(said)}")


def _readable(evaluation: Mapping[str, Any]) -> list[PublicData]:
    """What can be read as samples, and so be compared; a stream may never end."""
    found = []
    for name, loader in evaluation.items():
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            with suppress(TypeError, ValueError):
                found.append(PublicData.of(loader, name=name))
    return found


class PrivateFit:
    """One private run, from its first step, or from where `saved` ends, to its last."""

    def __init__(self, privacy: Privacy, folder: Path, optimizer: Optimizer) -> None:
        self.privacy, self._optimizer, self.over = privacy, optimizer, False
        self.engine = PrivacyEngine(accountant=privacy.accountant, secure_mode=privacy.secure_mode)
        self._ledger_file, self._written = folder / "ledger.json", (-1, 0)
        self._loader: Any = None
        self._running: Any = None  # a generator
        self._stack = ExitStack()

    @classmethod
    def begun(
        cls,
        privacy: Privacy,
        folder: Path,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        loader: DataLoader[Any],
        physical: int | None,
        steps: Callable[[int], float],
        clip: float | None = None,
        saved: Mapping[str, Any] | None = None,
        evaluation: Mapping[str, Any] = MappingProxyType({}),  # loaders
    ) -> Self:
        """`steps` tells how many there will be, from how many there are in an epoch."""
        refuse_several_processes()
        size, rate = float(loader.batch_size or 0), None
        if privacy.records is not None:
            rate = min(1.0, size / privacy.records)
        units = units_of(privacy.unit, privacy.records_per_unit, loader)
        sampling = plan_sampling(loader, True, rate, units)
        total = int(steps(sampling.steps_per_epoch))
        budget = Budget(epsilon=privacy.epsilon, delta=privacy.delta)
        promise = (privacy.delta, privacy.records or sampling.records)
        what = "unit" if units else "record"
        warn_of_weaknesses(privacy.epsilon, *promise, unit=what)
        public = _readable(evaluation) if privacy.eval_is_public else []
        refuse_overlap(loader, public, units)
        fit = cls(privacy, folder, optimizer)
        engine = fit.engine
        with ExitStack() as stack:
            stack.enter_context(locked(folder))
            record = fit._record(saved)
            z = None if saved is None else saved["run"]["noise_multiplier"]
            if z is None:
                z = calibrate_event(sampling.event, total, budget, accountant=privacy.accountant)
            *_, fit._loader = engine.make_private(
                module=module,
                optimizer=optimizer,
                data_loader=loader,
                noise_multiplier=z,
                method=privacy.method,
                max_grad_norm=clip,
                criterion=privacy.criterion,
                sample_rate=rate,
                expected_batch_size=None if rate is None else size,
                max_physical_batch_size=physical,
                unit=units,
            )
            stack.callback(engine.detach)
            engine.ledger.budget = budget
            if saved is None:
                engine.ledger.reserve(engine.plan.event, total)
            else:
                engine.load_state_dict({**saved, "ledger": record})
                if lost := steps_beyond(saved["ledger"], record):
                    engine.ledger.warn(_LOST.format(lost))
            engine.ledger.warn(*weaknesses(None, *promise, unit=what))
            fit._note(public, complete=0 < len(public) == len(evaluation))
            fit._running = iter(fit._loader)
            stack.callback(optimizer.register_step_post_hook(lambda *_: fit.write_ledger()).remove)
            fit.write_ledger()
            fit._stack = stack.pop_all()
        return fit

    def _note(self, public: Iterable[PublicData], *, complete: bool) -> None:
        """Put what is looked at on record, and whether all that was declared public is known."""
        if self.privacy.unprivate_metrics:
            self.engine.note_unprivate("what was measured on private batches was logged")
        for each in public:
            self.engine.ledger.declare_public(each.name, each.digest, each.count, "measured on")
        if self.privacy.eval_is_public and not complete:
            self.engine.ledger.warn(_UNCOMPARED)

    def _record(self, saved: Mapping[str, Any] | None) -> Any:
        """What the folder says was released: nothing yet, or all that is behind what was saved."""
        record = Ledger().state_dict()
        if self._ledger_file.exists():
            record = json.loads(self._ledger_file.read_bytes())
        if saved is None and record["events"]:
            raise ValueError(
                f"{self._ledger_file} tells of a private run in this folder: go on with it from "
                "its last checkpoint, or choose another folder. What was released stays released."
            )
        if saved is not None and steps_beyond(saved["ledger"], record) is None:
            raise ValueError(
                f"{self._ledger_file} is missing, or leaves out releases that are behind the "
                "checkpoint. Restore it, or train anew in another folder."
            )
        return record

    @property
    def steps_per_epoch(self) -> int:
        return len(self._loader)

    @property
    def left_of_epoch(self) -> int:
        """Steps of the epoch that runs, or of the next one."""
        done: int = self._loader.position % len(self._loader)
        return len(self._loader) - done

    @property
    def affordable(self) -> bool:
        """Whether the budget pays for one more step; it may not after steps that were lost."""
        try:
            self.engine.ledger.reserve(self.engine.plan.event, 1)
        except BudgetExceeded:
            return False
        return True

    def pieces(self) -> Iterator[tuple[Any, bool]]:
        """Those of the next batch; whether it is the last one, after which a step is due."""
        last = False
        while not last:
            for batch in self._running:
                last = self._loader.last_piece
                yield batch, last
                break
            else:
                self._running = iter(self._loader)

    def end_epoch(self) -> None:
        """After its last step, or the last of all: random numbers are as they were."""
        if self._loader.position < len(self._loader):
            self._running.close()
        next(self._running, None)

    def add_piece(self) -> None:
        """Clip what was recorded of a piece that is not the last, and add it up."""
        self._optimizer.step()

    def write_ledger(self, *, evaluated: bool = False) -> None:
        """On the disk before anybody sees what it is the price of."""
        ledger = self.engine.ledger
        if evaluated and not self.privacy.eval_is_public:
            self.engine.note_unprivate(_LOOKED)
        now = (ledger.steps, len(ledger.warnings))
        if now != self._written:
            text = json.dumps(ledger.state_dict(), ensure_ascii=False, allow_nan=False)
            with replacing(self._ledger_file, what="the ledger") as temporary:
                temporary.write_text(text + "\n", encoding="utf-8")
            self._written = now

    def certify(self, folder: Path) -> None:
        document = self.engine.certificate()  # which may put a warning on record
        self.write_ledger()
        write_certificate(folder / "certificate.json", document)

    def save(self, folder: Path) -> None:
        """What a run needs to go on, beside the framework's own files, and written before them."""
        self.write_ledger()
        save_file(folder / _STATE, self.engine.state_dict())

    @staticmethod
    def saved_in(folder: str | Path | None) -> Mapping[str, Any] | None:
        return None if folder is None else load_file(Path(folder, _STATE), _KEYS)

    def close(self) -> None:
        """Training is over: random numbers are as they were, and the model has no hooks."""
        if not self.over:
            self.over = True
            try:
                self.write_ledger()  # where a step was interrupted right after its release
            finally:
                self._running.close()
                self._stack.close()
