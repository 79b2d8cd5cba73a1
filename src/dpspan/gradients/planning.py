"""How a model has to be taken, found out at each kind of call that is new.

Modules are looked at on a few samples (see `layout`). What holds a layer that sees anything but
samples is taken as a whole, and where the layers alone do not tell that recording them is exact,
the gradients of two samples as they would be recorded are compared with plain autograd's. The loss
for that is made up: sines of all numbers that the model gives for a sample, weighed differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpspan.gradients.layers import rule_for
from dpspan.gradients.layers.generic import exchanged
from dpspan.gradients.layers.recurrent import is_recurrent
from dpspan.gradients.layout import (
    FEW,
    FOLDED,
    ONE,
    UNCLEAR,
    Call,
    Layout,
    Seen,
    Trial,
    is_inside,
    named_tensors,
    replaced,
)
from dpspan.gradients.numerics import full_precision
from dpspan.support.errors import CaptureError
from dpspan.support.left_as_found import Mode, left_as_found, meanwhile
from dpspan.support.sharded import local

if TYPE_CHECKING:
    from dpspan.gradients.capture import Capture

Forward = Callable[..., Any]

_RELATIVE, _ABSOLUTE = 1e-2, 1e-4  # of the parameter's gradient and of the whole gradient
_MODES: tuple[Mode, ...] = ("without dropout", "evaluation")
_COARSE = 30  # times that where half precision or TF32 may be about


class CaptureErrorAt(CaptureError):
    """What went wrong at the modules at `paths`."""

    def __init__(self, paths: set[str], message: str) -> None:
        super().__init__(message)
        self.paths = paths


class Planner:
    """Knows where the batch is in every module's inputs, and which modules are taken as a whole."""

    def __init__(self, capture: Capture, others: Sequence[Planner]) -> None:
        self._capture = capture
        # By kind of call of the model; what other captures found out stays known.
        self._layouts: dict[Any, Layout] = others[0]._layouts if others else {}
        self.units: set[str] = others[0].units if others else set()
        self._attached = set(self.units)  # those that the capture takes so already
        self._planned: Layout | None = None  # of the last call, if that could be looked at
        self._loose = Layout()  # of modules that are called on their own
        self._again: Callable[[], None] = lambda: None  # look at the last call again
        self.looking = False
        self.plain: dict[str, Tensor] | None = None  # gradients, while they are to be plain ones

    def plan(self, forward: Forward, call: Call) -> None:
        """Find out, at a kind of call that is new, which modules have to be taken as a whole."""
        rows, views, model = self._capture.rows, self._capture.batch.views, self._capture.model
        if self.looking or rows == 0:
            return
        tensors = named_tensors(call)
        dimensions = tuple((name, x.dim()) for name, x in tensors.items())
        kind = model.training, rows > views, dimensions
        sized = (*kind, tuple(x.shape[1:] for x in tensors.values()))
        layout = self._layouts.get(kind) or self._layouts.get(sized)
        new = layout is None or any(
            layout.place("", name, x) == 0 and len(x) != rows for name, x in tensors.items()
        )
        shards = self._capture.shards
        if shards.processes.any(new) or layout is None:
            # The first process has the most samples, and what is seen of them goes for all.
            call, rows = shards.first((call, rows))
            self._planned = layout = Layout()
            with meanwhile(self, looking=True):
                if shards and not self._layouts:  # what torch refuses it says at the first run
                    with self._capture.unit_runs(), left_as_found(model), torch.no_grad():
                        forward(*call[0], **call[1])
                self._look(layout, "", forward, call, rows)
                if "" not in layout.refused:
                    self._decide(layout, forward, call, rows)
            # How many dimensions are folded into the batch depends on their sizes.
            folded = any(FOLDED in seen.first.values() for seen in layout.seen.values())
            self._layouts[sized if folded else kind] = layout
        self._planned = None if "" in layout.refused else layout
        if not shards:  # or all would have to look again
            self._again = partial(self._look, layout, "", forward, call, rows)
        if self._attached != self.units:
            self._attach()

    def routed(self, unit: str) -> str | None:
        """A module inside that is given what values in the batch pick for it."""
        seen = {} if self._planned is None else self._planned.seen
        return next((p for p in seen if seen[p].routed and is_inside(p, [unit])), None)

    def place(self, path: str, x: Tensor) -> tuple[int, int]:
        """Where the batch is in a layer's input (see `layout`), and what is folded into it."""
        layout = self._layout
        if layout is self._loose:
            # Outside a call of the whole model, one row may be a sample that was picked out.
            return ONE if self._capture.sees_batch and len(x) == 1 else 0, 1
        if path not in layout.seen or x.dim() not in layout.seen[path].first:
            self._again()  # something else happens than before
            if path not in layout.seen or layout.seen[path].first.get(x.dim()) != 0:
                raise CaptureError(
                    f"Layer '{path}' is given other inputs than when the model was looked at: what "
                    "it sees depends on the values in the batch (as in a mixture of experts), so "
                    "it cannot be told which sample they belong to."
                )
        seen = layout.seen[path]
        return seen.first[x.dim()], seen.folds[x.dim()]

    def in_front(self, path: str, forward: Forward, call: Call) -> Seen:
        """Where the batch is in the arguments of a module; ValueError if that is unclear."""
        tensors, layout, rows = named_tensors(call), self._layout, self._capture.rows
        looks: list[Callable[[], None]] = [partial(self._look, layout, path, forward, call, rows)]
        if layout is not self._loose:
            looks.insert(0, self._again)
        while looks and any(layout.place(path, name, x) is None for name, x in tensors.items()):
            looks.pop(0)()
        if path in layout.refused:
            raise ValueError(f"{layout.refused[path]}.")
        seen = layout.seen[path]
        if {*seen.outputs.values()} & {FOLDED, UNCLEAR}:
            raise ValueError("an output of it has no batch dimension in front.")
        if not seen.fits_unit:
            raise ValueError("the batch is in none of the dimensions of what it is given.")
        for name, x in tensors.items():
            place = seen.inputs[name, x.dim()]
            if place >= 0 and x.shape[place] != rows:
                raise ValueError(f"its input {name} has not {rows} samples.")
        return seen

    @property
    def _layout(self) -> Layout:
        """Of the call of the model that is under way, or goes backward; else of loose modules."""
        # A checkpointed module runs again during the backward pass.
        under_way = self._capture.sees_batch or torch._C._current_graph_task_id() != -1
        return self._planned if self._planned is not None and under_way else self._loose

    def _attach(self) -> None:
        self._capture.attach()
        self._attached = set(self.units)

    def _look(self, layout: Layout, path: str, forward: Forward, call: Call, rows: int) -> None:
        capture = self._capture
        with capture.unit_runs():
            module = capture.model.get_submodule(path)
            layout.look(Trial(module, path, forward, call, rows, capture.batch.views))

    def _decide(self, layout: Layout, forward: Forward, call: Call, rows: int) -> None:
        """Take as a whole what holds a layer that sees anything but samples, and try it out."""
        seen = layout.seen
        owners = {
            path: module
            for path, module in self._capture.model.named_modules()
            if path in seen and self._capture.owns(path, module) and not is_recurrent(module)
        }
        without_rule = {path for path, module in owners.items() if rule_for(module) is None}
        for path in owners:
            if not (seen[path].fits_unit if path in without_rule else seen[path].fits_rule):
                self._enclose(layout, path)
        doubtful = {p for p in owners if {*seen[p].first.values()} != {0}}
        first: CaptureError | None = None
        while doubtful or without_rule or self.units:
            self._attach()
            problem = self._try(layout, forward, call, rows)
            if problem is None:
                return
            before = set(self.units)
            if first is None or not isinstance(first, CaptureErrorAt):  # the more telling one
                first = problem
            for path in problem.paths if isinstance(problem, CaptureErrorAt) else doubtful:
                inside = next((u for u in self.units if is_inside(path, [u])), path)
                self._enclose(layout, inside)
            if self.units == before and seen[""].takes_batch:
                self.units.add("")
            if self.units == before:
                raise first

    def _enclose(self, layout: Layout, path: str) -> None:
        """Take the module around this one as a whole."""
        unit = layout.around(path)
        if unit is not None:
            self.units.difference_update([u for u in self.units if is_inside(u, [unit])])
            self.units.add(unit)

    def _try(self, layout: Layout, forward: Forward, call: Call, rows: int) -> CaptureError | None:
        """What is wrong with the gradients of two samples as they would be recorded now."""
        capture, model, views = self._capture, self._capture.model, self._capture.batch.views
        batch = [n for n, x in named_tensors(call).items() if layout.place("", n, x) == 0]
        args, kwargs = replaced(call, batch, itemgetter([i % rows for i in range(FEW * views)]))
        # Copies, for the plain run: their gradients set off no hook.
        trained = {} if capture.shards else capture.trained()
        own = {name: p.detach().requires_grad_() for name, p in trained.items()}

        def plainly(*args: Any, **kwargs: Any) -> Any:
            with capture.unit_runs(), exchanged(model, own):
                return forward(*args, **kwargs)

        def losses(run: Forward, seed: int, mode: Mode) -> Tensor | None:
            with left_as_found(model, seed, mode=mode):
                return _made_up_losses(run(*args, **kwargs), FEW * views, views)

        for mode in _MODES:
            plain, again = losses(plainly, 0, mode), losses(plainly, 1, mode)
            if plain is None or again is None:
                return None  # there is no output to compare
            if torch.allclose(plain, again, rtol=1e-4, equal_nan=True):
                break
        else:
            return None  # it draws random numbers whatever one does
        # A weight per sample: what goes to another one is seen even if the two are the same.
        weights = torch.tensor([1.0, -2.0]) if plain.dim() else torch.ones(())
        if capture.shards:
            expected = self._plain_shards(partial(losses, plainly, 0, mode), plain.numel())
        else:
            expected = _plain_gradients(plain, own)
        try:
            with capture.rehearsal(FEW):
                seen = losses(model if capture.shards else model.forward, 0, mode)
                assert seen is not None
                (seen * weights.to(seen)).sum().backward()
                gradients = capture.gradients()
        except CaptureError as error:
            return error
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # its text may show private data
            return CaptureError(
                f"{type(model).__name__} cannot be run so that the gradients of its samples stay "
                f"apart ({type(error).__name__}): have a module own what its forward uses, and "
                "give inputs that all samples share a first dimension of 1."
            )
        rows_of = torch.diag(1 / weights) if plain.dim() else torch.ones(1, FEW)
        found = [gradients.combine(row) for row in rows_of.to(gradients.device)]
        different = {name for pair in zip(found, expected, strict=True) for name in _differ(*pair)}
        different.update(*capture.shards.processes.all_of(different))  # each knows its shards
        return _not_those_of_autograd(different) if different else None

    def _plain_shards(
        self, losses: Callable[[], Tensor | None], count: int
    ) -> list[dict[str, Tensor]]:
        """`_plain_gradients` of a sharded model: they are taken where they would be an error."""
        shards, found = self._capture.shards, []
        shards.reshard()
        parameters = self._capture.trained()
        kept = {name: p.grad for name, p in parameters.items()}
        for number in range(count):
            self.plain = {name: torch.zeros_like(local(p)) for name, p in parameters.items()}
            found.append(self.plain)
            try:
                loss = losses()
                assert loss is not None
                loss.view(-1)[number].backward()
            finally:
                self.plain = None
                shards.reshard()
                for name, p in parameters.items():
                    p.grad = kept[name]
        return found


def _not_those_of_autograd(names: set[str]) -> CaptureErrorAt:
    return CaptureErrorAt(
        {name.rpartition(".")[0] for name in names},
        f"The gradients of '{min(names)}' that would be recorded for two samples are not those of "
        "plain autograd, so nothing is. Keep the batch in the first dimension of every layer's "
        "input, and give inputs that all samples share a first dimension of 1, never reduced.",
    )


def _made_up_losses(output: Any, rows: int, views: int) -> Tensor | None:
    """One loss per sample; of a model that gives nothing but a loss, that loss; or nothing."""
    tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    flat = [full_precision(x).reshape(rows, -1) for x in tensors if x.dim() and len(x) == rows]
    if flat:
        numbers = torch.cat(flat, dim=1)
        weights = torch.linspace(-1, 2, numbers.shape[1]).to(numbers)
        return (numbers.sin() * weights).sum(1).view(-1, views).sum(1)
    scalars = [full_precision(x) for x in tensors if not x.dim()]
    return torch.stack(scalars).sum() if scalars else None


def _plain_gradients(losses: Tensor, own: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The gradient of each loss, by name."""
    grad = partial(torch.autograd.grad, retain_graph=True, materialize_grads=True)
    try:
        each = [grad(loss, list(own.values())) for loss in losses.view(-1)]
    except RuntimeError as error:
        if "checkpoint" not in str(error):
            raise
        raise CaptureError(
            "The model uses gradient checkpointing, and what runs again during the backward pass "
            "cannot be compared with plain autograd. Turn it off (gradient_checkpointing_disable() "
            "of Hugging Face's models); to save memory, set max_physical_batch_size."
        ) from error
    return [dict(zip(own, gradient, strict=True)) for gradient in each]


def _differ(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Iterator[str]:
    """The parameters of which the gradient found is not the one expected, up to rounding."""
    coarse = any(x.element_size() < 4 or x.is_cuda for x in expected.values())
    slack = _COARSE if coarse or torch.is_autocast_enabled("cpu") else 1
    whole = torch.stack([x.double().norm() for x in expected.values()]).norm()
    for name, x in expected.items():
        error = (found[name].double() - x.double()).norm()
        if bool(error > slack * (_RELATIVE * x.double().norm() + _ABSOLUTE * whole)):
            yield name
