"""What runs in place of a module's forward pass while a capture is attached to the model.

A module with a rule runs as it is, its parameters hidden; one without is vectorised by torch.func,
and everything below it too; a recurrent one goes step by step. The model itself is planned first.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only

from dpspan.gradients.layers import Rule, rule_for
from dpspan.gradients.layers.generic import per_sample_forward
from dpspan.gradients.layers.recurrent import (
    InPlaceOf,
    Terms,
    is_recurrent,
    sequences,
    step_by_step,
)
from dpspan.gradients.layers.terms import Rows
from dpspan.gradients.layout import ONE, SHARED, Call, joined
from dpspan.gradients.planning import CaptureErrorAt
from dpspan.support.errors import CaptureError

if TYPE_CHECKING:
    from dpspan.gradients.capture import Capture


class StandIn(InPlaceOf):
    """Stands in for the forward pass of a module, until `restore`."""

    def __init__(self, capture: Capture, path: str, module: nn.Module) -> None:
        self.capture, self._path, self._module = capture, path, module
        self.users = vars(module).get("forward")  # a forward pass given to this very module
        self._forward: Callable[..., Any] = self.users or _own_forward(module)
        below = self._forward  # and below other stand-ins
        self.inner = below.inner if isinstance(below, InPlaceOf) else below
        self._recurrent = is_recurrent(module)
        self._plans = not path and not self._recurrent and rule_for(module) is None
        self._ahead = bool(capture.shards)  # whether the model is planned before it is called
        self._alone, self.plan = self._run, self._plan  # what torch.compile must not see
        self._compiles = True
        self.takes()
        module.forward = self

    def takes(self, rule: Rule | None = None, *, unit: bool = False, forced: bool = False) -> None:
        """How to take the module: by a rule, as a whole (for the sake of layers inside), as is."""
        self._rule, self._unit, self._forced = rule, unit, forced

    def restore(self) -> None:
        """Give the module its forward pass back."""
        if vars(self._module).get("forward") is self:
            del self._module.forward
            if self.users is not None:
                self._module.forward = self.users

    def _plan(self, args: Any, kwargs: Any) -> None:
        """Of the model itself: find out how it has to be taken."""
        if self._plans:
            forward = self._module if self._ahead else self._forward
            self.capture.planner.plan(forward, (args, kwargs))

    def stay_uncompiled(self) -> None:
        """Keep torch.compile out: what is recorded must not become part of a graph.

        It goes on behind the model itself, so what lies between the layers is compiled.
        """
        if self._compiles:
            alone = torch.compiler.disable(StandIn._run, recursive=bool(self._path))
            self._alone, self._compiles = MethodType(alone, self), False
            self.plan = torch.compiler.disable(self._plan)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._path:
            return self._alone(*args, **kwargs)
        capture = self.capture
        with capture.call_of_model(args, kwargs):
            graphs = capture.batch.graphs if capture.active else None
            if graphs is None:
                outputs = self._alone(*args, **kwargs)
            else:
                outputs = graphs.call(capture, self._alone, args, kwargs)
        return capture.handed_out(outputs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        capture = self.capture
        if self._recurrent and self._unit and (capture.active or capture.inside_unit):
            return self._step_by_step(*args, **kwargs)
        if capture.active:
            if not self._ahead:
                self.plan(args, kwargs)
            if self._unit:
                return self._as_a_whole(*args, **kwargs)
            if self._rule is not None:
                return self._by_rule(self._rule, *args, **kwargs)
        return self._forward(*args, **kwargs)

    def _by_rule(self, rule: Rule, *args: Any, **kwargs: Any) -> Tensor:
        capture, path, module, rows = self.capture, self._path, self._module, self.capture.rows
        own = module._parameters.items()
        hidden = {name: p for name, p in own if p is not None and p.requires_grad}
        for name, parameter in hidden.items():
            capture.watch(joined(path, name), parameter)
        try:
            for parameter in hidden.values():
                parameter.requires_grad_(False)
            output: Tensor = self._forward(*args, **kwargs)
        finally:
            for parameter in hidden.values():
                parameter.requires_grad_(True)
        x: Tensor = next(iter((*args, *kwargs.values()))).detach()
        if rows == 0:  # no gradient to record
            return capture.listen(output, path, nothing)
        batch, folds = capture.planner.place(path, x)
        if batch > 0:
            x = x.movedim(batch, 0)
        elif batch in (ONE, SHARED):
            # Given one copy of the output each, the samples' gradients arrive apart. A copy of its
            # own, or the layers behind could not work in place on it.
            x, output = (y.expand(rows, *y.shape[batch == ONE :]) for y in (x, output))
            output = output.contiguous()
        unchanged = _unchanged(path, x)

        def receive(grad: Tensor) -> None:
            unchanged()
            for name, term in rule(module, x, grad.movedim(batch, 0) if batch > 0 else grad):
                if name in hidden:
                    capture.add(path, name, term, folds)

        return capture.listen(output, path, receive)

    def _as_a_whole(self, *args: Any, **kwargs: Any) -> Any:
        capture, path = self.capture, self._path
        if capture.rows == 0:  # nothing to vectorise over, and no gradient to record
            with capture.unit_runs(), torch.no_grad():
                output = self._forward(*args, **kwargs)
            # Part of the graph, so that a backward pass has somewhere to go.
            return tree_map_only(
                Tensor,
                lambda x: capture.listen(x, path, nothing) if x.is_floating_point() else x,
                output,
            )
        try:
            return self._vectorised((args, kwargs))
        except (torch.OutOfMemoryError, CaptureError):
            raise
        except (RuntimeError, ValueError) as error:
            raise CaptureErrorAt({path}, self._refusal(error)) from error

    def _vectorised(self, call: Call) -> Any:
        capture, path = self.capture, self._path
        seen = capture.planner.in_front(path, self._forward, call)
        leaves, _ = tree_flatten_with_path(call)
        places = [
            seen.inputs.get((keystr(where), leaf.dim()), SHARED) if isinstance(leaf, Tensor) else -1
            for where, leaf in leaves
        ]
        copies = {
            name: capture.listen(
                parameter.detach().expand(capture.rows, *parameter.shape),
                path,
                lambda grad, name=name: capture.add(path, name, Rows(grad)),  # type: ignore[misc]
            )
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad
        }
        with capture.unit_runs():
            return per_sample_forward(
                self._module, self._forward, copies, call, places, seen.outputs
            )

    def _refusal(self, error: Exception) -> str:
        why = "has parameters but no per-sample rule"
        if self._forced:
            why = "holds layers that see something else than the samples one by one"
        routed = self.capture.planner.routed(self._path)
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

    def _step_by_step(self, *args: Any, **kwargs: Any) -> Any:
        capture, module, path = self.capture, self._module, self._path
        weights = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if not capture.active:  # torch.func vectorises these steps, but no fused kernel
            return step_by_step(module, weights, lambda x, _: x, *args, **kwargs)
        found = sequences(module, args[0] if args else kwargs["input"])
        if found != capture.rows:
            raise CaptureError(
                f"Layer '{path}' ({type(module).__name__}) saw {found} samples, the batch has "
                f"{capture.rows}. Its input must be the whole batch: of shape (samples, steps, "
                "features) if it is built with batch_first=True, which is not the default, "
                "(steps, samples, features) if it is not, (samples, features) for a cell."
            )
        unchanged = _unchanged(path, *tree_leaves((args, kwargs)))

        def listen(output: Tensor, terms: Terms) -> Tensor:
            def receive(grad: Tensor) -> None:
                unchanged()
                for name, term in terms(grad):
                    if name in weights and weights[name].requires_grad:
                        capture.add(path, name, term)

            return capture.listen(output, path, receive)

        hidden = {name: weight.detach() for name, weight in weights.items()}
        return step_by_step(module, hidden, listen, *args, **kwargs)

    # A copy of the model is an ordinary model: its forward is its class's again.
    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        return _own_forward(memo[id(self._module)])

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward, (self._module,)


def captures_on(model: nn.Module) -> set[Capture]:
    """Every capture that is attached to the model."""
    found = set()
    for module in model.modules():
        forward = vars(module).get("forward")
        while isinstance(forward, StandIn):
            found.add(forward.capture)
            forward = forward.users
    return found


class Hook:
    """A hook that stays behind when the model is copied or pickled; `copied` takes its place."""

    def __init__(
        self, function: Callable[..., Any], *, copied: Callable[..., None] | None = None
    ) -> None:
        self._function, self._copied = function, copied or nothing
        self._compiles = True

    def stay_uncompiled(self) -> None:
        """Keep torch.compile out."""
        if self._compiles:
            self._function, self._compiles = torch.compiler.disable(self._function), False

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return self._copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_nothing, ()


def while_there(method: Callable[..., None]) -> Callable[..., None]:
    """A method, but not its object: what outlives a run must not keep it alive."""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (found := known()) is not None:
            found(*args)

    return call


def nothing(*_: Any) -> None:
    """A hook that does nothing."""


def _get_nothing() -> Callable[..., None]:
    return nothing


def _own_forward(module: nn.Module) -> MethodType:
    return MethodType(type(module).forward, module)


def _unchanged(path: str, *inputs: Any) -> Callable[[], None]:
    """A check that inputs which a layer has used are still what they were."""
    versions = [(x, x._version) for x in inputs if isinstance(x, Tensor)]

    def check() -> None:
        if any(x._version != version for x, version in versions):
            raise CaptureError(
                f"The input of '{path}' was modified in place after the layer used it. "
                "Use the out-of-place form of that operation."
            )

    return check
