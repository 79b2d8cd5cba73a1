"""Is the loss a sum (or mean) of one term per sample? Where it can be seen, it is checked.

A criterion is called again on some of the samples. For a loss that the training loop computes by
itself there is no module to ask: the model's outputs are handed to the loop as a tensor subclass
that tells of the backward() at the end of what is computed from them (and is a plain tensor in
everything else), and autograd's graph is read.
"""

import math
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dpspan.gradients.layout import Call
from dpspan.model.isolation import Rehearsal, same, tensors_of
from dpspan.support.checks import expect
from dpspan.support.errors import CaptureError
from dpspan.support.left_as_found import left_as_found, plain_tensors
from dpspan.support.randomness import fresh_seed, shuffled

_ROUNDS = 3

# Nodes of autograd's graph that hand on the same numbers, in another shape or type.
_SAME = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias", "Clone", "ToCopy"}
_REDUCTIONS = {1: "mean", 2: "sum"}  # torch's numbers of them
_SCALED_SUM = "scaled sum"  # by 1 / samples perhaps, or by something else


def check_criterion(criterion: nn.Module | None, loss_reduction: str, model: nn.Module) -> None:
    """Refuse a criterion whose reduction is not the one the engine undoes, or that is trained."""
    known = loss_reduction in ("mean", "sum")
    expect(known, "loss_reduction to be 'mean' or 'sum'", loss_reduction)
    module = isinstance(criterion, nn.Module | None)
    expect(module, "criterion to be a module, such as nn.CrossEntropyLoss()", criterion)
    reduction = getattr(criterion, "reduction", None)
    if reduction in ("mean", "sum") and reduction != loss_reduction:
        raise ValueError(
            f"{type(criterion).__name__} has reduction='{reduction}' but loss_reduction is "
            f"'{loss_reduction}': per-sample gradients would be off by the batch size. Pass "
            f"loss_reduction='{reduction}'."
        )
    if reduction == "batchmean" and loss_reduction != "mean":
        raise ValueError("reduction='batchmean' goes with loss_reduction='mean'.")
    class_weights = isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss)
    if class_weights and reduction == "mean" and getattr(criterion, "weight", None) is not None:
        raise ValueError(
            f"{type(criterion).__name__} with class weights and reduction='mean' divides by the "
            "weights of the whole batch, so every sample's gradient depends on the others. Use "
            "reduction='sum' with loss_reduction='sum'."
        )
    own = set(model.parameters())
    for name, parameter in () if criterion is None else criterion.named_parameters():
        if parameter.requires_grad and parameter not in own:
            raise ValueError(
                f"The criterion ({type(criterion).__name__}) has the trainable parameter '{name}', "
                "whose gradient would be private data without clip and noise. Make it part of the "
                "model, or freeze it: criterion.requires_grad_(False)."
            )


class CriterionCheck:
    """Checks on real batches that a criterion splits into samples and keeps nothing of them.

    Whenever `due`, until a batch has passed, and wherever a mean leaves something out by its
    ignore_index, which is when it mixes samples.
    """

    def __init__(self, criterion: nn.Module, *, mean: bool) -> None:
        self._criterion, self._mean = criterion, mean
        self._ignored = getattr(criterion, "ignore_index", None) if mean else None
        self.passed = False
        self._cannot = False  # it cannot be called on a part of a batch, or not repeatably
        self.harmless: set[str] = set()  # tensors that change, but that nothing depends on

    def __call__(self, call: Call, samples: int, *, due: bool) -> None:
        tensors = tensors_of(call)
        outputs, *others = sorted(tensors.values(), key=lambda x: not x.requires_grad)
        entries = len(outputs)
        ignored = None if self._ignored is None else _first(others, entries, self._ignored)
        if (self.passed or self._cannot) and ignored is None and not due:
            return
        # Tokens of all samples in one row are cut between samples, not inside one.
        block = max(1, entries // samples) if samples > 1 and entries % samples == 0 else 1
        paths = frozenset(path for path, x in tensors.items() if len(x) == entries)
        if entries < 2 * block:
            return
        parts = _Parts(self._criterion, call, entries // block, block, paths)
        first = (fresh_seed() % entries if ignored is None else ignored) // block
        try:
            verdicts = [parts.split(self._mean, first, wide=i == 0) for i in range(_ROUNDS)]
            self._cannot = False in verdicts and not parts.repeatable()
            self.harmless |= parts.harmless()
        except Exception:  # whatever it says may show private data
            self._cannot = True
        if self._cannot:
            return
        if False in verdicts:
            raise ValueError(
                f"The loss ({type(self._criterion).__name__}) mixes samples: the loss of a batch "
                f"is not the {'mean' if self._mean else 'sum'} of the losses of its samples, so no "
                "sample's gradient can be bounded. Make it one loss per sample, then take the mean "
                "(of tokens that are not ignored too: over each sample's first)."
            )
        self.passed |= True in verdicts


class _Parts(Rehearsal):
    """A criterion's call, and the same call on some of its samples."""

    def split(self, mean: bool, first: int, *, wide: bool) -> bool | None:
        """Cut the samples in two at random: all of them, or a few, among which `first`.

        Among few a huge or broken sample, which could drown every difference, is rare.
        """
        chosen = shuffled(self.samples)[: None if wide else 8]
        if first not in chosen:
            chosen[0] = first
        chosen = chosen[shuffled(len(chosen))]
        cut, seed = 1 + int(shuffled(len(chosen) - 1)[0]), fresh_seed()
        return self.splits(lambda part: self._loss(part, seed), chosen, cut, mean=mean)

    def repeatable(self) -> bool:
        seed = fresh_seed()
        first, second = self._loss(self.everybody, seed), self._loss(self.everybody, seed)
        return first is not None and same(first, second)

    def harmless(self) -> set[str]:
        """Tensors that a call changes: the same way for all samples, or with no effect later."""
        before = state(self.model)
        order, seed = shuffled(self.samples), fresh_seed()
        kept, later = [], []
        for part in (order[: self.samples // 2], order[self.samples // 2 :]):
            with left_as_found(self.model, seed) as restart:
                self._run(part)
                kept.append({name: x.detach().clone() for name, x in state(self.model).items()})
                restart()
                later.append(self._run(order))
        first, second = kept
        changed = {name for name, x in first.items() if not same(x, before.get(name))}
        alike = {name for name in changed if same(first[name], second.get(name))}
        no_effect = later[0] is not None and same(later[0], later[1])
        return alike | (changed - dict(self.model.named_buffers()).keys() if no_effect else set())

    def _loss(self, chosen: Tensor, seed: int) -> Tensor | None:
        with left_as_found(self.model, seed):
            return self._run(chosen)

    def _run(self, chosen: Tensor) -> Tensor | None:
        args, kwargs = self.of(chosen)
        with torch.no_grad():
            output = tree_leaves(self.model.forward(*args, **kwargs))
        return next((x for x in output if isinstance(x, Tensor)), None)


def state(module: nn.Module) -> dict[str, Tensor]:
    """What a module keeps: parameters, buffers, and tensors that are plain attributes."""
    return dict([*module.named_parameters(), *module.named_buffers()]) | plain_tensors(module)


def _first(tensors: list[Tensor], entries: int, value: int) -> int | None:
    """The first entry that holds this value."""
    labels = (x for x in tensors if not x.is_floating_point() and len(x) == entries)
    found = ((x == value).unsqueeze(-1).flatten(1).any(1).nonzero() for x in labels)
    return next((int(rows[0]) for rows in found if len(rows)), None)


class Output(Tensor):
    """What is computed of the model's outputs, as long as it needs a gradient."""

    tell: Callable[[Tensor], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on plain tensors, and pass on whom to tell."""
        outputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)]
        tell = outputs[0].tell if outputs else None
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.backward and tell is not None:
                tell(outputs[0])
            if all(kind in (cls, Tensor, nn.Parameter) for kind in types):
                result = func(*args, **(kwargs or {}))
                return tree_map_only(Tensor, lambda x: _telling(x, tell), result)
            args, kwargs = tree_map_only(cls, _plain, (args, kwargs or {}))
        return func(*args, **kwargs)  # another subclass decides, and nobody is told

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return _plain(self).__reduce_ex__(protocol)


def tell_of_backward(outputs: Any, tell: Callable[[Tensor], None]) -> tuple[Any, list[Tensor]]:
    """The outputs with every tensor that needs a gradient replaced, and what stands behind them."""
    behind: list[Tensor] = []
    if "torch._dynamo" in sys.modules:  # a compiled loss goes on without a graph here
        untraced: set[type] = getattr(torch._dynamo.config, "nontraceable_tensor_subclasses", set())
        untraced.add(Output)

    def one(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x
        behind.append(x.view_as(x))  # new: the hooks on x hear of the loop's backward pass only
        return _telling(behind[-1], tell)

    return tree_map_only(Tensor, one, outputs), behind


def _telling(x: Tensor, tell: Callable[[Tensor], None] | None) -> Tensor:
    if not x.requires_grad or tell is None:
        return _plain(x)
    told = x if isinstance(x, Output) else x.as_subclass(Output)
    told.tell = tell
    return told


def _plain(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor) if isinstance(x, Output) else x


def refuse_outside(loss: Tensor, rows: int, known: Collection[Tensor]) -> None:
    """CaptureError if a gradient goes elsewhere than to what is known, and to inputs of `rows`."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [below for below, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is None or leaf in known:
            continue
        if isinstance(leaf, nn.Parameter) or leaf.shape[:1] != (rows,):
            raise CaptureError(
                f"Something of shape {tuple(leaf.shape)} that needs a gradient takes part in the "
                "loss and is no part of the private model: its gradient would have neither clip "
                "nor noise. Make it a parameter of the module that make_private gets, or freeze it "
                "(requires_grad_(False), or torch.no_grad() around an encoder)."
            )


def mixes(loss: Tensor, outputs: Sequence[Tensor], samples: int) -> bool:
    """Whether gradients at some samples' outputs depend on others; by differentiating twice."""
    outputs = [x for x in outputs if x.dim() and len(x) and len(x) % samples == 0]
    if samples < 2 or not outputs:
        return False
    kept = shuffled(samples) < samples // 2
    rows = [kept.repeat_interleave(len(x) // samples).to(x.device) for x in outputs]
    try:
        with torch.enable_grad():
            slopes = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
            # Squared, since plain sums of slopes may be constant (those of a softmax are zero).
            terms = [
                g[r].double().square().sum()
                for g, r in zip(slopes, rows, strict=True)
                if g is not None and g.requires_grad
            ]
            if not terms:
                return False
            total = torch.stack(terms).sum()
            bends = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
    except (RuntimeError, NotImplementedError):
        return False
    own = others = 0.0
    for bend, r in zip(bends, rows, strict=True):
        if bend is not None:
            size = bend.nan_to_num(0, 0, 0).abs()
            own, others = max(own, float(size[r].max())), max(others, float(size[~r].max()))
    return others > 1e-5 * own


class Reductions:
    """How the terms of a loss treat the batch, by all batches that were looked at.

    A sum that is divided is a mean if the divisor goes with the samples, which takes batches of two
    sizes to tell: one batch may have as many as a constant has. Filled-up ones have a `fixed` size.
    """

    def __init__(self) -> None:
        # Of each term: divisors, and for how many samples.
        self._seen: dict[tuple[int, int], set[tuple[float, int]]] = {}
        self.doubtful = False  # a divisor was neither a constant nor did it go with the samples

    def __call__(self, loss: Tensor, samples: int, *, fixed: bool = False) -> set[str | None]:
        """'mean', 'sum', None where the graph is silent."""
        kinds = set[str | None]()
        found = _reductions(_behind(loss.grad_fn), samples)
        for place, kind in enumerate(found):
            if isinstance(kind, float):
                seen = self._seen.setdefault((len(found), place), set())
                seen.add((kind, samples))
                kinds.add(self._divided(seen, fixed))
            else:
                kinds.add(None if kind == _SCALED_SUM else kind)
        return kinds

    def _divided(self, seen: set[tuple[float, int]], fixed: bool) -> str | None:
        divisors, several = {x for x, _ in seen}, len({n for _, n in seen}) > 1
        if several and len(divisors) == 1:
            return "sum"
        mean = len(divisors) == len(seen) and all(x % n == 0 for x, n in seen)
        self.doubtful |= (fixed or several) and not mean
        return "mean" if mean and (fixed or several) else None


def _reductions(node: Any, samples: int) -> list[str | float | None]:
    """Of each term; a number for a sum that is divided by it."""
    kind, inputs = _kind(node), _inputs(node)
    if getattr(node, "_saved_reduction", None) in _REDUCTIONS:
        return [_of_torch_loss(node, samples)]
    stacked = kind in ("Mean", "Sum") and _kind(inputs[0]) == "Stack"
    if stacked and len(_inputs(inputs[0])) % samples:
        kind, inputs = "Add", _inputs(inputs[0])  # several losses, not those of the samples
    if kind == "Mean":
        return ["mean" if node._saved_self_sym_numel % samples == 0 else None]
    if kind == "Sum":
        return [_SCALED_SUM if _kind(inputs[0]) in ("Mul", "Div") else "sum"]
    if kind in ("Add", "Sub") or (kind == "Neg" and inputs):
        return [found for below in inputs for found in _reductions(below, samples)]
    if kind in ("Mul", "Div") and len(inputs) == 1:
        factor = _factor(node) or math.nan
        mean = math.isfinite(factor) and not (kind == "Mul" and factor % samples == 0)
        divisor = factor if kind == "Div" and math.isfinite(factor) else None

        def become(found: str | float | None) -> str | float | None:
            if found in ("sum", _SCALED_SUM):
                return divisor
            return found if mean else None

        return [become(found) for found in _reductions(inputs[0], samples)]
    return [None]


def _kind(node: Any) -> str:
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def _inputs(node: Any) -> list[Any]:
    below = (_behind(below) for below, _ in getattr(node, "next_functions", ()))
    return [node for node in below if node is not None]


def _behind(node: Any) -> Any:
    while node is not None and _kind(node) in _SAME:
        node = node.next_functions[0][0]
    return node


def _of_torch_loss(node: Any, samples: int) -> str | None:
    reduction = _REDUCTIONS[node._saved_reduction]
    if getattr(node, "_saved_weight", None) is not None:
        return None
    total = getattr(node, "_saved_total_weight", None)
    if reduction == "mean" and total is not None and float(total) != node._saved_target.numel():
        return None  # some entries are ignored
    return reduction if node._saved_self.numel() % samples == 0 else None


def _factor(node: Any) -> float | None:
    """The constant by which a scalar is multiplied or divided."""
    for name in ("_saved_other", "_saved_self"):
        value: Any = getattr(node, name, None)
        constant = isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad
        if constant or isinstance(value, int | float):
            return float(value)
    return None
