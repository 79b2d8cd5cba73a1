"""Watches a private run for ways out that have no noise, and for samples that are not kept apart.

What it sees never leaves it except as an error or a warning to the operator. What takes time or
makes a GPU wait is looked at in the batches 1, 2, 4, 8, …; some of it at random ones in between.
"""

import random
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpspan.gradients.capture import Capture, Hook
from dpspan.gradients.stand_in import while_there
from dpspan.model import isolation
from dpspan.model.criterion import (
    CriterionCheck,
    Reductions,
    mixes,
    refuse_outside,
    state,
    tell_of_backward,
)
from dpspan.model.isolation import NotComparable, Stage, Versions, differing, versions
from dpspan.model.validation import refuse_wrapped_call
from dpspan.support.distributed import is_sharded
from dpspan.support.errors import CaptureError
from dpspan.support.left_as_found import meanwhile
from dpspan.support.randomness import fresh_seed
from dpspan.support.sharded import local

_RARELY = 50  # one batch in so many is fingerprinted besides
_ENOUGH, _SURE = 32, 0.9  # rows that are not equal to their record: so many, and this share

Contents = dict[str, list[float]]


class _Snapshot(NamedTuple):
    """What a model and a criterion keep: its versions, and perhaps fingerprints."""

    versions: Versions
    contents: Contents | None = None


class Guard:
    """Told of each batch by `expect`, asked before each release by `check`."""

    def __init__(
        self,
        module: nn.Module,
        capture: Capture,
        *,
        criterion: nn.Module | None,
        views: int,
        units: bool = False,  # several records may be one sample: their order counts
        mean_loss: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._module, self._criterion, self._capture = module, criterion, capture
        self._views, self._units, self._mean_loss, self._warn = views, units, mean_loss, warn
        self._drawn = self._samples = 0  # records of the batch, and with those that fill it up
        self._several = False  # whether there is more than one to look at
        self._batches = 0  # with samples that could be mixed
        self._handed = self._used = 0  # batches of this epoch, and those that a step followed
        self._due = self._probe_due = self._probing = False
        self._refused: str | None = None  # what a batch has changed stays changed
        self._probed_modes: set[bool] = set()  # training and evaluation can differ
        self._shared: set[str] = set()  # inputs that once had another length than the batch
        self._harmless: set[str] = set()  # buffers that change, but not with the samples
        self._shapes: list[torch.Size] | None = None
        self._squares: set[tuple[torch.Size, ...]] = set()
        self._before = _Snapshot({})  # the batch
        self._settled = _Snapshot(self._versions(), self._fingerprints(constant=True))
        self._stepped: _Snapshot | None = None  # weights as the optimizer left them
        self._order_known, self._places_known = views == 1, not units
        self._filled_up = 0  # batches with stand-ins, of which the first and then ever fewer
        self._fill_due = self._rows_known = False  # are looked at: is their order known?
        self._handed_over, self._outputs = list[Tensor](), list[Tensor]()
        self._loss_known = self._taken = self._over = False
        self._reductions = Reductions()
        self._checked = True  # between batches: what the model sees then is public
        look = Hook(self._look_at_batch, copied=_OfACopy(self))
        # In front: the layers' own hooks must not be half-way when the probe runs the model.
        self._hooks = [
            module.register_forward_pre_hook(look, with_kwargs=True, prepend=True),
            module.register_forward_hook(Hook(self._look_at_outputs)),
        ]
        self._check_loss = None
        if criterion is not None:
            self._check_loss = CriterionCheck(criterion, mean=mean_loss)
            hook = Hook(while_there(self._look_at_criterion))
            self._hooks.append(criterion.register_forward_hook(hook, with_kwargs=True))
            weakref.finalize(self, self._hooks[-1].remove)

    def expect(
        self, samples: int, *, rows: int | None = None, most: int = 0, new_epoch: bool
    ) -> None:
        """A batch of so many samples, filled up to `rows` with stand-ins that come last.

        A sharded model needs all processes: for the first one's samples, `most` of them.
        """
        self._check_weights()
        if new_epoch:
            self._check_use()
            self._handed = self._used = 0
        self._handed += 1
        self._drawn, self._samples, self._checked = samples, rows or samples, False
        filled_up = samples > 1 and self._samples > samples
        self._filled_up += filled_up
        self._fill_due = filled_up and self._filled_up.bit_count() == 1
        self._several = (most if self._capture.shards else samples) > 1
        self._batches += self._several
        self._probe_due = self._several and self._batches.bit_count() == 1
        self._due = samples > 1 and self._probe_due
        look = self._due or fresh_seed() % _RARELY == 0
        self._before = _Snapshot(self._versions(), self._fingerprints() if look else None)

    def hand_over(self, batch: Any) -> None:
        """This is the batch; kept only where the order of its rows has to be checked."""
        if self._due and (self._views > 1 or self._units):
            leaves = (x for x in tree_leaves(batch) if isinstance(x, Tensor))
            self._handed_over = [x for x in leaves if x.shape[:1] == (self._samples,)]

    def check(self) -> None:
        """Between hand-over and step, a batch may change gradients only."""
        self._handed_over, self._outputs, self._checked = [], [], True
        changed = self._harmful(self._changed_since(self._before))
        if self._before.contents is not None and not changed:
            changed = self._written_past_autograd()
        self._refuse(changed)
        self._used += 1
        self._taken |= self._drawn > 1
        if self._drawn > 1 and not self._probed_modes:
            self._warn(
                "a step was taken before the model could be checked to keep samples apart: it was "
                "not called as a whole on the batch, or no gradient was finite"
            )

    @property
    def _watching(self) -> bool:
        """Whether the batch at hand is a private one: the step's public pass records, too."""
        looking = self._capture.planner.looking
        return self._capture.active and not self._checked and not looking

    def stepped(self) -> None:
        tensors = {name: x for name, (x, _) in self._before.versions.items()}
        weights = self._written({n: x for n, x in tensors.items() if isinstance(x, nn.Parameter)})
        self._stepped = _Snapshot(weights, self._fingerprints() if self._due else None)

    def moved(self) -> str | None:
        """A weight that is not what it was when the batch came."""
        weights = dict(self._module.named_parameters())
        return next((n for n in self._changed_since(self._before) if n in weights), None)

    def forget_weights(self) -> None:
        """A saved state was loaded: the weights may be others from now on."""
        self._stepped = None

    def review(self) -> None:
        """Before anything is saved or certified: raise if private data may be in what is kept."""
        self._check_weights()
        self._refuse([] if self._over else self._written_past_autograd())

    def warn_of_unknowns(self) -> None:
        """What could never be checked belongs on the certificate."""
        self._check_use()
        if self._taken and not self._order_known:
            self._warn(
                f"views={self._views}: it could not be checked that the rows of a record come one "
                "after the other (torch.stack(views, 1).flatten(0, 1)); if they come view after "
                "view (torch.cat), a record counts more than once"
            )
        if self._taken and not self._places_known:
            self._warn(
                "unit=: it could not be checked that the rows of a batch keep their order in the "
                "training loop; if they do not, records count for other units than their own"
            )
        if self._taken and self._filled_up and not self._rows_known:
            self._warn(
                "cuda_graphs: it could not be checked that the rows of a batch keep their order in "
                "the training loop; if they do not, records that fill up a batch may count"
            )
        if self._taken and not (self._loss_known or getattr(self._check_loss, "passed", False)):
            self._warn(
                "the loss could not be checked to be the "
                f"{'mean' if self._mean_loss else 'sum'} of one loss per sample, as loss_reduction "
                "says: pass criterion= and call that module on the model's output"
            )

    def remove(self) -> None:
        self._over, self._stepped = True, None
        for hook in self._hooks:
            hook.remove()

    def _look_at_batch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Probe the model; notice inputs of varying length."""
        refuse_wrapped_call(module)
        samples, rows = self._samples, self._samples * self._views
        if self._probing or not self._watching or not self._several:
            return
        call = args, kwargs
        batch, others = isolation.call_paths(call, rows)
        shards = self._capture.shards
        if not shards.first(bool(batch)):
            return
        self._shared |= others
        inputs = {path: x for path, x in batch.items() if path not in self._shared}
        for x in inputs.values():
            self._look_at_order(x)
        shapes = tuple(x.shape for x in batch.values())
        # Where something in the model is as long as the batch is large, it may be taken for one.
        square = any(rows in x.shape[1:] for x in inputs.values()) and shapes not in self._squares
        new = module.training not in self._probed_modes
        if shards.first(new or square or self._probe_due):
            self._capture.prepare(*args, **kwargs)  # not inside a rehearsal, which is undone
            call, samples, *rest = shards.first((call, samples, frozenset(inputs), fresh_seed()))
            paths, seed = rest
            seeds = partial(random.Random(seed).getrandbits, 32) if shards else fresh_seed
            views, mean = self._views, self._mean_loss
            stage = Stage(module, call, samples, views, paths, self._capture, mean, seeds)
            self._probe(stage, thorough=new)
            if square:
                self._squares.add(shapes)
        sizes = [x.shape[1:] for x in inputs.values()]
        if self._shapes is not None and sizes != self._shapes:
            self._warn(
                "the shape of the inputs varies from batch to batch: where it depends on the "
                "longest record, padding must be masked so that it has no effect on other records; "
                "padding to a fixed length is safe"
            )
        self._shapes = sizes

    def _probe(self, stage: Stage, *, thorough: bool) -> None:
        harmless: set[str] | None = set()
        try:
            with meanwhile(self, _probing=True):
                harmless = isolation.probe(stage, thorough=thorough)
        except NotComparable as error:
            self._warn(f"the model could not be checked to keep samples apart: {error}")
        if harmless is not None:
            self._harmless |= harmless
            self._probed_modes.add(self._module.training)

    def _look_at_outputs(self, module: nn.Module, _: Any, outputs: Any) -> Any:
        """Hear of the backward pass of what the loop makes of them."""
        if self._probing or not self._due or not self._watching:
            return None
        tensors = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
        sizes = {x.shape[:1] for x in tensors if x.requires_grad}
        self._loss_known |= () in sizes  # the probe has looked at it
        if not sizes & {(), (self._samples * self._views,)}:
            return None  # not of the whole batch
        told, behind = tell_of_backward(outputs, self._look_at_loss)
        self._outputs += behind
        return told

    def _look_at_loss(self, loss: Tensor) -> None:
        if not self._outputs or not self._watching:
            return  # of an earlier batch
        known = {*self._module.parameters(), *self._capture.anchors.values()}
        refuse_outside(loss, self._samples * self._views, known)
        if loss.dim():
            return
        declared, other = ("mean", "sum") if self._mean_loss else ("sum", "mean")
        found = self._reductions(loss, self._samples, fixed=self._capture.batch.live is not None)
        if other in found:
            raise ValueError(
                f"The loss is a {other} over the batch, but loss_reduction is '{declared}': "
                "per-sample gradients would be off by the batch size. Pass loss_reduction="
                f"'{other}', or compute the {declared}."
            )
        if mixes(loss, self._outputs, self._samples):
            raise ValueError(
                "The loss mixes samples: the gradient at the model's output for one sample depends "
                "on the outputs for others, so no sample's gradient can be bounded. Make it one "
                f"loss per sample, then take the {declared}."
            )
        self._loss_known |= found == {declared}
        self._loss_known &= not self._reductions.doubtful

    def _look_at_criterion(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensors = isolation.tensors_of((args, kwargs)).values()
        if not tensors or not torch.is_grad_enabled():
            return
        for x in tensors:
            if not x.requires_grad:
                self._look_at_order(x)
        assert self._check_loss is not None
        self._check_loss((args, kwargs), self._samples, due=self._due and not self._checked)

    def _look_at_order(self, rows: Tensor) -> None:
        """Rows of one record must come one after the other, and stand-ins last."""
        if self._fill_due and len(rows) == self._samples * self._views:
            last = stand_ins_come_last(rows.unflatten(0, (-1, self._views)), self._drawn)
            if last is False:
                raise CaptureError(
                    "The training loop puts the rows of a batch into another order, but with "
                    "cuda_graphs=True the last ones are those that do not count. Leave the order "
                    "as it is (a collate_fn may choose it), or leave cuda_graphs out."
                )
            self._rows_known |= bool(last)
        for given in self._handed_over:
            order = order_of_views(given, rows, self._views)
            if order == "view":
                raise CaptureError(
                    f"The rows of the batch come view after view, as torch.cat makes them; "
                    f"views={self._views} expects the rows of each record one after the other, or "
                    "a record would count more than once. Use torch.stack(views, 1).flatten(0, 1) "
                    f"for inputs and labels.repeat_interleave({self._views}) for labels."
                )
            self._order_known |= order == "record"
        if self._units:  # rows may be made of any part of the batch
            in_place = {keeps_order(given, rows, self._views) for given in self._handed_over}
            if False in in_place and True not in in_place:
                raise CaptureError(
                    "The training loop puts the rows of a batch into another order, so a record "
                    "would count for another unit than its own. Leave the order as the loader "
                    "gives it, or leave unit= out."
                )
            self._places_known |= True in in_place

    def _changed_since(self, before: _Snapshot) -> list[str]:
        changed = differing(before.versions, self._versions())
        if before.contents is not None:
            was, now = before.contents, self._fingerprints()
            changed += [name for name in {**was, **now} if was.get(name) != now.get(name)]
        return changed

    def _check_weights(self) -> None:
        """Between two steps only the optimizer moves the weights."""
        if self._stepped is None:
            return
        weights = self._stepped.versions
        changed = [name for name in self._changed_since(self._stepped) if name in weights]
        self._stepped = _Snapshot({n: x for n, x in self._versions().items() if n in weights})
        if changed:
            self._warn(
                f"weights were changed between private steps, other than by the optimizer "
                f"('{changed[0]}' first): the guarantee covers what was put there only if it is "
                "public or made of what private steps released"
            )

    def _check_use(self) -> None:
        """Who takes batch after batch and no step does something else with them."""
        if self._handed > 1 and not self._used:
            self._warn(
                "batches were taken from the private loader for a whole epoch without one private "
                "step: whatever else was made of them is not private"
            )

    def _written_past_autograd(self) -> list[str]:
        """What nobody trains and has changed though its version has not: through `.data`."""
        contents, was = self._fingerprints(constant=True), self._settled.contents or {}
        now = self._versions()
        seen = differing(self._settled.versions, now)
        changed = (n for n, x in contents.items() if x != was.get(n, x) and n not in seen)
        harmful = self._harmful(changed)
        if not harmful:
            self._settled = _Snapshot(now, contents)
        return harmful

    def _harmful(self, names: Iterable[str]) -> list[str]:
        """Without those that change, but not with the samples."""
        own = () if self._check_loss is None else self._check_loss.harmless
        harmless = self._harmless | {f"criterion.{name}" for name in own}
        return [name for name in names if name not in harmless]

    def _refuse(self, changed: list[str]) -> None:
        if changed and self._refused is None:
            part = "criterion" if changed[0].startswith("criterion.") else "model"
            self._refused = (
                f"'{changed[0]}' was changed by the private batch: it would carry private data out "
                "of training without noise. Turn the running statistics of its module off, or "
                f"replace the module, and build the {part} anew."
            )
        if self._refused is not None:
            raise CaptureError(self._refused)

    def _tensors(self) -> dict[str, Tensor]:
        self._capture.shards.reshard()
        model = dict([*self._module.named_parameters(), *self._module.named_buffers()])
        known = {id(x) for x in model.values()}
        own = {} if self._criterion is None else state(self._criterion)
        return model | {f"criterion.{n}": x for n, x in own.items() if id(x) not in known}

    def _versions(self) -> Versions:
        return self._written(self._tensors())

    def _written(self, tensors: dict[str, Tensor]) -> Versions:
        found = versions(tensors)
        if self._capture.shards:  # of which this process's part can be written to by itself
            for name, (x, version) in found.items():
                found[name] = x, version + (local(x)._version if is_sharded(x) else 0)
        return found

    def _fingerprints(self, *, constant: bool = False) -> Contents:
        """Two numbers a tensor: they see changes through `.data`, which leave the version as it is.

        Of all in state_dict, to which modules may add. `constant` leaves out what is trained.
        """
        saved = {n: x for n, x in self._module.state_dict().items() if isinstance(x, Tensor)}
        tensors = {**saved, **self._tensors()}
        if constant:
            every = self._module.named_parameters(remove_duplicate=False)  # tied: by each name
            trained = {n for n, p in every if p.requires_grad}
            tensors = {n: x for n, x in tensors.items() if n not in trained}
        exact = ((name, local(x.detach()).double()) for name, x in tensors.items())
        moments = {name: torch.stack([x.sum(), x.square().sum()]) for name, x in exact}
        return {name: numbers.nan_to_num().tolist() for name, numbers in moments.items()}


class _OfACopy(Hook):
    """What stays of the guard in a copy of the model, and in copies of that: no training."""

    def __init__(self, guard: Guard) -> None:
        super().__init__(self._look)
        self._guard = weakref.ref(guard)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def _look(self, module: nn.Module, *_: Any) -> None:
        guard, trained = self._guard(), any(p.requires_grad for p in module.parameters())
        if guard is not None and guard._watching and trained:
            raise CaptureError(
                "A copy of the private model was called, ready for training, while a private batch "
                "is at hand: its gradients would have no clip and no noise. Train the model that "
                "make_private returned; call copies under torch.no_grad(), or freeze them."
            )


def stand_ins_come_last(rows: Tensor, live: int) -> bool | None:
    """Whether the rows behind the first `live` are still the copies of the first that they were.

    None if that cannot be seen, as when augmented at random; False if copies are elsewhere.
    """
    flat = rows.detach().flatten(1).nan_to_num()
    *_, group, counts = torch.unique(flat, dim=0, return_inverse=True, return_counts=True)
    copies = len(rows) - live
    if copies and bool((group[live:] == group[0]).all()):
        return True
    return False if copies > 1 and int(counts.max()) > copies else None


def keeps_order(given: Tensor, rows: Tensor, views: int) -> bool | None:
    """Whether each row is still made of the record in its place; None if it cannot be seen.

    False where the very same rows, most of them no other's equal, are in other places. Augmented
    ones are not equal to their records, but nearer to them than to the next.
    """
    known = _views_of(given, rows, views)
    if known is None:
        return None
    own, now = (x.detach().reshape(len(rows), -1).nan_to_num().double() for x in (known, rows))
    if not bool((own != own[0]).any()):
        return None  # all alike
    if torch.equal(own, now):
        return True
    kinds, group = torch.unique(torch.cat([own, now]), dim=0, return_inverse=True)
    moved = torch.equal(*(half.sort().values for half in group.chunk(2)))
    if moved and len(kinds) > max(3, len(rows) // (2 * views)):
        return False
    near, far = ((now - other).norm(dim=1) for other in (own, own.roll(views, 0)))
    nearer, decisive = int((near < far).sum()), int((near != far).sum())
    return True if decisive >= _ENOUGH and nearer >= _SURE * decisive else None


def _views_of(given: Tensor, rows: Tensor, views: int) -> Tensor | None:
    """What the loader gave, as (records, views, …), if `rows` may be made of it."""
    if rows.shape[:1] != (len(given) * views,) or given.dtype != rows.dtype:
        return None
    given = given.detach().to(rows.device)
    if given.shape[1:] == rows.shape[1:]:
        return given.unsqueeze(1).expand(-1, views, *given.shape[1:])
    return given if given.shape[1:] == (views, *rows.shape[1:]) else None


def order_of_views(given: Tensor, rows: Tensor, views: int) -> str | None:
    """'record' (all rows of one record, then the next), 'view', or None if it cannot be seen.

    `given` is what the loader gave, n records or n × views rows of them; `rows` is what was made of
    it. Augmented rows are not equal to their record, but nearer to it than to another.
    """
    known = _views_of(given, rows, views)
    if known is None:
        return None
    by_record, by_view = (
        (rows.detach().double() - order.flatten(0, 1).double()).view(len(rows), -1).norm(dim=1)
        for order in (known, known.transpose(0, 1))
    )
    for name, near, far in ("record", by_record, by_view), ("view", by_view, by_record):
        nearer, decisive = int((near < far).sum()), int((near != far).sum())
        equal = not bool((near > 0).any())
        if nearer and (equal or (decisive >= _ENOUGH and nearer >= _SURE * decisive)):
            return name
    return None
