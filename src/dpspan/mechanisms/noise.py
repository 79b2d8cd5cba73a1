"""Gaussian noise from a generator of its own, in float64.

A float32 generator has no tail: torch's ends at 5.77 σ on a CPU, and whatever lies beyond would
tell for sure that a record took part. So noise is drawn and added in float64, then rounded.

Which float64 numbers a draw can be tells something too (Mironov, 2012). Secure noise is drawn from
a cryptographic generator, as a sum, and what it was added to is rounded to a grid that is coarse
compared with float64 and fine compared with the noise: that is post-processing, and every point of
the grid is reached in billions of ways.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from dpspan.support.secure import SecureGenerator

_STREAMS = 4  # independent generators of a CPU; a constant, so that a seed fixes the numbers
_LONG = 1 << 16  # numbers from which on the streams are filled side by side
_GRID = 16  # its points are the std, rounded down to a power of two, times 2 to minus this apart


class Noise:
    """Draws the noise of one training run.

    Generators are seeded from OS entropy, shared with nothing else (not with a forked process
    either), and never saved: a resumed run draws fresh noise. A fixed `seed` is for debugging, and
    makes the run not private. `secure` noise has none; numbers for a GPU are drawn on the CPU.
    """

    def __init__(self, seed: int | None = None, *, secure: bool = False) -> None:
        self.seed, self.secure = seed, secure
        self._process = os.getpid()
        self._streams: Sequence[np.random.Generator | SecureGenerator] = []
        self._on_devices: dict[torch.device, torch.Generator] = {}

    def add(self, parts: Mapping[str, Tensor], std: float | Tensor) -> dict[str, Tensor]:
        """Each part plus independent N(0, std²) noise, drawn for all of them at once."""
        sizes = [part.numel() for part in parts.values()]
        flat = torch.cat([part.flatten() for part in parts.values()])
        noisy = self.normal(flat, std).add_(flat)
        if self.secure:
            step = torch.as_tensor(std).double().log2().floor().sub(_GRID).exp2()
            rounded = noisy.div(step).round_().mul_(step)  # exact: it is a power of two
            noisy = torch.where(step > 0, rounded, noisy)  # without noise there is no grid
        pieces = noisy.to(flat.dtype).split(sizes)
        return {
            name: piece.view_as(part)
            for (name, part), piece in zip(parts.items(), pieces, strict=True)
        }

    def normal(self, like: Tensor, std: float | Tensor) -> Tensor:
        """Independent N(0, std²) numbers in float64, with the shape and device of `like`."""
        if os.getpid() != self._process:  # forked: the other process goes on with these generators
            self._process, self._streams, self._on_devices = os.getpid(), [], {}
        shape, device = like.shape, like.device
        if device.type == "cpu" or self.secure:
            numbers = torch.from_numpy(self._on_cpu(like.numel()))
            return numbers.view(shape).to(device).mul_(std)
        generator = self._on_device(device)
        return torch.randn(shape, generator=generator, dtype=torch.float64, device=device).mul_(std)

    def _on_cpu(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        if not self._streams:  # 128 bits of OS entropy; torch's CPU generator keeps 32 of any seed
            usual = np.random.default_rng(self.seed).spawn(_STREAMS)
            self._streams = [SecureGenerator() for _ in usual] if self.secure else usual
        if count < _LONG:
            return self._streams[0].standard_normal(count)
        numbers = np.empty(count)
        parts = np.array_split(numbers, _STREAMS)
        with ThreadPoolExecutor(min(_STREAMS, torch.get_num_threads())) as threads:
            jobs = zip(self._streams, parts, strict=True)
            list(threads.map(lambda job: job[0].standard_normal(out=job[1]), jobs))
        return numbers

    def _on_device(self, device: torch.device) -> torch.Generator:
        if device not in self._on_devices:
            seed = secrets.randbits(63) if self.seed is None else self.seed
            self._on_devices[device] = torch.Generator(device).manual_seed(seed)
        return self._on_devices[device]
