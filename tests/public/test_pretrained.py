"""Frozen pre-trained networks as features: tiny random ones, by a folder and by a name."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpspan
from dpspan.app.config import Config
from dpspan.app.run import RunFolder, train
from helpers.digits import settings, write_npz
from helpers.needs import extra


class Tiny(nn.Module):
    """As timm makes one without a classifier; in training it would do something else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).flatten(1)


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    stub: Any = types.ModuleType("timm")
    stub.create_model = lambda name, **options: (calls.append((name, options)), Tiny())[1]
    monkeypatch.setitem(sys.modules, "timm", stub)
    return calls


def images(count: int, seed: int) -> Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_features_are_scaled_by_public_samples_alone(timm: list[Any]) -> None:
    public, private = images(40, 0), images(30, 1)
    layer = dpspan.PretrainedFeatures.learn(public, model="timm/tiny")
    assert timm == [("tiny", {"pretrained": True, "num_classes": 0})]
    network = Tiny().eval()
    with torch.no_grad():
        known, seen = network(public), network(private)
    scale = known.std(0) + 0.1 * known.std(0).mean()
    expected = nn.functional.normalize((seen - known.mean(0)) / scale)
    layer.train()  # what is frozen stays as it is
    found = dpspan.encode(layer, TensorDataset(private, torch.arange(30)), progress=False)
    assert torch.allclose(found.tensors[0], expected, atol=1e-5)
    assert not any(p.requires_grad for p in layer.parameters())


def test_copies_of_public_samples_are_refused_and_the_rest_is_on_the_certificate(timm: Any) -> None:
    public, private = images(40, 0), images(30, 1)
    layer = dpspan.PretrainedFeatures.learn(public, model="timm/tiny")
    with pytest.raises(ValueError, match="do not publish"):
        dpspan.encode(layer, TensorDataset(public, torch.arange(40)), progress=False)
    encoded = dpspan.encode(layer, TensorDataset(private, torch.arange(30) % 2), progress=False)
    model, engine = nn.Linear(6, 2), dpspan.PrivacyEngine(accountant="rdp")
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(encoded, batch_size=10),
        noise_multiplier=1.0,
    )
    (used,) = engine.certificate(delta=1e-3)["public"]
    assert used["detail"] == "PretrainedFeatures"


def test_it_can_be_printed(timm: Any) -> None:
    layer = dpspan.PretrainedFeatures.learn(images(40, 0), model="timm/tiny")
    assert "model='timm/tiny'" in repr(nn.Sequential(layer))


def test_it_is_read_again_with_the_weights_it_had(timm: Any, tmp_path: Path) -> None:
    public = images(40, 0)
    layer = dpspan.PretrainedFeatures.learn(public, model="timm/tiny")
    with torch.no_grad():
        layer.responses.frozen.layers[0].weight.mul_(2.0)  # published anew in the meantime
    layer.save(tmp_path / "features")
    again = dpspan.PretrainedFeatures.load(tmp_path / "features", public)
    assert again.digest == layer.digest
    assert torch.equal(again(public), layer(public))


@pytest.mark.parametrize("kind", ["Bert", "ViT", "ResNet"])
def test_models_of_hugging_face(kind: str, tmp_path: Path) -> None:
    transformers = extra("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "Bert":
        options = {**small, "intermediate_size": 16, "vocab_size": 30}
        x = torch.randint(1, 30, (20, 7))
        x[:, 5:] = 0
    elif kind == "ViT":
        options = {**small, "intermediate_size": 16, "image_size": 16, "patch_size": 8}
        x = images(20, 0)
    else:
        options = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]}
        x = images(20, 0)
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    model.save_pretrained(tmp_path)
    layer = dpspan.PretrainedFeatures.learn(x, model=str(tmp_path), side=16)
    found = layer(x)
    assert found.shape == (20, 16)
    assert torch.allclose(found.norm(dim=1), torch.ones(20), atol=1e-5)
    if kind == "Bert":  # one by one and without what fills it up
        with torch.no_grad():
            alone = torch.cat([model(row[None, :5]).last_hidden_state.mean(1) for row in x])
        assert torch.allclose(layer.responses(x), alone, atol=1e-5)


@pytest.mark.parametrize(
    ("public", "options", "message"),
    [
        (images(1, 0), {}, "at least two samples of 'public' that differ"),
        (images(1, 0).repeat(5, 1, 1, 1), {}, "at least two samples of 'public' that differ"),
        (images(5, 0)[:, :2], {}, "to be a tensor of images"),
        (images(5, 0).flatten(1), {}, "to be a tensor of images"),
        (torch.ones(5, 3, 2, dtype=torch.int64), {}, "to be a tensor of images"),
        (DataLoader([{"a": x} for x in images(5, 0)]), {}, "to be a tensor of images"),
        (images(5, 0), {"seed": "x"}, "seed to be an integer"),
        (images(5, 0), {"side": 0}, "side to be an integer"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(
    timm: Any, public: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dpspan.PretrainedFeatures.learn(public, model="timm/tiny", **options)


def test_by_a_configuration(timm: Any, tmp_path: Path) -> None:
    write_npz(tmp_path)
    chosen = settings(
        tmp_path, budget={"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}
    )
    chosen["features"] = {"name": "pretrained", "public": "optin", "model": "timm/tiny", "side": 12}
    config = Config.model_validate(chosen)
    train(config, stop=lambda: True)
    result = train(config, resume=True)
    assert result.status == "finished"
    assert RunFolder(result.folder).features.exists()
    chosen["features"]["side"] = 16
    with pytest.raises(ValueError, match="was learnt with other settings"):
        train(Config.model_validate(chosen), resume=True)
