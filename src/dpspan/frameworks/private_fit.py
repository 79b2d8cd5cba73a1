"""What all frameworks share: the settings, and a private run inside somebody else's loop.

A framework's loop counts batches and takes one optimizer step for each. So it iterates over
`tickets`, one to a step, and the records are drawn when the step is taken: as many pieces as the
draw needs, none ahead of its time. What was released is in `ledger.json`, step by step: callbacks
may look at the model after any of them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpspan.accounting.calibration import calibrate_event
from dpspan.accounting.ledger import Ledger, steps_beyond
from dpspan.accounting.promises import Budget, warn_of_weaknesses, weaknesses
from dpspan.engine.checkpoint import load_file, save_file
from dpspan.engine.engine import PrivacyEngine
from dpspan.engine.plan import plan_sampling
from dpspan.mechanisms import DPSGD, Method
from dpspan.support.errors import BudgetExceeded
from dpspan.support.files import replacing

LEDGER, CERTIFICATE = "ledger.json", "certificate.json"
_STATE = "privacy.safetensors"  # of the engine, in the folder of a checkpoint
_KEYS = {"format", "run", "ledger", "loader", "mechanism"}
_PUBLIC_NAMES = ("learning_rate", "epoch", "epsilon")  # of what a loop logs while it trains


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """What makes a framework's training private.

    Args:
        epsilon: of the whole training, which never spends more.
        delta: well below 1 / number of records.
        method: how a step uses the gradients; DP-SGD by default.
        records: about how many private records there are, as a public number: the sampling rate is
            batch size / records. Without it the exact number is used, and certificates tell it.
        eval_is_public: declares that evaluation data are nobody's secret. Otherwise every number
            measured on them is logged as `unprivate_…`, and nothing may be chosen by it.
        unprivate_metrics: log what is measured on private batches, as `unprivate_…`; never publish
            that. Otherwise it is logged nowhere.
        criterion: the loss of public samples, for methods that use their gradients.
        accountant: "pld" or "rdp".
    """

    epsilon: float
    delta: float
    method: Method = field(default_factory=DPSGD)
    records: int | None = None
    eval_is_public: bool = False
    unprivate_metrics: bool = False
    criterion: nn.Module | None = None
    accountant: str = "pld"

    @property
    def budget(self) -> Budget:
        return Budget(epsilon=self.epsilon, delta=self.delta)

    def logged_as(self, name: str, *, evaluating: bool) -> str | None:
        """The name under which a number may be logged; None if it may not."""
        if name in _PUBLIC_NAMES or name.startswith("unprivate_"):
            return name
        if evaluating:
            return name if self.eval_is_public else f"unprivate_{name}"
        return f"unprivate_{name}" if self.unprivate_metrics else None


class PrivateFit:
    """One private run, from its first step, or from where `saved` ends, to its last."""

    def __init__(
        self,
        privacy: Privacy,
        folder: Path,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        loader: DataLoader[Any],
        physical: int | None,
        steps: Callable[[int], int],
        clip: float | None = None,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """`steps` tells how many there will be, from how many there are in an epoch."""
        self.engine = engine = PrivacyEngine(accountant=privacy.accountant)
        self._ledger_file, self.over = folder / LEDGER, False
        self._written: tuple[int, ...] | None = None
        record, budget, size = self._record(), privacy.budget, loader.batch_size or 0
        if saved is None and record is not None and record["events"]:
            raise ValueError(
                f"{self._ledger_file} tells of a private run in this folder: go on with it from "
                "its last checkpoint, or choose another folder. What was released stays released."
            )
        rate = None if privacy.records is None else min(1.0, size / privacy.records)
        sampling = plan_sampling(loader, True, rate)
        total = steps(sampling.steps_per_epoch)
        told = privacy.records or sampling.records
        if saved is None:
            warn_of_weaknesses(privacy.epsilon, privacy.delta, told)
            z = calibrate_event(sampling.event, total, budget, accountant=privacy.accountant)
        else:
            z = saved["run"]["noise_multiplier"]
        *_, self._loader = engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=z,
            method=privacy.method,
            max_grad_norm=clip,
            criterion=privacy.criterion,
            sample_rate=rate,
            expected_batch_size=None if rate is None else float(size),
            max_physical_batch_size=physical,
        )
        engine.ledger.budget = budget
        for sentence in weaknesses(None, privacy.delta, told):
            engine.ledger.warn(sentence)
        if saved is None:
            engine.ledger.reserve(engine.plan.event, total)
        else:
            self._go_on(saved, record)
        if privacy.unprivate_metrics:
            engine.note_unprivate("what was measured on private batches was logged")
        self._optimizer = optimizer
        self._hook = optimizer.register_step_post_hook(lambda *_: self.write_ledger())
        self._running: Any = iter(self._loader)  # a generator
        self.write_ledger()

    @property
    def steps_per_epoch(self) -> int:
        return len(self._loader)

    @property
    def left_of_epoch(self) -> int:
        """Steps of the epoch that runs, or of the next one."""
        return len(self._loader) - self._loader.position % len(self._loader)

    @property
    def tickets(self) -> DataLoader[Any]:
        """An epoch of them: empty mappings, which stand for batches not drawn yet."""
        return DataLoader(range(len(self._loader)), batch_size=1, collate_fn=_ticket)  # type: ignore[arg-type]

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
            position = self._loader.position
            for batch in self._running:
                last = self._loader.position > position
                yield batch, last
                break
            else:
                self._running = iter(self._loader)

    def add_piece(self) -> None:
        """Clip what was recorded of a piece that is not the last, and add it up."""
        self._optimizer.step()

    def write_ledger(self, note: str | None = None) -> None:
        """On the disk before anybody sees what it is the price of."""
        ledger = self.engine.ledger
        if note is not None:
            self.engine.note_unprivate(note)
        now = (ledger.steps, len(ledger.warnings), len(ledger.invalid))
        if self._written == now:  # a piece, and no step
            return
        record = self._record() if self._written is None else None
        if record and record["events"] and not ledger.covers(Ledger.from_state(record)):
            raise ValueError(
                f"{self._ledger_file} tells of releases that this process does not know, and is "
                "kept. Train in another folder."
            )
        text = json.dumps(ledger.state_dict(), ensure_ascii=False, allow_nan=False)
        with replacing(self._ledger_file, what="the ledger") as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
        self._written = now

    @staticmethod
    def saved_in(folder: str | Path | None) -> Mapping[str, Any] | None:
        """What `save` wrote."""
        return None if folder is None else load_file(Path(folder, _STATE), _KEYS)

    def save(self, folder: Path) -> None:
        """What a run needs to go on, beside the framework's own files, and written before them."""
        self.write_ledger()
        save_file(folder / _STATE, self.engine.state_dict())

    def close(self) -> None:
        """Training is over: random numbers are as they were, and the model has no hooks."""
        self.over = True
        self._running.close()
        self._hook.remove()
        self.engine.detach()

    def _record(self) -> Any:
        """What is on the disk."""
        return json.loads(self._ledger_file.read_bytes()) if self._ledger_file.exists() else None

    def _go_on(self, saved: Mapping[str, Any], record: Any) -> None:
        """Everything as it was saved, but for the books, which may be longer."""
        lost = None if record is None else steps_beyond(saved["ledger"], record)
        if lost is None:
            raise ValueError(
                f"{self._ledger_file} is missing, or leaves out releases that are behind the "
                "checkpoint. Restore it, or train anew in another folder."
            )
        self.engine.load_state_dict({**saved, "ledger": record})
        if lost:
            self.engine.ledger.warn(
                f"{lost} steps were charged that the model was not trained by: the process ended "
                "before the next checkpoint"
            )


def _ticket(_: Any) -> dict[str, Any]:
    return {}
