"""Records what per-sample gradients are made of while the user's own loop runs.

Each trainable layer's input is noted in the forward pass and the gradient of its output in the
backward pass; together they give the layer's per-sample gradients (see `layers`). The layer's
parameters are hidden from autograd while the layer runs, so autograd never computes the summed
weight gradients that private training would throw away. It follows that *any* gradient which does
reach a parameter came by a way the capture does not see: that is an error, never silence.

Parameters are known by module and name: a sharded model exchanges them for others while it runs.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle, unserializable_hook

from dpspan.gradients.batch import ExpectedBatch
from dpspan.gradients.graphs import Graphs
from dpspan.gradients.identities import Scaled, Tap
from dpspan.gradients.layers import own_parameters, rule_for
from dpspan.gradients.layers.groups import Ragged
from dpspan.gradients.layers.recurrent import is_of_opacus, is_recurrent
from dpspan.gradients.layers.terms import Rows, Term, only_first, weighted
from dpspan.gradients.layout import joined
from dpspan.gradients.numerics import plain_arithmetic
from dpspan.gradients.operator import Left, PerSampleGradients, Right
from dpspan.gradients.planning import CaptureErrorAt, Planner
from dpspan.gradients.stand_in import Hook, StandIn, _get_nothing, _own_forward, captures_on
from dpspan.support.distributed import Processes, is_sharded
from dpspan.support.errors import CaptureError
from dpspan.support.left_as_found import meanwhile
from dpspan.support.sharded import Shards, shards_itself

# Models that 0.1 pickled look for the private ones here.
__all__ = ["Capture", "Hook", "_get_nothing", "_own_forward", "captures_on"]


class Capture:
    """Attached to a model; `expect(n)` arms it for one batch, `collect()` returns its gradients."""

    def __init__(self, model: nn.Module, processes: Processes | None = None) -> None:
        """`processes` are those that a sharded model is spread over."""
        self.model, self.shards = model, Shards(model, processes)
        self._names: dict[str, str] = {}  # all names of trainable parameters: the first of its own
        self._owners: dict[str, tuple[nn.Module, str]] = {}  # by first name: whose it is, and how
        self._modules = set(model.modules())  # they call it
        for name, first, module in _trainable(model):
            self._names[name] = first
            self._owners.setdefault(first, (module, name.rpartition(".")[2]))
        self._batch: ExpectedBatch | None = None
        self.inside_unit = False  # torch.func runs a module: the stand-ins inside keep still
        self.inside_call = False  # of the model
        self.sees_batch = False  # inside a call of the model that was given the batch
        self.anchors: dict[torch.device, Tensor] = {}
        others = captures_on(model)
        if any(other._batch is not None for other in others):
            raise CaptureError(
                "The model is in the middle of a private step: finish it with optimizer.step(), or "
                "call engine.detach(), before asking for gradients."
            )
        self.planner: Planner = Planner(self, [other.planner for other in others])
        self._watched: dict[nn.Parameter, RemovableHandle] = {}
        self._stand_ins: dict[nn.Module, StandIn] = {}
        self._watch_all()
        self._hooks: list[RemovableHandle] = []
        if self.shards:  # in front of what gathers the model's own: to plan is to run all of it
            ahead = Hook(lambda _, args, kwargs: self.prepare(*args, **kwargs))
            hook = model.register_forward_pre_hook(ahead, with_kwargs=True, prepend=True)
            self._hooks.append(hook)
            for name, parameter in self.shards.gathered():
                if parameter.requires_grad:
                    self.watch(name, parameter)
        try:
            self.attach()
        except CaptureError:
            self.remove()
            raise

    def expect(
        self,
        samples: int,
        *,
        views: int = 1,
        units: tuple[int, ...] | None = None,
        largest: int | None = None,
        planned: int | None = None,
        scale: float = 1.0,
        live: int | None = None,
        discard: bool = False,
        everywhere: bool = False,
        carriers: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        """Prepare for a batch of `samples`; `discard` drops what it brings.

        The samples are this process's own, or the same in every one that has a shard of the model
        (`everywhere`): sums over them are added up, or not.

        Of a batch that was filled up only the first `live` samples count: the gradients of the
        others are zeros. `graphs` record and replay the model.

        With `views` the model sees that many rows for each sample, one after the other, whose
        gradients are added up. With `units` the samples are records of so many units, of so many
        records each (at most `largest`), one after the other: gradients are then means of units.

        Memory is planned for so many samples as `planned` says, by default for those that there
        are. Gradients are those of the loss times `scale`: before anything is measured, as numbers
        of a mean over many overflow later than those of one over few.

        Of a parameter with `carriers` only its gradient's images in them are kept (see
        `PerSampleGradients.compress`): a layer's input is let go during the backward pass.
        """
        self._batch = ExpectedBatch(
            rows=samples * views,
            views=views,
            units=units,
            largest=largest,
            planned=None if planned is None else planned * views,
            scale=scale,
            live=live,
            discard=discard,
            everywhere=everywhere,
            carriers=carriers or {},
            graphs=graphs,
        )
        self._watch_all()  # parameters may have been exchanged since
        if "torch._dynamo" in sys.modules:  # something may have been compiled
            hooks = (*self.model._forward_pre_hooks.values(), *self.model._forward_hooks.values())
            for ours in (*self._stand_ins.values(), *hooks):
                if isinstance(ours, StandIn | Hook):
                    ours.stay_uncompiled()

    def collect(self) -> PerSampleGradients:
        """The per-sample gradients of the expected batch, which is then over."""
        batch = self._batch
        if batch is None:
            raise CaptureError("No batch is expected: draw one from the private loader first.")
        for name, first, module in _trainable(self.model):
            if module not in self._modules or self._name(name) != first:
                raise CaptureError(
                    f"Parameter '{name}' belongs to another module, or is shared with others, than "
                    "when the model was made private. Build the model before make_private."
                )
        if batch.rows > 0 and not batch.discard and not batch.heard:
            raise CaptureError(
                f"No gradient was recorded for the batch of {batch.rows} samples. Call the model "
                "on the batch with gradients enabled and loss.backward() before optimizer.step()."
            )
        gradients = self.gradients()
        if batch.live is not None:  # those that fill up the batch are no records
            places = torch.arange(gradients.samples, device=gradients.device)
            gradients.counted = places < batch.live
        self.disarm()
        return gradients

    def gradients(self, *, counted: Tensor | None = None) -> PerSampleGradients:
        """What has been recorded so far; `counted` as of `PerSampleGradients`."""
        batch = self.batch
        shapes: dict[str, torch.Size] = {}
        for name, parameter in self.trained().items():
            if name in batch.carriers:
                left, right = batch.carriers[name]
                shapes |= {Left(name): left.shape, Right(name): right.shape}
            else:
                shapes[name] = parameter.shape
        samples = 0 if batch.discard else batch.samples
        known = next(iter(self.trained().values()), torch.empty(0))
        like = torch.empty(0, dtype=known.dtype, device=known.device)  # not sharded if that is
        return PerSampleGradients(
            shapes,
            batch.terms,
            samples,
            like=like,
            planned=None if batch.planned is None else batch.planned // batch.views,
            counted=counted,
            placement=self.shards.of_same if batch.everywhere else self.shards.of_sums,
        )

    def rehearsal(self, samples: int, *, carried: bool = False) -> AbstractContextManager[None]:
        """A run of so many samples, the same in all processes, that leaves no trace."""
        views, carriers = self.batch.views, self.batch.carriers if carried else {}
        batch = ExpectedBatch(samples * views, views, everywhere=True, carriers=carriers)
        return meanwhile(self, _batch=batch)

    def recording(self) -> AbstractContextManager[None]:
        """Around a run of the expected batch that becomes a graph, which sees to stand-ins."""
        batch = replace(self.batch, live=None, graphs=None, terms={}, heard=False)
        # The anchors of other graphs belong to another stream.
        return meanwhile(self, _batch=batch, anchors={})

    def disarm(self) -> None:
        """Forget the expected batch, if there is one, and what it brought."""
        self._batch = None

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in (*self._watched.values(), *self._hooks):
            handle.remove()
        for stand_in in self._stand_ins.values():
            stand_in.restore()
        self.disarm()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def active(self) -> bool:
        """Whether a forward pass would be recorded now."""
        return self._batch is not None and not self.inside_unit and torch.is_grad_enabled()

    @property
    def heard(self) -> bool:
        """Whether a backward pass has reached the expected batch."""
        return self._batch is not None and self._batch.heard

    @property
    def batch(self) -> ExpectedBatch:
        assert self._batch is not None
        return self._batch

    @property
    def rows(self) -> int:
        """Rows of the expected batch: its samples, each as often as it has views."""
        return self.batch.rows

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Plan a call of the model that is about to come."""
        if self.active:
            with self.call_of_model(args, kwargs, only_planned=True):
                self._stand_ins[self.model].plan(args, kwargs)

    @contextmanager
    def call_of_model(
        self, args: Any, kwargs: Any, *, only_planned: bool = False
    ) -> Iterator[None]:
        """Around a call of the whole model."""
        before = self.sees_batch, self.inside_call
        self.inside_call = True
        if self.active:
            if not self.shards:  # which are watched as they are kept and as they are gathered
                self._watch_all()
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.sees_batch = any(x.shape[:1] == (self.rows,) for x in tensors)
            if not (before[1] or only_planned):  # outside of an autocast, maybe
                self._choose_where_to_scale(tensors)
        try:
            yield
        finally:
            self.sees_batch, self.inside_call = before

    def _choose_where_to_scale(self, inputs: list[Tensor]) -> None:
        """At the outputs, where something is in half precision, frozen or not.

        There 1/n would be rounded, for all records alike, before it is undone. A sharded model may
        run in less than it is kept in.
        """
        halves = (torch.float16, torch.bfloat16)
        cast = any(torch.is_autocast_enabled(d) for d in ("cpu", "cuda"))
        low = cast or self.shards or any(p.dtype in halves for p in self.model.parameters())
        before, now = self.batch.at_outputs, bool(low) and self.batch.scale != 1
        if before not in (None, now) or (now and any(x.grad_fn is not None for x in inputs)):
            raise CaptureError(
                "In half precision with a mean loss, all calls of the model for a batch have to be "
                "in the same precision, and what they are given must not depend on weights (on "
                "what the model gave before, say). Take loss_reduction='sum', or float32."
            )
        self.batch.at_outputs = now

    def handed_out(self, outputs: Any) -> Any:
        """What a call of the model gives, in float32 where its gradient is multiplied there."""
        if self.inside_call or not self.active or not self.batch.at_outputs:
            return outputs
        leaves, structure = tree_flatten(outputs)
        known = (Tensor, bool, int, float, str, bytes, type(None))
        if strange := [type(x).__name__ for x in leaves if not isinstance(x, known)]:
            raise CaptureError(
                f"In half precision with a mean loss the model's outputs have to be tensors, in "
                f"tuples, lists or dictionaries, got a {strange[0]}. Take loss_reduction='sum', "
                "or float32."
            )
        scale = self.batch.scale
        scaled = [
            Scaled.apply(x, scale) if isinstance(x, Tensor) and x.requires_grad else x  # type: ignore[no-untyped-call]
            for x in leaves
        ]
        return tree_unflatten(scaled, structure)

    def unit_runs(self) -> AbstractContextManager[None]:
        """Around a run of a module that torch.func takes as a whole, or of a plain one."""
        return meanwhile(self, inside_unit=True)

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, as they are now."""
        now = {name: module._parameters.get(own) for name, (module, own) in self._owners.items()}
        return {name: p for name, p in now.items() if p is not None and p.requires_grad}

    def owns(self, path: str, module: nn.Module) -> bool:
        """Whether a module has trainable parameters of its own."""
        return any(joined(path, name) in self._names for name in own_parameters(module))

    def _name(self, name: str) -> str:
        """The name under which a parameter is recorded; the first of several, if it is shared."""
        if name not in self._names:
            raise CaptureError(
                f"Parameter '{name}' became trainable after the model was made private, so its "
                "gradients are not clipped. Unfreeze it before make_private."
            )
        return self._names[name]

    def _watch_all(self) -> None:
        for name, parameter in self.trained().items():
            self.watch(name, parameter)

    def watch(self, name: str, parameter: nn.Parameter) -> None:
        """Make a gradient that reaches this parameter an error."""
        if parameter in self._watched:
            return
        if is_sharded(parameter) and name not in self.shards:
            raise RuntimeError(
                "fully_shard was called on the model after make_private, so its parameters are not "
                "those of the optimizer and the private step. Call it before both."
            )

        @unserializable_hook  # type: ignore[untyped-decorator]
        def escaped(grad: Tensor) -> Tensor:
            if self.planner.plain is not None:  # a rehearsal asks for it, and nobody else gets it
                self.planner.plain[name] = self.shards.part(name, grad)
                return torch.zeros_like(grad)
            if self._batch is None:
                raise CaptureError(
                    f"A gradient reached '{name}' outside a private step. Draw a batch from the "
                    "private loader first, or evaluate under torch.no_grad()."
                )
            raise CaptureErrorAt(
                {name.rpartition(".")[0]},
                f"Parameter '{name}' takes part in the loss outside its own module's forward (for "
                "example F.linear(x, module.weight)), so its per-sample gradient is unknown. Call "
                "the module itself, or compute this in a module that owns the parameter.",
            )

        self._watched[parameter] = parameter.register_hook(escaped)

    def attach(self) -> None:
        """Let stand-ins take each module as it has to be taken; see `planning` for the units."""
        for stand_in in self._stand_ins.values():
            stand_in.takes()
        self._stand_in("", self.model)
        self._attach("", self.model, set())

    def _attach(self, path: str, module: nn.Module, seen: set[nn.Module]) -> None:
        if module in seen:
            return
        seen.add(module)
        own, rule, forced = self.owns(path, module), rule_for(module), path in self.planner.units
        if own and rule is None and is_of_opacus(module):
            raise CaptureError(
                f"Layer '{path}' ({type(module).__name__}) is Opacus', whose states do not "
                "have the batch in front: use torch's own, or dpspan.fix(model)."
            )
        # Without a rule its forward may use all parameters below it: torch.func takes all of it.
        if forced or (own and rule is None):
            self._refuse_shards_inside(path, module)
            self._stand_in(path, module).takes(unit=True, forced=forced)
            for name, part in module.named_modules(prefix=path):
                if part not in seen and is_recurrent(part):
                    self._stand_in(name, part).takes(unit=True)
                    seen.add(part)
            return
        if own:
            self._stand_in(path, module).takes(rule)
        for name, child in module.named_children():
            self._attach(joined(path, name), child, seen)

    def _refuse_shards_inside(self, path: str, module: nn.Module) -> None:
        """What is gathered by itself would take the place of each sample's own copy."""
        inside = [n for n, m in module.named_modules() if m is not module and shards_itself(m)]
        if inside:
            raise CaptureErrorAt(
                {path},
                f"'{path}' ({type(module).__name__}) is taken as a whole: it has parameters of its "
                "own but no per-sample rule, or holds a layer that sees something else than "
                f"samples. But fully_shard was called on '{inside[0]}' inside of it. Move such "
                "parameters into a small module of their own, or call it on the one around only.",
            )

    def _stand_in(self, path: str, module: nn.Module) -> StandIn:
        if module not in self._stand_ins or "forward" not in vars(module):  # a rehearsal undid it
            self._stand_ins[module] = StandIn(self, path, module)
        return self._stand_ins[module]

    def listen(self, output: Tensor, path: str, receive: Callable[[Tensor], None]) -> Tensor:
        """`output`, arranged so that `receive` gets its gradient in the backward pass."""
        # A checkpointed module of the model runs again during the backward pass.
        inside = self.inside_call or torch._C._current_graph_task_id() != -1
        batch = self.batch

        def heard(grad: Tensor) -> None:
            self.check_backward(path, batch)
            batch.heard = True
            if not batch.discard:
                with plain_arithmetic():
                    receive(self._own_size(path, grad, inside))

        if output.requires_grad and not output._is_view():
            output.register_hook(heard)
            return output
        # The first trainable layer: nothing before it needs a gradient, so nothing else would
        # ask autograd for the gradient of its output. And a hook on a view (a linear layer's
        # output, of sequences) is lost when what follows works in place on it.
        tapped: Tensor = Tap.apply(self.anchor(output.device), output, heard)  # type: ignore[no-untyped-call]
        return tapped

    def _own_size(self, path: str, grad: Tensor, inside: bool) -> Tensor:
        """The gradient of each record's own loss."""
        batch = self.batch
        if batch.scale == 1 or (batch.at_outputs and inside):
            return grad
        if grad.dtype in (torch.float16, torch.bfloat16):
            raise CaptureError(
                f"Layer '{path}' has gradients in half precision, of a mean, and was used outside "
                "of a call of the model itself, or under an autocast inside of it. Call the model, "
                "all of it under autocast, take loss_reduction='sum', or float32."
            )
        return grad * batch.scale

    def anchor(self, device: torch.device) -> Tensor:
        """A number that has a gradient, and so has what depends on it."""
        if device not in self.anchors:
            self.anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self.anchors[device]

    def check_backward(self, path: str, batch: ExpectedBatch) -> None:
        """Refuse a backward pass that is of another batch than the expected one, or is no end."""
        if batch is not self._batch:
            raise CaptureError(
                f"backward() reached '{path}' after its batch was finished. Call backward() once "
                "per batch, before optimizer.step()."
            )
        if torch.is_grad_enabled():
            raise CaptureError(
                f"backward(create_graph=True) reached '{path}': gradients of gradients have no "
                "per-sample rule. Leave gradient penalties out of the private loss."
            )

    def add(self, path: str, own: str, term: Term, folds: int = 1) -> None:
        """Add a term, of `folds` rows a row of the batch, to the gradients of a module's own."""
        batch = self.batch
        if term.samples != folds * batch.rows:
            raise CaptureError(
                f"Layer '{path}' saw {term.samples} samples, the batch has {batch.rows}. The "
                "first dimension of every layer's input must be the whole batch: build layers with "
                "batch_first=True, fold no other dimension into it, and pick or drop no samples."
            )
        name = self._name(joined(path, own))
        rows = batch.views * folds  # that belong to one record, one after the other
        if batch.live is not None:
            term = only_first(term, batch.live * rows)
        groups = batch.groups(rows, term)
        if isinstance(groups, Ragged):
            term = weighted(term, groups.weights)
        if name not in batch.carriers:
            planned = folds * (batch.rows if batch.planned is None else batch.planned)
            batch.put(name, (term if groups is None else term.merged(groups)).compact(planned))
            return
        left, right = (Rows(image) for image in term.compress(*batch.carriers[name]))
        batch.put(Left(name), left if groups is None else left.merged(groups))
        batch.put(Right(name), right if groups is None else right.merged(groups))


def _trainable(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Each trainable parameter by all names it has: that name, the first one, and whose it is."""
    first: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                name = joined(path, own)
                yield name, first.setdefault(parameter, name), module
