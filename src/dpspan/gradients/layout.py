"""Where the batch is in every module's inputs, found by running the model on 2 and on 3 samples.

From one batch it cannot be told: a table of positions looks like a batch of as many samples. With
one sample more, what belongs to the samples grows, and what they share does not.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_with_path

from dpspan.support.left_as_found import Mode, left_as_found

Call = tuple[tuple[Any, ...], dict[str, Any]]
Pair = tuple[torch.Size, torch.Size]  # of one tensor, with fewer and with more samples

# In place of the dimension that is the batch: there is none, the same for all samples; a first
# dimension of 1 stands for it; it is in front with another one folded into it, (n·k, …); who knows.
SHARED, ONE, FOLDED, UNCLEAR = -1, -2, -3, -4
FEW, MORE = 2, 3


@dataclass
class Seen:
    """What was seen of one module's calls; places are dimensions, or one of the words above."""

    inputs: dict[tuple[str, int], int] = field(default_factory=dict)  # by argument and dimensions
    first: dict[int, int] = field(default_factory=dict)  # the first argument, by its dimensions
    folds: dict[int, int] = field(default_factory=dict)  # k of (n·k, …), in the same way
    outputs: dict[tuple[int, int], int] = field(default_factory=dict)  # by number and dimensions
    routed: bool = False  # what it sees, or whether it is called, depends on values in the batch

    def add(self, inputs: dict[str, Pair], outputs: list[Pair], views: int) -> None:
        """One call."""
        for position, (name, pair) in enumerate(inputs.items()):
            place, dimensions = _place(pair, views), len(pair[0])
            _enter(self.inputs, (name, dimensions), place)
            if position == 0:
                folds = pair[0][0] // (FEW * views) if place == FOLDED else 1
                sizes = [shape[0] if shape else 0 for shape in pair]
                self.routed |= sizes[0] != sizes[1] and sizes[0] * MORE != sizes[1] * FEW
                same = self.folds.setdefault(dimensions, folds) == folds
                _enter(self.first, dimensions, place if same else UNCLEAR)
        for number, pair in enumerate(outputs):
            # A single number may be of the whole batch: who knows what is done with one a sample.
            place = _place(pair, views) if pair[0] else UNCLEAR
            _enter(self.outputs, (number, len(pair[0])), place)

    @property
    def fits_rule(self) -> bool:
        """Whether a layer's rule may do for it."""
        return not self.routed and bool(self.first) and UNCLEAR not in self.first.values()

    @property
    def fits_unit(self) -> bool:
        """Whether torch.func may take it as a whole."""
        places = {*self.inputs.values(), *self.outputs.values()}
        return not self.routed and bool(self.outputs) and not places & {FOLDED, UNCLEAR}

    @property
    def takes_batch(self) -> bool:
        """Whether it is given whole batches."""
        return self.fits_unit and any(place >= 0 for place in self.inputs.values())


_Shapes = tuple[dict[str, torch.Size], list[torch.Size]]  # of the inputs and of the outputs


@dataclass(frozen=True)
class Trial:
    """A module and a call of it, to be run on a few rows of the named arguments."""

    module: nn.Module
    path: str
    forward: Callable[..., Any]
    call: Call
    rows: int  # of the batch
    views: int  # rows that belong to one sample
    names: set[str] = field(default_factory=set)

    def run(self) -> tuple[dict[str, Seen], bool]:
        """What was seen of the modules below, and whether a sample's output is its own."""
        seen, apart, random = self._compare("without dropout")
        if not self.module.training:
            return seen, apart or random
        try:  # layers that training skips at random
            others, apart_then, random_then = self._compare("evaluation")
        except Exception:
            return seen, apart or random
        return {**others, **seen}, apart or (random and (apart_then or random_then))

    def _compare(self, mode: Mode) -> tuple[dict[str, Seen], bool, bool]:
        """What was seen, whether samples are apart, and whether the outputs are random."""
        (few, output), (more, wider) = self._run(FEW, 0, mode), self._run(MORE, 0, mode)
        seen: dict[str, Seen] = defaultdict(Seen)
        for name in {**few, **more}:
            for one, other in zip(few[name], more[name], strict=False):
                inputs = {n: (shape, other[0].get(n, shape[:0])) for n, shape in one[0].items()}
                seen[name].add(inputs, list(zip(one[1], other[1], strict=False)), self.views)
            seen[name].routed |= len(few[name]) != len(more[name])
        if _agree(output, wider, self.views):
            return dict(seen), True, False
        return dict(seen), False, not _agree(output, self._run(FEW, 1, mode)[1], self.views)

    def _run(self, samples: int, seed: int, mode: Mode) -> tuple[dict[str, list[_Shapes]], Any]:
        """The shapes of every call at and below the module, by path, and its output."""
        rows = [i % self.rows for i in range(samples * self.views)]
        args, kwargs = replaced(self.call, self.names, itemgetter(rows))
        record: dict[str, list[_Shapes]] = defaultdict(list)

        def note(path: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs = {n: x.shape for n, x in named_tensors((args, kwargs)).items()}
            record[path].append((inputs, [x.shape for x in _tensors(output)]))

        with ExitStack() as hooks:
            for name, child in self.module.named_modules():
                if name:
                    hook = partial(note, joined(self.path, name))
                    hooks.enter_context(child.register_forward_hook(hook, with_kwargs=True))
            with left_as_found(self.module, seed, mode=mode):
                output = self.forward(*args, **kwargs)
        note(self.path, self.module, args, kwargs, output)
        return record, output


class Layout:
    """What is known of the modules that one kind of call of the model goes through."""

    def __init__(self) -> None:
        self.seen: dict[str, Seen] = {}
        self.refused: dict[str, str] = {}  # modules whose calls tell nothing, and why

    def place(self, path: str, name: str, leaf: Tensor) -> int | None:
        """Where the batch is in an argument; None: never seen."""
        seen = self.seen.get(path)
        return None if seen is None else seen.inputs.get((name, leaf.dim()))

    def look(self, trial: Trial) -> None:
        """Run a module on a few samples of the batch that it is called with.

        Arguments with the batch in front are cut; where that fails, one may be a table as long.
        """
        path, tensors = trial.path, named_tensors(trial.call)
        names = [name for name, x in tensors.items() if x.shape[:1] == (trial.rows,)]
        self.refused[path] = "no argument of it has the batch in front"
        for table in [None, *names] if len(names) > 1 else [None] * len(names):
            try:
                seen, apart = replace(trial, names={*names} - {table}).run()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a model raises where inputs do not fit together
                telling = isinstance(error, RuntimeError | ValueError)
                what = error if telling else type(error).__name__
                why = f"it cannot be run on {FEW} and {MORE} samples of the batch ({what})"
            else:
                # A table taken for the batch would put it in front of nothing.
                if apart and (table is None or {*seen[path].outputs.values()} == {0}):
                    del self.refused[path]
                    self._learn(seen)
                    return
                why = "what it computes for a sample depends on the other samples"
            if table is None:
                self.refused[path] = why

    def _learn(self, seen: dict[str, Seen]) -> None:
        for path, new in seen.items():
            old = self.seen.setdefault(path, new)
            old.inputs |= new.inputs
            old.first |= new.first
            old.folds |= new.folds
            old.outputs |= new.outputs
            old.routed |= new.routed

    def around(self, path: str) -> str | None:
        """The innermost module around a path that takes and gives whole batches."""
        while path:
            path = path.rpartition(".")[0]
            if path in self.seen and self.seen[path].takes_batch:
                return path
        return None


def joined(path: str, name: str) -> str:
    """The name in the model of what a module at this path calls by that name."""
    return f"{path}.{name}" if path else name


def is_inside(path: str, units: Collection[str]) -> bool:
    """Whether a path is one of the units, or below one."""
    return "" in units or any(f"{path}.".startswith(f"{unit}.") for unit in units)


def named_tensors(call: Call) -> dict[str, Tensor]:
    """The tensors among the arguments, by where they are."""
    leaves, _ = tree_flatten_with_path(call)
    return {keystr(where): leaf for where, leaf in leaves if isinstance(leaf, Tensor)}


def replaced(call: Call, names: Collection[str], new: Callable[[Tensor], Tensor]) -> Call:
    """The call with others in the place of the named tensors."""
    result: Call = tree_map_with_path(
        lambda where, leaf: new(leaf) if keystr(where) in names else leaf, call
    )
    return result


def _enter(places: dict[Any, int], key: Any, place: int) -> None:
    places[key] = place if places.get(key, place) == place else UNCLEAR


def _tensors(output: Any) -> list[Tensor]:
    return [x for x in tree_leaves(output) if isinstance(x, Tensor)]


def _place(pair: Pair, views: int) -> int:
    """The dimension that is as long as there are rows; FOLDED: a multiple of that, in front."""
    few, more = pair
    if few == more:
        return ONE if few[:1] == (1,) else SHARED
    grown = [i for i, sizes in enumerate(zip(few, more, strict=False)) if sizes[0] != sizes[1]]
    if len(few) != len(more) or len(grown) != 1:
        return UNCLEAR
    (place,) = grown
    factor = few[place] // (FEW * views)
    if not factor or (few[place], more[place]) != (factor * FEW * views, factor * MORE * views):
        return UNCLEAR
    return place if factor == 1 else FOLDED if place == 0 else UNCLEAR


def _agree(output: Any, other: Any, views: int) -> bool:
    """Whether the samples that both have are given the same, up to rounding."""
    for x, y in zip(_tensors(output), _tensors(other), strict=True):
        place = _place((x.shape, y.shape), views)
        if place == UNCLEAR:
            return False
        if place == FOLDED or not x.dim() or not x.is_floating_point():
            continue  # a single number is a loss of the whole batch
        x, y = x.detach().double(), y.detach().double()
        if place >= 0:
            y = y.narrow(place, 0, x.shape[place])
        scale = float(x.nan_to_num(posinf=0.0, neginf=0.0).abs().max()) if x.numel() else 1.0
        if not torch.allclose(x, y, rtol=1e-2, atol=1e-3 * scale, equal_nan=True):
            return False
    return True
