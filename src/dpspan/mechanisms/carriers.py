"""Gradient carriers: a weight's gradient G, d_out × d_in, seen through thin matrices L and R.

RGP keeps of G only ∂L = G Rᵀ and ∂R = Lᵀ G, where L is d_out × r with orthonormal columns and R is
r × d_in with orthonormal rows. What comes back, ∂L R + L ∂R − L Lᵀ ∂L R, is the orthogonal
projection of G onto the matrices whose columns lie in L or whose rows lie in R. Carriers come from
weights that have been released, or from chance: never from gradients.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpspan.gradients.numerics import full_precision, plain_arithmetic
from dpspan.gradients.operator import Left, Right
from dpspan.support.checks import check_count
from dpspan.support.distributed import Processes, is_sharded
from dpspan.support.sharded import whole

Matrices = Sequence[Tensor]  # each (…, rows, columns)
Draw = Callable[..., Tensor]  # of sizes: standard normals, from a public seed

_CARRIED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

# Relative size of the unit vectors for missing directions: squared, well above float64's rounding.
_FILL = 1e-6


class Carrier(NamedTuple):
    """L and R of one weight."""

    left: Tensor  # (d_out, r)
    right: Tensor  # (r, d_in)

    def reconstruct(self, left: Tensor, right: Tensor) -> Tensor:
        """∂L R + L ∂R − L Lᵀ ∂L R; of one weight, or of a stack of them."""
        return (left - self.left @ (self.left.mT @ left)) @ self.right + self.left @ right


@dataclass(frozen=True, kw_only=True)
class History:
    """The directions of the update so far, W_t − W_0; in the first `warmup` steps those of W_t.

    A warm-up of None never ends.

    Found by one power pass (the paper's Algorithm 2): two products, and no SVD.
    """

    warmup: int | None = 1
    iterations: int = 1

    def __post_init__(self) -> None:
        if self.warmup is not None:
            check_count("warmup", self.warmup)  # W_0 − W_0 has no directions
        check_count("iterations", self.iterations)

    def carriers(
        self, weights: Matrices, first: Matrices, rank: int, step: int, draw: Draw
    ) -> list[Carrier]:
        moved = [now - then for now, then in zip(weights, first, strict=True)]
        updates = weights if self.warmup is None or step < self.warmup else moved
        right = [_placed(draw(*u.shape[:-2], rank, u.shape[-1]), u) for u in updates]
        for _ in range(self.iterations):
            left = orthonormal([u @ r.mT for u, r in zip(updates, right, strict=True)])
            right = [columns.mT @ u for columns, u in zip(left, updates, strict=True)]
        right = [columns.mT for columns in orthonormal([r.mT for r in right])]
        return [Carrier(*both) for both in zip(left, right, strict=True)]


@dataclass(frozen=True, kw_only=True)
class RandomCarriers:
    """Random directions, new ones at every step: the paper's control, RGP-random."""

    def carriers(
        self, weights: Matrices, first: Matrices, rank: int, step: int, draw: Draw
    ) -> list[Carrier]:
        left, right = (
            orthonormal([_placed(draw(*w.shape[:-2], w.shape[side], rank), w) for w in weights])
            for side in (-2, -1)
        )
        return [Carrier(*both) for both in zip(left, [r.mT for r in right], strict=True)]


# Give carriers for weights that were `first` at step 0: matrices, or stacks of one shape.
CarrierSource = History | RandomCarriers


def orthonormal(matrices: Matrices) -> list[Tensor]:
    """For each matrix (or stack of them) orthonormal columns that span its own.

    By Cholesky factors of Gram matrices, twice, in float64. All at once, since a GPU takes longer
    to start the QR decomposition of each matrix than to compute it: rows of zeros, which change no
    Gram matrix, make them equally long.
    """
    rank, longest = matrices[0].shape[-1], max(x.shape[-2] for x in matrices)
    padded = [F.pad(x, (0, 0, 0, longest - x.shape[-2])) for x in matrices]
    columns = torch.cat([x.reshape(-1, longest, rank) for x in padded]).double()
    size = torch.linalg.matrix_norm(columns, keepdim=True)
    # What has too few directions, such as a weight that has not moved, gets unit vectors.
    units = torch.eye(longest, rank, dtype=columns.dtype, device=columns.device)
    columns = columns / torch.where(size > 0, size, 1) + _FILL * units
    for _ in range(2):  # the second time corrects what rounding did in the first
        lower, _ = torch.linalg.cholesky_ex(columns.mT @ columns)
        columns = torch.linalg.solve_triangular(lower, columns.mT, upper=False).mT
    parts = columns.split([x.shape[:-2].numel() for x in matrices])
    return [
        part[:, : x.shape[-2]].reshape(x.shape).to(x)
        for part, x in zip(parts, matrices, strict=True)
    ]


def _placed(numbers: Tensor, like: Tensor) -> Tensor:
    """The numbers where and as `like` is, without waiting for the work before."""
    return numbers.to(like.device, non_blocking=True).to(like.dtype)


def carried_weights(
    model: nn.Module, rank: int, layers: Callable[[str], bool] | None, head: Collection[str] = ()
) -> dict[str, nn.Parameter]:
    """Trainable weights of linear and convolution layers that carriers make smaller; no `head`."""
    of_layers = {module.weight for module in model.modules() if isinstance(module, _CARRIED)}
    # A weight tied to an embedding is one of its lines per token.
    others = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or name in head or parameter not in of_layers - others:
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


def head_of(model: nn.Module) -> set[str]:
    """The names of the parameters of the last linear layer that is trained."""
    names = {parameter: name for name, parameter in model.named_parameters()}  # the first of each
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    if not linear:
        raise ValueError("head_scale= is for a model with a trainable linear layer: leave it out.")
    return {names[parameter] for parameter in linear[-1].parameters()}


def as_matrix(weight: Tensor) -> Tensor:
    """A weight as d_out × d_in, in at least float32."""
    return full_precision(weight.detach()).flatten(1)


def alike(matrices: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of those of one shape, in groups to stack: a GPU would wait for each alone.

    A sharded one is alone: it is whole while it is looked at, and there may be room for one only.
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, matrix in matrices.items():
        groups.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(name)
    if is_sharded(*matrices.values()):
        return [[name] for names in groups.values() for name in names]
    return list(groups.values())


@plain_arithmetic()
def carriers_of(
    weights: Mapping[str, Tensor],
    first: Mapping[str, Tensor],
    source: CarrierSource,
    rank: int,
    *,
    step: int,
    seed: int,
) -> dict[str, Carrier]:
    """L and R of each weight, all of them matrices, at a step of a run that began with `first`."""
    # On the CPU and by number: the same in every process and after a resumption.
    words = np.random.default_rng([seed, step])

    def draw(*sizes: int) -> Tensor:
        return torch.from_numpy(words.standard_normal(sizes, dtype=np.float32))

    if is_sharded(*weights.values()):  # one whole one at a time
        found: dict[str, Carrier] = {}
        for (name,) in alike(weights):
            now, then = ([whole(values[name]).unsqueeze(0)] for values in (weights, first))
            ((left, right),) = source.carriers(now, then, rank, step, draw)
            found[name] = Carrier(left[0], right[0])
        return found
    groups = alike(weights)
    now, then = (
        [torch.stack([values[name] for name in names]) for names in groups]
        for values in (weights, first)
    )
    return {
        name: Carrier(left, right)
        for names, stack in zip(groups, source.carriers(now, then, rank, step, draw), strict=True)
        for name, left, right in zip(names, *stack, strict=True)
    }


class RunCarriers:
    """L and R of a run's weights, found anew at every step, in the same memory."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        source: CarrierSource,
        rank: int,
        seed: int,
        processes: Processes,
    ) -> None:
        self._weights, self._processes = weights, processes
        self._source, self._rank, self._seed = source, rank, seed
        self.first: dict[str, Tensor] | None = None  # W_0: as the first private step finds it
        self._found: dict[str, Carrier] = {}
        self._step: int | None = None  # the one of which they are

    @property
    def matrices(self) -> dict[str, Tensor]:
        """The weights."""
        return {name: as_matrix(weight) for name, weight in self._weights.items()}

    def at(self, step: int) -> dict[str, Carrier]:
        """Those of a step, which the weights have not moved since."""
        if self._step != step:
            now = self.matrices
            if self.first is None:
                self.first = {name: weight.clone() for name, weight in now.items()}
            with self._processes.together():
                fresh = carriers_of(
                    now, self.first, self._source, self._rank, step=step, seed=self._seed
                )
            # Where a weight has hardly moved, its directions are those of rounding.
            self._processes.make_same(x for carrier in fresh.values() for x in carrier)
            self._found, self._step = _written_over(self._found, fresh), step
        return self._found

    def reconstructed(
        self, carriers: Mapping[str, Carrier], released: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """The weights' gradients: ∂L R + L ∂R − L Lᵀ ∂L R, or ∂L R where no ∂R was released."""
        for names in alike(self.matrices):
            stack = Carrier(*map(torch.stack, zip(*(carriers[n] for n in names), strict=True)))
            left = torch.stack([released[Left(name)] for name in names])
            if Right(names[0]) in released:
                right = torch.stack([released[Right(name)] for name in names])
                gradients = stack.reconstruct(left, right)
            else:
                gradients = left @ stack.right
            for name, matrix in zip(names, gradients, strict=True):
                yield name, matrix.view(self._weights[name].shape)

    def begin_from(self, first: Mapping[str, Tensor] | None) -> None:
        """Go on with a run that began with these weights."""
        if first is not None:
            now = self.matrices
            if {n: w.shape for n, w in first.items()} != {n: w.shape for n, w in now.items()}:
                raise ValueError("The state does not fit this run: it carries other weights.")
            first = {n: weight.to(now[n].device, now[n].dtype) for n, weight in first.items()}
        self.first, self._step = first, None


def _written_over(old: dict[str, Carrier], new: dict[str, Carrier]) -> dict[str, Carrier]:
    """The new carriers in the memory of the old ones, where those are alike."""
    before, after = ([x for carrier in each.values() for x in carrier] for each in (old, new))
    kinds = [[(x.shape, x.dtype, x.device) for x in each] for each in (before, after)]
    if old.keys() != new.keys() or kinds[0] != kinds[1]:
        return new
    torch._foreach_copy_(before, after)
    return old
