"""Looks at the running model on private batches: does it keep samples apart?

Which dimension of a layer's input is the batch, and whether a module lets one sample see another,
cannot be read off a module in general. So the step is rehearsed with some samples in one company
and again in another, under the same random numbers: their per-sample gradients must not change.
What is compared never leaves this module except as an error or a warning to the operator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_with_path,
)

from dpspan.gradients.capture import Capture
from dpspan.gradients.numerics import Arithmetic, plain_arithmetic
from dpspan.gradients.operator import PerSampleGradients
from dpspan.model.criterion import splits
from dpspan.support.errors import UnsupportedModule
from dpspan.support.untouched import (
    RandomNumbers,
    fresh_seed,
    plain_tensors,
    positions,
    shuffled,
    untouched,
)

Call = tuple[tuple[Any, ...], dict[str, Any]]

# Comparisons of a new model and of one that has passed; more where they are left to chance.
_FIRST, _FIRST_IF_RANDOM, _LATER, _LATER_IF_RANDOM = 5, 6, 1, 2
_MOST = 12  # while no gradient is finite


class NotComparable(Exception):
    """Two runs of the model cannot be compared, so nothing can be said."""


class NotFinite(NotComparable):
    """Not of this batch; of another perhaps."""


def probe(
    capture: Capture,
    call: Call,
    samples: int,
    *,
    views: int = 1,
    mean_loss: bool = True,
    thorough: bool = True,
    shared: Collection[str] = (),
) -> set[str]:
    """Raise `UnsupportedModule` if a sample's gradient depends on other samples.

    Each sample is `views` rows of the input. Inputs at the paths `shared` are all samples' own.
    `thorough` is for a model seen for the first time. `NotComparable` if nothing could be said.

    Returns the names of buffers that the model changes, but in the same way whatever the samples
    are (a step counter, a cache of positions).
    """
    stage = _Stage(capture, call, samples, views, mean_loss, frozenset(shared))
    random = stage.draws()
    if thorough:
        rounds = _FIRST_IF_RANDOM if random else _FIRST
    else:
        rounds = _LATER_IF_RANDOM if random else _LATER
    done, decided, start = 0, False, 0 if thorough else fresh_seed()
    while done < rounds or (not decided and done < _MOST):
        decided |= _compare_companies(stage, wide=(start + done) % 3 == 0)
        done += 1
    if not decided:
        raise NotFinite
    if not thorough:
        return set()
    _check_memory(stage)
    stage.check_scale()
    return stage.harmless()


def call_paths(call: Call, rows: int) -> tuple[dict[str, Tensor], set[str]]:
    """The tensors of a call that have the batch in front, by path, and the paths of the others."""
    flat, _ = tree_flatten_with_path(call, is_leaf=_is_packed)
    leaves = [(keystr(path), x) for path, x in flat]
    tensors = {path: x for path, x in leaves if isinstance(x, Tensor) and x.dim()}
    batch = {path: x for path, x in tensors.items() if len(x) == rows}
    return batch, tensors.keys() - batch.keys()


def _is_packed(x: Any) -> bool:
    """Whether it is a packed sequence, in whose parts no sample can be exchanged."""
    return isinstance(x, PackedSequence)


def _compare_companies(stage: _Stage, *, wide: bool) -> bool:
    """Compare kept samples in two companies; whether the comparison could decide anything."""
    seed = fresh_seed()
    try:
        kept, first, second = companies(stage.samples, wide)
        norms, others = stage.norms(first, seed), stage.norms(second, seed)
    except (RuntimeError, ValueError):  # sequences that must be sorted, say
        kept, first, second = neighbours(stage.samples)
        norms, others = stage.norms(first, seed), stage.norms(second, seed)
    if not differ(norms[kept], others[kept]):
        return bool((norms[kept] + others[kept]).isfinite().any())
    if differ(norms, stage.norms(first, seed)):
        raise NotComparable("it draws random numbers that a seed does not control")
    square = stage.squares()
    if square and _shared_by_all(stage, square):
        return _compare_companies(stage.sharing(square), wide=wide)
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


def companies(samples: int, wide: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Which positions keep their sample, and who stands where in each of two companies.

    A wide company is the whole batch. A narrow one is six samples over and over: few enough that
    one huge or broken record, which could drown every difference, is rarely among them.
    """
    position, shift = positions(samples), 1 + fresh_seed() % (samples - 1)
    kept = shuffled(samples) < max(1, samples // 2)
    if wide:
        return kept, position, torch.where(kept, position, (position + shift) % samples)
    staying, joining = (shuffled(samples)[position % 2] for _ in range(2))
    first, second = (torch.where(kept, staying, x % samples) for x in (joining, joining + shift))
    return kept, first, second


def neighbours(samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `companies`, in an order that stays the same: who goes is replaced by who stands next."""
    kept, position, _ = companies(samples, wide=True)
    before = torch.where(kept, position, -1).cummax(0).values
    return kept, position, torch.where(before < 0, before[before >= 0][0], before)


def _shared_by_all(stage: _Stage, square: set[str]) -> bool:
    """Whether a square input is the same to all samples: then they may change places under it.

    Without dropout, which comes with the place.
    """
    if len(stage.batch) <= len(square):
        return False
    sharing, seed = stage.sharing(square), fresh_seed()
    places = positions(stage.samples)
    with _evaluating(stage.model):
        norms, moved = sharing.norms(places, seed), sharing.norms(places.roll(1), seed)
    return not differ(norms.roll(1, 0), moved) and differ(norms, norms.roll(1, 0))


def _check_memory(stage: _Stage) -> None:
    """Refuse a model in which something of a batch, kept in an attribute, reaches later ones."""
    everybody = positions(stage.samples)
    _, _, few = neighbours(stage.samples)
    seed = fresh_seed()
    after_itself, after_few = (stage.norms(everybody, seed, before=b) for b in (everybody, few))
    if not differ(after_itself, after_few):
        return
    if differ(after_itself, stage.norms(everybody, seed, before=everybody)):
        raise NotComparable("it draws random numbers that a seed does not control")
    raise UnsupportedModule(
        f"{stage.remembers(seed)} keeps something of a batch, and the gradients of later batches "
        "depend on it: it carries private data from step to step without noise. Remove it, or keep "
        "it as it is while the model trains."
    )


class _Stage(NamedTuple):
    """A batch and the model, ready to be rehearsed."""

    capture: Capture
    call: Call
    samples: int
    views: int
    mean_loss: bool
    shared: frozenset[str]

    @property
    def model(self) -> nn.Module:
        return self.capture.model

    @property
    def rows(self) -> int:
        return self.samples * self.views

    @property
    def batch(self) -> dict[str, Tensor]:
        batch, _ = call_paths(self.call, self.rows)
        return {path: x for path, x in batch.items() if path not in self.shared}

    def squares(self) -> set[str]:
        """Inputs that could be a batch, or a mask that all samples share."""
        return {path for path, x in self.batch.items() if x.shape == (self.rows, self.rows)}

    def sharing(self, paths: set[str]) -> _Stage:
        return self._replace(shared=self.shared | paths)

    def draws(self) -> bool:
        """Whether the model draws random numbers."""
        with untouched(self.model, fresh_seed()), torch.no_grad():
            before = RandomNumbers.of(self.model)
            args, kwargs = self._of(positions(self.samples))  # it may work in place on them
            self.model(*args, **kwargs)
            return before != RandomNumbers.of(self.model)

    def norms(self, company: Tensor, seed: int, *, before: Tensor | None = None) -> Tensor:
        """Of the gradients of these samples, in a run by itself or right after another."""
        with untouched(self.model, seed) as reseed:
            if before is not None:
                self._run(self._of(before))
                reseed()
            return self._run(self._of(company))

    def harmless(self) -> set[str]:
        """Buffers that a run changes, and the blank batch in the same way."""
        before = {name: b.clone() for name, b in self.model.named_buffers()}
        after = self._buffers_after(self._of(positions(self.samples)))
        changed = [n for n, b in after.items() if n not in before or not torch.equal(b, before[n])]
        if not changed:
            return set()
        # Exchanged samples might leave a maximum as it is; a blank batch would not.
        blank = self._buffers_after(self._replaced(torch.zeros_like))
        return {name for name in changed if name in blank and torch.equal(after[name], blank[name])}

    def check_scale(self) -> None:
        """A loss that the model returns must be the mean, or the sum, that the engine undoes."""
        with untouched(self.model, fresh_seed()), torch.no_grad(), _evaluating(self.model):
            order, part = positions(self.samples), max(1, self.samples // 3)
            together = self._loss(order)
            if together is None:
                return
            try:
                losses = self._loss(order[:part]), self._loss(order[part:])
            except Exception:  # whatever it says may show private data
                raise NotComparable("its loss cannot be computed on a part of the batch") from None
        same = splits(together, *losses, (part, self.samples - part), mean=self.mean_loss)
        if same is False:
            reduction = "mean" if self.mean_loss else "sum"
            raise UnsupportedModule(
                f"The loss that {type(self.model).__name__} returns is not the {reduction} of one "
                f"loss per sample, as loss_reduction='{reduction}' says: per-sample gradients "
                "would be off by the batch size. Pass the loss_reduction that it has."
            )

    def culprit(self, kept: Tensor, first: Tensor, second: Tensor, seed: int) -> str:
        """The first module whose output for the kept samples changes with the others, by name."""
        rows = kept.repeat_interleave(self.views)
        outputs = (self._outputs(self._of(company), seed) for company in (first, second))
        for (path, module, x), (_, _, y) in zip(*outputs, strict=False):
            alike = x.shape == y.shape and len(x) == len(rows)
            if path and alike and differ(x[rows].flatten(1), y[rows].flatten(1)):
                return f"'{path}' ({type(module).__name__})"
        return type(self.model).__name__

    def remembers(self, seed: int) -> str:
        """What the model keeps, by name where it is a tensor."""
        before = {name: (x, x._version) for name, x in plain_tensors(self.model).items()}
        with untouched(self.model, seed):
            self._run(self._of(positions(self.samples)))
            now = {name: (x, x._version) for name, x in plain_tensors(self.model).items()}
            changed = [
                name
                for name, (x, version) in now.items()
                if name not in before or before[name][0] is not x or before[name][1] != version
            ]
        return f"'{changed[0]}'" if changed else type(self.model).__name__

    def _of(self, company: Tensor) -> Call:
        """The call with these samples in place of the batch's."""
        rows = (company[:, None] * self.views + positions(self.views)).flatten()

        def pick(x: Tensor) -> Tensor:
            picked = x.detach()[rows.to(x.device)]
            return picked.requires_grad_(x.requires_grad)

        return self._replaced(pick)

    def _replaced(self, replace: Any) -> Call:
        """The call with every input that has the batch in front replaced."""
        batch = self.batch
        replaced: Call = tree_map_with_path(
            lambda path, leaf: replace(leaf) if keystr(path) in batch else leaf,
            self.call,
            is_leaf=_is_packed,
        )
        return replaced

    def _run(self, call: Call) -> Tensor:
        """Norms of the per-sample gradients of a made-up loss, by parameter.

        The loss is not linear, or its gradients might not depend on the samples at all: the sine
        of every output, weighed by random numbers. A loss that the model returns counts as it is.
        """
        with self.capture.rehearsal(), torch.enable_grad():
            args, kwargs = call
            outputs = tree_leaves(self.model(*args, **kwargs))
            generator = torch.Generator("cpu").manual_seed(0)
            terms = []
            for x in outputs:
                if not isinstance(x, Tensor) or not x.requires_grad:
                    continue
                if x.dim() == 0:
                    terms.append(self.rows * x if self.mean_loss else x)
                elif len(x) == self.rows:
                    weights = torch.rand(x.shape[1:], generator=generator, device="cpu").to(
                        x.device
                    )
                    terms.append((x.sin() * weights).sum())
            if not terms:
                raise NotComparable("no output of it has the batch in front and needs a gradient")
            torch.stack([term.double() for term in terms]).sum().backward()
            return parameter_norms(self.capture.gradients())

    def _loss(self, company: Tensor) -> Tensor | None:
        args, kwargs = self._of(company)
        outputs = (x for x in tree_leaves(self.model(*args, **kwargs)) if isinstance(x, Tensor))
        return next((x for x in outputs if not x.dim()), None)

    def _buffers_after(self, call: Call) -> dict[str, Tensor]:
        with untouched(self.model, 0):
            self._run(call)
            return {name: b.clone() for name, b in self.model.named_buffers()}

    def _outputs(self, call: Call, seed: int) -> list[tuple[str, nn.Module, Tensor]]:
        """Every module's output tensors, in the order in which they came."""
        seen: list[tuple[str, nn.Module, Tensor]] = []
        handles = []
        for path, module in self.model.named_modules():

            def note(m: nn.Module, _: Any, output: Any, path: str = path) -> None:
                tensors = (t for t in tree_leaves(output) if isinstance(t, Tensor) and t.dim())
                seen.extend((path, m, t.detach().clone()) for t in tensors)

            handles.append(module.register_forward_hook(note))
        try:
            with torch.no_grad(), untouched(self.model, seed):
                args, kwargs = call
                self.model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return seen


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def parameter_norms(gradients: PerSampleGradients) -> Tensor:
    """Of each parameter's gradients, (n, parameters): a small one must not be lost among others."""
    arithmetic, zero = Arithmetic.of(gradients.like), gradients.like.new_zeros(gradients.samples)
    with plain_arithmetic():
        squares = [
            gradients.terms[name].squared_norms(arithmetic).value.double()
            if name in gradients.terms
            else zero.double()
            for name in gradients.shapes
        ]
    return torch.stack(squares, dim=1).sqrt()


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
