"""Second-phase pre-training (Gu, Kamath, Wu 2023): a warm start of a part of a pre-trained model.

    f(W_PT, θ)   a pre-trained model with a small set of trainable parameters
    θ_0          θ trained on the second public dataset: this phase
    θ            trained privately from θ_0, W_PT as it was, by any method

Public samples cost no privacy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from dpspan.model.trainable import Model, Trainable, chosen_parameters, train_only
from dpspan.public.warm_start import WarmStart, WarmStartResult
from dpspan.support.checks import describe, expect


@dataclass(frozen=True, kw_only=True, eq=False)
class SecondPhase(WarmStart):
    """A warm start that trains one set of parameters, which private training then goes on with.

    `model = phase.prepare(model)` freezes the rest; then build the optimizer and call
    `make_private(..., warm_start=phase)`, which trains on the public data, keeps them apart from
    the private data and puts them on record. The other arguments are `WarmStart`'s.

    Args:
        trainable: `LastLayers(2)`, `FirstAndLast()`, `Named(("fc",))`, `BiasOnly()`, `LoRA(rank=8)`
            or your own.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> import dpspan
        >>> public = torch.randn(40, 4), torch.arange(40) % 2
        >>> phase = dpspan.SecondPhase(data=public, trainable=dpspan.LastLayers(1))
        >>> model = phase.prepare(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['2.weight', '2.bias']
    """

    trainable: Trainable

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(
            isinstance(self.trainable, Trainable),
            "trainable to be a set of parameters, such as LastLayers(1)",
            self.trainable,
        )

    def prepare(self, model: Model) -> Model:
        """Freeze everything else, in place; the model with what the set adds to it."""
        return train_only(model, self.trainable)

    def run(
        self, model: nn.Module, criterion: nn.Module | None, *, progress: bool = False
    ) -> WarmStartResult:
        """Train the set on the public data, in place; see `WarmStart.run`."""
        chosen = chosen_parameters(model, self.trainable)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad != (parameter in chosen):
                state = "trainable" if parameter.requires_grad else "frozen"
                raise ValueError(
                    f"The model is not prepared for {self.trainable!r}: '{name}' is {state}. Call "
                    "phase.prepare(model) first, and build the optimizer after it."
                )
        return super().run(model, criterion, progress=progress)

    def describe(self) -> dict[str, Any]:
        """The configuration, without the data."""
        return {**super().describe(), "trainable": describe(self.trainable)}

    def summary(self, result: WarmStartResult) -> str:
        """For the record: what was trained, and how."""
        return f"second phase of {describe(self.trainable)}, {super().summary(result)}"
