"""Is the loss a sum (or mean) of one term per sample? Where it can be seen, it is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpspan.gradients.capture import Hook
from dpspan.support.untouched import fresh_seed, plain_tensors, positions, shuffled, untouched

_ROUNDS = 3


def check_criterion(criterion: nn.Module | None, loss_reduction: str, model: nn.Module) -> None:
    """Refuse a criterion whose reduction is not the one the engine undoes, or that is trained."""
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f"Expected loss_reduction 'mean' or 'sum', got {loss_reduction!r}.")
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


def splits(
    together: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    sizes: tuple[int, int],
    *,
    mean: bool,
) -> bool | None:
    """Whether the losses of two parts make up the loss of both; None if nothing can be said."""
    if together is None or first is None or second is None:
        return None
    if together.dim():  # one loss per entry
        apart = torch.cat([first, second])
        if apart.shape != together.shape:
            return False
    elif mean:
        n, m = sizes
        apart, together = first * n + second * m, together * (n + m)
    else:
        apart = first + second
    finite = together.isfinite()
    if not torch.equal(finite, apart.isfinite()):
        return False
    if not bool(finite.any()):
        return None
    return torch.allclose(apart[finite], together[finite], rtol=1e-3, atol=1e-6)


class CriterionWatch:
    """Checks on real batches that a criterion splits into samples and keeps nothing of them.

    Whenever `due`, until a batch has passed, and wherever a mean leaves something out by its
    ignore_index, which is when it mixes samples. `look` is shown what comes beside the outputs.
    """

    def __init__(
        self,
        criterion: nn.Module,
        *,
        mean: bool,
        samples: Callable[[], int],
        due: Callable[[], bool],
        look: Callable[[Tensor], None],
    ) -> None:
        self._criterion = criterion
        self._mean = mean
        self._samples, self._due, self._look = samples, due, look
        self._ignored = getattr(criterion, "ignore_index", None) if mean else None
        self.passed = False
        self._cannot = False  # it cannot be called on a part of a batch, or not repeatably
        self.harmless: set[str] = set()  # tensors that change, but that nothing depends on
        self._handle = criterion.register_forward_hook(Hook(self._check), with_kwargs=True)

    def remove(self) -> None:
        """Take the hook off the criterion."""
        self._handle.remove()

    def _check(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = (args, kwargs)
        tensors = [x for x in tree_leaves(call) if isinstance(x, Tensor) and x.dim()]
        if not tensors or not torch.is_grad_enabled():
            return
        for x in tensors:
            if not x.requires_grad:
                self._look(x)
        entries = len(next((x for x in tensors if x.requires_grad), tensors[0]))
        ignored = None if self._ignored is None else _first(tensors[1:], entries, self._ignored)
        if (self.passed or self._cannot) and ignored is None and not self._due():
            return
        batch = self._samples()
        # Tokens of all samples in one row are cut between samples, not inside one.
        block = entries // batch if batch > 1 and entries % batch == 0 else 1
        parts = _Parts(module, call, entries, block)
        if entries // block < 2:
            return
        first = fresh_seed() % entries if ignored is None else ignored
        first //= block
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
                f"The loss ({type(module).__name__}) mixes samples: the loss of a batch is not the "
                f"{'mean' if self._mean else 'sum'} of the losses of its samples, so no sample's "
                "gradient can be bounded. (A mean over the tokens that are not ignored does this: "
                "average over each sample's tokens first.) Make it one loss per sample, then take "
                "the mean."
            )
        self.passed |= True in verdicts


class _Parts:
    """A criterion's call, and the same call on some of its samples."""

    def __init__(self, module: nn.Module, call: Any, entries: int, block: int) -> None:
        self._module, self._call, self._entries, self._block = module, call, entries, block
        self._count = entries // block

    def split(self, mean: bool, first: int, *, wide: bool) -> bool | None:
        """Cut the samples in two at random: all of them, or a few, among which `first`.

        Among few a huge or broken sample, which could drown every difference, is rare.
        """
        chosen = shuffled(self._count)
        chosen = chosen if wide else chosen[:8]
        if first not in chosen:
            chosen[0] = first
        chosen = chosen[shuffled(len(chosen))]
        cut = 1 + int(shuffled(len(chosen) - 1)[0])
        seed = fresh_seed()
        together, one, other = (
            self._loss(part, seed) for part in (chosen, chosen[:cut], chosen[cut:])
        )
        return splits(together, one, other, (cut, len(chosen) - cut), mean=mean)

    def repeatable(self) -> bool:
        everybody, seed = positions(self._count), fresh_seed()
        first, second = self._loss(everybody, seed), self._loss(everybody, seed)
        return first is not None and second is not None and _same(first, second)

    def harmless(self) -> set[str]:
        """Tensors that a call changes: the same way for all samples, or with no effect later."""
        before = state(self._module)
        order, seed = shuffled(self._count), fresh_seed()
        kept, later = [], []
        for part in (order[: self._count // 2], order[self._count // 2 :]):
            with untouched(self._module, seed) as reseed:
                self._run(part)
                kept.append({name: x.detach().clone() for name, x in state(self._module).items()})
                reseed()
                later.append(self._run(order))
        first, second = kept
        changed = [n for n, x in first.items() if n not in before or not _same(x, before[n])]
        no_effect = None not in later and _same(*later)  # type: ignore[arg-type]
        saved = {name for name, _ in self._module.named_buffers()}
        return {
            name
            for name in changed
            if (no_effect and name not in saved) or _same(first[name], second.get(name))
        }

    def _loss(self, chosen: Tensor, seed: int) -> Tensor | None:
        with untouched(self._module, seed):
            return self._run(chosen)

    def _run(self, chosen: Tensor) -> Tensor | None:
        rows = (chosen[:, None] * self._block + positions(self._block)).flatten()

        def pick(leaf: Any) -> Any:
            whole = not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != self._entries
            return leaf if whole else leaf.detach()[rows.to(leaf.device)]

        args, kwargs = tree_map(pick, self._call)
        with torch.no_grad():
            output = tree_leaves(self._module.forward(*args, **kwargs))
        return next((x for x in output if isinstance(x, Tensor)), None)


def state(module: nn.Module) -> dict[str, Tensor]:
    """What a module keeps: parameters, buffers, and tensors that are plain attributes."""
    kept = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {**kept, **plain_tensors(module)}


def _first(tensors: list[Tensor], entries: int, value: int) -> int | None:
    """The first entry that holds this value."""
    for x in tensors:
        if not x.is_floating_point() and len(x) == entries:
            found = (x == value).flatten(1).any(1) if x.dim() > 1 else x == value
            if bool(found.any()):
                return int(found.int().argmax())
    return None


def _same(x: Tensor, y: Tensor | None) -> bool:
    return (
        y is not None
        and x.shape == y.shape
        and torch.allclose(x.double(), y.double(), equal_nan=True)
    )
