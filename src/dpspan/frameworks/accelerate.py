"""accelerate: `prepare` in place of `accelerator.prepare` (the extra `accelerate`)."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Never

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpspan.engine.engine import PrivacyEngine
from dpspan.frameworks.private_fit import Privacy, PrivateFit, refuse
from dpspan.support.randomness import renew

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType, send_to_device
except ImportError as error:
    needed = "the package accelerate: pip install 'dpspan[accelerate]'"
    raise ModuleNotFoundError(f"dpspan.frameworks.accelerate needs {needed}.") from error

__all__ = ["Privacy", "PrivateBatches", "prepare"]


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    *others: Any,
    privacy: Privacy,
    epochs: int,
    physical: int | None = None,
    resume_from: str | Path | None = None,
) -> tuple[Any, ...]:
    """As `accelerator.prepare(model, optimizer, loader, *others)`, for private training.

    The loader that comes back hands out private batches on the accelerator's device, in pieces of
    at most `physical` records; its `engine` knows ε. `ledger.json` is kept in the accelerator's
    `project_dir`. `resume_from` goes on from what `accelerator.save_state` wrote there.
    """
    refuse("accelerate", _problems(accelerator, optimizer))
    fit = PrivateFit.begun(
        privacy,
        Path(accelerator.project_dir),
        module=model.to(accelerator.device),
        optimizer=optimizer,
        loader=loader,
        physical=physical,
        steps=lambda in_an_epoch: epochs * in_an_epoch,
        saved=PrivateFit.saved_in(resume_from),
    )
    model, prepared, *others = accelerator.prepare(model, optimizer, *others)

    def save(_: Any, __: Any, path: str) -> None:
        fit.save(Path(path))
        renew()  # the random numbers that accelerate saves must not be those of a private batch

    accelerator.register_save_state_pre_hook(save)
    if resume_from is not None:
        accelerator.load_state(str(resume_from))
    accelerator.register_load_state_pre_hook(_load_before)
    accelerator.clip_grad_norm_ = accelerator.clip_grad_value_ = _clipped
    return model, prepared, PrivateBatches(fit, prepared, accelerator.device), *others


class PrivateBatches:
    """Private batches on a device; `len` counts steps."""

    def __init__(self, fit: PrivateFit, optimizer: AcceleratedOptimizer, device: Any) -> None:
        self._fit, self._optimizer, self._device = fit, optimizer, device
        self.engine: PrivacyEngine = fit.engine
        self.close = fit.close  # when training is over: another process may use the folder

    def __len__(self) -> int:
        return self._fit.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._fit.left_of_epoch):
            if not self._fit.affordable:
                warnings.warn("dpspan: the budget is spent: training is over.", stacklevel=2)
                break
            for batch, last in self._fit.pieces():
                # The weights stay as they are until the last piece; schedulers ask whether.
                self._optimizer._is_overflow = not last
                yield send_to_device(batch, self._device)
        self._fit.end_epoch()


def _problems(accelerator: Accelerator, optimizer: Optimizer) -> Iterator[str]:
    if accelerator.distributed_type != DistributedType.NO:
        yield "several processes add up gradients before they are clipped: start one, unwrapped"
    if accelerator.mixed_precision not in ("no", "bf16"):
        yield "fp16 and fp8 scale the loss, and so the clip: use mixed_precision='bf16'"
    if accelerator.gradient_accumulation_steps != 1:
        yield (
            "gradient_accumulation_steps divides the loss: leave it out, give the loader the batch "
            "size of a step and `physical` what fits"
        )
    if isinstance(optimizer, AcceleratedOptimizer):
        yield "the optimizer is prepared already: give it as it was"
    if accelerator.project_dir is None:
        yield "what is released must be on record: give the Accelerator a project_dir"


def _load_before(*_: Any) -> Never:
    raise RuntimeError(
        "accelerator.load_state would restore weights without what they cost: pass resume_from= "
        "to dpspan.frameworks.accelerate.prepare instead."
    )


def _clipped(*_: Any, **__: Any) -> Never:
    raise RuntimeError(
        "The gradient of each record is clipped by privacy.method, and what the optimizer sees "
        "is released inside optimizer.step(): leave clip_grad_norm_ and clip_grad_value_ out."
    )
