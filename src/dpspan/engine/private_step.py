"""One private run at work: from a sampled batch to param.grad.

Pieces of a logical batch are clipped and added up, and so are the sums of several processes. Then
the step is entered in the ledger, noise is drawn once, and the noisy mean becomes param.grad.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dpspan.accounting.certificate import certificate, weights_sha256
from dpspan.accounting.ledger import Ledger
from dpspan.engine.plan import Given, Plan
from dpspan.engine.sampling import Piece, PrivateLoader
from dpspan.engine.smoothing import Smoother
from dpspan.gradients.capture import Capture
from dpspan.gradients.graphs import Graphs
from dpspan.gradients.numerics import plain_arithmetic
from dpspan.gradients.operator import PerSampleGradients
from dpspan.mechanisms.base import Gradient, Mechanism, Setting, Sums
from dpspan.mechanisms.noise import Noise
from dpspan.model.guard import Guard
from dpspan.support.distributed import weights_of
from dpspan.support.errors import CaptureError


class PrivateRun:
    """Sits between the loader (`on_piece`) and the optimizer (`before_step`)."""

    def __init__(
        self,
        plan: Plan,
        given: Given,
        setting: Setting,
        mechanism: Mechanism,
        *,
        loader: PrivateLoader,
        ledger: Ledger,
    ) -> None:
        self.plan, self.loader, self.mechanism = plan, loader, mechanism
        self._module, self._ledger, self.processes = setting.model, ledger, setting.processes
        # Not the numbers of the sampling; and processes draw the noise of different shards.
        own = None if given.seed is None else given.seed + 1 + (self.processes.rank << 40)
        self._noise = Noise(own, secure=plan.secure_mode)
        self._capture = Capture(self._module, self.processes)
        self._mean_loss = plan.loss_reduction == "mean"
        self._graphs: Graphs | None = None
        if given.cuda_graphs:
            recorded = mechanism.clipped_sum if stays_in_place(mechanism) else None
            self._graphs = Graphs(recorded)
        self.guard = Guard(
            self._module,
            self._capture,
            criterion=setting.criterion,
            views=plan.views,
            units=plan.unit == "unit",
            mean_loss=self._mean_loss,
            warn=setting.warn,
        )
        self._piece: Piece | None = None
        self._total: Sums = {}
        self._steps = 0  # of this process
        self.smoother, self._moved = Smoother(plan.post_processing, self._module), False
        self._charged_passes: set[int] = set()
        self._last_digest: str | None = None  # of the weights as the run left them
        self._step_hooks = [
            given.optimizer.register_step_pre_hook(self.before_step),
            given.optimizer.register_step_post_hook(lambda *_: self._stepped()),
        ]
        loader.on_piece = self.on_piece
        loader.on_batch = self.guard.hand_over

    def on_piece(self, piece: Piece) -> None:
        """A piece of a batch is about to be handed to the training loop."""
        self.processes.refuse_late_group()
        self.refuse_averaged()
        new_epoch = piece.first and self.loader.position == 0
        with self.processes.together(self.loader.place(piece.last, self._steps)):
            self._let_go(new_epoch)
        if piece.first:  # whatever an abandoned batch left behind was never released
            self._total = {}
            self._compare_processes()
        self._piece = piece
        with self.processes.together():
            rows = piece.size if piece.padded else None
            self.guard.expect(piece.samples, rows=rows, most=piece.most, new_epoch=new_epoch)
        # No samples: the batch is a stand-in of one record that nobody drew. What it brings is
        # dropped, as is what stand-ins bring that fill up a padded piece.
        self._capture.expect(
            piece.size,
            views=self.plan.views,
            units=piece.units,
            largest=self.plan.records_per_unit,
            planned=self._planned,
            scale=piece.size if self._mean_loss else 1.0,
            live=piece.samples if piece.padded else None,
            discard=piece.samples == 0 and not piece.padded,
            carriers=self.mechanism.carriers(),
            graphs=self._graphs,
        )

    @property
    def _planned(self) -> int:
        """Records of a piece to plan memory for, by public numbers."""
        most = self.plan.most_at_once(self.processes.world)
        return min(most, self.loader.max_physical_batch_size or most)

    def _let_go(self, new_epoch: bool) -> None:
        """Forget the piece before; an error if it had something to add."""
        lost = self._piece is not None and self._capture.heard
        self._piece = None
        self._capture.disarm()
        if self._graphs is not None:
            self._graphs.sums = None  # nothing of the last batch counts
        if lost and not new_epoch:  # an epoch that was left early may leave a batch behind
            raise CaptureError(
                "backward() was called on the last batch, but optimizer.step() was not, so its "
                "gradients would be lost. Call optimizer.step() for every batch of the loader. To "
                "gather a large batch from small pieces, pass max_physical_batch_size instead."
            )

    def _compare_processes(self) -> None:
        """At the steps 1, 2, 4, 8, …, and every 64: do all have the same books and weights?"""
        if self.processes.world == 1 or (self._steps.bit_count() > 1 and self._steps % 64):
            return
        self.processes.agree(
            {
                "number of charged steps": self._ledger.steps,
                "place in the data": self.loader.state_dict(),
            }
        )
        if self.processes.keep_same(weights_of(self._module)):
            self.guard.forget_weights()  # they were set right by a hair's breadth

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Optimizer hook: put the released gradient where the optimizer looks for it."""
        self._capture.shards.reshard()
        check_optimizer(optimizer, self._module)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._step()
            return None

        def private_closure() -> Any:
            closure()
            self._step()
            # The loss has no noise: an optimizer that acts on it must not get it.
            return torch.full((), torch.nan)

        return (args[0], private_closure), {k: v for k, v in kwargs.items() if k != "closure"}

    @plain_arithmetic()
    def _step(self) -> None:
        """One step, or, before the last piece of a batch, what this piece adds to it."""
        processes = self.processes
        with processes.together():
            piece, gradients = self._collect()
        self.mechanism.prepare(self._capture)  # the public pass, if one is due
        with processes.together():
            part, total = self._clipped_sum(piece, gradients), self._total
            self._total = {n: total[n] + v for n, v in part.items()} if total else part
            del gradients, part  # what they were made of is not needed any more
        if not piece.last:
            self._hand_over({})  # torch optimizers leave parameters without a gradient alone
            return
        total, self._total = self._total, {}
        with processes.together():
            self._charge()  # before anything is released; raises if the budget does not allow it
        released = self._release(self._common(total, processes.add_up))
        gradient = self.mechanism.gradient(released)  # post-processing
        torch._foreach_div_(list(gradient.values()), self.plan.expected_batch_size)
        self._hand_over(gradient)
        self._moved = True
        self._steps += 1

    def _clipped_sum(self, piece: Piece, gradients: PerSampleGradients) -> Sums:
        part = None if self._graphs is None else self._graphs.take(copied=not piece.last)
        if part is None:
            return self.mechanism.clipped_sum(gradients)
        if gradients.terms:
            raise CaptureError(
                f"'{next(iter(gradients.terms))}' was used outside of the model's own call, so its "
                "gradient is not among the recorded ones. Leave cuda_graphs out."
            )
        return part

    def _common(self, sums: Sums, travel: Callable[[Sums], Sums]) -> Sums:
        """The sums, where those travel of which processes do not keep a shard each."""
        shards = self._capture.shards
        if not shards:
            return travel(sums)
        return sums | travel({name: x for name, x in sums.items() if name not in shards})

    def _release(self, total: Sums) -> Sums:
        """By the first process: the others hold no sum over all samples, except for their shards.

        Whatever else they release here is of no use, and the first one's takes its place.
        """
        if self.processes.world == 1:
            return self.mechanism.release(total, self._noise, self.plan.noise_multiplier)
        released = total
        with self.processes.together():
            if self.processes.is_first or self._capture.shards:
                released = self.mechanism.release(total, self._noise, self.plan.noise_multiplier)
            known, made = ({n: (x.shape, x.dtype) for n, x in s.items()} for s in (total, released))
            if made != known:
                raise TypeError(
                    f"{type(self.mechanism).__name__}.release changes names or shapes of the sums, "
                    "so other processes cannot receive it. Do that in gradient()."
                )
        return self._common(released, self.processes.spread)

    def _collect(self) -> tuple[Piece, PerSampleGradients]:
        """The piece at hand and its gradients, once everything about them has been checked."""
        piece, self._piece = self._piece, None
        if piece is None:
            raise CaptureError(
                "optimizer.step() without a fresh batch. Each step takes one batch from the "
                "private loader: iterate over the loader that make_private returned."
            )
        self.loader.refuse_seeds()
        gradients = self._capture.collect()
        self.guard.check()
        return piece, gradients

    def _charge(self) -> None:
        """Every step of a Poisson sample; of a partition, the epoch before its first release."""
        if self.plan.sampling.independent_steps or self.loader.passes not in self._charged_passes:
            self._ledger.protect(self.plan.unit)
            self._ledger.charge(self.plan.event)
            self._charged_passes.add(self.loader.passes)

    def _hand_over(self, gradient: Gradient) -> None:
        shards = self._capture.shards
        shards.reshard()
        if shards:
            gradient = {name: shards.tensor(name, x) for name, x in gradient.items()}
        if gradient:
            gradient = self.smoother.filtered(gradient)
        for name, parameter in self._module.named_parameters():
            # Whatever else has a gradient, a weight frozen after backward() say, has none of ours.
            value = gradient.get(name)
            parameter.grad = None if value is None else value.to(parameter.dtype)

    def _stepped(self) -> None:
        if self._moved:  # not by a piece of a batch
            self.smoother.stepped()
            self._moved = False
        elif moved := self.guard.moved():
            why = (
                f"The optimizer changed '{moved}' after a piece of a batch, which has no gradient "
                "(weight decay of its own, say). The number of pieces is private, and so it would "
                "reach the weights without noise: let step() skip parameters whose grad is None, "
                "or leave max_physical_batch_size out."
            )
            self._ledger.invalidate(why)
            raise CaptureError(why)
        self.guard.stepped()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has its averaged weights meanwhile."""
        self._before_average()
        try:
            with self.smoother.averaged():
                self.guard.stepped()
                yield
        finally:
            self.guard.stepped()

    def adopt_average(self) -> None:
        """The model has its averaged weights for good."""
        self._before_average()
        self.smoother.show()
        self.guard.stepped()

    def _before_average(self) -> None:
        self.refuse_averaged()
        averaging = "average_weights" in self.plan.post_processing
        if not averaging or self._piece is not None or self._last_digest is not None:
            raise RuntimeError("Give average_weights=, and ask between steps, before detach().")
        self._capture.shards.reshard()
        self.guard.review()

    def refuse_averaged(self) -> None:
        """RuntimeError while the model does not have the weights that are trained."""
        if self.smoother.shown:
            raise RuntimeError("Leave engine.averaged() first; adopt_average() ends training.")

    def go_on(self) -> None:
        """A saved state was loaded: weights may be others, and processes are compared again.

        Of a batch that is under way nothing counts any more: it was clipped as things were before.
        """
        self._total = {}
        if self._graphs is not None:
            self._graphs.sums = None
        self.guard.forget_weights()
        self._steps = 0

    def certificate(self, delta: float | None) -> dict[str, Any]:
        """What was spent and how; why it is not private, if a last look tells so."""
        self.guard.warn_of_unknowns()
        try:
            self.guard.review()
        except CaptureError as error:
            self._ledger.invalidate(str(error))
        training = {**self.plan.describe(), "weights_sha256": self.weights_digest()}
        return certificate(self._ledger, delta=delta, training=training)

    def weights_digest(self) -> str:
        """Of the weights now, or as the run left them."""
        if self._last_digest == "":
            raise RuntimeError(
                "The certificate of a sharded model tells the digest of its whole weights, for "
                "which all processes are needed: ask for it before detach()."
            )
        return self._last_digest or weights_sha256(self._module.state_dict())

    def remove(self) -> None:
        """Take every hook off the model and the optimizer, and refuse to go on."""
        if self._last_digest is None:
            # Of shards it takes all processes, and nobody waits here for those somewhere else.
            self._last_digest = "" if self._capture.shards else self.weights_digest()
            with suppress(CaptureError):  # told again whenever something is saved or certified
                self.guard.review()
        for hook in self._step_hooks:
            hook.remove()
        self.guard.remove()
        self._capture.remove()
        self.loader.on_piece = _refuse


def stays_in_place(mechanism: Mechanism) -> bool:
    """Whether the class whose `clipped_sum` it is says so: who overrides it says it again."""
    owner = next(each for each in type(mechanism).__mro__ if "clipped_sum" in vars(each))
    return bool(vars(owner).get("stays_in_place", False))


def check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    """Refuse an optimizer that would move parameters which the private step does not cover."""
    known = set(module.parameters())
    for index, group in enumerate(optimizer.param_groups):
        if any(parameter not in known for parameter in group["params"]):
            raise ValueError(
                f"Parameter group {index} of the optimizer holds a parameter that is not part of "
                "the model, so its gradient is not private. Build the optimizer from "
                "model.parameters() (after dpspan.fix)."
            )


def _refuse(_: Piece) -> None:
    raise RuntimeError(
        "engine.detach() ended the private run: training on more batches would not be private."
    )
