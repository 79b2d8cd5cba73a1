"""PrivacyEngine: the front door. Takes a model, an optimizer and a data loader, gives them back."""

import dataclasses
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpspan.accounting.certificate import write_certificate
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.promises import Budget, warn_of_weaknesses, weaknesses
from dpspan.engine.admission import begin
from dpspan.engine.checkpoint import load, save
from dpspan.engine.plan import Given, Plan, calibrated, plan_run, plan_sampling, units_of
from dpspan.engine.private_step import PrivateRun
from dpspan.engine.sampling import PrivateLoader
from dpspan.mechanisms import DPSGD, Method
from dpspan.public.warm_start import WarmStart
from dpspan.support.distributed import Processes
from dpspan.support.units import RECORDS_PER_UNIT, Ids, Units

Model = TypeVar("Model", bound=nn.Module)


class PrivacyEngine:
    """Makes one training run differentially private and keeps its books.

    `ledger` shares a budget with other releases from the same data. `debug_seed` fixes noise and
    sampling; the certificate then says that the run is not private. Where torch.distributed knows
    several processes, they train one model together, or those of the group `processes` do.
    With `secure_mode` noise and batches come from a cryptographic generator, and released numbers
    are hardened against attacks on their last bits; that takes time, and no seed.
    """

    def __init__(
        self,
        *,
        accountant: str = "pld",
        ledger: Ledger | None = None,
        debug_seed: int | None = None,
        processes: ProcessGroup | None = None,
        secure_mode: bool = False,
    ) -> None:
        if secure_mode and debug_seed is not None:
            raise ValueError("Expected no debug_seed, which says what to draw, beside secure_mode.")
        self.ledger = Ledger(accountant=accountant) if ledger is None else ledger
        self._seed, self._group, self._secure = debug_seed, processes, secure_mode
        if debug_seed is not None:
            self.ledger.invalidate("noise and sampling were drawn from a fixed debug_seed")
        self.processes = Processes()
        self._run: PrivateRun | None = None

    def make_private(
        self,
        *,
        module: Model,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        method: Method | None = None,
        max_grad_norm: float | None = None,
        criterion: nn.Module | None = None,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        sample_rate: float | None = None,
        expected_batch_size: float | None = None,
        max_physical_batch_size: int | None = None,
        views: int = 1,
        low_pass: float | None = None,
        average_weights: float | None = None,
        unit: Ids | Units | None = None,
        records_per_unit: int = RECORDS_PER_UNIT,
        warm_start: WarmStart | None = None,
        cuda_graphs: bool = False,
        non_private: bool = False,
    ) -> tuple[Model, Optimizer, PrivateLoader]:
        """Train with this noise multiplier z.

        z means the same for every method: one step is one Gaussian mechanism of that noise
        multiplier on a Poisson sample. The model and the optimizer come back as they are, with
        hooks; the loader is a new one.

        Args:
            module: the model; its trainable parameters are all released together.
            optimizer: any torch optimizer over parameters of the model.
            data_loader: a map-style DataLoader; its batch size is the expected batch size L.
            noise_multiplier: z; 0 only with `non_private=True`.
            method: how a step uses the gradients; `DPSGD()` by default.
            max_grad_norm: the clip, where the method does not state it.
            criterion: the loss module, if there is one, to check that it keeps samples apart.
            loss_reduction: 'mean' or 'sum', how the loss you call backward() on treats the batch.
            poisson_sampling: False assigns each record to one batch per epoch instead; an epoch
                then costs one Gaussian without amplification by sampling.
            sample_rate: q, a public constant. Without it q is batch size / dataset size, which
                tells the number of records, and the certificate says so.
            expected_batch_size: L, if not the loader's batch size; a public constant.
            max_physical_batch_size: most samples to process at once.
            views: the model sees this many rows for each record, one after the other (augmented
                copies: `x.flatten(0, 1)` of x with shape (n, views, …), labels repeated to match).
                Their mean gradient is clipped, so a record still counts once.
            low_pass: β, for example 0.9: the optimizer gets an average over time of what steps
                release, in which each step before counts β times as much. It costs nothing.
            average_weights: α, for example 0.999: an average of the weights over the last steps,
                about 1/(1 − α) of them, is kept beside them; see `averaged`. It costs nothing.
            unit: whose records they are, if a person may have several: one id a record (as many as
                the dataset has records), or a function of a record. Then units are drawn, the mean
                gradient of a unit's records is clipped, and the guarantee is for all of them
                together; the batch size and `sample_rate` count units.
            records_per_unit: most records of one unit in a step, drawn anew from all of its own.
            warm_start: train on labelled public data first, here and now (`WarmStart(data=...)`).
            cuda_graphs: record the model and replay it, so that a GPU waits for no launches. Every
                batch is filled up to one size, with copies at its end that do not count.
            non_private: allow noise_multiplier = 0.
        """
        if self._run is not None:
            raise RuntimeError(
                "This engine already trains a model. Make another one with ledger=engine.ledger, "
                "so that both spend from the same budget."
            )
        method = DPSGD() if method is None else method
        processes = self._join()
        with processes.together():
            given = Given(
                module=module,
                optimizer=optimizer,
                data_loader=data_loader,
                noise_multiplier=noise_multiplier,
                method=method if max_grad_norm is None else method.with_clip(max_grad_norm),
                criterion=criterion,
                loss_reduction=loss_reduction,
                poisson_sampling=poisson_sampling,
                sample_rate=sample_rate,
                expected_batch_size=expected_batch_size,
                max_physical_batch_size=max_physical_batch_size,
                views=views,
                low_pass=low_pass,
                average_weights=average_weights,
                units=units_of(unit, records_per_unit, data_loader),
                warm_start=warm_start,
                cuda_graphs=cuda_graphs,
                non_private=non_private,
                secure_mode=self._secure,
                seed=self._seed,
            )
            plan = plan_run(given, self.ledger.accountant)
        self._run = begin(plan, given, ledger=self.ledger, processes=processes, warn=self._warn)
        return module, optimizer, self._run.loader

    def make_private_with_epsilon(
        self,
        *,
        module: Model,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        method: Method | None = None,
        max_grad_norm: float | None = None,
        criterion: nn.Module | None = None,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        sample_rate: float | None = None,
        expected_batch_size: float | None = None,
        max_physical_batch_size: int | None = None,
        views: int = 1,
        low_pass: float | None = None,
        average_weights: float | None = None,
        unit: Ids | Units | None = None,
        records_per_unit: int = RECORDS_PER_UNIT,
        warm_start: WarmStart | None = None,
        cuda_graphs: bool = False,
    ) -> tuple[Model, Optimizer, PrivateLoader]:
        """Train for `epochs` epochs within (target_epsilon, target_delta), and stop there.

        The noise multiplier is the smallest that keeps the whole run, together with what the
        ledger already holds, within the target. A step beyond it raises `BudgetExceeded` before
        anything is released. The other arguments are those of `make_private`.
        """
        budget = Budget(epsilon=target_epsilon, delta=target_delta)
        unit = units_of(unit, records_per_unit, data_loader)
        sampling = plan_sampling(data_loader, poisson_sampling, sample_rate, unit)
        told = sampling.records if sample_rate is None else None  # else their number is a secret
        warn_of_weaknesses(target_epsilon, target_delta, told, unit="unit" if unit else "record")
        ledger = self.ledger
        z, events = calibrated(sampling, epochs, budget, ledger)
        z = self._join().same(z)  # to the last digit
        if ledger.budget not in (None, budget):
            raise ValueError(
                f"The ledger already has a budget of {ledger.budget}. Ask for that target, or "
                "set engine.ledger.budget first."
            )
        result = self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=z,
            method=method,
            max_grad_norm=max_grad_norm,
            criterion=criterion,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            sample_rate=sample_rate,
            expected_batch_size=expected_batch_size,
            max_physical_batch_size=max_physical_batch_size,
            views=views,
            low_pass=low_pass,
            average_weights=average_weights,
            unit=unit,
            records_per_unit=records_per_unit,
            warm_start=warm_start,
            cuda_graphs=cuda_graphs,
        )
        run = self._running()
        run.plan = dataclasses.replace(run.plan, epochs=epochs, budget=budget)
        ledger.budget = budget
        ledger.warn(*weaknesses(None, target_delta, told, unit=ledger.unit))
        ledger.reserve(run.plan.event, events)
        return result

    @property
    def plan(self) -> Plan:
        """What the run does with private data; frozen, and made before the first of its steps."""
        return self._running().plan

    @property
    def accountant(self) -> Ledger:
        """The ledger, under the name it has in Opacus; `accountant.get_epsilon(delta)` works."""
        return self.ledger

    def get_epsilon(self, delta: float | None = None) -> float:
        """ε spent so far at δ (by default the budget's δ)."""
        return self.ledger.epsilon(delta)

    @property
    def noise_multiplier(self) -> float:
        """z of the run."""
        return self._running().plan.noise_multiplier

    def averaged(self) -> AbstractContextManager[None]:
        """The model with its averaged weights meanwhile: to evaluate, certify or save it so."""
        return self._running().averaged()

    def adopt_average(self) -> None:
        """Give the model its averaged weights for good: training is over."""
        self._running().adopt_average()

    def certificate(self, delta: float | None = None) -> dict[str, Any]:
        """What was spent and how, as a JSON document.

        `training.weights_sha256` tells which weights it is about: see
        `dpspan.accounting.certificate.weights_sha256`. Of a sharded model it is that of the whole
        weights, which are gathered one by one: all processes must ask, before `detach`.
        """
        return self._running().certificate(delta)

    def write_certificate(self, path: str | Path, delta: float | None = None) -> Path:
        """Write `certificate()` to a file; of several processes the first one does."""
        document = self.certificate(delta)
        return write_certificate(path, document) if self.processes.is_first else Path(path)

    def diagnostics(self) -> list[dict[str, Any]]:
        """What the method noted by `diagnose=`, from public data and released results only."""
        return self._running().mechanism.diagnostics()

    def note_unprivate(self, what: str) -> None:
        """Put on record that something computed from private data without noise was looked at."""
        self.ledger.warn(f"unprivate: {what}")

    def _warn(self, message: str) -> None:
        """To the operator, once, and to the certificate."""
        if message not in self.ledger.warnings and self.processes.is_first:  # who hears of all
            warnings.warn(f"dpspan: {message}.", stacklevel=2)
        self.ledger.warn(message)

    def state_dict(self) -> dict[str, Any]:
        """The ledger, where the sampler stands and the method's state; never a noise generator."""
        run = self._running()
        run.refuse_averaged()
        run.guard.review()
        smoothed = run.smoother.state_dict()
        return {
            "format": "dpspan.engine.1",
            "run": run.plan.describe(),
            "ledger": self.ledger.state_dict(),
            "loader": run.loader.state_dict(),
            "mechanism": run.mechanism.state_dict(),
            **({"post_processing": smoothed} if smoothed else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; the engine must have been set up in the same way."""
        run = self._running()
        run.refuse_averaged()
        expected = {"format", "run", "ledger", "loader", "mechanism"}
        if not isinstance(state, dict) or set(state) - {"post_processing"} != expected:
            raise ValueError(f"Expected an engine state with the keys {sorted(expected)}.")
        if state["format"] != "dpspan.engine.1":
            raise ValueError(f"Expected an engine state of format 1, got {state['format']!r}.")
        run.plan.check_described(state["run"])
        loader, mechanism = run.loader.state_dict(), run.mechanism.state_dict()
        smoothed = run.smoother.state_dict()
        try:  # all or nothing
            run.smoother.load_state_dict(state.get("post_processing", {}))
            run.mechanism.load_state_dict(state["mechanism"])
            run.loader.load_state_dict(state["loader"])
            self.ledger.load_state_dict(state["ledger"])
            run.go_on()
        except Exception:
            run.smoother.load_state_dict(smoothed)
            run.mechanism.load_state_dict(mechanism)
            run.loader.load_state_dict(loader)
            raise

    def save_checkpoint(
        self,
        path: str | Path | BinaryIO,
        *,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
    ) -> Path | None:
        """Write engine, model, optimizer and `checkpoint_dict` to one file, all or nothing.

        Or into a file that is open for bytes, such as `io.BytesIO()`. Of several processes the
        first one writes; all of them load. A sharded model is saved into a folder: every process
        calls this, and writes its shards.
        """

        def content() -> dict[str, Any]:
            return {
                "engine": self.state_dict(),
                "module": module.state_dict(),
                "optimizer": None if optimizer is None else optimizer.state_dict(),
                "checkpoint_dict": checkpoint_dict or {},
            }

        return save(path, content, module, self.processes)

    def load_checkpoint(
        self, path: str | Path | BinaryIO, *, module: nn.Module, optimizer: Optimizer | None = None
    ) -> dict[str, Any]:
        """Restore `save_checkpoint` into a run that was set up in the same way.

        Of a sharded model: into more or fewer processes too, or into one that is not sharded.
        """
        keys = {"engine", "module", "optimizer", "checkpoint_dict"}
        content = load(path, keys, module, self.processes)
        if optimizer is not None and content["optimizer"] is None:
            raise ValueError(f"{path} holds no optimizer state: load it without optimizer=.")
        # The books first: weights must never be restored without what they cost.
        self.load_state_dict(content["engine"])
        module.load_state_dict(content["module"])
        if optimizer is not None:
            optimizer.load_state_dict(content["optimizer"])
        extra: dict[str, Any] = content["checkpoint_dict"]
        return extra

    def detach(self) -> None:
        """Take every hook off the model, the optimizer and the criterion; training is over."""
        if self._run is not None:
            self._run.remove()

    def _join(self) -> Processes:
        """The processes of this run, which hear of each other's notes on the ledger."""
        ledger = self.ledger
        if self.processes.world == 1:
            self.processes = processes = Processes.of_this_run(self._group)
            processes.notes, processes.hear = ledger.notes, self._hear
            ledger.mark = processes.same(ledger.mark)  # the others' are copies of the first's
        return self.processes

    def _hear(self, note: tuple[str, str]) -> None:
        kind, text = note
        (self._warn if kind == "warning" else self.ledger.invalidate)(text)

    def _running(self) -> PrivateRun:
        if self._run is None:
            raise RuntimeError("No training run yet: call make_private first.")
        return self._run
