"""The weights that RGP carries: which they are, where they began, and their carriers at a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from dpspan.gradients.numerics import full_precision, plain_arithmetic
from dpspan.mechanisms.carriers import Carrier, CarrierSource

_CARRIED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class CarriedWeights:
    """Weights as matrices, and what they were when private training began."""

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self._weights = weights
        self._alike = _by_shape(weights)
        self.first: dict[str, Tensor] | None = None  # W_0: as the first private step finds it

    def shapes(self) -> dict[str, torch.Size]:
        """(d_out, d_in) of each."""
        return {name: _matrix(weight).shape for name, weight in self._weights.items()}

    def unflattened(self, name: str, matrix: Tensor) -> Tensor:
        """A matrix in the form of its weight."""
        return matrix.view(self._weights[name].shape)

    @plain_arithmetic()
    def carriers(
        self, source: CarrierSource, rank: int, *, step: int, seed: int
    ) -> dict[str, Carrier]:
        """L and R of each weight."""
        now = {name: _matrix(weight) for name, weight in self._weights.items()}
        if self.first is None:
            self.first = {name: weight.clone() for name, weight in now.items()}
        # Weights of one shape in one stack: a GPU would wait for each alone.
        stacked, first = (
            [torch.stack([values[name] for name in names]) for names in self._alike]
            for values in (now, self.first)
        )
        # On the CPU and by number: the same in every process and after a resumption.
        words = np.random.default_rng([seed, step])

        def draw(*sizes: int) -> Tensor:
            return torch.from_numpy(words.standard_normal(sizes, dtype=np.float32))

        found = source.carriers(stacked, first, rank, step, draw)
        return {
            name: Carrier(left, right)
            for names, stack in zip(self._alike, found, strict=True)
            for name, left, right in zip(names, *stack, strict=True)
        }

    def go_on_from(self, first: Mapping[str, Tensor] | None) -> None:
        """Take W_0 from an earlier process."""
        if first is None:
            self.first = None
            return
        if {name: weight.shape for name, weight in first.items()} != self.shapes():
            raise ValueError("The state does not fit this run: it carries other weights.")
        self.first = {name: w.to(_matrix(self._weights[name])) for name, w in first.items()}


def carried_weights(
    model: nn.Module, rank: int, layers: Callable[[str], bool] | None
) -> dict[str, nn.Parameter]:
    """The trainable weights of linear and convolution layers that carriers make smaller."""
    of_layers = {module.weight for module in model.modules() if isinstance(module, _CARRIED)}
    others = {  # a weight tied to an embedding is one of its lines per token
        module.weight for module in model.modules() if isinstance(module, nn.Embedding)
    }
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter not in of_layers - others:
            continue
        d_out, d_in = parameter.shape[0], parameter.shape[1:].numel()
        smaller = rank * (d_out + d_in) < d_out * d_in and rank <= min(d_out, d_in)
        if smaller and (layers is None or layers(name)):
            found[name] = parameter
    if not found:
        raise ValueError(
            f"No trainable weight of a linear or convolution layer becomes smaller with rank={rank}"
            + (" among those that layers= chooses" if layers else "")
            + ". Lower the rank, or use DPSGD."
        )
    return found


def _by_shape(weights: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of weights that are of one shape as matrices, in groups."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, weight in weights.items():
        matrix = _matrix(weight)
        groups.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(name)
    return list(groups.values())


def _matrix(weight: Tensor) -> Tensor:
    """A weight as d_out × d_in, in at least float32."""
    return full_precision(weight.detach()).flatten(1)
