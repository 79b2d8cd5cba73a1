"""Records what per-sample gradients are made of while the user's own loop runs.

Each trainable layer's input is noted in the forward pass and the gradient of its output in the
backward pass; together they give the layer's per-sample gradients (see `layers`). The layer's
parameters are hidden from autograd while the layer runs, so autograd never computes the summed
weight gradients that private training would throw away. It follows that *any* gradient which does
reach a parameter came by a way the capture does not see: that is an error, never silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle, unserializable_hook

from dpspan.gradients.layers import Rule, rule_for
from dpspan.gradients.layers.generic import per_sample_forward
from dpspan.gradients.layers.recurrent import (
    Terms,
    is_of_opacus,
    is_recurrent,
    sequences,
    step_by_step,
)
from dpspan.gradients.layers.terms import Rows, Term
from dpspan.gradients.layout import (
    FEW,
    FOLDED,
    ONE,
    SHARED,
    UNCLEAR,
    Call,
    Layout,
    Seen,
    is_inside,
    named_tensors,
    samples_of,
)
from dpspan.gradients.numerics import plain_arithmetic
from dpspan.gradients.operator import Left, PerSampleGradients, Right
from dpspan.gradients.trial import differences, made_up_losses, plain_gradients
from dpspan.support.errors import CaptureError
from dpspan.support.quiet import evaluating, on_the_side, without_dropout

Quiet = Callable[[], AbstractContextManager[None]]


class Capture:
    """Hooks on a model; `expect(n)` arms them for one batch, `collect()` returns its gradients.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> import dpspan
        >>> model = nn.Linear(2, 1, bias=False)
        >>> with dpspan.Capture(model) as capture:
        ...     capture.expect(2)
        ...     model(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).sum().backward()
        ...     capture.collect().norms().tolist()
        [5.0, 2.0]
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._names: dict[str, str] = {}  # of each trainable parameter, its first if it has several
        self._owners: dict[str, tuple[nn.Module, str]] = {}  # whose it is, and what they call it
        self._watched: set[nn.Parameter] = set()  # an unknown gradient of these is an error
        self._expected: int | None = None  # rows
        self._views = 1  # rows that belong to one sample
        self._discard = False
        self._inside_generic = False
        self._sees_batch = False  # inside a call of the model that was given the batch
        self._hidden: set[nn.Parameter] = set()
        self._batch = 0  # tells a late backward pass from one that belongs to this batch
        self.heard = False  # whether a backward pass has reached the expected batch
        self._terms: dict[str, list[Term]] = {}
        self._carriers: Mapping[str, tuple[Tensor, Tensor]] = {}
        self._handles: list[RemovableHandle] = []
        self._layer_handles: list[RemovableHandle] = []
        self._generic: list[nn.Module] = []
        self._anchors: dict[torch.device, Tensor] = {}
        self._layouts: dict[Any, Layout] = {}  # by kind of call of the model
        self._planned: Layout | None = None  # of the last call, if that could be looked at
        self._loose = Layout()  # of modules that are called on their own
        self._again: Callable[[], None] = _nothing  # look at the last call again
        self._units: set[str] = set()  # modules taken as a whole for the sake of those inside
        self._attached: set[str] = set()  # those of them that are taken so already
        self._looking = False
        for name, first, module, _ in _trainable(model):
            self._names[name] = first
            self._owners.setdefault(first, (module, name.rpartition(".")[2]))
        self._modules = set(model.modules())
        for other in captures_on(model):  # what is known of the model stays known
            self._layouts, self._units = other._layouts, other._units
            if other._expected is not None:
                raise CaptureError(
                    "The model is in the middle of a private step: finish it with "
                    "optimizer.step(), or call engine.detach(), before asking for gradients."
                )
        self._handles += [
            model.register_forward_pre_hook(Hook(self._enter, self), with_kwargs=True),
            model.register_forward_hook(Hook(self._leave, self), always_call=True),
        ]
        for name, parameter in self._trained().items():
            self.watch(name, parameter)
        self._attach_all()

    # -- the life of a capture ------------------------------------------------------------------

    def expect(
        self,
        samples: int,
        *,
        views: int = 1,
        discard: bool = False,
        carriers: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """Arm the hooks for a batch of `samples`; `discard` drops what it brings.

        With `views` the model sees that many rows for each sample, one after the other, whose
        gradients are added up.

        Of a parameter with `carriers` only its gradient's images in them are kept (see
        `PerSampleGradients.compress`), from the moment it is known: a layer's input is then let go
        during the backward pass.
        """
        self.disarm()
        self._expected, self._views = samples * views, views
        self._discard, self._carriers = discard, carriers or {}

    def collect(self, *, scale: float = 1.0) -> PerSampleGradients:
        """The per-sample gradients of the expected batch, times `scale`; disarms the hooks."""
        if self._expected is None:
            raise CaptureError("No batch is expected: draw one from the private loader first.")
        for name, first, module, _ in _trainable(self.model):
            if module not in self._modules or self._name(name) != first:
                raise CaptureError(
                    f"Parameter '{name}' belongs to another module, or is shared with others, than "
                    "when the model was made private. Build the model before make_private."
                )
        samples = 0 if self._discard else self._expected
        if samples > 0 and not self.heard:
            raise CaptureError(
                f"No gradient was recorded for the batch of {samples} samples. Call the model on "
                "the batch with gradients enabled and loss.backward() before optimizer.step()."
            )
        gradients = self.gradients(scale=scale)
        self.disarm()
        return gradients

    def gradients(self, *, scale: float = 1.0) -> PerSampleGradients:
        """What has been recorded so far."""
        shapes: dict[str, torch.Size] = {}
        for name, parameter in self._trained().items():
            if name in self._carriers:
                left, right = self._carriers[name]
                shapes |= {Left(name): left.shape, Right(name): right.shape}
            else:
                shapes[name] = parameter.shape
        samples = 0 if self._discard else self.samples // self._views
        known = next(self.model.parameters(), torch.empty(0))
        like = torch.empty(0, dtype=known.dtype, device=known.device)  # not sharded if that is
        return PerSampleGradients(shapes, self._terms, samples, like=like, scale=scale)

    @contextmanager
    def rehearsal(self, samples: int | None = None) -> Iterator[None]:
        """A run of the expected batch, or of so many samples, that leaves no trace."""
        before = self._terms, self.heard, self._batch
        expected = self._expected, self._discard, self._carriers
        self._terms, self.heard, self._batch = {}, False, -self._batch - 1
        if samples is not None:
            self._expected, self._discard, self._carriers = samples * self._views, False, {}
        try:
            yield
        finally:
            self._terms, self.heard, self._batch = before
            self._expected, self._discard, self._carriers = expected

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._sees_batch = any(x.shape[:1] == (self._expected,) for x in tensors)
        if self.active:
            for name, parameter in self._trained().items():
                self.watch(name, parameter)

    def _leave(self, *_: Any) -> None:
        self._sees_batch = False

    def disarm(self) -> None:
        """Forget the expected batch, if there is one, and what it brought."""
        for parameter in self._hidden:  # an interrupted forward pass may have left some
            parameter.requires_grad_(True)
        self._hidden = set()
        self._sees_batch = False
        self._expected, self._discard, self.heard = None, False, False
        self._batch += 1
        self._terms, self._carriers = {}, {}

    def remove(self) -> None:
        """Take every hook off again; the model is as it was."""
        for handle in self._handles + self._layer_handles:
            handle.remove()
        for module in self._generic:
            vars(module)["forward"].restore()
        self._handles, self._layer_handles, self._generic = [], [], []
        self.disarm()

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def active(self) -> bool:
        """Whether a forward pass would be recorded now."""
        return self._expected is not None and not self._inside_generic and torch.is_grad_enabled()

    # -- attaching ------------------------------------------------------------------------------

    def _attach_all(self) -> None:
        for handle in self._layer_handles:
            handle.remove()
        root = vars(self.model).get("forward")  # it may be running: it stays
        for module in self._generic:
            if module is not self.model:
                vars(module)["forward"].restore()
        mine = isinstance(root, _Forward) and root.capture is self
        self._layer_handles, self._generic = [], [self.model] if mine else []
        self._attached = set(self._units)
        self._attach("", self.model, set())

    def _attach(self, path: str, module: nn.Module, seen: set[nn.Module]) -> None:
        if module in seen:
            return
        seen.add(module)
        own, rule = self._own(path, module), rule_for(module)
        if own and rule is None and is_of_opacus(module):
            raise CaptureError(
                f"Layer '{path}' ({type(module).__name__}) is Opacus', whose states do not "
                "have the batch in front: use torch's own, or dpspan.fix(model)."
            )
        # Without a rule, its forward may use its own and its children's parameters in any way, so
        # torch.func takes the whole subtree.
        unit = path in self._units or (own and rule is None)
        if unit or (not path and rule is None):  # the model itself may have to become a unit later
            if module not in self._generic:
                self._stand_in(path, module)
            stand_in = vars(module)["forward"]
            stand_in.unit, stand_in.forced = unit, path in self._units
            if unit:
                for name, part in module.named_modules(prefix=path):
                    if part not in seen and is_recurrent(part):
                        self._stand_in(name, part)
                        seen.add(part)
                return
        elif own and rule is not None:
            layer = _Layer(self, path, rule)
            self._layer_handles += [
                module.register_forward_pre_hook(Hook(layer.hide, self)),
                # Before any hook of the user's, which may replace the output; and always, since
                # the parameters must come back even if the forward pass fails.
                module.register_forward_hook(
                    Hook(layer.record, self), prepend=True, with_kwargs=True, always_call=True
                ),
            ]
        for name, child in module.named_children():
            self._attach(joined(path, name), child, seen)

    def _stand_in(self, path: str, module: nn.Module) -> None:
        module.forward = _Forward(self, path, module)
        self._generic.append(module)

    def _own(self, path: str, module: nn.Module) -> bool:
        """Whether a module has trainable parameters of its own."""
        return any(joined(path, name) in self._names for name in _own_parameters(module))

    def _name(self, name: str) -> str:
        """The name under which a parameter is recorded; the first of several, if it is shared."""
        if name not in self._names:
            raise CaptureError(
                f"Parameter '{name}' became trainable after the model was made private, so its "
                "gradients are not clipped. Unfreeze it before make_private."
            )
        return self._names[name]

    def _trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, as they are now: a sharded model exchanges them."""
        now = {name: module._parameters.get(own) for name, (module, own) in self._owners.items()}
        return {name: p for name, p in now.items() if p is not None and p.requires_grad}

    def watch(self, name: str, parameter: nn.Parameter) -> None:
        """Make a gradient that reaches this parameter an error."""
        if parameter not in self._watched and name in self._names:
            self._watched.add(parameter)
            self._handles.append(parameter.register_hook(self._escape(name)))

    # -- how the model has to be taken ----------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Plan a call of the model that is about to come."""
        stand_in = vars(self.model).get("forward")
        if isinstance(stand_in, _Forward) and self.active:
            self._enter(self.model, args, kwargs)
            stand_in.plan(args, kwargs)
            self._leave()

    def plan(self, forward: Callable[..., Any], call: Call) -> None:
        """Find out, at a kind of call that is new, which modules have to be taken as a whole."""
        if self._looking or self.samples == 0:
            return
        tensors = named_tensors(call)
        dimensions = tuple((name, x.dim()) for name, x in tensors.items())
        kind = self.model.training, self.samples > self._views, dimensions
        sized = (*kind, tuple(x.shape[1:] for x in tensors.values()))
        layout = self._layouts.get(kind) or self._layouts.get(sized)
        if layout is None or any(
            layout.place("", name, x) == 0 and len(x) != self.samples for name, x in tensors.items()
        ):
            self._planned = layout = Layout()
            self._looking = True
            try:
                self._look(layout, "", forward, call)
                if "" not in layout.refused:
                    self._decide(layout, forward, call)
            finally:
                self._looking = False
            folded = any(seen.folded for seen in layout.seen.values())
            self._layouts[sized if folded else kind] = layout
        self._planned = None if "" in layout.refused else layout
        self._again = partial(self._look, layout, "", forward, call)
        if self._attached != self._units:
            self._attach_all()

    def _look(self, layout: Layout, path: str, forward: Callable[..., Any], call: Call) -> None:
        module = self.model.get_submodule(path)
        with self.inside_generic():
            layout.look(module, path, forward, call, self.samples, self._views)

    def known(self) -> dict[str, Seen]:
        """What was seen of the modules of the call under way."""
        return self._layout.seen

    @property
    def _layout(self) -> Layout:
        """Of the call of the model that is under way, or goes backward; else of loose modules."""
        # A checkpointed module runs again during the backward pass.
        under_way = self._sees_batch or torch._C._current_graph_task_id() != -1
        return self._planned if self._planned is not None and under_way else self._loose

    def _decide(self, layout: Layout, forward: Callable[..., Any], call: Call) -> None:
        """Take as a whole what holds a layer that sees anything but samples, and try it out."""
        seen = layout.seen
        owners = {
            path: module
            for path, module in self.model.named_modules()
            if path in seen and self._own(path, module) and not is_recurrent(module)
        }
        without_rule = {path for path, module in owners.items() if rule_for(module) is None}
        for path in owners:
            if not (seen[path].fits_unit if path in without_rule else seen[path].fits_rule):
                self._enclose(layout, path)
        doubtful = {p for p in owners if {*seen[p].first.values()} != {0}}
        first: CaptureError | None = None
        while doubtful or without_rule or self._units:
            self._attach_all()
            problem = self._try(layout, forward, call)
            if problem is None:
                return
            before = set(self._units)
            if first is None or not isinstance(first, _At):  # the more telling one
                first = problem
            for path in problem.paths if isinstance(problem, _At) else doubtful:
                inside = next((u for u in self._units if is_inside(path, [u])), path)
                self._enclose(layout, inside)
            if self._units == before and seen[""].takes_batch:
                self._units.add("")
            if self._units == before:
                raise first

    def _enclose(self, layout: Layout, path: str) -> None:
        """Take the module around this one as a whole."""
        unit = layout.around(path)
        if unit is not None:
            self._units.difference_update([u for u in self._units if is_inside(u, [unit])])
            self._units.add(unit)

    def _try(self, layout: Layout, forward: Callable[..., Any], call: Call) -> CaptureError | None:
        """What is wrong with the gradients of two samples as they would be recorded now."""
        model, rows = self.model, FEW * self._views
        batch = [n for n, x in named_tensors(call).items() if layout.place("", n, x) == 0]
        args, kwargs = samples_of(call, batch, [i % self.samples for i in range(rows)])
        # Copies, for the plain run: their gradients set off no hook.
        own = {name: p.detach().requires_grad_() for name, p in self._trained().items()}

        def plainly(*args: Any, **kwargs: Any) -> Any:
            with self.inside_generic(), _reparametrize_module(model, own, tie_weights=True):
                return forward(*args, **kwargs)

        def losses(run: Callable[..., Any], seed: int, quiet: Quiet) -> Tensor | None:
            with quiet(), on_the_side(model, seed):
                return made_up_losses(run(*args, **kwargs), rows, self._views)

        for quiet in (without_dropout, lambda: evaluating(model)):
            plain, again = losses(plainly, 0, quiet), losses(plainly, 1, quiet)
            if plain is None or again is None:
                return None  # there is no output to compare
            if torch.allclose(plain, again, rtol=1e-4, equal_nan=True):
                expected = plain_gradients(plain, list(own.values()))
                break
        else:
            return None  # it draws random numbers whatever one does
        # A weight per sample: what goes to another one is seen even if the two are the same.
        weights = torch.tensor([1.0, -2.0]) if plain.dim() else torch.ones(())
        try:
            with self.rehearsal(FEW):
                found = losses(model.forward, 0, quiet)
                assert found is not None
                (found * weights.to(found)).sum().backward()
                gradients = self.gradients()
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
        different = {
            name
            for row, gradient in zip(rows_of.to(gradients.device), expected, strict=True)
            for name in differences(gradients.combine(row), dict(zip(own, gradient, strict=True)))
        }
        if not different:
            return None
        return _At(
            {name.rpartition(".")[0] for name in different},
            f"The gradients of '{min(different)}' that would be recorded for two samples are not "
            "those of plain autograd, so nothing is. Keep the batch in the first dimension of "
            "every layer's input, and give inputs that all samples share a first dimension of 1 "
            "without reducing it again.",
        )

    def in_front(self, path: str, forward: Callable[..., Any], call: Call) -> Seen:
        """Where the batch is in the arguments of a module; ValueError if that is unclear."""
        tensors, layout = named_tensors(call), self._layout
        looks: list[Callable[[], None]] = [partial(self._look, layout, path, forward, call)]
        if layout is not self._loose:
            looks.insert(0, self._again)
        while looks and (
            path not in layout.seen
            or any(layout.place(path, name, x) is None for name, x in tensors.items())
        ):
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
            if place >= 0 and x.shape[place] != self.samples:
                raise ValueError(f"its input {name} has not {self.samples} samples.")
        return seen

    def _escape(self, name: str) -> Callable[[Tensor], None]:
        @unserializable_hook  # type: ignore[untyped-decorator]
        def escaped(_: Tensor) -> None:
            if self._expected is None:
                raise CaptureError(
                    f"A gradient reached '{name}' outside a private step. Draw a batch from the "
                    "private loader first, or evaluate under torch.no_grad()."
                )
            raise _At(
                {name.rpartition(".")[0]},
                f"Parameter '{name}' takes part in the loss outside its own module's forward (for "
                "example F.linear(x, module.weight)), so its per-sample gradient is unknown. Call "
                "the module itself, or move the computation into one nn.Module that owns the "
                "parameter.",
            )

        hook: Callable[[Tensor], None] = escaped
        return hook

    # -- recording ------------------------------------------------------------------------------

    def listen(self, output: Tensor, path: str, receive: Callable[[Tensor], None]) -> Tensor:
        """`output`, arranged so that `receive` gets its gradient in the backward pass."""
        batch = self._batch

        def heard(grad: Tensor) -> None:
            if batch != self._batch:
                raise CaptureError(
                    f"backward() reached '{path}' after its batch was finished. Call backward() "
                    "once per batch, before optimizer.step()."
                )
            if torch.is_grad_enabled():
                raise CaptureError(
                    f"backward(create_graph=True) reached '{path}': gradients of gradients have no "
                    "per-sample rule. Leave gradient penalties out of the private loss."
                )
            self.heard = True
            if not self._discard:
                with plain_arithmetic():
                    receive(grad)

        if output.requires_grad and not output._is_view():
            output.register_hook(heard)
            return output
        # The first trainable layer: nothing before it needs a gradient, so nothing else would
        # ask autograd for the gradient of its output. And a hook on a view (a linear layer's
        # output, of sequences) is lost when what follows works in place on it.
        anchor = self._anchors.setdefault(
            output.device, torch.zeros((), device=output.device, requires_grad=True)
        )
        tapped: Tensor = _Tap.apply(anchor, output, heard)  # type: ignore[no-untyped-call]
        return tapped

    def add(self, path: str, local: str, term: Term, folds: int = 1) -> None:
        """Add one term, of `folds` rows a row of the batch, to a module's parameter's gradients."""
        if term.samples != folds * self.samples:
            raise CaptureError(
                f"Layer '{path}' saw {term.samples} samples, the batch has {self._expected}. The "
                "first dimension of every layer's input must be the whole batch: build layers with "
                "batch_first=True, fold no other dimension into it, and pick or drop no samples."
            )
        name = self._name(joined(path, local))
        rows = self._views * folds  # that belong to one sample, one after the other
        if name not in self._carriers:
            whole = term if rows == 1 else term.merged(rows)
            self._put(name, whole.compact())
            return
        left, right = (Rows(image) for image in term.compress(*self._carriers[name]))
        self._put(Left(name), left if rows == 1 else left.merged(rows))
        self._put(Right(name), right if rows == 1 else right.merged(rows))

    def _put(self, name: str, term: Term) -> None:
        terms = self._terms.setdefault(name, [])
        if terms and isinstance(terms[-1], Rows) and isinstance(term, Rows):
            terms[-1] = Rows(terms[-1].values + term.values)
        else:
            terms.append(term)

    @property
    def samples(self) -> int:
        """Rows of the expected batch."""
        assert self._expected is not None
        return self._expected

    def place(self, path: str, x: Tensor) -> tuple[int, int]:
        """Where the batch is in a layer's input (see `layout`), and what is folded into it."""
        layout = self._layout
        if layout is self._loose:
            # Outside a call of the whole model, one row may be a sample that was picked out.
            return ONE if self._sees_batch and len(x) == 1 else 0, 1
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

    def hide(self, path: str, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep autograd from computing the gradients of a module's parameters."""
        for name, parameter in parameters.items():
            self.watch(joined(path, name), parameter)
            parameter.requires_grad_(False)
            self._hidden.add(parameter)

    def show(self, parameters: Iterable[nn.Parameter]) -> None:
        """Undo `hide`."""
        for parameter in parameters:
            parameter.requires_grad_(True)
            self._hidden.discard(parameter)

    @contextmanager
    def inside_generic(self) -> Iterator[None]:
        """While torch.func runs a module, the hooks of its children keep still."""
        before, self._inside_generic = self._inside_generic, True
        try:
            yield
        finally:
            self._inside_generic = before


class _At(CaptureError):
    """What went wrong at the modules at `paths`."""

    def __init__(self, paths: set[str], message: str) -> None:
        super().__init__(message)
        self.paths = paths


class _Layer:
    """The hooks of one module that has a rule."""

    def __init__(self, capture: Capture, path: str, rule: Rule) -> None:
        self._capture, self._path, self._rule = capture, path, rule
        self._hidden: dict[str, nn.Parameter] | None = None

    def hide(self, module: nn.Module, _: Any) -> None:
        if self._capture.active:
            own = dict(module.named_parameters(recurse=False))
            self._hidden = {name: p for name, p in own.items() if p.requires_grad}
            self._capture.hide(self._path, self._hidden)

    def record(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            return None
        self._capture.show(hidden.values())
        if not isinstance(output, Tensor):  # the forward pass failed
            return None
        x: Tensor = next(iter((*args, *kwargs.values()))).detach()
        samples = self._capture.samples
        if samples == 0:  # no gradient to record
            return self._capture.listen(output, self._path, _nothing)
        batch, folds = self._capture.place(self._path, x)
        if batch > 0:
            x = x.movedim(batch, 0)
        elif batch in (ONE, SHARED):
            # Given one copy of the output each, the samples' gradients arrive apart. A copy of its
            # own, or the layers behind could not work in place on it.
            x, output = (y.expand(samples, *y.shape[batch == ONE :]) for y in (x, output))
            output = output.contiguous()
        unchanged = _unchanged(self._path, x)

        def receive(grad: Tensor) -> None:
            unchanged()
            for name, term in self._rule(module, x, grad.movedim(batch, 0) if batch > 0 else grad):
                if name in hidden:
                    self._capture.add(self._path, name, term, folds)

        return self._capture.listen(output, self._path, receive)


def _unchanged(path: str, *inputs: Tensor) -> Callable[[], None]:
    """A check that inputs which a layer has used are still what they were."""
    versions = [x._version for x in inputs]

    def check() -> None:
        if versions != [x._version for x in inputs]:
            raise CaptureError(
                f"The input of '{path}' was modified in place after the layer used it. "
                "Use the out-of-place form of that operation."
            )

    return check


class _Forward:
    """Stands in for the forward of a module that is taken as a whole, until `restore`.

    And for the model's own, which plans first.
    """

    def __init__(self, capture: Capture, path: str, module: nn.Module) -> None:
        self.capture, self._path, self._module = capture, path, module
        self.unit = True  # whether torch.func takes it as a whole
        self.forced = False  # for the sake of layers inside
        self._users = vars(module).get("forward")  # a forward pass given to this very module
        self._forward: Callable[..., Any] = self._users or _own_forward(module)
        self.inner = getattr(self._forward, "inner", self._forward)  # below other stand-ins
        self._recurrent = is_recurrent(module)

    def restore(self) -> None:
        """Give the module its forward pass back."""
        if self._users is None:
            del self._module.forward
        else:
            self._module.forward = self._users

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        capture = self.capture
        if self._recurrent and (capture.active or capture._inside_generic):
            return self._step_by_step(*args, **kwargs)
        self.plan(args, kwargs)
        if not capture.active or not self.unit:
            return self._forward(*args, **kwargs)
        if capture.samples == 0:  # nothing to vectorise over, and no gradient to record
            with capture.inside_generic(), torch.no_grad():
                output = self._forward(*args, **kwargs)
            return tree_map_only(Tensor, self._heard, output)
        try:
            return self._vectorised((args, kwargs))
        except (torch.OutOfMemoryError, CaptureError):
            raise
        except (RuntimeError, ValueError) as error:
            raise _At({self._path}, self._refusal(error)) from error

    def plan(self, args: Any, kwargs: Any) -> None:
        """Of the model itself: find out how it has to be taken."""
        if self.capture.active and not self._path and not self._recurrent:
            self.capture.plan(self._forward, (args, kwargs))

    def _refusal(self, error: Exception) -> str:
        seen = self.capture.known()
        why = "has parameters but no per-sample rule"
        if self.forced:
            why = "holds layers that see something else than the samples one by one"
        routed = next((p for p in seen if seen[p].routed and is_inside(p, [self._path])), None)
        if routed is not None:
            why += (
                f" ('{routed}' is given what other values in the batch pick for it, as the experts "
                "of a mixture of experts are: which token it sees depends on the batch)"
            )
        name = f"Module '{self._path}'" if self._path else "The model"
        reason = re.split(r"[.,] [Pp]lease ", str(error))[0].rstrip(". ")
        return (
            f"{name} ({type(self._module).__name__}) {why}, and torch.func cannot vectorise it: "
            f"{reason}. Build it from layers with a rule (Linear, Conv, Embedding, norms) with "
            "the batch in front, freeze it, or try dpspan.fix(model)."
        )

    def _vectorised(self, call: Call) -> Any:
        capture, samples = self.capture, self.capture.samples
        seen = capture.in_front(self._path, self._forward, call)
        leaves, _ = tree_flatten_with_path(call)
        places = [
            seen.inputs.get((keystr(where), leaf.dim()), SHARED) if isinstance(leaf, Tensor) else -1
            for where, leaf in leaves
        ]
        copies = {
            name: capture.listen(
                parameter.detach().expand(samples, *parameter.shape),
                self._path,
                lambda grad, n=name: capture.add(self._path, n, Rows(grad)),  # type: ignore[misc]
            )
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad
        }
        with capture.inside_generic():
            return per_sample_forward(
                self._module, self._forward, copies, call, places, seen.outputs
            )

    def _heard(self, x: Tensor) -> Tensor:
        """Part of the graph, so that a backward pass has somewhere to go."""
        return self.capture.listen(x, self._path, _nothing) if x.is_floating_point() else x

    def _step_by_step(self, *args: Any, **kwargs: Any) -> Any:
        capture, module = self.capture, self._module
        weights = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if not capture.active:  # torch.func vectorises these steps, but no fused kernel
            return step_by_step(module, weights, lambda x, _: x, *args, **kwargs)
        found = sequences(module, args[0] if args else kwargs["input"])
        if found != capture.samples:
            raise CaptureError(
                f"Layer '{self._path}' ({type(module).__name__}) saw {found} samples, the batch "
                f"has {capture.samples}. Its input must be the whole batch: of shape (samples, "
                "steps, features) if it is built with batch_first=True, which is not the default, "
                "(steps, samples, features) if it is not, (samples, features) for a cell."
            )
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        unchanged = _unchanged(self._path, *given)

        def listen(output: Tensor, terms: Terms) -> Tensor:
            def receive(grad: Tensor) -> None:
                unchanged()
                for name, term in terms(grad):
                    if name in weights and weights[name].requires_grad:
                        capture.add(self._path, name, term)

            return capture.listen(output, self._path, receive)

        hidden = {name: weight.detach() for name, weight in weights.items()}
        return step_by_step(module, hidden, listen, *args, **kwargs)

    # A copy of the model is an ordinary model: its forward is its class's again.
    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        return _own_forward(memo[id(self._module)])

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward, (self._module,)


def captures_on(model: nn.Module) -> set[Capture]:
    """Every capture whose hooks the model carries."""
    found = set()
    for module in model.modules():
        for item in (*module._forward_pre_hooks.values(), vars(module).get("forward")):
            if isinstance(item, Hook | _Forward) and item.capture is not None:
                found.add(item.capture)
    return found


def joined(path: str, name: str) -> str:
    """The name in the model of what a module at this path calls by that name."""
    return f"{path}.{name}" if path else name


def _trainable(model: nn.Module) -> Iterator[tuple[str, str, nn.Module, nn.Parameter]]:
    """Each trainable parameter by all names it has: that name, the first one, whose it is, itself.

    What is recorded is known by name, since a sharded model exchanges its parameters as it runs.
    """
    first: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                name = joined(path, own)
                yield name, first.setdefault(parameter, name), module, parameter


def _own_parameters(module: nn.Module) -> Iterator[str]:
    """Names of a module's own parameters; lists and dicts of them belong to who holds them.

    So do the parameters from which a parametrization computes a weight.
    """
    yield from module._parameters
    for name, child in module.named_children():
        holds = isinstance(child, nn.ParameterList | nn.ParameterDict)
        if holds or (name == "parametrizations" and parametrize.is_parametrized(module)):
            yield from (joined(name, own) for own, _ in child.named_parameters())


def _own_forward(module: nn.Module) -> MethodType:
    return MethodType(type(module).forward, module)


class Hook:
    """A hook that stays behind when the model is copied or pickled; `copied` takes its place."""

    def __init__(
        self,
        function: Callable[..., Any],
        capture: Capture | None = None,
        *,
        copied: Callable[..., None] | None = None,
    ) -> None:
        self._function, self.capture, self._copied = function, capture, copied or _nothing

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return self._copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_nothing, ()


def _nothing(*_: Any) -> None:
    return None


def _get_nothing() -> Callable[..., None]:
    return _nothing


class _Tap(torch.autograd.Function):
    """The identity, with an ear on its gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, heard: Callable[[Tensor], None]) -> Tensor:
        ctx.heard = heard
        return x.data  # not a view: the layers behind may work in place on it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        ctx.heard(grad)
        return None, grad, None
