"""One private step: from a sampled batch to param.grad.

Pieces of a logical batch are clipped and added up; after the last piece the step is entered in the
ledger, noise is drawn once, and the noisy mean becomes param.grad for any torch optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dpspan.capture import Capture, Hook
from dpspan.errors import CaptureError
from dpspan.mechanisms.base import Mechanism, Sums
from dpspan.noise import Noise
from dpspan.numerics import exact
from dpspan.probe import probe
from dpspan.sampling import Piece


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
        mean_loss: bool,
        charge: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        self._module = module
        self._capture = Capture(module)
        self._mechanism = mechanism
        self._noise = noise
        self._noise_multiplier = noise_multiplier
        self._lot_size = lot_size
        self._mean_loss = mean_loss
        self._charge = charge
        self._warn = warn
        self._piece: Piece | None = None
        self._total: Sums | None = None
        self._probed_modes: set[bool] = set()  # training and evaluation can differ
        self._probing = False
        self._shapes: list[torch.Size] | None = None
        self._versions: dict[str, tuple[Tensor, int]] = {}
        self._contents: Tensor | None = None  # of everything the first batch must not change
        self._watch_contents = True
        self._step_hook = optimizer.register_step_pre_hook(self.before_step)
        # In front: the layers' own hooks must not be half-way when the probe runs the model.
        self._probe_hook = module.register_forward_pre_hook(
            Hook(self._look_at_batch), with_kwargs=True, prepend=True
        )

    def on_piece(self, piece: Piece) -> None:
        """A piece of a batch is about to be handed to the training loop."""
        if self._piece is not None and self._capture.heard:
            raise CaptureError(
                "backward() was called on the last batch, but optimizer.step() was not, so its "
                "gradients would be lost. Call optimizer.step() for every batch of the loader. To "
                "gather a large batch from small pieces, pass max_physical_batch_size instead."
            )
        if piece.first:  # whatever an abandoned batch left behind was never released
            self._total = None
        self._piece = piece
        self._versions = self._tensor_versions()
        if self._watch_contents:
            self._contents = self._fingerprint()
        # No samples: the batch is a stand-in of one record that nobody drew. What it brings is
        # dropped.
        self._capture.expect(max(piece.samples, 1), discard=piece.samples == 0)

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
            loss = closure()
            self._finish_piece()
            return loss

        return (args[0], private_closure), {k: v for k, v in kwargs.items() if k != "closure"}

    @exact()
    def _finish_piece(self) -> None:
        piece, self._piece = self._piece, None
        if piece is None:
            raise CaptureError(
                "optimizer.step() without a fresh batch. Each step takes one batch from the "
                "private loader: iterate over the loader that make_private returned."
            )
        self._check_nothing_leaked()
        gradients = self._capture.collect(scale=piece.samples if self._mean_loss else 1)
        if piece.samples > 1 and not self._probed_modes:
            self._warn(
                "the model was never called as a whole on a batch, so it could not be checked "
                "that it keeps samples apart"
            )
        part = self._mechanism.clipped_sum(gradients)
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
        for name, value in released.items():
            parameters[name].grad = value.to(parameters[name].dtype)

    def _look_at_batch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Probe the model on the first batch in each mode; notice inputs of varying length."""
        samples = self._piece.samples if self._piece is not None else 0
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        batch = [x for x in tensors if x.shape[:1] == (samples,)]
        if samples < 2 or not batch or self._probing or not self._capture.active:
            return
        if module.training not in self._probed_modes:
            self._probing = True
            try:
                probe(module, args, kwargs, samples, mean_loss=self._mean_loss)
            finally:
                self._probing = False
            self._probed_modes.add(module.training)
        shapes = [x.shape[1:] for x in batch]
        if self._shapes is not None and shapes != self._shapes:
            self._warn(
                "the shape of the inputs varies from batch to batch: where it depends on the "
                "longest record, padding must be masked so that it has no effect on other records; "
                "padding to a fixed length is safe"
            )
        self._shapes = shapes

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def _tensor_versions(self) -> dict[str, tuple[Tensor, int]]:
        return {name: (x, x._version) for name, x in self._tensors().items()}

    def _fingerprint(self) -> Tensor:
        """Two numbers a tensor, which also see changes that leave its version as it is."""
        parts = [x.detach().double() for x in self._tensors().values()]
        return torch.stack([torch.stack([x.sum(), x.square().sum()]).cpu() for x in parts])

    def _check_nothing_leaked(self) -> None:
        """Between hand-over and step, a batch may change gradients only."""
        now = self._tensor_versions()
        changed = [
            name
            for name, (x, version) in self._versions.items()
            if name not in now or now[name][0] is not x or now[name][1] != version
        ]
        if self._contents is not None and not changed:
            same = torch.isclose(
                self._contents, self._fingerprint(), rtol=0, atol=0, equal_nan=True
            )
            changed = [n for n, ok in zip(self._versions, same.all(1), strict=True) if not ok]
            self._contents, self._watch_contents = None, False
        if changed:
            raise CaptureError(
                f"'{changed[0]}' was changed by the private batch: it would carry private data out "
                "of training without noise. Turn the running statistics of its module off, or "
                "replace the module."
            )

    def remove(self) -> None:
        """Take every hook off the model and the optimizer."""
        self._step_hook.remove()
        self._probe_hook.remove()
        self._capture.remove()


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
