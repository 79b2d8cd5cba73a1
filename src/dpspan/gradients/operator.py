"""The per-sample gradients of a batch as an operator: the rows of J, without J.

No method in this library needs the n × p matrix itself, only norms, inner products and weighted
sums of its rows. Each is computed parameter by parameter, in the memory of one layer.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from dpspan.gradients.layers.linear import Outer, ghost_norms
from dpspan.gradients.layers.terms import Rows, Sum, Term, inner, stacked
from dpspan.gradients.numerics import Arithmetic, bounds, full_precision, plain_arithmetic
from dpspan.support.sharded import Placement

_SMALL = 512  # numbers per sample up to which rows are worth packing together
_ALIGNED = 64  # packed rows are as long as a multiple of this


class SmallGradient(str):
    """Names what is summed in place of a gradient; `Left` and `Right` by the name of the weight.

    It equals names of its own kind only, whatever a model calls its parameters.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and str.__eq__(self, str(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((type(self), str(self)))


class Left(SmallGradient):
    """∂L = G Rᵀ, for the gradient G of a weight with carriers L and R."""


class Right(SmallGradient):
    """∂R = Lᵀ G."""


Names = tuple[str, ...]  # of the parameters in a pack


class Pack(NamedTuple):
    """One or more parameters that are worked on together."""

    term: Term
    shape: torch.Size


class PerSampleGradients:
    """J: one gradient per sample over named parameters. Parameters that took no part are zero."""

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        terms: Mapping[str, Sequence[Term]],
        samples: int,
        *,
        like: Tensor,
        scale: float = 1.0,
        planned: int | None = None,
        counted: Tensor | None = None,
        placement: Placement = dict,
    ) -> None:
        """`counted` (n,) says of each sample whether it may be part of a sum; None: all are.

        The others have bounds without end, and `combine` leaves them out. Memory is planned for
        `planned` samples, by default for those that there are. `placement` says what becomes of a
        sum by parameter: of a sharded model a process keeps its shards.
        """
        self.counted, self.placement = counted, placement
        self.shapes = dict(shapes)
        self.samples = samples
        self.terms = {name: _total(terms[name]) for name in shapes if terms.get(name)}
        self.like = full_precision(like.new_empty(0))  # dtype and device
        self.scale = scale
        self.planned = samples if planned is None else planned

    @classmethod
    def concatenate(cls, pieces: Sequence[Self]) -> Self:
        """The samples of several batches one after the other."""
        first, *others = pieces
        assert all(piece.counted is None for piece in pieces)
        if any(piece.shapes != first.shapes or piece.scale != first.scale for piece in others):
            raise ValueError("Expected gradients of the same parameters, scaled alike.")
        if not others:
            return first
        stacks = {
            name: [stacked([piece.term(name) for piece in pieces])]
            for name in first.shapes
            if any(name in piece.terms for piece in pieces)
        }
        samples = sum(piece.samples for piece in pieces)
        like, scale, place = first.like, first.scale, first.placement
        return cls(first.shapes, stacks, samples, like=like, scale=scale, placement=place)

    def select(self, names: Collection[str]) -> Self:
        """The gradients over some of the parameters only; nothing is copied."""
        unknown = [name for name in names if name not in self.shapes]
        if unknown:
            raise ValueError(f"Expected names of trainable parameters, got {unknown}.")
        chosen = set(names)
        if chosen == self.shapes.keys():
            return self
        return self.derived(self.terms, {n: s for n, s in self.shapes.items() if n in chosen})

    def derived(
        self,
        terms: Mapping[str, Term],
        shapes: Mapping[str, torch.Size] | None = None,
        samples: int | None = None,
    ) -> Self:
        """Other gradients, of the same samples or of so many others, alike in everything else."""
        alone = {name: [term] for name, term in terms.items()}
        shapes = self.shapes if shapes is None else shapes
        return type(self)(
            shapes,
            alone,
            self.samples if samples is None else samples,
            like=self.like,
            scale=self.scale,
            planned=self.planned if samples is None else None,
            counted=self.counted,
            placement=self.placement,
        )

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self.like.device

    @plain_arithmetic()
    def norms(self) -> Tensor:
        """Norm of each sample's gradient, (n,) float64."""
        value, _ = self._squared_norms
        return self.scale * value.sqrt()

    @plain_arithmetic()
    def norm_bounds(self) -> Tensor:
        """Upper bounds of the norms of the vectors that `combine` sums, (n,) float64.

        They exceed `norms()` by rounding only, and cover all of it (see `numerics`): a clip factor
        computed from them clips. A gradient that is not finite has a bound that is not finite.
        """
        _, bound = self._squared_norms
        # The margin is for the weights, which are rounded to working precision.
        found = self.scale * (1 + 16 * Arithmetic.of(self.like).unit) * bound.sqrt()
        return found if self.counted is None else found.masked_fill(~self.counted, torch.inf)

    @plain_arithmetic()
    def combine(self, weights: Tensor, *, finite: bool = False) -> dict[str, Tensor]:
        """wᵀJ, a weighted sum of the gradients, by parameter.

        A sample of weight zero adds nothing, even if its gradient is not finite; blanking it out
        takes a pass over everything, which `finite` (a promise that all are) saves on a GPU.
        """
        return self.placement(self.sums(weights, finite=finite))

    def sums(self, weights: Tensor, *, finite: bool = False) -> Iterator[tuple[str, Tensor]]:
        """What `combine` places: each parameter's whole sum, made when it is asked for."""
        if weights.shape != (self.samples,):
            raise ValueError(
                f"Expected one weight per sample, shape ({self.samples},), "
                f"got {tuple(weights.shape)}."
            )
        weights = (weights * self.scale).to(self.like)
        unused = ~usable_weights(weights)
        if self.counted is not None:
            unused = unused | ~self.counted
        weights = weights.masked_fill(unused, 0.0)
        dropped: Tensor | None = unused
        # On a CPU looking first is cheaper than blanking; on a GPU looking would stall the stream.
        if finite or (weights.device.type == "cpu" and not bool(unused.any())):
            dropped = None

        def total(names: Names) -> Tensor:
            return self.packs[names].term.combine(weights, dropped)

        for name, found in one_by_one(self.shapes, self.packs, total):
            yield name, self.like.new_zeros(self.shapes[name]) if found is None else found

    @plain_arithmetic()
    def gram(self, other: Self) -> Tensor:
        """J Hᵀ, inner products with the gradients of `other`, (n, m) float64."""
        if self.shapes != other.shapes:
            raise ValueError("Expected gradients of the same parameters on both sides.")
        shape = self.samples, other.samples
        total = torch.zeros(shape, dtype=torch.float64, device=self.device)
        for name in (name for name in self.terms if name in other.terms):
            total += inner(self.terms[name], other.terms[name], self.shapes[name])
        return total.mul_(self.scale * other.scale)

    @plain_arithmetic()
    def compress(self, carriers: Mapping[str, tuple[Tensor, Tensor]]) -> Self:
        """J with each carried weight's gradient G replaced by ∂L = G Rᵀ and ∂R = Lᵀ G.

        `carriers[name]` is (L, R), L of shape (d_out, r) and R of shape (r, d_in) for a weight
        seen as a d_out × d_in matrix. The result has `Left(name)` and `Right(name)` in place of
        'name'; what is not carried stays as it is.
        """
        unknown = carriers.keys() - self.shapes.keys()
        if unknown:
            raise ValueError(f"Expected carriers for trainable parameters, got {sorted(unknown)}.")
        shapes: dict[str, torch.Size] = {}
        terms = {name: term for name, term in self.terms.items() if name not in carriers}
        for name, shape in self.shapes.items():
            if name not in carriers:
                shapes[name] = shape
                continue
            left, right = carriers[name]
            d_out, d_in = shape[0], shape[1:].numel()
            fit = left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0]
            if not fit or (left.shape[0], right.shape[1]) != (d_out, d_in):
                raise ValueError(
                    f"Expected carriers of shapes ({d_out}, r) and (r, {d_in}) for '{name}', "
                    f"got {tuple(left.shape)} and {tuple(right.shape)}."
                )
            shapes |= {Left(name): left.shape, Right(name): right.shape}
            if name in self.terms:
                images = self.terms[name].compress(left.to(self.like), right.to(self.like))
                terms[Left(name)], terms[Right(name)] = map(Rows, images)
        return self.derived(terms, shapes)

    @plain_arithmetic()
    def matrix(self) -> Tensor:
        """The rows themselves, (n, p), parameters in the order of `shapes`."""
        columns = [self.term(name).rows(0, self.samples) for name in self.shapes]
        return self.scale * torch.cat(columns, dim=1)

    def term(self, name: str) -> Term:
        """A parameter's term; zeros for one that took no part."""
        if name in self.terms:
            return self.terms[name]
        return Rows(self.like.new_zeros(()).expand(self.samples, *self.shapes[name]))

    @cached_property
    def _squared_norms(self) -> tuple[Tensor, Tensor]:
        """Squared norms and their upper bounds, over all parameters."""
        arithmetic = Arithmetic.of(self.like)
        terms = [pack.term for pack in self.packs.values()]
        outers = [term for term in terms if isinstance(term, Outer)]
        others = [term for term in terms if not isinstance(term, Outer)]
        parts = ghost_norms(outers, arithmetic)
        parts += [term.squared_norms(arithmetic) for term in others]
        if not parts:
            zero = torch.zeros(self.samples, dtype=torch.float64, device=self.device)
            return zero, zero
        value = torch.stack([part.value for part in parts])
        magnitude = torch.stack([part.magnitude for part in parts])
        errors = tuple((p.value_error, p.magnitude_error, p.summand_error) for p in parts)
        bound = bounds(value, magnitude, _on_device(errors, value.device))
        return value.sum(0), bound.sum(0)

    @cached_property
    def packs(self) -> dict[Names, Pack]:
        """The terms to work with: many small parameters (biases, norms) as rows side by side.

        A step then takes a few large operations instead of hundreds of small ones. On a GPU, where
        a launch costs as much as a large operation, that goes for everything kept as rows.
        """
        return self._packed(self._together)

    def aligned(self, other: Self) -> Self:
        """The same gradients with the packs of `other`."""
        if self._together == other._together:
            return self
        same = self.derived(self.terms)
        same.packs = same._packed(other._together)
        return same

    @cached_property
    def _together(self) -> Names:
        """Which parameters share a pack."""
        on_cpu = self.device.type == "cpu"
        return tuple(
            name
            for name, shape in self.shapes.items()
            if shape.numel() <= _SMALL or (not on_cpu and isinstance(self.terms.get(name), Rows))
        )

    def _packed(self, together: Names) -> dict[Names, Pack]:
        packs = {}
        if any(name in self.terms for name in together):
            rows = [self.term(name).rows(0, self.samples) for name in together]
            width = sum(part.shape[1] for part in rows)
            # Rows that begin on a round address: GPUs multiply others at half the speed.
            rows.append(self.like.new_zeros(self.samples, -width % _ALIGNED))
            joint = torch.cat(rows, dim=1)
            packs[together] = Pack(Rows(joint), joint.shape[1:])
            sizes = [self.shapes[name].numel() for name in together]
            for name, own in zip(together, joint[:, :width].split(sizes, dim=1), strict=True):
                self.terms[name] = Rows(own)  # a view: what was packed is not held twice
        alone = [name for name in self.terms if name not in together]
        return packs | {(name,): Pack(self.terms[name], self.shapes[name]) for name in alone}

    @cached_property
    def pack_magnitudes(self) -> Tensor:
        """What the rounding of each pack is relative to: roots of `Term.magnitudes`, (packs, n)."""
        if not self.packs:
            return torch.zeros(0, self.samples, dtype=torch.float64, device=self.device)
        return torch.stack([pack.term.magnitudes() for pack in self.packs.values()]).sqrt()


def one_by_one(
    shapes: Mapping[str, torch.Size], packs: Collection[Names], total: Callable[[Names], Tensor]
) -> Iterator[tuple[str, Tensor | None]]:
    """Each parameter's part of the total of its pack, made when it is asked for; None without one.

    In the order of `shapes` whatever the packs are: processes that place sums do so together.
    """
    pack_of = {name: names for names in packs for name in names}
    ready: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if name in pack_of and name not in ready:
            names = pack_of[name]
            sizes = [shapes[other].numel() for other in names]
            ready |= zip(names, total(names)[: sum(sizes)].split(sizes), strict=True)
        found = ready.pop(name, None)
        yield name, None if found is None else found.view(shape)


@cache
def _on_device(errors: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    """Constants of a model, copied once: a copy would stall a GPU, and a graph cannot hold it."""
    return torch.tensor(errors, dtype=torch.float64).to(device, non_blocking=True)


def usable_weights(weights: Tensor) -> Tensor:
    """Which weights `combine` uses: a subnormal one is rounded coarsely, possibly up."""
    limits, sizes = torch.finfo(weights.dtype), weights.abs()
    return (sizes >= limits.tiny) & (sizes <= limits.max)  # neither for NaN


def _total(terms: Sequence[Term]) -> Term:
    """The sum of a parameter's terms as one term."""
    if len(terms) == 1:
        return terms[0]
    outers = [term for term in terms if isinstance(term, Outer)]
    if len(outers) == len(terms):  # a linear layer called several times is one longer sequence
        a, b = zip(*((term.a, term.b) for term in outers), strict=True)
        return Outer(torch.cat(a, dim=1), torch.cat(b, dim=1))
    return Sum(terms)
