"""Private batches: a loader that draws them as the accounting assumes, in physical pieces.

The amplification by sampling that the ledger counts holds for Poisson sampling only. A shuffled
loader of fixed-size batches is a different mechanism, so the loader made here replaces the
sampling of the user's `DataLoader` and keeps everything else of it.
"""

import math
import secrets
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, ClassVar, NamedTuple, Never, Self

import numpy as np
import torch
from dp_accounting import DpEvent
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from dpspan.accounting.events import gaussian_event, step_event
from dpspan.public.data import batches_of, check_map_style, like
from dpspan.support.checks import check_count, check_share
from dpspan.support.distributed import Processes
from dpspan.support.errors import CaptureError
from dpspan.support.randomness import FreshWorker, fresh_randomness, renew
from dpspan.support.secure import SecureGenerator
from dpspan.support.units import Units

Array = np.ndarray[Any, Any]
AnyGenerator = np.random.Generator | SecureGenerator


@dataclass(frozen=True, kw_only=True)
class PoissonDraw:
    """Each record enters each step independently with probability `sample_rate`."""

    independent_steps: ClassVar[bool] = True  # an interrupted epoch may go on with fresh steps

    records: int = field(repr=False)  # under add/remove adjacency the size is private: not shown
    sample_rate: float
    steps_per_epoch: int

    def __post_init__(self) -> None:
        check_count("records", self.records)
        check_share("sample_rate", self.sample_rate)
        check_count("steps_per_epoch", self.steps_per_epoch)

    @classmethod
    def one_pass(cls, *, records: int, sample_rate: float) -> Self:
        """An epoch of 1/q steps, in which a record takes part once on average."""
        steps = max(1, round(1 / check_share("sample_rate", sample_rate)))
        return cls(records=records, sample_rate=sample_rate, steps_per_epoch=steps)

    @property
    def events_per_epoch(self) -> int:
        return self.steps_per_epoch

    def event(self, noise_multiplier: float) -> DpEvent:
        return step_event(noise_multiplier, self.sample_rate)

    def epoch(self, generator: AnyGenerator) -> Iterator[Tensor]:
        for _ in range(self.steps_per_epoch):
            # float64: the 24 bits of a float32 uniform would round a small sample_rate visibly.
            drawn = generator.random(self.records) < self.sample_rate
            yield torch.from_numpy(np.flatnonzero(drawn))


@dataclass(frozen=True, kw_only=True)
class PartitionDraw:
    """Each record picks one of the epoch's `batches`, independently and uniformly.

    This is the honest form of a shuffled loader. A record takes part exactly once per epoch, and
    adding or removing it leaves every other record in its batch (in a shuffled loader of
    fixed-size batches it would move others, so several batches would change). So one epoch costs
    one Gaussian mechanism, without amplification by sampling.
    """

    independent_steps: ClassVar[bool] = False
    events_per_epoch: ClassVar[int] = 1

    records: int = field(repr=False)  # as above
    batches: int

    def __post_init__(self) -> None:
        check_count("records", self.records)
        check_count("batches", self.batches)

    @property
    def steps_per_epoch(self) -> int:
        return self.batches

    def event(self, noise_multiplier: float) -> DpEvent:
        return gaussian_event(noise_multiplier)

    def epoch(self, generator: AnyGenerator) -> Iterator[Tensor]:
        choice = generator.integers(self.batches, size=self.records)
        for batch in range(self.batches):
            yield torch.from_numpy(np.flatnonzero(choice == batch))


# `event` is what is charged: a step, or, where steps depend on one another, an epoch. `epoch`
# yields the record indices of each logical batch, which may be empty. Checkpoints hold the `repr`.
Draw = PoissonDraw | PartitionDraw


class Piece(NamedTuple):
    """One physical piece of one logical batch."""

    samples: int  # records drawn into this piece; the others that it holds are stand-ins
    size: int  # records that it holds
    padded: bool  # whether a graph needs that size: stand-ins come behind the records
    first: bool  # first piece of its logical batch
    last: bool  # last piece of its logical batch
    units: tuple[int, ...] | None = None  # records of each unit in it, one unit after the other
    most: int = 0  # records of this piece in the first process, which has the most


def _parts(share: Array, limit: int, sizes: Array | None) -> list[Array]:
    """Records, or units of these sizes, in parts of at most `limit` records."""
    if sizes is None:
        return np.split(share, range(limit, len(share), limit))
    cuts, held = [], 0
    for place, size in enumerate(sizes[share].tolist()):
        if held and held + size > limit:
            cuts.append(place)
            held = 0
        held += size
    return np.split(share, cuts)


def filled_up(batch: Any, records: int, size: int) -> Any:
    """A collated batch, and copies of its first record behind it, whatever the order is."""
    leaves, structure = tree_flatten(batch)
    of_records = [isinstance(x, Tensor) and x.shape[:1] == (records,) for x in leaves]
    if not any(of_records):
        raise CaptureError(
            "cuda_graphs=True fills up every batch, and this one has no tensor with the records in "
            "front. Let the collate_fn make tensors, or leave cuda_graphs out."
        )
    for index, x in enumerate(leaves):
        if of_records[index]:
            leaves[index] = torch.cat([x, x[:1].expand(size - records, *x.shape[1:])])
    return tree_unflatten(leaves, structure)


class _Feed:
    """Batch sampler of a DataLoader that outlives one epoch (for its persistent workers)."""

    source: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.source


class PrivateLoader:
    """Iterates over privately drawn batches of a DataLoader's dataset; `len` counts steps.

    With physical batches there are more iterations: `last_piece` tells those that end in a step.
    `on_piece` is called with the `Piece` and `on_batch` with the batch, right before the batch is
    handed over. `epoch` counts the epochs that are over and `position` the steps of the running
    one whose last piece was handed over; at `on_piece` the coming step is not counted yet, so an
    epoch starts where `piece.first` and `position == 0`. Leaving an epoch early ends it. `passes`
    counts the iterations that began; unlike `epoch` it never goes back, whatever state is loaded.
    `pieces` counts those of the running one.

    While it is iterated, Python, numpy and torch draw from OS entropy, in workers too: dropout and
    augmentation by a known seed would void the guarantee (see `randomness`).
    """

    batch_size: None = None  # the size of a private batch is random

    def __init__(
        self,
        loader: DataLoader[Any],
        draw: Draw,
        max_physical_batch_size: int | None = None,
        *,
        seed: int | None = None,
        padded: bool = False,
        units: Units | None = None,
        secure: bool = False,
    ) -> None:
        """Keep the loader's dataset, collation and workers; draw its batches by `draw`.

        `padded` pieces all have the physical size: what is missing is filled up with stand-ins.
        With `units` these are drawn, and whoever is drawn brings some records.

        `seed` is for debugging: whoever knows it knows who took part in which step. By default this
        and whatever else is drawn comes from OS entropy; `secure` is by a cryptographic generator.
        """
        records = records_of(loader)
        known, whose = (records, "dataset") if units is None else (len(units), "units")
        if draw.records != known:
            raise ValueError(f"Expected draw.records {known}, the {whose}'s, got {draw.records}.")
        self._draw, self._units = draw, units
        self.dataset: Any = loader.dataset
        self.collate_fn: Callable[[list[Any]], Any] = loader.collate_fn
        self.max_physical_batch_size, self._padded = max_physical_batch_size, padded
        self.on_piece: Callable[[Piece], None] = lambda _: None
        self.on_batch: Callable[[Any], None] = lambda _: None
        self.epoch = self.position = self.passes = self.pieces = 0
        self.last_piece = True
        self._resuming = False
        self._fresh, self._processes = seed is None, Processes()
        # 128 bits, for numpy. torch's CPU generator keeps 32 bits of any seed: few enough to try
        # them all and learn who took part in which step. Never saved.
        self._secret = secrets.randbits(128) if seed is None else seed
        self._secure = secure
        self._seed: int | None = None  # of torch, for the piece at hand
        self._feed = _Feed()
        begin = FreshWorker(loader.worker_init_fn) if self._fresh else loader.worker_init_fn
        self._inner = like(  # in_order: pieces are matched by order
            loader,
            batch_sampler=self._feed,
            worker_init_fn=begin,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            generator=loader.generator,
            persistent_workers=loader.persistent_workers,
        )

    @property
    def draw(self) -> Draw:
        """By which batches are drawn, and steps charged."""
        return self._draw

    def __reduce__(self) -> Never:
        raise TypeError(
            "A private loader cannot be copied or pickled: the copy would draw the same batches, "
            "and two steps on one sample cost more than the ledger says. Make another one."
        )

    def spread_over(self, processes: Processes) -> None:
        """Draw the same batches as the others do, and take a part of each."""
        self._processes, self._secret = processes, processes.same(self._secret)

    def place(self, *more: int) -> int:
        """A number that tells where in which run this is; the same in all of its processes."""
        return hash((self._secret, self.passes, self.pieces, *more)) % 2**62

    @property
    def max_physical_batch_size(self) -> int | None:
        """Most samples in one piece (None: no limit); a change holds from the next epoch on."""
        return self._max_physical_batch_size

    @max_physical_batch_size.setter
    def max_physical_batch_size(self, size: int | None) -> None:
        if size is not None:
            check_count("max_physical_batch_size", size)
        if size is not None and self._units is not None and size < self._units.most:
            raise ValueError(
                f"Expected max_physical_batch_size of at least {self._units.most}, the records of "
                f"a unit, which is never divided, got {size}. Raise it, or lower records_per_unit=."
            )
        self._max_physical_batch_size = size

    def __len__(self) -> int:
        return self.draw.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        if self.position and not self._resuming:  # the last epoch was left early
            self.epoch += 1
            self.position = 0
        self._resuming = False
        # Counted here, at the first batch: iterators made side by side must not share a number.
        self.passes, self.pieces = self.passes + 1, 0
        pieces: deque[Piece] = deque()
        # By the pass: of one stream, processes would have read more or less of an epoch left early.
        seed = self._secret, self.passes
        generator: AnyGenerator = np.random.default_rng(seed)
        if self._secure:  # units' own generators are not, and must not tell anything of the seed
            generator = SecureGenerator(seed)
            seed = tuple(generator.integers(1 << 52, size=2).tolist())
        steps = islice(self.draw.epoch(generator), len(self) - self.position)
        source = self._feed.source = self._cut(steps, pieces, seed)
        entropy = fresh_randomness() if self._fresh else nullcontext()
        with closing(source), entropy:  # an epoch left early lets go of what it has drawn
            batches = iter(self._inner)
            while True:
                # Once more for each piece: a training loop may seed for purposes of its own.
                self._seed = renew() if self._fresh else None
                batch = next(batches, None)
                if not pieces:
                    break
                piece = pieces.popleft()  # a DataLoader returns batches in the order it asked
                if piece.padded:
                    batch = filled_up(batch, max(1, piece.samples), piece.size)
                self.pieces += 1
                self.on_piece(piece)
                self.on_batch(batch)
                self.position, self.last_piece = self.position + piece.last, piece.last
                yield batch
                if self._feed.source is not source:
                    raise RuntimeError(
                        "This epoch ended when a newer iteration over the same PrivateLoader "
                        "began: finish one before the next, or make two loaders."
                    )
        self.epoch += 1
        self.position = 0

    def _cut(
        self, batches: Iterable[Tensor], pieces: deque[Piece], seed: Sequence[int]
    ) -> Generator[list[int], None, None]:
        """Cut logical batches into index lists of the physical size; queue a `Piece` for each.

        Of several processes each takes every W-th record, and as many pieces as the others. Or
        every W-th unit, whose records stay together; which of them take part is drawn by `seed`.
        `padded` pieces will be filled up to exactly that size. For an empty one record 0 stands in,
        and the engine drops what it contributes. An empty step must run like any other: its noise,
        its step and its event are part of the mechanism. But models and loops fail on tensors of
        length zero (`x.view(len(x), -1)`, means that become NaN).
        """
        limit, padded = self.max_physical_batch_size, self._padded
        units, processes = self._units, self._processes
        sizes = None if units is None else units.sizes
        for step, batch in enumerate(batches, start=1):
            shares = [batch[rank :: processes.world].numpy() for rank in range(processes.world)]
            parts = [_parts(share, limit or sys.maxsize, sizes) for share in shares]
            most = max(map(len, parts))
            for number in range(most):
                mine = parts[processes.rank][number : number + 1]
                part, counts = mine[0].tolist() if mine else [], None
                if units is not None and part:
                    drawn = [units.drawn(unit, [*seed, step]) for unit in part]
                    part, counts = list(chain(*drawn)), tuple(map(len, drawn))
                held = limit if padded and limit else max(1, len(part))
                last, shown = number == most - 1, sum(map(len, parts[0][number : number + 1]))
                pieces.append(Piece(len(part), held, padded, number == 0, last, counts, shown))
                yield part or [0]

    def refuse_seeds(self) -> None:
        """Refuse the piece at hand if torch was seeded since it was drawn."""
        if self._seed is not None and self._seed != torch.initial_seed():
            raise CaptureError(
                "torch was seeded between a private batch and its step (torch.manual_seed in the "
                "loop, say). With dropout or augmentation by a known seed one record moves the "
                "gradients of all others: seed before the loop only."
            )

    def state_dict(self) -> dict[str, str | int]:
        """Where the loader stands; never the generator, so that no batch is drawn twice."""
        return {"draw": repr(self.draw), "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: the next iteration yields that epoch's other steps.

        They are drawn afresh. The batches of a PartitionDraw depend on one another, so its
        epoch restarts (and counts as one more epoch).
        """
        if state.keys() != {"draw", "epoch", "position"}:
            raise ValueError(f"Expected keys draw, epoch, position in state, got {sorted(state)}.")
        if state["draw"] != repr(self.draw):
            raise ValueError(f"Expected state['draw'] = {self.draw!r}, got {state['draw']!r}.")
        for key, most in ("epoch", math.inf), ("position", len(self)):
            if type(state[key]) is not int or not 0 <= state[key] <= most:
                raise ValueError(f"Expected state[{key!r}] in 0..{most}, got {state[key]!r}.")
        self.epoch = state["epoch"]
        self.position = state["position"] if self.draw.independent_steps else 0
        self._resuming = True


@batches_of.register(PrivateLoader)
def _(source: PrivateLoader) -> Iterable[Any]:
    raise TypeError(
        "The public data were given as a PrivateLoader, the loader of a private training run: "
        "private records must not become public. Give other data that anybody may see."
    )


class BatchMemoryManager:
    """Limits the physical batch size inside a `with` block; Opacus users know the name.

    `optimizer` is accepted since they pass it, and unused: `on_piece` tells the engine.
    """

    def __init__(
        self, *, data_loader: PrivateLoader, max_physical_batch_size: int, optimizer: object = None
    ) -> None:
        check_count("max_physical_batch_size", max_physical_batch_size)
        self._loader = data_loader
        self._inside = max_physical_batch_size

    def __enter__(self) -> PrivateLoader:
        self._outside = self._loader.max_physical_batch_size
        self._loader.max_physical_batch_size = self._inside
        return self._loader

    def __exit__(self, *exception: object) -> None:
        self._loader.max_physical_batch_size = self._outside


def records_of(loader: DataLoader[Any] | PrivateLoader) -> int:
    """Count the records; refuse a loader that would lose its meaning with its sampling."""
    if isinstance(loader, PrivateLoader):
        raise TypeError(
            "This data loader is private already: pass the DataLoader it was made from."
        )
    dataset: Any = loader.dataset
    check_map_style(dataset, "The data loader's dataset")
    if len(dataset) == 0:
        raise ValueError("The data loader's dataset is empty: give it at least one record.")
    if loader.batch_sampler is None:
        raise ValueError("The data loader has batch_size=None: build it with a batch_size.")
    for name, sampler, known in (
        ("batch_sampler", loader.batch_sampler, (BatchSampler,)),
        ("sampler", loader.sampler, (RandomSampler, SequentialSampler)),
    ):
        if type(sampler) not in known or loader.batch_size is None:
            raise ValueError(
                f"The data loader's {name} is a {type(sampler).__name__}: private sampling would "
                "silently replace it, and unequal weights would change the privacy analysis; "
                f"build the DataLoader without {name}."
            )
    order: Any = loader.sampler
    drawn = getattr(order, "num_samples", len(dataset)), getattr(order, "replacement", False)
    if drawn != (len(dataset), False) or len(order.data_source) != len(dataset):
        raise ValueError(
            "The data loader's sampler takes a part of its dataset, or records several times, and "
            "private sampling would silently take all of it: give torch.utils.data.Subset(dataset, "
            "indices) as the dataset, and leave sampler out."
        )
    return len(dataset)
