"""Watches a private run for ways out that have no noise, and for samples that are not kept apart.

What it sees never leaves it except as an error or a warning to the operator. What takes time or
makes a GPU wait is looked at in the batches 1, 2, 4, 8, …; some of it at random ones in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpspan.gradients.capture import Capture, Hook
from dpspan.model.criterion import CriterionWatch, state
from dpspan.model.isolation import Call, NotComparable, NotFinite, call_paths, probe
from dpspan.model.loss_graph import mixes, reductions, tell_of_backward
from dpspan.model.views import order_of_views
from dpspan.support.errors import CaptureError
from dpspan.support.untouched import fresh_seed

_RARELY = 50  # one batch in so many is fingerprinted besides

Versions = dict[str, tuple[Tensor, int]]


class Guard:
    """Told of each batch by `expect`, asked before each release by `check`."""

    def __init__(
        self,
        module: nn.Module,
        capture: Capture,
        *,
        criterion: nn.Module | None,
        views: int,
        mean_loss: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._module, self._criterion = module, criterion
        self._capture = capture
        self._views = views
        self._mean_loss = mean_loss
        self._warn = warn
        self._samples = 0
        self._batches = 0  # with samples that could be mixed
        self._handed = self._used = 0  # batches of this epoch, and those that a step followed
        self._due = False
        self._refused: str | None = None  # what a batch has changed stays changed
        self._probed_modes: set[bool] = set()  # training and evaluation can differ
        self._probing = False
        self._shared: set[str] = set()  # inputs that once had another length than the batch
        self._harmless: set[str] = set()  # buffers that change, but not with the samples
        self._shapes: list[torch.Size] | None = None
        self._squares: set[tuple[torch.Size, ...]] = set()
        self._versions: Versions = {}
        self._contents: dict[str, list[float]] | None = None
        self._settled = self._fingerprints(constant=True)
        self._settled_versions = self._tensor_versions()
        self._stepped: Versions | None = None  # weights as the optimizer left them
        self._stepped_contents: dict[str, list[float]] | None = None
        self._handed_over: list[Tensor] = []
        self._order_known = views == 1
        self._outputs: list[Tensor] = []
        self._loss_known = self._taken = self._over = False
        self._checked = True  # between batches: what the model sees then is public
        # In front: the layers' own hooks must not be half-way when the probe runs the model.
        self._hooks = [
            module.register_forward_pre_hook(
                Hook(self._look_at_batch, copied=_OfACopy(capture)), with_kwargs=True, prepend=True
            ),
            module.register_forward_hook(Hook(self._look_at_outputs)),
        ]
        self._watch = None
        if criterion is not None:
            self._watch = CriterionWatch(
                criterion,
                mean=mean_loss,
                samples=lambda: self._samples,
                due=lambda: self._due and not self._checked,
                look=self._look_at_order,
            )

    # -- the life of a batch --------------------------------------------------------------------

    def expect(self, samples: int, *, new_epoch: bool) -> None:
        """A batch of so many samples is about to be handed over."""
        self._versions = self._tensor_versions()
        self._check_weights(self._versions)
        if new_epoch:
            self._check_use()
            self._handed = self._used = 0
        self._handed += 1
        self._samples, self._checked = samples, False
        self._batches += samples > 1
        self._due = samples > 1 and self._batches.bit_count() == 1
        self._contents = None
        if self._due or fresh_seed() % _RARELY == 0:
            self._contents = self._fingerprints()

    def hand_over(self, batch: Any) -> None:
        """This is the batch; kept only where the order of its views has to be checked."""
        if self._due and self._views > 1:
            leaves = (x for x in tree_leaves(batch) if isinstance(x, Tensor))
            self._handed_over = [x for x in leaves if x.shape[:1] == (self._samples,)]

    def check(self) -> None:
        """Between hand-over and step, a batch may change gradients only."""
        self._handed_over, self._outputs, self._checked = [], [], True
        harmless = self._harmless_names()
        changed = [
            n for n in _differing(self._versions, self._tensor_versions()) if n not in harmless
        ]
        if self._contents is not None and not changed:
            contents, before = self._fingerprints(), self._contents
            names = {**before, **contents}
            changed = [n for n in names if contents.get(n) != before.get(n) and n not in harmless]
            changed = changed or self._written_past_autograd(harmless)
            self._contents = None
        if changed and self._refused is None:
            self._refused = _changed(changed[0])
        if self._refused is not None:
            raise CaptureError(self._refused)
        self._used += 1
        self._taken |= self._samples > 1
        if self._samples > 1 and not self._probed_modes:
            self._warn(
                "a step was taken before the model could be checked to keep samples apart: it was "
                "not called as a whole on the batch, or no gradient was finite"
            )

    @property
    def _watching(self) -> bool:
        """Whether the batch at hand is a private one: the step's public pass records, too."""
        return self._capture.active and not self._checked

    def stepped(self) -> None:
        """The optimizer has moved the weights."""
        self._stepped = {
            name: (x, _version(x))
            for name, (x, _) in self._versions.items()
            if isinstance(x, nn.Parameter)
        }
        self._stepped_contents = self._fingerprints() if self._due else None

    def forget_weights(self) -> None:
        """A saved state was loaded: the weights may be others from now on."""
        self._stepped = None

    def review(self) -> None:
        """Before anything is saved or certified: raise if private data may be in what is kept."""
        if not self._over:
            self._check_weights(self._tensor_versions())
            changed = self._written_past_autograd(self._harmless_names())
            if changed and self._refused is None:
                self._refused = _changed(changed[0])
        if self._refused is not None:
            raise CaptureError(self._refused)

    def warn_of_unknowns(self) -> None:
        """What could never be checked belongs on the certificate."""
        self._check_use()
        if self._taken and not self._order_known:
            self._warn(
                f"views={self._views}: it could not be checked that the rows of a record come one "
                "after the other (torch.stack(views, 1).flatten(0, 1)); if they come view after "
                "view (torch.cat), a record counts more than once"
            )
        if self._taken and not self._loss_known and not (self._watch and self._watch.passed):
            self._warn(
                "the loss could not be checked to be the "
                f"{'mean' if self._mean_loss else 'sum'} of one loss per sample, as loss_reduction "
                "says: pass criterion= and call that module on the model's output"
            )

    def remove(self) -> None:
        """Take the hooks off the model and the criterion: the run is over."""
        self._over, self._stepped = True, None
        for hook in self._hooks:
            hook.remove()
        if self._watch is not None:
            self._watch.remove()

    # -- samples --------------------------------------------------------------------------------

    def _look_at_batch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Probe the model; notice inputs of varying length."""
        samples, rows = self._samples, self._samples * self._views
        if self._probing or not self._watching or samples < 2:
            return
        batch, others = call_paths((args, kwargs), rows)
        if not batch:
            return
        self._shared |= others
        inputs = [x for path, x in batch.items() if path not in self._shared]
        for x in inputs:
            self._look_at_order(x)
        shapes = tuple(x.shape for x in batch.values())
        # Where something in the model is as long as the batch is large, it may be taken for one.
        square = any(rows in x.shape[1:] for x in inputs) and shapes not in self._squares
        new = module.training not in self._probed_modes
        if new or square or self._due:
            self._capture.prepare(*args, **kwargs)  # not inside a rehearsal, which is undone
            self._probe((args, kwargs), thorough=new)
            if square:
                self._squares.add(shapes)
        sizes = [x.shape[1:] for x in inputs]
        if self._shapes is not None and sizes != self._shapes:
            self._warn(
                "the shape of the inputs varies from batch to batch: where it depends on the "
                "longest record, padding must be masked so that it has no effect on other records; "
                "padding to a fixed length is safe"
            )
        self._shapes = sizes

    def _probe(self, call: Call, *, thorough: bool) -> None:
        self._probing, before = True, self._tensor_versions()
        try:
            self._harmless |= probe(
                self._capture,
                call,
                self._samples,
                views=self._views,
                mean_loss=self._mean_loss,
                thorough=thorough,
                shared=self._shared,
            )
            self._probed_modes.add(self._module.training)
        except NotComparable as error:
            if not isinstance(error, NotFinite):
                self._warn(f"the model could not be checked to keep samples apart: {error}")
                self._probed_modes.add(self._module.training)
        finally:
            # What the rehearsals have written and put back is as it was, for all but its version.
            self._probing, after = False, self._tensor_versions()
            self._versions = _carried_over(self._versions, before, after)
            self._settled_versions = _carried_over(self._settled_versions, before, after)

    def _look_at_outputs(self, module: nn.Module, _: Any, outputs: Any) -> Any:
        """Hear of the backward pass of what the loop makes of them."""
        if self._probing or not self._due or not self._watching:
            return None
        sizes = {
            x.shape[:1] for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad
        }
        self._loss_known |= () in sizes  # the probe has looked at it
        if not sizes & {(), (self._samples * self._views,)}:
            return None  # not of the whole batch
        told, behind = tell_of_backward(outputs, self._look_at_loss)
        self._outputs += behind
        return told

    def _look_at_loss(self, loss: Tensor) -> None:
        if not self._outputs or loss.dim() or not self._watching:
            return  # of an earlier batch
        declared, other = ("mean", "sum") if self._mean_loss else ("sum", "mean")
        found = reductions(loss, self._samples)
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

    def _look_at_order(self, rows: Tensor) -> None:
        """Rows of one record must come one after the other."""
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

    # -- state ----------------------------------------------------------------------------------

    def _check_weights(self, now: Versions) -> None:
        """Between two steps only the optimizer moves the weights."""
        if self._stepped is None:
            return
        weights = {name: now[name] for name in self._stepped if name in now}
        changed = _differing(self._stepped, weights)
        if not changed and self._stepped_contents is not None:
            contents, before = self._fingerprints(), self._stepped_contents
            changed = [name for name in weights if contents[name] != before[name]]
        self._stepped_contents = None
        if changed:
            self._stepped = weights
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

    def _written_past_autograd(self, harmless: set[str]) -> list[str]:
        """What nobody trains and has changed though its version has not: through `.data`."""
        versions, contents = self._tensor_versions(), self._fingerprints(constant=True)
        excused = {*_differing(self._settled_versions, versions), *harmless}
        changed = [
            name
            for name, content in contents.items()
            if name not in excused and content != self._settled.get(name, content)
        ]
        if not changed:
            self._settled, self._settled_versions = contents, versions
        return changed

    def _harmless_names(self) -> set[str]:
        watched = () if self._watch is None else self._watch.harmless
        return self._harmless | {f"criterion.{name}" for name in watched}

    def _tensors(self) -> dict[str, Tensor]:
        model = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        if self._criterion is None:
            return model
        known = {id(x) for x in model.values()}
        own = {f"criterion.{n}": x for n, x in state(self._criterion).items() if id(x) not in known}
        return {**model, **own}

    def _tensor_versions(self) -> Versions:
        return {name: (x, _version(x)) for name, x in self._tensors().items()}

    def _fingerprints(self, *, constant: bool = False) -> dict[str, list[float]]:
        """Two numbers a tensor: they see changes through `.data`, which leave the version as it is.

        Of all that would be saved, too: a module may add to its state_dict what is neither weight
        nor buffer. `constant` leaves out what is trained.
        """
        saved = {n: x for n, x in self._module.state_dict().items() if isinstance(x, Tensor)}
        tensors = {**saved, **self._tensors()}
        if constant:
            trained = {n for n, p in self._module.named_parameters() if p.requires_grad}
            tensors = {n: x for n, x in tensors.items() if n not in trained}
        fingerprints = {}
        for name, tensor in tensors.items():
            x = tensor.detach().double()
            fingerprints[name] = torch.stack([x.sum(), x.square().sum()]).nan_to_num().tolist()
        return fingerprints


class _OfACopy:
    """What stays of the guard in a copy of the model: the copy must not be trained instead."""

    def __init__(self, capture: Capture) -> None:
        self._capture = weakref.ref(capture)

    def __call__(self, module: nn.Module, *_: Any) -> None:
        capture = self._capture()
        trained = any(p.requires_grad for p in module.parameters())
        if capture is not None and capture.active and trained:
            raise CaptureError(
                "A copy of the private model was called, ready for training, while a private batch "
                "is at hand: its gradients would have no clip and no noise. Train the model that "
                "make_private returned; call copies under torch.no_grad(), or freeze them with "
                "requires_grad_(False)."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> _OfACopy:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobody, ()


def _nobody() -> Callable[..., None]:
    return lambda *_: None


def _differing(before: Versions, now: Versions) -> list[str]:
    """Names of tensors that came, went, were replaced or written to."""
    return [
        name
        for name in {**before, **now}
        if name not in before
        or name not in now
        or before[name][0] is not now[name][0]
        or before[name][1] != now[name][1]
    ]


def _carried_over(known: Versions, before: Versions, after: Versions) -> Versions:
    """`known` as it would be now, but for what had changed before."""
    changed = set(_differing(known, before))
    kept = {name: version for name, version in known.items() if name in changed}
    return kept | {name: version for name, version in after.items() if name not in changed}


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _changed(name: str) -> str:
    part = "criterion" if name.startswith("criterion.") else "model"
    return (
        f"'{name}' was changed by the private batch: it would carry private data out of training "
        f"without noise. Turn the running statistics of its module off, or replace the module, and "
        f"build the {part} anew."
    )
