"""nn.Conv1d, Conv2d and Conv3d with groups, stride, dilation and every padding mode."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import grad as conv_grad

from dpspan.gradients.layers.groups import Groups
from dpspan.gradients.layers.linear import Outer
from dpspan.gradients.layers.terms import (
    Factored,
    Rows,
    Term,
    blocks,
    by_blocks,
    compact,
    fused,
    joined,
    joined_pairs,
    kept,
    merged_rows,
)
from dpspan.gradients.numerics import Arithmetic, SquaredNorms, full_precision, squared_norms

_COST_OF_PATCHES = 4

# Rows of up to this many bytes are kept even where the factors are smaller: otherwise they are
# made for the norm (and in a subspace once more for the residual), and the sum convolves again. A
# GPU, which has to copy every patch for that, gains more by keeping them.
_CPU_ROWS_KEPT_BYTES = 8 * 2**20
_GPU_ROWS_KEPT_BYTES = 1024 * 2**20

# A GPU copies so many numbers in the time of the launches that sliding rows take beyond one.
_COPIED_IN_A_LAUNCH = 2**24

# Below this many channels a group is too thin for the grouped convolution to vectorise.
_GROUPED_CONVOLUTION_CHANNELS = 8


@dataclass(frozen=True)
class Patches(Factored):
    """Row i is Σ_t b_it ⊗ a_it over output positions t, a_t the patch of the input x under t.

    The patches are never kept: they repeat every input number up to once per kernel entry.
    """

    x: Tensor  # (n, channels, …)
    b: Tensor  # (n, out channels, …)
    weight: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def depth(self) -> int:
        return self.b.shape[2:].numel()

    def rows(self, start: int, stop: int) -> Tensor:
        x, b = full_precision(self.x[start:stop]), full_precision(self.b[start:stop])
        n = stop - start
        if n == 0:
            return x.new_zeros(0, self.weight.numel())
        one_by_one = self.weight[2:].numel() == 1
        thin = min(self.weight[:2]) < _GROUPED_CONVOLUTION_CHANNELS
        copied = self.depth * self.weight[1:].numel() * self.groups
        few = n * copied <= _COPIED_IN_A_LAUNCH or self._rows_are_larger_than_patches
        if x.is_cuda and not one_by_one and few:
            return by_blocks(lambda i, j: self._unfolded_rows(x[i:j], b[i:j]), n, copied, x)
        if x.is_cuda or one_by_one or thin:
            line = self.weight[1] * self.weight[3:].numel() * self.groups
            copied = self.stride[0] * self.depth * line
            return by_blocks(lambda i, j: self._sliding_rows(x[i:j], b[i:j]), n, copied, x)
        # One group per sample: the library's own weight gradient then keeps the samples apart.
        b = b.reshape(1, n * self.weight[0], *b.shape[2:])
        x = x.reshape(1, n * x.shape[1], *x.shape[2:])
        return self._weight_gradient(x, b, samples=n).reshape(n, self.weight.numel())

    def lines(self, start: int, stop: int, width: int) -> Tensor:
        if self.groups > 1:  # an output channel sees its own group's inputs only
            return self.rows(0, self.samples)[:, start * width : stop * width]
        weight = torch.Size((stop - start, *self.weight[1:]))
        part = replace(self, b=self.b[:, start:stop], weight=weight)
        return part.rows(0, self.samples)

    def squared_norms(self, arithmetic: Arithmetic) -> SquaredNorms:
        positions, d_in = self.depth, self.weight[1:].numel()
        d_out = self.weight[0] // self.groups
        # The ghost norm must write out every patch first: it has to be cheaper to pay.
        # Where products round their factors, its bound is also the looser one.
        cheap = self.x.is_cuda and not arithmetic.factor
        if (1 if cheap else _COST_OF_PATCHES) * positions * (d_in + d_out) >= d_in * d_out:
            return super().squared_norms(arithmetic)
        parts: list[SquaredNorms] = []
        for start, stop in blocks(self.samples, positions * d_in * self.groups, self.x):
            a = self._unfold(full_precision(self.x[start:stop]))
            b = self._sequences(full_precision(self.b[start:stop]))
            # A group sees its own channels only: groups are like samples, then added up.
            parts.append(Outer(a.flatten(0, 1), b.flatten(0, 1)).squared_norms(arithmetic))
        value = joined([part.value for part in parts]).view(-1, self.groups).sum(1)
        magnitude = joined([part.magnitude for part in parts]).view(-1, self.groups).sum(1)
        return parts[0]._replace(value=value, magnitude=magnitude)

    def magnitudes(self) -> Tensor:
        # An input number lies in at most one patch per kernel entry.
        overlap = self.weight[2:].numel()
        return overlap * squared_norms(self.x) * squared_norms(self.b)

    def combine(self, weights: Tensor, dropped: Tensor | None) -> Tensor:
        x, b = kept(self.x, dropped), kept(self.b, dropped)
        b = b * weights.view(-1, *([1] * (b.dim() - 1)))
        if not x.is_cuda:
            return self._weight_gradient(x, b, samples=1).flatten()
        # On a GPU the convolution may round to TF32 or use transforms that no simple error bound
        # covers; a matrix product does neither unless the user asks for it.
        total = x.new_zeros(self.groups, self.weight[0] // self.groups, self.weight[1:].numel())
        numbers = self.depth * (total.shape[2] + total.shape[1]) * self.groups
        for start, stop in blocks(self.samples, numbers, x):
            left = self._sequences(b[start:stop]).transpose(0, 1).flatten(1, 2)
            right = self._unfold(x[start:stop]).transpose(0, 1).flatten(1, 2)
            total = total + left.transpose(1, 2) @ right
        return total.flatten()

    def compact(self, planned: int) -> Term:
        stored = self.x.shape[1:].numel() + self.b.shape[1:].numel()
        limit = _CPU_ROWS_KEPT_BYTES if self.x.device.type == "cpu" else _GPU_ROWS_KEPT_BYTES
        size = self.weight.numel()
        return compact(self, size, size if planned * size * 4 <= limit else stored)

    def rows_to_keep(self, start: int, stop: int) -> Tensor:
        x, b = full_precision(self.x[start:stop]), full_precision(self.b[start:stop])
        if self.groups > 1 or not len(x) or not fused(x) or not Arithmetic.of(x).factor:
            return self.rows(start, stop)
        from dpspan.gradients.layers import kernels

        pad = [side for p in reversed(self.padding) for side in (p, p)]
        return kernels.patch_products(F.pad(x, pad), b, self.weight[2:], self.stride, self.dilation)

    def merged(self, groups: Groups) -> Rows:
        return merged_rows(self, groups, self.weight.numel())

    def compress(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        if self.groups > 1:  # carriers would mix what the groups keep apart
            return super().compress(left, right)
        x, b = full_precision(self.x), full_precision(self.b)
        own_kernel = fused(x) and bool(Arithmetic.of(x).factor)
        if x.is_cuda and not own_kernel:  # small kernels cost more than copying the patches once
            ranges = blocks(len(x), self.depth * right.shape[1], x)
            return joined_pairs([self._compressed(x[i:j], b[i:j], left, right) for i, j in ranges])
        # R a is a convolution with r filters, and Lᵀ G the gradient of one with r outputs: neither
        # needs the rows of the whole weight. Both are what will be clipped, however they round.
        filters = right.view(-1, *self.weight[1:])
        seen = torch.convolution(
            x, filters, None, self.stride, self.padding, self.dilation, False, [0], 1
        )
        outputs = (left.T @ b.flatten(2)).view(len(b), len(right), *b.shape[2:])
        thin = replace(self, x=x, b=outputs, weight=filters.shape)
        rights = thin.rows_to_keep(0, self.samples).view(self.samples, *right.shape)
        return torch.bmm(b.flatten(2), seen.flatten(2).transpose(1, 2)), rights

    def _compressed(
        self, x: Tensor, b: Tensor, left: Tensor, right: Tensor
    ) -> tuple[Tensor, Tensor]:
        """G Rᵀ and Lᵀ G from patches that are written out."""
        patches, outputs = self._unfold(x)[:, 0], b.flatten(2)
        return torch.bmm(outputs, patches @ right.T), torch.bmm(left.T @ outputs, patches)

    @property
    def _rows_are_larger_than_patches(self) -> bool:
        """Whether copying whole patches moves less memory than interleaving lines of rows.

        Sliding rows copy a line's share of the patches, and write, read and write the rows;
        unfolded ones copy all of the patches and write the rows once.
        """
        lines, d_out = self.weight[2], self.weight[0] // self.groups
        return self.depth * (lines - 1) < 2 * d_out * lines

    def _unfolded_rows(self, x: Tensor, b: Tensor) -> Tensor:
        """Rows by one batched product with all patches."""
        return torch.matmul(self._sequences(b).transpose(2, 3), self._unfold(x)).flatten(1)

    def _sliding_rows(self, x: Tensor, b: Tensor) -> Tensor:
        """Rows by one batched product per line of the kernel.

        Patches repeat every input number once per kernel entry. Laid out with the first spatial
        axis outermost, the patches under one line of the kernel are those under the line before,
        further along in memory: so only the entries of one line have to be copied apart. A stride
        separates the lines into as many phases.
        """
        n, lines, step, dilation = len(x), self.weight[2], self.stride[0], self.dilation[0]
        height, width = self.b.shape[2], self.b.shape[3:].numel()
        long = height + (lines - 1) * dilation // step
        pad = [side for p in reversed(self.padding) for side in (p, p)]
        pad[-1] = step * long - x.shape[2] - pad[-2]  # as far as the last phase reaches; may crop
        channels, others = x.shape[1] // self.groups, len(pad) // 2 - 1
        x = F.pad(x, pad).unflatten(1, (self.groups, -1)).unflatten(3, (long, step)).movedim(4, 2)
        view = _windows(x, 5, self.weight[3:], self.stride[1:], self.dilation[1:])
        # Positions behind the kernel's entries.
        view = view.movedim(tuple(range(4, 5 + others)), tuple(range(-1 - others, 0)))
        under = channels * self.weight[3:].numel()
        laid_out = view.reshape(n, self.groups, step, under, long * width)
        out = b.reshape(n, self.groups, b.shape[1] // self.groups, self.depth)
        products = []
        for index in range(lines):
            start, phase = divmod(index * dilation, step)
            patches = laid_out[:, :, phase, :, start * width : (start + height) * width]
            products.append(_batched(out, patches).unflatten(3, (channels, -1)))
        return torch.stack(products, dim=4).flatten(1)

    def _unfold(self, x: Tensor) -> Tensor:
        """Patches as (n, groups, positions, d_in): a strided view, copied once."""
        pad = [side for p in reversed(self.padding) for side in (p, p)]
        x = F.pad(x, pad).unflatten(1, (self.groups, -1))
        view = _windows(x, 3, self.weight[2:], self.stride, self.dilation)
        view = view.movedim(2, 2 + len(self.stride))  # channels behind positions
        return view.reshape(len(x), self.groups, self.depth, self.weight[1:].numel())

    def _sequences(self, b: Tensor) -> Tensor:
        """Output gradients as (n, groups, positions, d_out)."""
        apart = b.reshape(b.shape[0], self.groups, b.shape[1] // self.groups, self.depth)
        return apart.transpose(2, 3)

    def _weight_gradient(self, x: Tensor, b: Tensor, samples: int) -> Tensor:
        """The weight gradient by torch itself, for `samples` samples laid side by side."""
        shape = (samples * self.weight[0], *self.weight[1:])
        gradient: Callable[..., Tensor] = getattr(conv_grad, f"conv{len(self.stride)}d_weight")
        groups = samples * self.groups
        return gradient(x, shape, b, self.stride, self.padding, self.dilation, groups)


def _windows(x: Tensor, axis: int, *geometry: tuple[int, ...]) -> Tensor:
    """What lies under a kernel of this size, stride and dilation, in dimensions at the end."""
    for size, step, gap in zip(*geometry, strict=True):
        x = x.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]
        axis += 1
    return x


def _batched(left: Tensor, right: Tensor) -> Tensor:
    """left rightᵀ over (n, groups); one group is a plain batch, which needs no copy."""
    if left.shape[1] == 1:
        return torch.bmm(left[:, 0], right[:, 0].transpose(1, 2)).unsqueeze(1)
    return left @ right.transpose(2, 3)


def conv_terms(module: nn.Module, x: Tensor, grad: Tensor) -> Iterator[tuple[str, Term]]:
    """Terms of a convolution's weight and bias."""
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    padding = module.padding
    if isinstance(padding, str) or module.padding_mode != "zeros":
        # The same padding that the module applies before it convolves.
        pad = module._reversed_padding_repeated_twice
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x, padding = F.pad(x, pad, mode=mode), (0,) * len(module.stride)
    shape, dilation = module.weight.shape, module.dilation
    yield "weight", Patches(x, grad, shape, module.stride, padding, dilation, module.groups)
    yield "bias", Rows(grad.flatten(2).sum(2))
