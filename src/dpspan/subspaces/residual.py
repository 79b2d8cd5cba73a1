"""What is left of gradients outside a subspace, and how long it can be at most.

The residual of g is r = g − Σ_j a_j h_j. Its norm by ‖g‖² − ‖Bg‖² cancels: for gradients almost in
the span, float32 returns anything, and a norm that came out too small would clip too little. So the
norm is taken of the residual itself, and *what was measured is what is summed*: the rows of r are
written out and kept until their sum is taken. Then the norm is known up to its own rounding, in
every precision and whatever B is.

Two kinds of rows are not kept. Where a layer's inner products come from its factors, in float64,
the quadratic form ‖g‖² − 2Σ a_j⟨g, h_j⟩ + Σ a_j a_l⟨h_j, h_l⟩ has the norm at a fraction of the
cost. And rows that take more memory than `_memory` allows are written out a few lines at a time.
Their sum is wᵀJ − (wᵀA)H, and what rounding can hide between the measured vector and the summed one
comes on top of the norm (see `numerics`), in IEEE float32 whatever torch is set to.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dpspan.gradients.layers.embedding import Lookup
from dpspan.gradients.layers.linear import Outer
from dpspan.gradients.layers.terms import Rows, Stack, Term, joined, line_blocks, weighted_sum
from dpspan.gradients.numerics import Arithmetic, ieee, plain_arithmetic, product, squared_norms
from dpspan.gradients.operator import Names, Pack, PerSampleGradients, one_by_one, usable_weights

_FLOAT64 = Arithmetic(2.0**-53, 0.0)
_LEAST = 2.0**-53  # no error below is smaller than this share of a length

# Most memory for rows that are kept: a constant of a CPU, a share of a GPU's own.
_KEPT_BYTES, _KEPT_SHARE = 4 * 2**30, 0.25

# A sum wᵀJ − (wᵀA)H may cancel. What its rounding leaves is relative to ‖w_i g_i‖, so a residual
# that is not kept counts as no shorter than this share of what was taken off.
_CANCELLATION = 2.0**-6


@dataclass(frozen=True, eq=False, repr=False)
class Residual:
    """Rows J − A H."""

    gradients: PerSampleGradients  # J
    anchors: PerSampleGradients  # H
    shares: Tensor  # A (n, m) float64
    taken: Tensor  # (n,) the length of A H: of the embedding
    kernels: Mapping[Names, tuple[Tensor, Tensor]]  # by pack: J Hᵀ and H Hᵀ in float64

    def norm_bounds(self) -> Tensor:
        """Upper bounds of the norms of the vectors that `combine` sums, (n,) float64."""
        _, squares = self._squared_norms
        # As in PerSampleGradients: the weights are rounded to working precision.
        bound = (1 + 16 * Arithmetic.of(self.gradients.like).unit) * squares.sqrt()
        if set(self._rows) >= set(self.anchors.packs):  # all of them are kept
            return bound
        return torch.maximum(bound, _CANCELLATION * self.taken)

    @plain_arithmetic()
    def combine(self, weights: Tensor) -> dict[str, Tensor]:
        """wᵀ(J − A H), by parameter."""
        with ieee(self.gradients.like):
            return self.gradients.placement(self._sums(weights))

    def _sums(self, weights: Tensor) -> Iterator[tuple[str, Tensor]]:
        """As `PerSampleGradients.sums`; A is of these samples, so A H is placed as they are."""
        like, shapes = self.gradients.like, self.gradients.shapes
        scaled = (weights * self.gradients.scale).to(like)
        used = usable_weights(scaled)  # a weight that is dropped for J is dropped for H too
        rounded = torch.where(used, scaled, 0.0)
        dropped = None if like.device.type == "cpu" and bool(used.all()) else ~used
        kept = {name for names in self._rows for name in names}
        others = [name for name in shapes if name not in kept]
        if others:
            shares = torch.where(used.unsqueeze(1), self.shares, 0.0)
            taken = torch.where(used, weights, 0.0).to(shares) @ shares  # 0 · NaN is not 0
            own = self.gradients.select(others).sums(weights)
            spanned = self.anchors.select(others).sums(taken, finite=True)

        def total(names: Names) -> Tensor:
            return weighted_sum(self._rows[names], rounded, dropped)

        for name, found in one_by_one(shapes, self._rows, total):
            if found is None:
                (mine, whole), (theirs, inside) = next(own), next(spanned)
                assert name == mine == theirs
                found = whole - inside
            yield name, found

    @cached_property
    def _rows(self) -> dict[Names, Tensor]:
        """The rows of r that are kept, by pack, in the units of J as it was recorded."""
        anchors, like = self.anchors.packs, self.gradients.like
        packs = {names: pack for names, pack in anchors.items() if names not in self.kernels}
        numbers = self.gradients.planned * sum(pack.shape.numel() for pack in packs.values())
        if numbers * like.element_size() > _memory(like.device):
            return {}
        shares = (self.shares * (self.anchors.scale / self.gradients.scale)).to(like)
        rows = {}
        for names, pack in packs.items():
            lines = line_blocks(self._own(names).term, pack.term, pack.shape)
            parts = [product(shares, right, off=left) for left, right in lines]
            rows[names] = joined(parts, dim=1)
        return rows

    @cached_property
    @plain_arithmetic()
    def _squared_norms(self) -> tuple[Tensor, Tensor]:
        """Squared norms and their upper bounds, over all parameters."""
        rows = self._rows
        with ieee(self.gradients.like):  # as `combine`
            return self._measure(rows)

    def _measure(self, rows: Mapping[Names, Tensor]) -> tuple[Tensor, Tensor]:
        own, anchors, scale = self.gradients.packs, self.anchors.packs, self.gradients.scale
        arithmetic = Arithmetic.of(self.gradients.like)
        # In the units of J as it was recorded; the scale comes back at the end.
        shares = self.shares * (self.anchors.scale / scale)
        # The length of what is taken off each row, pack by pack, if nothing in it cancelled.
        lengths = self.anchors.pack_magnitudes
        # (`combine` drops weights that are subnormal: no more than the last term.)
        lost = torch.finfo(self.gradients.like.dtype).tiny * lengths.sum(1, keepdim=True)
        taken = dict(zip(anchors, lengths @ shares.abs().T + lost / _LEAST, strict=True))
        rounded = shares.to(self.gradients.like)
        value = torch.zeros(len(shares), dtype=torch.float64, device=shares.device)
        bound = value.clone()
        for names in anchors:
            if names in rows:
                square = squared_norms(rows[names])
                hidden = (arithmetic.norm + arithmetic.summand) * square.sqrt()
            elif names in self.kernels:
                square, hidden = _by_kernel(
                    own[names], anchors[names], shares, taken[names], *self.kernels[names]
                )
            else:
                square, hidden = _by_rows(self._own(names), anchors[names], rounded, taken[names])
            value += square
            bound += (square.sqrt() + hidden).square()
        beside = [name for names in own if names not in anchors for name in names]
        if beside:  # the subspace has no part in these parameters: the gradient itself is left
            shapes = {name: self.gradients.shapes[name] for name in beside}
            untouched = self.gradients.derived(self.gradients.terms, shapes)  # measured in `ieee`
            value += (untouched.norms() / scale).square()
            bound += (untouched.norm_bounds() / scale).square()
        return value * scale**2, bound * scale**2

    def _own(self, names: Names) -> Pack:
        """Rows of J; zeros of parameters that took no part in the private batch."""
        if names in self.gradients.packs:
            return self.gradients.packs[names]
        pack, zero = self.anchors.packs[names], self.gradients.like.new_zeros(())
        return Pack(Rows(zero.expand(self.gradients.samples, pack.shape.numel())), pack.shape)


def _memory(device: torch.device) -> float:
    """Bytes for rows that are kept."""
    if device.type != "cuda":
        return _KEPT_BYTES
    return _KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory


def _by_rows(own: Pack, anchors: Pack, shares: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms of the rows of r in one pack, and how much longer than that they can be."""
    arithmetic = Arithmetic.of(shares)
    parts = [
        squared_norms(product(shares, right, off=left))
        for left, right in line_blocks(own.term, anchors.term, own.shape)
    ]
    square = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
    # `combine` sums products of factors, not these rows (which were rounded, then combined).
    mine = arithmetic.product(own.term.depth) + arithmetic.summand
    others = arithmetic.product(anchors.term.depth) + arithmetic.summand
    others += arithmetic.product(shares.shape[1] + 2)
    if isinstance(own.term, Rows):  # of g = r + Σ a_j h_j, rather than one more pass over the rows
        return square, (mine + arithmetic.norm) * square.sqrt() + 2 * (mine + others) * taken
    length = own.term.magnitudes().sqrt()
    return square, arithmetic.norm * square.sqrt() + (mine + others) * length + others * taken


def _by_kernel(
    own: Pack, anchors: Pack, shares: Tensor, taken: Tensor, cross: Tensor, gram: Tensor
) -> tuple[Tensor, Tensor]:
    """The same from inner products in float64, which leave room for the cancellation."""
    precise = own.term.double().squared_norms(_FLOAT64)
    square = precise.value - 2 * (shares * cross).sum(1) + (shares @ gram * shares).sum(1)
    square = square.clamp(min=0)
    length = precise.magnitude.sqrt() + taken  # what all rounding is relative to
    terms = _width(own.term) + max(own.term.depth, anchors.term.depth) ** 2 + len(gram)
    unit = precise.value_error + precise.magnitude_error + 8 * _FLOAT64.product(terms)
    longer = (square + unit * length.square()).sqrt() - square.sqrt()
    summand = Arithmetic.of(own.term.rows(0, 0)).summand
    return square, longer + (summand + precise.summand_error) * length


def _width(term: Term) -> int:
    """Length of the longest product in a kernel."""
    if isinstance(term, Stack):
        return max(_width(part) for part in term.parts)
    assert isinstance(term, Outer | Lookup)
    return max(term.b.shape[2], term.a.shape[2] if isinstance(term, Outer) else 1)
