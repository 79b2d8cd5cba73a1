"""Facts about numbers on a device, for checks that must not make a step wait for it."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Health:
    """Brings a few facts from the device: at once the first time and on a CPU, later without
    waiting, as soon as they are there."""

    def __init__(self) -> None:
        self._asked = False
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    def known(self, facts: Tensor) -> Sequence[float] | None:
        """These facts, or those of an earlier call, or none yet."""
        arrived: list[float] | None = None
        if not facts.is_cuda or not self._asked:
            self._asked, arrived = True, facts.tolist()
            return arrived
        if self._pending is not None and self._pending[1].query():
            arrived, self._pending = self._pending[0].tolist(), None
        if self._pending is None:
            host = torch.empty_like(facts, device="cpu", pin_memory=True)
            host.copy_(facts, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = host, event
        return arrived
