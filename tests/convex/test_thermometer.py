"""A frozen layer of cut points: what the estimators prepare, for any method and in YAML."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpspan
from dpspan.app.config.sections import ThermometerSection
from dpspan.app.run import train
from dpspan.convex.scaling import PublicScaling, cut_points
from helpers.digits import config, write_npz

LEARN = dpspan.ThermometerFeatures.learn


def rows(count: int, seed: int) -> torch.Tensor:
    """A bent column, one of two values, one that never varies."""
    draw = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return torch.stack([draw[:, 0].exp(), (draw[:, 1] > 0).float(), torch.full((count,), 2.0)], 1)


def test_it_makes_what_the_estimators_prepare() -> None:
    public, private = rows(200, 0), rows(50, 1)
    layer = LEARN(public, cuts=5, limit=2.0)
    seen = public.double().numpy()
    preparation = replace(
        PublicScaling(limit=2.0).prepare(seen), cuts=cut_points(5, seen.shape[1], seen)
    )
    expected = preparation.apply(private.double().numpy())
    assert expected.shape == (50, 3 + 5)
    found = layer(private)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)
    assert np.array_equal(found[:, 3:].numpy(), expected[:, 3:])
    at_points = preparation.apply(seen)  # some public rows lie on them
    assert np.array_equal(layer(public)[:, 3:].numpy(), at_points[:, 3:])
    assert found.shape[1] == layer.basis.shape[1]


def test_each_record_is_treated_by_itself_and_a_file_makes_the_same(tmp_path: Path) -> None:
    public, private = rows(100, 0), rows(20, 1)
    layer = LEARN(public)
    alone = torch.cat([layer(row[None]) for row in private])
    torch.testing.assert_close(alone, layer(private))
    layer.save(tmp_path / "layer.safetensors")
    again = dpspan.ThermometerFeatures.load(tmp_path / "layer.safetensors", public)
    assert again.digest == layer.digest
    assert torch.equal(again(private), layer(private))
    assert layer.digest == LEARN(public, seed=0).digest
    with pytest.raises(ValueError, match="Expected the public data that"):
        dpspan.ThermometerFeatures.load(tmp_path / "layer.safetensors", rows(100, 2))


def test_columns_without_points_are_scaled_only() -> None:
    public = rows(60, 0)[:, 1:]
    assert LEARN(public)(public).shape == (60, 2)


@pytest.mark.parametrize(
    ("public", "options", "message"),
    [
        (torch.rand(9, 1, 4, 4), {}, r"to be rows, \(n, columns\)"),
        (torch.rand(9, 4), {"cuts": 0}, "cuts"),
        (torch.rand(9, 4), {"limit": 0.5}, "limit >= 1"),
    ],
)
def test_arguments_are_checked(public: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LEARN(public, **options)


def test_the_section_has_the_layers_defaults() -> None:
    defaults = LEARN.__func__.__kwdefaults__  # type: ignore[attr-defined]
    mine = ThermometerSection(public="rows").settings
    assert mine == {name: defaults[name] for name in mine}
    assert set(defaults) - set(mine) == {"seed", "device"}


def test_any_method_trains_behind_it_and_copies_are_refused() -> None:
    public, private = rows(80, 0), rows(60, 1)
    layer, labels = LEARN(public), (private[:, 0] > 1).long()
    encoded = dpspan.encode(layer, TensorDataset(private, labels), progress=False)
    model = nn.Linear(layer.basis.shape[1], 2)
    engine = dpspan.PrivacyEngine(accountant="rdp")
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(encoded, batch_size=20),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
    )
    (record,) = engine.certificate(1e-5)["public"]
    assert (record["detail"], record["sha256"]) == ("ThermometerFeatures", layer.public.digest)
    twice = torch.cat([private, public[:1]])
    with pytest.raises(ValueError, match="also occur"):
        dpspan.encode(layer, TensorDataset(twice, torch.zeros(61).long()), progress=False)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    for name, count, seed in (("private", 300, 0), ("public", 80, 1), ("test", 200, 2)):
        draw = np.random.default_rng(seed).normal(size=(count, 2)).round(4)
        sick = (np.abs(draw[:, 0]) > 0.8).astype(int)  # no slope tells it
        with Path(f"{name}.csv").open("w", newline="") as file:
            lines = [[*row, ill] for row, ill in zip(draw, sick, strict=True)]
            csv.writer(file).writerows([["a", "b", "ill"], *lines])

    def source(name: str) -> dict[str, Any]:
        return {"format": "csv", "path": f"{name}.csv", "inputs": ["a", "b"], "label": "ill"}

    return {
        "data": {
            "classes": 2,
            "private": source("private"),
            "test": source("test"),
            "test_is_public": True,
            "public": {"clinic": source("public")},
        },
        "features": {"name": "thermometer", "public": "clinic"},
        "model": {"name": "logistic"},
        "method": {"name": "adagrad"},
        "budget": {"epsilon": 8.0, "delta": 1e-4, "accountant": "rdp"},
        "training": {
            "epochs": 1,
            "batch_size": 100,
            "optimizer": {"name": "sgd", "learning_rate": 0.1},
        },
        "output": {"folder": "run"},
    }


def test_a_configuration_reaches_what_no_slope_can(table: dict[str, Any]) -> None:
    Path("c.yaml").write_text(yaml.safe_dump(table))
    reached = train("c.yaml").metrics
    flat = {key: part for key, part in table.items() if key != "features"}
    Path("flat.yaml").write_text(yaml.safe_dump(flat | {"output": {"folder": "flat"}}))
    with pytest.warns(UserWarning, match="enter as they are"):  # behind the layer they do not
        assert reached["test_accuracy"] > train("flat.yaml").metrics["test_accuracy"] + 0.1
    told = json.loads(Path("run/certificate.json").read_text())["public"]
    assert {(each["name"], each["detail"]) for each in told} == {
        ("clinic", "ThermometerFeatures"),
        ("test", "measured on"),
    }
    assert dpspan.verify("run").holds
    labels = np.loadtxt("test.csv", delimiter=",", skiprows=1)[:, 2]
    guessed = dpspan.load_run("run").predict("test.csv").astype(int)
    assert (guessed == labels).mean() == pytest.approx(reached["test_accuracy"])


def test_a_convex_run_declares_the_public_data_of_its_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_npz(tmp_path)
    monkeypatch.chdir(tmp_path)
    features = {"name": "patches", "public": "optin", "filters": 9, "size": [3], "directions": 12}
    train(config(tmp_path, features=features, method={"name": "adagrad", "steps": 3}))
    told = json.loads(Path("run/certificate.json").read_text())["public"]
    assert ("optin", "PatchFeatures") in {(each["name"], each["detail"]) for each in told}
