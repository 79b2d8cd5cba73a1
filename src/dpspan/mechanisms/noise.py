"""Gaussian noise from a generator of its own, in float64.

A float32 generator has no tail: torch's ends at 5.77 σ on a CPU, and whatever lies beyond would
tell for sure that a record took part. So noise is drawn and added in float64, then rounded.
"""

import os
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

_STREAMS = 4  # independent generators of a CPU; a constant, so that a seed fixes the numbers
_LONG = 1 << 16  # numbers from which on the streams are filled side by side


class Noise:
    """Draws the noise of one training run.

    Generators are seeded from OS entropy, shared with nothing else (not with a forked process
    either), and never saved: a resumed run draws fresh noise. A fixed `seed` is for debugging, and
    makes the run not private.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self._process = os.getpid()
        self._streams: list[np.random.Generator] = []
        self._on_devices: dict[torch.device, torch.Generator] = {}

    def add(self, parts: Mapping[str, Tensor], std: float | Tensor) -> dict[str, Tensor]:
        """Each part plus independent N(0, std²) noise, drawn for all of them at once."""
        sizes = [part.numel() for part in parts.values()]
        flat = torch.cat([part.flatten() for part in parts.values()])
        pieces = self.normal(flat, std).add_(flat).to(flat.dtype).split(sizes)
        return {
            name: piece.view_as(part)
            for (name, part), piece in zip(parts.items(), pieces, strict=True)
        }

    def normal(self, like: Tensor, std: float | Tensor) -> Tensor:
        """Independent N(0, std²) numbers in float64, with the shape and device of `like`."""
        if os.getpid() != self._process:  # forked: the other process goes on with these generators
            self._process, self._streams, self._on_devices = os.getpid(), [], {}
        shape, device = like.shape, like.device
        if device.type == "cpu":
            return torch.from_numpy(self._on_cpu(like.numel())).view(shape).mul_(std)
        generator = self._on_device(device)
        return torch.randn(shape, generator=generator, dtype=torch.float64, device=device).mul_(std)

    def _on_cpu(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        if not self._streams:  # 128 bits of OS entropy; torch's CPU generator keeps 32 of any seed
            self._streams = np.random.default_rng(self.seed).spawn(_STREAMS)
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
