"""Features by a frozen network that others have trained: any of timm or of Hugging Face.

Its weights are taken to be public. Its features are centred and scaled by those of public samples:
each record is treated by itself, by public constants.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from dpspan.public.data import PublicData
from dpspan.public.patches import PatchFeatures
from dpspan.support.checks import check_count, check_seed

_AT_ONCE, _SMALLEST = 256, 0.1  # samples; and of the mean deviation, added to a feature's


class PretrainedFeatures(PatchFeatures):
    """(n, …) to (n, features) of length 1, for `dpspan.encode`; by `PretrainedFeatures.learn`."""

    @classmethod
    def learn(  # type: ignore[override]
        cls, public: Any, *, model: str, side: int | None = None, seed: int = 0, device: Any = "cpu"
    ) -> Self:
        """A network, with the mean and scale of its features of public samples.

        `public` are samples as the network gets them: images (enlarged to `side` pixels), or token
        ids that 0 fills up. `model` is a folder or a name at Hugging Face, `timm/NAME` one of timm.
        """
        side = None if side is None else check_count("side", side)
        settings = {"model": model, "side": side, "seed": check_seed(seed)}  # as of other layers
        data = PublicData.of(public)
        if not all(_fits(inputs) for inputs, *_ in data.batches):
            raise ValueError(
                f"Expected the public data '{data.name}' to be a tensor of images, (n, channels, "
                "height, width) with 1, 3 or more channels, or of token ids, (n, tokens)."
            )
        network = cls._network(settings, {}).to(device)
        pieces = data.pieces(_AT_ONCE)
        found = torch.cat([network(piece.inputs.to(device)) for piece in pieces])
        spread = found.std(0, correction=min(1, len(found) - 1))
        if not spread.mean() > 1e-6 * found.abs().mean():
            raise ValueError(f"Expected at least two samples of '{data.name}' that differ.")
        scale = spread + _SMALLEST * spread.mean()
        return cls(data, network, found.mean(0), torch.diag(1 / scale), settings)

    @classmethod
    def _network(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
        network = _Network(settings["model"], settings["side"])
        for name, weight in network.state_dict().items():  # whatever that name means by now
            weight.copy_(tensors.get(f"responses.{name}", weight))
        return network


def _fits(inputs: Any) -> bool:
    if not isinstance(inputs, Tensor):
        return False
    images = inputs.dim() == 4 and inputs.shape[1] != 2
    return images if inputs.is_floating_point() else inputs.dim() == 2


class _Network(nn.Module):
    """Pooled outputs for images, means over tokens for token ids."""

    def __init__(self, model: str, side: int | None) -> None:
        super().__init__()
        self.side, of_timm = side, model.startswith("timm/")
        library: Any = import_module("timm" if of_timm else "transformers")
        if of_timm:
            network = library.create_model(model[5:], pretrained=True, num_classes=0)
        else:
            network = library.AutoModel.from_pretrained(model)
        self.frozen = network.requires_grad_(False)

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        self.frozen.eval()  # whatever the model around it is told
        if not inputs.is_floating_point():
            mask = (inputs != 0).float()
            mask[:, 0] = 1  # of no token there is no mean
            found: Tensor = self.frozen(inputs, attention_mask=mask).last_hidden_state
            return (found * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        if self.side is not None:
            inputs = interpolate(inputs, (self.side, self.side), mode="bilinear")
        given = self.frozen(inputs.expand(-1, max(3, inputs.shape[1]), -1, -1))
        found = getattr(given, "last_hidden_state", given)  # (n, d), or with more dimensions
        found = found.flatten(2).mT if found.dim() == 4 else found
        return found if found.dim() == 2 else found.mean(1)
