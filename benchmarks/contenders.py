"""Who runs the step: one factory per contender, from a model and a batch to a step to call.

A step is forward, loss, backward, clip, noise, SGD: the whole of a training loop but for loading
data and accounting. All use one clipping bound and noise from torch's default generator.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLIP = 1.0
NOISE = 1.0
LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Contender:
    """A step ready to run, and what a reader should know about it.

    A call of `step` may be several steps, where they differ: its time is divided by them.
    """

    step: Callable[[], None]
    note: str = ""
    steps: int = 1


Factory = Callable[[nn.Module, Tensor, Tensor, float], Contender]


def training_step(
    model: Callable[..., Any], optimizer: Any, criterion: Any, x: Tensor, y: Tensor
) -> Callable[[], None]:
    """The loop body everyone writes; Opacus' objects take part in it as the plain ones do."""

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


def plain_step(model: nn.Module, x: Tensor, y: Tensor, noise: float) -> Contender:
    """PyTorch without privacy: no clipping, and `noise` is not used."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return Contender(training_step(model, optimizer, nn.CrossEntropyLoss(), x, y))


def compiled_step(model: nn.Module, x: Tensor, y: Tensor, noise: float) -> Contender:
    """The same, compiled: what somebody would run who needs no privacy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    compiled = torch.compile(model)
    return Contender(training_step(compiled, optimizer, nn.CrossEntropyLoss(), x, y))


def opacus_step(model: nn.Module, x: Tensor, y: Tensor, noise: float, *, mode: str) -> Contender:
    """Opacus as its documentation sets it up, less the Poisson loader and the accountant."""
    from opacus import PrivacyEngine

    model, optimizer, *criterion, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=noise,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    optimizer.step_hook = None  # the accountant
    loss = criterion[0] if criterion else nn.CrossEntropyLoss()  # ghost mode brings its own
    note = ghost_note(model) if mode == "ghost" else ""
    return Contender(training_step(model, optimizer, loss, x, y), note)


def ghost_note(model: Any) -> str:
    """Which layers get ghost norms: for others Opacus builds that layer's per-sample gradients."""
    kinds = {type(m) for m in model.modules() if list(m.parameters(recurse=False))}
    ghost = sorted(k.__name__ for k in kinds if k in model.NORM_SAMPLERS)
    other = sorted(k.__name__ for k in kinds if k not in model.NORM_SAMPLERS)
    return f"ghost norms: {', '.join(ghost) or 'none'}; instantiated: {', '.join(other) or 'none'}"


# ---------------------------------------------------------------------------------------------
# dpspan: the one function to change when the engine's interface does
# ---------------------------------------------------------------------------------------------
def method_step(
    model: nn.Module, x: Tensor, y: Tensor, noise: float, method: Any, *, graphs: bool = False
) -> Contender:
    """A method of dpspan, at the level below the engine: no loader, no ledger.

    With `graphs` as the engine's `cuda_graphs=True`: stand-ins fill up the batch.
    """
    from dpspan.gradients.capture import Capture
    from dpspan.gradients.graphs import Graphs
    from dpspan.mechanisms import Setting
    from dpspan.mechanisms.noise import Noise

    n = len(x)
    criterion = nn.CrossEntropyLoss()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=LEARNING_RATE)
    mechanism = method.bind(Setting(model=model, criterion=criterion))
    capture, generator = Capture(model), Noise()
    replayed: Graphs | None = None
    if graphs:
        x, y = filled_up(x), filled_up(y)
        summed = mechanism.clipped_sum if mechanism.stays_in_place else None
        replayed = Graphs(summed)

    def step() -> None:
        optimizer.zero_grad()
        capture.expect(
            len(x),
            scale=len(x),
            live=n if graphs else None,
            carriers=mechanism.carriers(),
            graphs=replayed,
        )
        criterion(model(x), y).backward()
        with torch.no_grad():
            gradients = capture.collect()
            mechanism.prepare(capture)
            total = None if replayed is None else replayed.take(copied=False)
            if total is None:
                total = mechanism.clipped_sum(gradients)
            del gradients  # as the engine does
            gradient = mechanism.gradient(mechanism.release(total, generator, noise))
            torch._foreach_div_(list(gradient.values()), n)
            for name, value in gradient.items():
                parameters[name].grad = value.to(parameters[name].dtype)
        optimizer.step()

    return Contender(step)


def filled_up(x: Tensor) -> Tensor:
    """As many records as the engine's padded batches have at this expected batch size."""
    size = math.ceil((len(x) + 2.33 * math.sqrt(len(x))) / 8) * 8
    return torch.cat([x, x[:1].expand(size - len(x), *x.shape[1:])])


def dpspan_step(model: nn.Module, x: Tensor, y: Tensor, noise: float) -> Contender:
    """DP-SGD of dpspan."""
    from dpspan.mechanisms import DPSGD

    return method_step(model, x, y, noise, DPSGD(clip=CLIP))


PLAIN, COMPILED = "non-private", "non-private, compiled"
CONTENDERS: dict[str, Factory] = {
    PLAIN: plain_step,
    COMPILED: compiled_step,
    "opacus hooks": partial(opacus_step, mode="hooks"),
    "opacus ghost": partial(opacus_step, mode="ghost"),
    "opacus functorch": partial(opacus_step, mode="functorch"),
    "dpspan": dpspan_step,
}


def naive_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The clipped mean gradient, one sample at a time: what every private step must equal."""
    parameters = [p for _, p in sorted(model.named_parameters())]
    total = torch.zeros(sum(p.numel() for p in parameters), device=x.device)
    for sample, label in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(sample[None]), label[None])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        total += gradient * (CLIP / gradient.norm()).clamp(max=1.0)
    return total / len(x)
