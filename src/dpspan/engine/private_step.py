"""One private step: from a sampled batch to param.grad.

Pieces of a logical batch are clipped and added up; after the last piece the step is entered in the
ledger, noise is drawn once, and the noisy mean becomes param.grad for any torch optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dpspan.engine.sampling import Piece
from dpspan.gradients.capture import Capture
from dpspan.gradients.numerics import plain_arithmetic
from dpspan.mechanisms.base import Mechanism, Sums
from dpspan.mechanisms.noise import Noise
from dpspan.model.guard import Guard
from dpspan.support.errors import CaptureError


class PrivateStep:
    """Sits between the loader (`on_piece`) and the optimizer (`before_step`)."""

    def __init__(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        mechanism: Mechanism,
        noise: Noise,
        noise_multiplier: float,
        lot_size: float,
        views: int,
        mean_loss: bool,
        criterion: nn.Module | None,
        refuse_seeds: Callable[[], None],
        charge: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        self._module = module
        self._capture = Capture(module)
        self._mechanism = mechanism
        self._noise = noise
        self._noise_multiplier = noise_multiplier
        self._lot_size = lot_size
        self._views = views
        self._mean_loss = mean_loss
        self._refuse_seeds = refuse_seeds
        self._charge = charge
        self.guard = Guard(
            module,
            self._capture,
            criterion=criterion,
            views=views,
            mean_loss=mean_loss,
            warn=warn,
        )
        self._piece: Piece | None = None
        self._total: Sums | None = None
        self._step_hooks = [
            optimizer.register_step_pre_hook(self.before_step),
            optimizer.register_step_post_hook(lambda *_: self.guard.stepped()),
        ]

    def on_piece(self, piece: Piece, *, new_epoch: bool = False) -> None:
        """A piece of a batch is about to be handed to the training loop."""
        lost = self._piece is not None and self._capture.heard
        self._piece = None
        self._capture.disarm()
        if lost and not new_epoch:  # an epoch that was left early may leave a batch behind
            raise CaptureError(
                "backward() was called on the last batch, but optimizer.step() was not, so its "
                "gradients would be lost. Call optimizer.step() for every batch of the loader. To "
                "gather a large batch from small pieces, pass max_physical_batch_size instead."
            )
        if piece.first:  # whatever an abandoned batch left behind was never released
            self._total = None
        self._piece = piece
        self.guard.expect(piece.samples, new_epoch=new_epoch)
        # No samples: the batch is a stand-in of one record that nobody drew. What it brings is
        # dropped.
        self._capture.expect(
            max(piece.samples, 1),
            views=self._views,
            discard=piece.samples == 0,
            carriers=self._mechanism.carriers(),
        )

    @property
    def samples(self) -> int:
        """Samples of the batch at hand, 0 between batches."""
        return 0 if self._piece is None else self._piece.samples

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Optimizer hook: put the released gradient where the optimizer looks for it."""
        check_optimizer(optimizer, self._module)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._finish_piece()
            return None

        def private_closure() -> Any:
            closure()
            self._finish_piece()
            # The loss has no noise: an optimizer that acts on it must not get it.
            return torch.full((), torch.nan)

        return (args[0], private_closure), {k: v for k, v in kwargs.items() if k != "closure"}

    @plain_arithmetic()
    def _finish_piece(self) -> None:
        piece, self._piece = self._piece, None
        if piece is None:
            raise CaptureError(
                "optimizer.step() without a fresh batch. Each step takes one batch from the "
                "private loader: iterate over the loader that make_private returned."
            )
        self._refuse_seeds()
        scale = max(piece.samples, 1) if self._mean_loss else 1
        gradients = self._capture.collect(scale=scale)
        self.guard.check()
        part = self._mechanism.clipped_sum(gradients)
        del gradients  # what they were made of is not needed any more
        if self._total is None:
            self._total = part
        else:
            self._total = {name: self._total[name] + value for name, value in part.items()}
        parameters = dict(self._module.named_parameters())
        if not piece.last:
            for parameter in parameters.values():
                parameter.grad = None  # torch optimizers leave such parameters alone
            return
        total, self._total = self._total, None
        self._charge()  # before anything is released; raises if the budget does not allow it
        released = self._mechanism.release(total, self._noise, self._noise_multiplier)
        torch._foreach_div_(list(released.values()), self._lot_size)
        for name, parameter in parameters.items():
            # Whatever else has a gradient, a weight frozen after backward() say, has none of ours.
            value = released.get(name)
            parameter.grad = None if value is None else value.to(parameter.dtype)

    def remove(self) -> None:
        """Take every hook off the model and the optimizer."""
        for hook in self._step_hooks:
            hook.remove()
        self.guard.remove()
        self._capture.remove()


def check_device(module: nn.Module) -> None:
    """Refuse a device without float64 (Apple's MPS): norms and noise are computed in it."""
    for name, parameter in module.named_parameters():
        try:
            parameter.new_zeros(1, dtype=torch.float64)
        except (TypeError, RuntimeError) as error:
            raise ValueError(
                f"Parameter '{name}' is on {parameter.device}, which has no float64. "
                "Norms and noise need it: move the model to the CPU or to a CUDA device."
            ) from error


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
