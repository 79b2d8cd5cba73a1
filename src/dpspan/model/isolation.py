"""Looks at the running model on private batches: does it keep samples apart?

Which dimension of a layer's input is the batch, and whether a module lets one sample see another,
cannot be read off a module in general. So the step is rehearsed with some samples in one company
and again in another, under the same random numbers: their per-sample gradients must not change.
What is compared never leaves this module except as an error or a warning to the operator.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from dpspan.gradients.capture import Capture
from dpspan.gradients.layout import Call, replaced
from dpspan.gradients.numerics import Arithmetic, plain_arithmetic
from dpspan.gradients.operator import PerSampleGradients
from dpspan.support.errors import UnsupportedModule
from dpspan.support.left_as_found import Mode, left_as_found, plain_tensors
from dpspan.support.randomness import RandomState, fresh_seed, shuffled

Versions = dict[str, tuple[Tensor, int]]

# Comparisons of a new model and of one that has passed; one more if they are left to chance.
_FIRST, _LATER = 5, 1
_MOST = 12  # while no gradient is finite


class NotComparable(Exception):
    """Two runs of the model cannot be compared, so nothing can be said."""


def tensors_of(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Tensor]:
    """The tensors of a call or a batch by path, but for those without dimensions."""
    flat, _ = tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {keystr(path): x for path, x in flat if isinstance(x, Tensor) and x.dim()}


def call_paths(call: Call, rows: int) -> tuple[dict[str, Tensor], set[str]]:
    """The tensors of a call that have the batch in front, by path, and the paths of the others."""
    # In the parts of a packed sequence no sample can be exchanged.
    tensors = tensors_of(call, is_leaf=lambda x: isinstance(x, PackedSequence))
    batch = {path: x for path, x in tensors.items() if len(x) == rows}
    return batch, tensors.keys() - batch.keys()


@dataclass(frozen=True)
class Rehearsal:
    """A call of a module, and the same call with other samples in the places of its own.

    Each sample is `views` rows of the tensors at `paths`.
    """

    model: nn.Module
    call: Call
    samples: int
    views: int
    paths: frozenset[str]

    @property
    def everybody(self) -> Tensor:
        return torch.arange(self.samples, device="cpu")

    def of(self, company: Tensor) -> Call:
        """The call with these samples."""
        rows = (company[:, None] * self.views + torch.arange(self.views, device="cpu")).flatten()

        def pick(x: Tensor) -> Tensor:
            return x.detach()[rows.to(x.device)].requires_grad_(x.requires_grad)

        return replaced(self.call, self.paths, pick)

    def splits(
        self, loss: Callable[[Tensor], Tensor | None], order: Tensor, cut: int, *, mean: bool
    ) -> bool | None:
        """Whether the losses of two parts of the samples make up the loss of both, if they tell."""
        together = loss(order)
        first, second = (None if together is None else loss(x) for x in (order[:cut], order[cut:]))
        if together is None or first is None or second is None:
            return None
        if together.dim():  # one loss per entry
            apart = torch.cat([first, second])
            if apart.shape != together.shape:
                return False
        elif mean:
            rest = len(order) - cut
            apart, together = first * cut + second * rest, together * len(order)
        else:
            apart = first + second
        finite = together.isfinite()
        if not torch.equal(finite, apart.isfinite()):
            return False
        if not bool(finite.any()):
            return None
        return torch.allclose(apart[finite], together[finite], rtol=1e-3, atol=1e-6)


@dataclass(frozen=True)
class Stage(Rehearsal):
    """A batch and the model, whose per-sample gradients are compared."""

    capture: Capture
    mean_loss: bool
    seed: Callable[[], int] = fresh_seed  # of a sharded model: the same one in all processes

    @property
    def rows(self) -> int:
        return self.samples * self.views

    def squares(self) -> set[str]:
        """Inputs that could be a batch, or a mask that all samples share."""
        batch, _ = call_paths(self.call, self.rows)
        return {path for path in self.paths if batch[path].shape == (self.rows, self.rows)}

    def draws(self) -> bool:
        """Whether the model draws random numbers."""
        with left_as_found(self.model, self.seed()), torch.no_grad():
            before = RandomState.now()
            self._called(self.of(self.everybody))
            return before != RandomState.now()

    def norms(
        self, company: Tensor, seed: int, *, before: Tensor | None = None, mode: Mode = "as found"
    ) -> Tensor:
        """Of the gradients of these samples, in a run by itself or right after another."""
        with left_as_found(self.model, seed, mode=mode) as restart:
            if before is not None:
                self._run(self.of(before))
                restart()
            return self._run(self.of(company))

    def harmless(self) -> set[str]:
        """Buffers that a run changes, and the blank batch in the same way."""
        before = {name: b.clone() for name, b in self.model.named_buffers()}
        after = self._buffers_after(self.of(self.everybody))
        changed = [n for n, b in after.items() if n not in before or not torch.equal(b, before[n])]
        if not changed:
            return set()
        # Exchanged samples might leave a maximum as it is; a blank batch would not. And what counts
        # records is the same for others, but not for one more.
        blank = self._buffers_after(replaced(self.call, self.paths, torch.zeros_like))
        more = self._buffers_of_one_more()
        return {
            name
            for name in changed
            if all(name in b and torch.equal(after[name], b[name]) for b in (blank, more or blank))
        }

    def _buffers_of_one_more(self) -> dict[str, Tensor] | None:
        """After a forward pass of one record more; None if the model takes so many only."""
        company = torch.cat([self.everybody, self.everybody[:1]])
        with left_as_found(self.model, 0), self.capture.unit_runs():
            try:
                self._called(self.of(company))
            except Exception:  # whatever it says may show private data
                return None
            return {name: b.clone() for name, b in self.model.named_buffers()}

    def check_scale(self) -> None:
        """A loss that the model returns must be the mean, or the sum, that the engine undoes."""
        reduction, part = "mean" if self.mean_loss else "sum", max(1, self.samples // 3)
        with left_as_found(self.model, self.seed(), mode="evaluation"), torch.no_grad():
            try:
                right = self.splits(self._loss, self.everybody, part, mean=self.mean_loss)
            except Exception:  # whatever it says may show private data
                raise NotComparable("its loss cannot be computed on a part of the batch") from None
        if right is False:
            raise UnsupportedModule(
                f"The loss that {type(self.model).__name__} returns is not the {reduction} of one "
                f"loss per sample, as loss_reduction='{reduction}' says: per-sample gradients "
                "would be off by the batch size. Pass the loss_reduction that it has."
            )

    def culprit(self, kept: Tensor, first: Tensor, second: Tensor, seed: int) -> str:
        """The first module whose output for the kept samples changes with the others, by name."""
        rows = kept.repeat_interleave(self.views)
        one, other = (self._outputs(self.of(company), seed) for company in (first, second))
        for (name, x), (_, y) in zip(one, other, strict=False):
            alike = x.shape == y.shape and len(x) == len(rows)
            if alike and differ(x[rows].flatten(1), y[rows].flatten(1)):
                return name
        return type(self.model).__name__

    def remembers(self, seed: int) -> str:
        """What the model keeps, by name where it is a tensor."""
        before = versions(plain_tensors(self.model))
        with left_as_found(self.model, seed):
            self._run(self.of(self.everybody))
            changed = differing(before, versions(plain_tensors(self.model)))
        return f"'{changed[0]}'" if changed else type(self.model).__name__

    def _run(self, call: Call) -> Tensor:
        """Norms of the per-sample gradients of a made-up loss, by parameter.

        The loss is not linear, or its gradients might not depend on the samples at all: the sine
        of every output, weighed by random numbers. A loss that the model returns counts as it is.
        """
        with self.capture.rehearsal(self.samples, carried=True), torch.enable_grad():
            generator = torch.Generator("cpu").manual_seed(0)
            terms = []
            for x in (x for x in self._called(call) if x.requires_grad):
                if x.dim() == 0:
                    terms.append(self.rows * x if self.mean_loss else x)
                elif len(x) == self.rows:
                    weights = torch.rand(x.shape[1:], generator=generator, device="cpu")
                    terms.append((x.sin() * weights.to(x.device)).sum())
            if not terms:
                raise NotComparable("no output of it has the batch in front and needs a gradient")
            torch.stack([term.double() for term in terms]).sum().backward()
            return parameter_norms(self.capture.gradients())

    def _called(self, call: Call) -> list[Tensor]:
        args, kwargs = call
        return [x for x in tree_leaves(self.model(*args, **kwargs)) if isinstance(x, Tensor)]

    def _loss(self, company: Tensor) -> Tensor | None:
        return next((x for x in self._called(self.of(company)) if not x.dim()), None)

    def _buffers_after(self, call: Call) -> dict[str, Tensor]:
        with left_as_found(self.model, 0):
            self._run(call)
            return {name: b.clone() for name, b in self.model.named_buffers()}

    def _outputs(self, call: Call, seed: int) -> list[tuple[str, Tensor]]:
        """The output tensors of every module inside the model, in the order in which they came."""
        seen: list[tuple[str, Tensor]] = []
        inside = {m: f"'{path}' ({type(m).__name__})" for path, m in self.model.named_modules()}
        del inside[self.model]

        def note(module: nn.Module, _: Any, output: Any) -> None:
            tensors = tensors_of(output).values() if module in inside else ()
            seen.extend((inside[module], t.detach().clone()) for t in tensors)

        with register_module_forward_hook(note), left_as_found(self.model, seed), torch.no_grad():
            self._called(call)
        return seen


def probe(stage: Stage, *, thorough: bool) -> set[str] | None:
    """Raise `UnsupportedModule` if a sample's gradient depends on other samples.

    `thorough` is for a model seen for the first time. `NotComparable` if nothing could be said.

    Returns the names of buffers that the model changes, but in the same way whatever the samples
    are (a step counter, a cache of positions); None if no gradient of this batch is finite.
    """
    rounds = (_FIRST if thorough else _LATER) + stage.draws()
    done, decided, start = 0, False, 0 if thorough else stage.seed()
    while done < rounds or (not decided and done < _MOST):
        decided |= _compare_companies(stage, wide=(start + done) % 3 == 0)
        done += 1
    if not decided:
        return None
    if not thorough:
        return set()
    _check_memory(stage)
    stage.check_scale()
    return stage.harmless()


def _compare_companies(stage: Stage, *, wide: bool) -> bool:
    """Compare kept samples in two companies; whether the comparison could decide anything."""
    seed = stage.seed()
    kept, first, second = companies(stage.samples, wide, stage.seed)
    try:
        norms, others = stage.norms(first, seed), stage.norms(second, seed)
    except (RuntimeError, ValueError):  # sequences that must be sorted, say
        kept, first, second = neighbours(stage.samples, stage.seed)
        norms, others = stage.norms(first, seed), stage.norms(second, seed)
    if not differ(norms[kept], others[kept]):
        return bool((norms[kept] + others[kept]).isfinite().any())
    if differ(norms, stage.norms(first, seed)):
        raise NotComparable("it draws random numbers that a seed does not control")
    square = stage.squares()
    if square and _shared_by_all(stage, square):
        return _compare_companies(replace(stage, paths=stage.paths - square), wide=wide)
    culprit = stage.culprit(kept, first, second, seed)
    hint = (
        f" An input of shape ({stage.rows}, {stage.rows}) counts as a batch here: if it is a mask "
        "that all samples share, set max_physical_batch_size so that no batch is as large."
    )
    raise UnsupportedModule(
        f"{culprit} lets the gradient of a sample depend on the other samples of the batch, so it "
        "cannot be bounded: it mixes samples. Replace batch statistics by layers that treat "
        "samples one by one (GroupNorm, LayerNorm), make a loss inside the model a mean of one "
        "loss per sample, keep the batch in the first dimension of every layer's input, and give "
        "inputs that all samples share a first dimension of 1 without reducing it again."
        + (hint if square else "")
    )


def companies(
    samples: int, wide: bool, seed: Callable[[], int] = fresh_seed
) -> tuple[Tensor, Tensor, Tensor]:
    """Which positions keep their sample, and who stands where in each of two companies.

    A wide company is the whole batch. A narrow one is six samples over and over: few enough that
    one huge or broken record, which could drown every difference, is rarely among them.
    """
    position, shift = torch.arange(samples, device="cpu"), 1 + seed() % (samples - 1)
    kept = shuffled(samples, seed()) < max(1, samples // 2)
    if wide:
        return kept, position, torch.where(kept, position, (position + shift) % samples)
    staying, joining = (shuffled(samples, seed())[position % 2] for _ in range(2))
    first, second = (torch.where(kept, staying, x % samples) for x in (joining, joining + shift))
    return kept, first, second


def neighbours(samples: int, seed: Callable[[], int] = fresh_seed) -> tuple[Tensor, Tensor, Tensor]:
    """As `companies`, in an order that stays the same: who goes is replaced by who stands next."""
    kept, position, _ = companies(samples, True, seed)
    before = torch.where(kept, position, -1).cummax(0).values
    return kept, position, torch.where(before < 0, before[before >= 0][0], before)


def _shared_by_all(stage: Stage, square: set[str]) -> bool:
    """Whether a square input is the same to all samples: then they may change places under it.

    Without dropout, which comes with the place.
    """
    if len(stage.paths) <= len(square):
        return False
    sharing = replace(stage, paths=stage.paths - square)
    seed, places = stage.seed(), stage.everybody
    norms, moved = (sharing.norms(x, seed, mode="evaluation") for x in (places, places.roll(1)))
    return not differ(norms.roll(1, 0), moved) and differ(norms, norms.roll(1, 0))


def _check_memory(stage: Stage) -> None:
    """Refuse a model in which something of a batch, kept in an attribute, reaches later ones."""
    _, _, few = neighbours(stage.samples, stage.seed)
    everybody, seed = stage.everybody, stage.seed()
    after_itself, after_few = (stage.norms(everybody, seed, before=b) for b in (everybody, few))
    if not differ(after_itself, after_few):
        return
    if differ(after_itself, stage.norms(everybody, seed, before=everybody)):
        raise NotComparable("it draws random numbers that a seed does not control")
    raise UnsupportedModule(
        f"{stage.remembers(seed)} keeps something of a batch, and the gradients of later batches "
        "depend on it: it carries private data from step to step without noise. Remove or fix it."
    )


def parameter_norms(gradients: PerSampleGradients) -> Tensor:
    """Of each parameter's gradients, (n, parameters): a small one must not be lost among others."""
    arithmetic, zero = Arithmetic.of(gradients.like), gradients.like.new_zeros(gradients.samples)
    with plain_arithmetic():
        squares = {n: x.squared_norms(arithmetic).value for n, x in gradients.terms.items()}
    return torch.stack([squares.get(n, zero).double() for n in gradients.shapes], dim=1).sqrt()


def differ(x: Tensor, y: Tensor) -> bool:
    """By more than rounding could explain, row by row; one finite and one not differ."""
    if x.shape != y.shape:
        return True
    x, y, finite = x.double(), y.double(), x.isfinite()
    if not torch.equal(finite, y.isfinite()):
        return True
    x, y = x.where(finite, 0), y.where(finite, 0)
    size = torch.maximum(x.abs(), y.abs())
    if not size.numel():
        return False
    # What should be zero is rounding of the rest; rounding to few bits, under autocast.
    rest = (1e-2 if torch.is_autocast_enabled() else 1e-5) * size.amax(1, keepdim=True)
    return bool(((x - y).abs() > 1e-3 * size + rest).any())


def same(x: Tensor, y: Tensor | None) -> bool:
    """But for rounding."""
    if y is None or x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.allclose(x.double(), y.double(), equal_nan=True)


def versions(tensors: dict[str, Tensor]) -> Versions:
    """Each tensor, and how often it was written to."""
    return {name: (x, 0 if x.is_inference() else x._version) for name, x in tensors.items()}


def differing(before: Versions, now: Versions) -> list[str]:
    """Names of tensors that came, went, were replaced or written to."""
    nothing = None, 0
    return [
        name
        for name in {**before, **now}
        if before.get(name, nothing)[0] is not now.get(name, nothing)[0]
        or before[name][1] != now[name][1]
    ]
