"""Kernels of our own, for a GPU: what would otherwise copy memory several times over.

Written in Triton, which comes with torch's CUDA builds; where it is missing, and on a CPU, torch's
operations do the same (see the callers).
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_SUM_COLUMNS, _SUM_ROWS = 128, 32


@triton.jit
def _weighted_sum(rows, weights, out, n, width, stride, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        weight = tl.load(weights + row, mask=row < n, other=0.0)
        used = (weight != 0.0)[:, None] & (column < width)[None, :]
        places = row.to(tl.int64)[:, None] * stride + column[None, :]
        total += tl.sum(tl.load(rows + places, mask=used, other=0.0) * weight[:, None], axis=0)
    tl.store(out + column, total, mask=column < width)


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """wᵀ rows (n, d) in IEEE float32; a row of weight zero is not read, whatever it holds."""
    n, width = rows.shape
    out = torch.empty(width, dtype=rows.dtype, device=rows.device)
    grid = (triton.cdiv(width, _SUM_COLUMNS),)
    with torch.cuda.device_of(rows):
        _weighted_sum[grid](
            rows, weights, out, n, width, rows.stride(0), COLUMNS=_SUM_COLUMNS, ROWS=_SUM_ROWS
        )
    return out


@triton.jit
def _patch_products(
    x,
    b,
    out,
    places,
    offsets,
    outputs,
    positions,
    width,
    sample,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """One tile of one sample's Σ_t b_t ⊗ patch_t, patches gathered on the way."""
    tiles_across = tl.cdiv(width, COLUMNS)
    tiles = tl.cdiv(outputs, OUTPUTS) * tiles_across
    n = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    output = (tile // tiles_across) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = (tile % tiles_across) * COLUMNS + tl.arange(0, COLUMNS)
    x += n * sample
    b += n * outputs * positions
    offset = tl.load(offsets + column, mask=column < width, other=0)
    total = tl.zeros((OUTPUTS, COLUMNS), dtype=tl.float32)
    for start in range(0, positions, POSITIONS):
        t = start + tl.arange(0, POSITIONS)
        place = tl.load(places + t, mask=t < positions, other=0)
        left = tl.load(
            b + output[:, None] * positions + t[None, :],
            mask=(output < outputs)[:, None] & (t < positions)[None, :],
            other=0.0,
        )
        right = tl.load(
            x + place[:, None] + offset[None, :],
            mask=(t < positions)[:, None] & (column < width)[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="tf32")
    tl.store(
        out + n * outputs * width + output[:, None] * width + column[None, :],
        total,
        mask=(output < outputs)[:, None] & (column < width)[None, :],
    )


def patch_products(
    x: Tensor,
    b: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Tensor:
    """Rows Σ_t b_it ⊗ (patch of x_i under t), (n, d_out · d_in), in TF32.

    x is padded already. Factors are cut off at TF32's eleven bits, not rounded: up to twice the
    error of a matrix product in TF32.
    """
    n, outputs, *sizes = b.shape
    places, offsets = _tables(tuple(x.shape[1:]), tuple(sizes), kernel, stride, dilation, x.device)
    positions, width = len(places), len(offsets)
    out = torch.empty(n, outputs * width, dtype=x.dtype, device=x.device)
    # As measured on an H200 for the layers of ResNet-20 and WRN-28-4, and for eight carriers.
    tile_outputs = min(128, max(16, triton.next_power_of_2(outputs)))
    tile_columns = 128 if tile_outputs == 128 or (tile_outputs < 64 and width > 256) else 64
    tiles = triton.cdiv(outputs, tile_outputs) * triton.cdiv(width, tile_columns)
    with torch.cuda.device_of(x):
        _patch_products[(n * tiles,)](
            x.contiguous(),
            b.contiguous(),
            out,
            places,
            offsets,
            outputs,
            positions,
            width,
            x.shape[1:].numel(),
            OUTPUTS=tile_outputs,
            COLUMNS=tile_columns,
            POSITIONS=32,
            num_warps=8 if tile_outputs == 128 else 4,
            num_stages=3,
        )
    return out


@cache
def _tables(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Where in a sample each position's patch begins, and where in a patch each entry is."""
    strides = [torch.Size(shape[axis + 1 :]).numel() for axis in range(len(shape))]
    places, offsets = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for size, step, along in zip(sizes, stride, strides[1:], strict=True):
        places = (places[:, None] + torch.arange(size, dtype=torch.int32) * step * along).flatten()
    spread = (1, *dilation)
    for size, step, along in zip((shape[0], *kernel), spread, strides, strict=True):
        offsets = (
            offsets[:, None] + torch.arange(size, dtype=torch.int32) * step * along
        ).flatten()
    return places.to(device), offsets.to(device)
