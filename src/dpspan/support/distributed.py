"""The processes of one run: what they have in common, and how sums travel between them.

Each holds the whole model and takes its part of every batch. Sums are added up in the first, which
alone draws noise; what it releases goes to all. A process that fails stops the others before the
next sum travels, so nothing partial is ever released.
"""

import atexit
import gc
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpspan.support.processes import told_of_others

Note = tuple[str, str]  # its kind, and what it says

_APART = 1e-3  # relative: processes may round differently, but weights further apart are an error
_ALONE = (
    "This is one of several processes (WORLD_SIZE and RANK say so, as torchrun sets them), and "
    "they do not know each other yet. Call torch.distributed.init_process_group() before "
    "make_private, so that they train one model together; for independent runs, unset both."
)
_LOST = (
    "Another process of this run is gone, or somewhere else in the program, so this one stops, "
    "too. Start all of them again and load the last checkpoint."
)
_LATE = (
    "torch.distributed was initialised after make_private, so this run does not know of the other "
    "processes. Call init_process_group() before make_private, so that they train one model "
    "together; for independent runs, pass PrivacyEngine(processes=) a group of one."
)


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _leave() -> None:
    """End the group's threads before the interpreter does: one that is late would abort it."""
    if _initialised():
        dist.destroy_process_group()
    gc.collect()  # whoever still had the group


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers: what processes that train one model have in common, so no shards."""
    every = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: x for name, x in every.items() if not is_sharded(x)}


def is_sharded(*tensors: Any) -> bool:
    """Whether of any of them each process has a part only (see `sharded`)."""
    known = sys.modules.get("torch.distributed.tensor")  # to import it takes more than a second
    return known is not None and any(isinstance(x, known.DTensor) for x in tensors)


class _Apart(pickle.Pickler):
    """Leaves tensors out, and keeps them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, x: Any) -> str | None:
        if not isinstance(x, Tensor):
            return None
        self.tensors.append(x)
        return str(len(self.tensors) - 1)


class _Together(pickle.Unpickler):
    """Puts tensors back by their names."""

    def __init__(self, file: io.BytesIO, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(file)
        self.persistent_load = tensors.__getitem__  # type: ignore[method-assign]


class Processes:
    """The processes of a group of torch.distributed, or this one alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.world, self._asked_for = 0, 1, group is not None
        # What the others' certificates must have, too, and what to do with what they have.
        self.notes: Callable[[], Iterable[Note]] = tuple
        self.hear: Callable[[Note], None] = lambda _: None
        self._told: set[Note] = set()
        member = group is not None and dist.get_rank(group) >= 0
        self.ranks = dist.get_process_group_ranks(group) if member else [0]
        self.group = group
        self._agreed = False  # whether all know of the last error
        self._left = False  # in the middle of something that takes all of them
        if group is None or dist.get_world_size(group) == 1:
            return
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("This process is not in the group that was given as processes=.")
        self._group, self._first = group, dist.get_global_rank(group, 0)
        # Flags and settings are on the CPU: they must not wait for what a GPU has still to do.
        backends = str(dist.get_backend_config(group))
        self._control = group
        if "cpu:gloo" not in backends:  # made by its members alone: others are somewhere else
            self._control = dist.new_group(
                self.ranks, backend="gloo", use_local_synchronization=True
            )
        self._by_cpu = "cuda:nccl" not in backends  # gloo takes no sums from a GPU

    @classmethod
    def of_torchrun(cls) -> Self:
        """Those that torchrun started, which get to know each other here; this one without it."""
        if told_of_others() and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if told_of_others() and not _initialised():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
            atexit.register(_leave)
        return cls.of_this_run()

    @classmethod
    def of_this_run(cls, group: dist.ProcessGroup | None = None) -> Self:
        """Those of the group, by default all that torch.distributed knows."""
        if group is None and _initialised():
            group = dist.group.WORLD
        if group is None and told_of_others():
            raise RuntimeError(_ALONE)
        return cls(group)

    def refuse_late_group(self) -> None:
        """RuntimeError if torch.distributed came to know of others since."""
        if not self._asked_for and _initialised() and dist.get_world_size() > 1:
            raise RuntimeError(_LATE)

    @property
    def is_first(self) -> bool:
        """Whether it is this process that draws noise and writes files."""
        return self.rank == 0

    # -- agreement ------------------------------------------------------------------------------

    @contextmanager
    def together(self, place: int = 0) -> Iterator[None]:
        """What fails inside of the block in one process fails in all of them.

        So does a process that is at another `place` in the run than the others.
        """
        if self.world == 1:
            yield
            return
        if self._left:
            raise RuntimeError(_LOST)
        error: Exception | None = None
        self._agreed = False
        try:
            yield
        except Exception as raised:
            if self._left or self._agreed:  # nobody listens, or all know it by an inner agreement
                raise
            error = raised
        mine = None if error is None else f"{type(error).__name__}: {error}"
        news = [note for note in self.notes() if note not in self._told]
        flags = torch.tensor([int(error is not None or bool(news)), place, -place])
        with self.connected(error):
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._control)
            said: list[Any] = [None] * self.world
            if flags[0]:
                dist.all_gather_object(said, (mine, news), group=self._control)
        if flags[0]:
            self._told.update(news)
            self._agreed = any(failure is not None for failure, _ in said)
            self._listen(said, error)
        if flags[1] != -flags[2]:
            self._agreed = True
            raise RuntimeError(
                "The processes are at different batches: each must iterate over its private loader "
                "as often as the others, in pieces of the same size, leave an epoch early and load "
                "a state where they do."
            )

    def _listen(
        self, said: Sequence[tuple[str | None, list[Note]]], error: Exception | None
    ) -> None:
        for note in (note for _, notes in said for note in notes):
            self.hear(note)
        if error is not None:
            raise error
        for rank, (failure, _) in enumerate(said):
            if failure is not None:
                raise RuntimeError(
                    f"Process {rank} of {self.world} stopped, so all do, and nothing was released: "
                    f"{failure}"
                )

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around several collectives: who fails in between cannot tell the others, and is out.

        They wait for its next part, and must not take something else for that.
        """
        try:
            yield
        except BaseException:
            self._left = self.world > 1
            raise

    @contextmanager
    def connected(self, earlier: Exception | None = None) -> Iterator[None]:
        """Around a collective."""
        try:
            yield
        except RuntimeError as lost:  # as torch says it
            raise earlier or RuntimeError(_LOST) from lost

    def any(self, fact: bool) -> bool:
        if self.world > 1:
            flag = torch.tensor(int(fact))
            with self.connected():
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._control)
            fact = bool(flag)
        return fact

    def same(self, value: Any) -> Any:
        if self.world == 1:
            return value
        box = [value]
        with self.connected():
            dist.broadcast_object_list(box, src=self._first, group=self._control)
        return box[0]

    def all_of(self, value: Any) -> list[Any]:
        values = [value] * self.world
        if self.world > 1:
            with self.connected():
                dist.all_gather_object(values, value, group=self._control)
        return values

    def agree(self, settings: Mapping[str, Any]) -> None:
        """ValueError, in all processes, unless all have the same settings."""
        first = self.same(dict(settings))
        with self.together():
            for name, mine in settings.items():
                if mine != first[name]:
                    raise ValueError(
                        f"Process {self.rank} has another {name} than the first: {mine!r}, not "
                        f"{first[name]!r}. Set up every process in the same way."
                    )

    # -- tensors --------------------------------------------------------------------------------

    @torch.no_grad()
    def add_up(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over all processes, in the first, and zeros in the others."""

        def send(x: Tensor) -> None:
            dist.reduce(x, self._first, group=self._group)
            if not self.is_first:
                x.zero_()  # what a backend leaves there may be the sums

        return self._travel(sums, send)

    @torch.no_grad()
    def spread(self, values: Mapping[str, Tensor], source: int = 0) -> dict[str, Tensor]:
        """One process's values, the first's by default, by those names and in those shapes."""

        def send(x: Tensor) -> None:  # as bytes: whatever the backend makes of its numbers
            dist.broadcast(x.view(torch.uint8), self.ranks[source], group=self._group)

        return self._travel(values, send)

    def of_each(self, mine: Any, device: torch.device) -> list[Any]:
        """What each process has, in their order, with the tensors in it on the device."""
        apart = _Apart(file := io.BytesIO())
        apart.dump(mine)
        told = file.getvalue(), [(x.shape, x.dtype) for x in apart.tensors]
        found = []
        with self.in_step():
            for rank, (text, kinds) in enumerate(self.all_of(told)):
                tensors = apart.tensors
                if rank != self.rank:
                    tensors = [torch.empty(s, dtype=kind, device=device) for s, kind in kinds]
                sent = self.spread({str(i): x for i, x in enumerate(tensors)}, rank)
                theirs = _Together(io.BytesIO(text), sent)
                found.append(mine if rank == self.rank else theirs.load())
        return found

    def make_same(self, tensors: Iterable[Tensor]) -> None:
        """Write the first process's numbers over the others'."""
        named = {str(i): x.detach() for i, x in enumerate(tensors)}
        for name, value in self.spread(named).items() if self.world > 1 else ():
            named[name].copy_(value)

    def keep_same(self, weights: Mapping[str, Tensor]) -> bool:
        """The same, for weights that should be equal but for rounding; whether any was not."""
        mine = {name: x.detach() for name, x in weights.items()}
        first = self.spread(mine)
        differ = [name for name, x in mine.items() if not torch.equal(x, first[name])]
        with self.together():
            for name in differ:
                now, then = mine[name].double(), first[name].double()
                if not torch.allclose(now, then, rtol=_APART, atol=_APART, equal_nan=True):
                    raise RuntimeError(
                        f"'{name}' differs between the processes by more than rounding: something "
                        "has changed it in one of them, or training is unstable. Do the same in "
                        "all, or lower the learning rate."
                    )
        for name in differ:
            mine[name].copy_(first[name])
        return bool(differ)

    def _travel(
        self, values: Mapping[str, Tensor], send: Callable[[Tensor], object]
    ) -> dict[str, Tensor]:
        """All values at once, as one vector for each dtype and device."""
        if self.world == 1:
            return dict(values)
        received = dict(values)
        for kind in sorted({(str(x.dtype), x.device.type) for x in values.values()}):
            alike = {name: x for name, x in values.items() if (str(x.dtype), x.device.type) == kind}
            flat = torch.cat([x.reshape(-1) for x in alike.values()])
            wire = flat.cpu() if self._by_cpu else flat
            with self.connected():
                send(wire)
            parts = wire.to(flat.device).split([x.numel() for x in alike.values()])
            received |= {n: p.view(x.shape) for (n, x), p in zip(alike.items(), parts, strict=True)}
        return received
