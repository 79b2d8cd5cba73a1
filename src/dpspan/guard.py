"""Watches the model while it handles a private batch, for ways out that have no noise.

What it sees never leaves it except as an error or a warning to the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpspan.capture import Capture, Hook
from dpspan.errors import CaptureError
from dpspan.probe import Call, NotComparable, is_packed, probe


class Guard:
    """Told of each batch by `expect`, asked before each release by `check`."""

    def __init__(
        self,
        module: nn.Module,
        capture: Capture,
        *,
        views: int,
        mean_loss: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._module = module
        self._capture = capture
        self._views = views
        self._mean_loss = mean_loss
        self._warn = warn
        self._samples = 0
        self._probed_modes: set[bool] = set()  # training and evaluation can differ
        self._probing = False
        self._harmless: set[str] = set()  # buffers that change, but not with the samples
        self._shapes: list[torch.Size] | None = None
        self._versions: dict[str, tuple[Tensor, int]] = {}
        self._known: set[str] = set()  # what there was before the batch came
        self._contents: dict[str, list[float]] | None = None
        self._contents_checked = False
        # In front: the layers' own hooks must not be half-way when the probe runs the model.
        self._hook = module.register_forward_pre_hook(
            Hook(self._look_at_batch), with_kwargs=True, prepend=True
        )

    def expect(self, samples: int) -> None:
        """A batch of so many samples is about to be handed over."""
        self._samples = samples
        self._versions = self._tensor_versions()
        self._known = set(self._versions)
        if not self._contents_checked:
            self._contents = self._fingerprints()

    def check(self) -> None:
        """Between hand-over and step, a batch may change gradients only."""
        now = self._tensor_versions()
        changed = [
            name
            for name, (x, version) in self._versions.items()
            if name not in self._harmless
            and (name not in now or now[name][0] is not x or now[name][1] != version)
        ]
        changed += [name for name in now if name not in self._known | self._harmless]
        if self._contents is not None and not changed:
            contents, before = self._fingerprints(), self._contents
            changed = [
                name
                for name in {**before, **contents}
                if contents.get(name) != before.get(name) and name not in self._harmless
            ]
            self._contents, self._contents_checked = None, not changed
        if changed:
            raise CaptureError(
                f"'{changed[0]}' was changed by the private batch: it would carry private data out "
                "of training without noise. Turn the running statistics of its module off, or "
                "replace the module."
            )
        if self._samples > 1 and not self._probed_modes:
            self._warn(
                "a step was taken before the model could be checked to keep samples apart: it was "
                "not called as a whole on the batch, or a mask could not be told from the batch"
            )

    def remove(self) -> None:
        """Take the hook off the model."""
        self._hook.remove()

    def _look_at_batch(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Probe the model on the first batch in each mode; notice inputs of varying length."""
        samples = self._samples
        leaves = tree_leaves((args, kwargs), is_leaf=is_packed)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        rows = samples * self._views
        batch = [x for x in tensors if x.shape[:1] == (rows,)]
        if samples < 2 or not batch or self._probing or not self._capture.active:
            return
        # An attention mask (T, T) could be taken for a batch where T = n: wait for another batch.
        ambiguous = len(batch) > 1 and any(x.shape == (rows, rows) for x in batch)
        if module.training not in self._probed_modes and not ambiguous:
            self._probe((args, kwargs))
            self._probed_modes.add(module.training)
        shapes = [x.shape[1:] for x in batch]
        if self._shapes is not None and shapes != self._shapes:
            self._warn(
                "the shape of the inputs varies from batch to batch: where it depends on the "
                "longest record, padding must be masked so that it has no effect on other records; "
                "padding to a fixed length is safe"
            )
        self._shapes = shapes

    def _probe(self, call: Call) -> None:
        self._probing = True
        try:
            self._harmless |= probe(
                self._capture, call, self._samples, views=self._views, mean_loss=self._mean_loss
            )
        except NotComparable as error:
            self._warn(f"the model could not be checked to keep samples apart: {error}")
        finally:
            self._probing = False
            self._versions = self._tensor_versions()

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def _tensor_versions(self) -> dict[str, tuple[Tensor, int]]:
        return {
            name: (x, 0 if x.is_inference() else x._version) for name, x in self._tensors().items()
        }

    def _fingerprints(self) -> dict[str, list[float]]:
        """Two numbers a tensor: they see changes through `.data`, which leave the version as it is.

        Of all that would be saved, too: a module may add to its state_dict what is neither weight
        nor buffer. Taken until a batch has passed, not at every step: reading them stalls a GPU.
        """
        fingerprints = {}
        saved = {n: x for n, x in self._module.state_dict().items() if isinstance(x, Tensor)}
        for name, tensor in {**saved, **self._tensors()}.items():
            x = tensor.detach().double()
            fingerprints[name] = torch.stack([x.sum(), x.square().sum()]).nan_to_num().tolist()
        return fingerprints
