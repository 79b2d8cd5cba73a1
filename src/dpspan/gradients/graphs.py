"""CUDA graphs: a model's forward and backward pass, and what a step sums, launched in one go.

A small step is as slow as the host that launches its kernels one by one. Recorded once, they are
replayed with two launches. A replay reads and writes the memory of the recording: inputs and the
gradients of outputs are copied there, parameters stay where they are, and the terms of per-sample
gradients come out there. So every batch has to be of one size: the loader fills it up with
stand-ins, whose output gradients are zeros here, and which no sum counts. As a side effect no time
tells how many records were drawn.

What is random in the model is drawn anew at every replay: torch's generator is known to the graph,
which takes its seed at the time. Noise and sampling are never part of a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dpspan.gradients.layers.terms import Term, only_first
from dpspan.gradients.numerics import Arithmetic, plain_arithmetic
from dpspan.gradients.operator import PerSampleGradients
from dpspan.support.errors import CaptureError
from dpspan.support.left_as_found import plain_tensors

if TYPE_CHECKING:
    from dpspan.gradients.capture import Capture

Forward = Callable[..., Any]
ClippedSum = Callable[[PerSampleGradients], dict[str, Tensor]]

_WARM_UP = 3  # calls of a kind that run as they are: libraries choose their kernels meanwhile
_MOST = 4  # kinds of calls that are recorded: each keeps the memory of a step


@dataclass(frozen=True)
class _Recording:
    """Two graphs, and where they read and write."""

    inputs: list[Tensor]
    outputs: list[Any]  # the leaves of what the model gave
    structure: TreeSpec
    ends: list[int]  # the outputs that have a gradient
    gradients: list[Tensor]  # of those
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    counted: Tensor  # (samples,) which of them are no stand-ins
    terms: dict[str, list[Term]]
    sums: dict[str, Tensor] | None

    def run(self, leaves: list[Any], capture: Capture, graphs: Graphs) -> Any:
        """The output for these inputs, behind which the backward graph waits."""
        torch._foreach_copy_(self.inputs, [x for x in leaves if isinstance(x, Tensor)])
        self.forward.replay()
        # Copies: what the loop keeps of this batch must not become the next one's.
        given = [x.clone() if isinstance(x, Tensor) else x for x in self.outputs]
        ends = [given[index] for index in self.ends]
        anchor = capture.anchor(ends[0].device)
        behind = _Behind.apply(anchor, self, capture, graphs, *ends)  # type: ignore[no-untyped-call]
        for index, end in zip(self.ends, behind, strict=True):
            given[index] = end
        return tree_unflatten(given, self.structure)


class Graphs:
    """Records the calls of one model, and replays them.

    `clipped_sum` becomes part of the backward graph; None if it reads what has another place at
    every step.
    """

    def __init__(self, clipped_sum: ClippedSum | None) -> None:
        self._clipped_sum = clipped_sum
        self._calls: Counter[Any] = Counter()
        self._recordings: dict[Any, _Recording] = {}
        self.sums: dict[str, Tensor] | None = None  # of the batch at hand, if a graph made them

    def take(self, *, copied: bool) -> dict[str, Tensor] | None:
        """The sums of the batch at hand, which the next replay will write over."""
        sums, self.sums = self.sums, None
        if sums is None or not copied:
            return sums
        return {name: value.clone() for name, value in sums.items()}

    def call(self, capture: Capture, forward: Forward, args: Any, kwargs: Any) -> Any:
        """The model's output, by a graph from the fourth call of a kind on."""
        batch = capture.batch
        if batch.called:
            raise CaptureError(
                "The model is called more than once for a batch, which cuda_graphs=True does not "
                "allow: a replay would write over the first call. Leave cuda_graphs out."
            )
        batch.called, self.sums = True, None
        leaves, structure = tree_flatten((args, kwargs))
        if any(map(_has_gradient, leaves)):
            raise CaptureError(
                "The model is given something that has a gradient, which a replay would not pass "
                "on. Make the layers before it part of the model, or leave cuda_graphs out."
            )
        on_cuda = any(p.is_cuda for p in capture.model.parameters())
        if not on_cuda or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        kind = self._kind(capture, leaves, structure)
        if kind not in self._recordings:
            self._calls[kind] += 1
            if self._calls[kind] <= _WARM_UP or len(self._recordings) == _MOST:
                return forward(*args, **kwargs)
            self._recordings[kind] = self._record(capture, forward, leaves, structure)
        return self._recordings[kind].run(leaves, capture, self)

    def _kind(self, capture: Capture, leaves: list[Any], structure: TreeSpec) -> Any:
        """All that a recording depends on but for the values of tensors."""
        model = capture.model
        held = (*model.parameters(), *model.buffers(), *plain_tensors(model).values())
        held += tuple(part for pair in capture.batch.carriers.values() for part in pair)
        return (
            repr(structure),
            tuple(map(_looks, leaves)),
            tuple(module.training for module in model.modules()),
            tuple((x.data_ptr(), x.shape, x.dtype, x.requires_grad) for x in held),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            Arithmetic.of(held[0]).factor,
            torch.backends.cudnn.allow_tf32,
        )

    def _record(
        self, capture: Capture, forward: Forward, leaves: list[Any], structure: TreeSpec
    ) -> _Recording:
        static = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(static, structure)
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        batch = capture.batch
        device = next(x.device for x in static if isinstance(x, Tensor))
        counted = torch.ones(batch.rows // batch.views, dtype=torch.bool, device=device)
        try:
            # Weights that autocast rounds are rounded at every replay: they change in between.
            autocast = torch.is_autocast_enabled("cuda")
            uncached = torch.autocast("cuda", enabled=autocast, cache_enabled=False)
            with capture.recording(), uncached:
                with torch.cuda.graph(first):
                    outputs, shape = tree_flatten(forward(*args, **kwargs))
                ends = [i for i, x in enumerate(outputs) if _has_gradient(x)]
                _check_ends([outputs[i] for i in ends], capture.rows)
                gradients = [torch.zeros_like(outputs[i]) for i in ends]
                with torch.cuda.graph(second, pool=first.pool()):
                    torch.autograd.backward([outputs[i] for i in ends], gradients)
                    terms, sums = self._made(capture, counted)
        except (CaptureError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:  # its text may show private data
            raise CaptureError(
                f"The model cannot be recorded as a CUDA graph ({type(error).__name__}): it waits "
                "for the GPU, or makes tensors on the CPU, while it runs. Leave cuda_graphs out."
            ) from None
        return _Recording(
            inputs=[x for x in static if isinstance(x, Tensor)],
            outputs=[x.detach() if isinstance(x, Tensor) else x for x in outputs],
            structure=shape,
            ends=ends,
            gradients=gradients,
            forward=first,
            backward=second,
            counted=counted,
            terms=terms,
            sums=sums,
        )

    @plain_arithmetic()
    def _made(
        self, capture: Capture, counted: Tensor
    ) -> tuple[dict[str, list[Term]], dict[str, Tensor] | None]:
        """What the backward graph leaves behind: the terms, or in their place the sums."""
        batch = capture.batch
        if self._clipped_sum is None:
            return batch.terms, None
        gradients = capture.gradients(counted=counted)
        batch.terms = {}  # let go, as without a graph: packing must not hold them twice
        return {}, self._clipped_sum(gradients)


class _Behind(torch.autograd.Function):
    """The identity; its backward pass is that of a recorded model."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        recording: _Recording,
        capture: Capture,
        graphs: Graphs,
        *ends: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.all = recording, capture, capture.batch, graphs
        return tuple(end.data for end in ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        recording, capture, batch, graphs = ctx.all
        capture.check_backward(type(capture.model).__name__, batch)
        if batch.heard:
            raise CaptureError(
                "With cuda_graphs=True backward() is called once for a batch, and every layer "
                "inside of the model's own call: this batch has gradients from elsewhere."
            )
        batch.heard = True
        live = len(recording.counted) if batch.live is None else batch.live
        recording.counted[:live] = True
        recording.counted[live:] = False
        for static, grad in zip(recording.gradients, grads, strict=True):
            static.copy_(grad)
            static[live * batch.views :].zero_()  # not times zero: it may not be finite
        recording.backward.replay()
        batch.terms = {
            name: [only_first(term, live) for term in terms]
            for name, terms in recording.terms.items()
        }
        graphs.sums = recording.sums
        return (None,) * (4 + len(grads))


def _looks(leaf: Any) -> Any:
    """What of an argument decides whether a recording fits."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    if isinstance(leaf, bool | int | float | str | torch.dtype | torch.device | None):
        return leaf
    raise CaptureError(
        f"The model is given a {type(leaf).__name__}: with cuda_graphs=True its arguments are "
        "tensors, numbers and text. Leave cuda_graphs out."
    )


def _has_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _check_ends(ends: list[Tensor], rows: int) -> None:
    if not ends or any(end.shape[:1] != (rows,) or rows in end.shape[1:] for end in ends):
        raise CaptureError(
            "cuda_graphs=True needs a model whose outputs have one row for each row of the batch, "
            f"in front (here {rows}) and in no other dimension; a loss belongs outside of it. Set "
            "another max_physical_batch_size, or leave cuda_graphs out."
        )
