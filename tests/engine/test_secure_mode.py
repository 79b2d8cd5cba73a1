"""`secure_mode=True`: noise and batches by a cryptographic generator, numbers on a grid."""

from __future__ import annotations

import io
import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.base import clone
from torch import Tensor, nn

from dpspan import GEP, PrivacyEngine
from dpspan.app.run import RunFolder, train
from dpspan.app.verification import verify
from dpspan.audit import audit_step
from dpspan.convex import PrivateLogisticRegression
from dpspan.engine.sampling import PartitionDraw, PrivateLoader
from dpspan.mechanisms.noise import Noise
from dpspan.support.secure import SECURE
from dpspan.support.units import Units
from helpers.digits import config, write_npz
from helpers.distributed import in_processes
from helpers.training import setup, weights
from helpers.training import train as steps

NOISY = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp", "secure_mode": True}


@pytest.mark.parametrize("std", [0.3, torch.tensor(0.3, dtype=torch.float64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_released_lies_on_a_grid(std: Any, dtype: torch.dtype) -> None:
    total, noise = torch.linspace(-3, 3, 200_000, dtype=dtype), Noise(secure=True)
    released = noise.add({"a": total}, std)["a"]
    assert released.dtype == dtype
    left = (released.double() - total.double()).numpy() / 0.3
    assert stats.kstest(left, "norm").pvalue > 1e-9
    step = 0.25 * 2.0**-16  # 0.25 is the power of two below 0.3
    points = released.double() / step
    assert (points == points.round()).all()
    odd = int((points.long() % 2).sum())  # the last bit is a fair coin
    assert abs(odd - 100_000) < 6 * 200_000**0.5 / 2
    usual = Noise().add({"a": total.double()}, std)["a"] / step
    assert (usual == usual.round()).double().mean() < 0.01


def test_long_noise_is_drawn_in_all_streams() -> None:
    x = Noise(secure=True).normal(torch.empty(300_000), 2.0).numpy()
    assert stats.kstest(x / 2, "norm").pvalue > 1e-9
    assert len(np.unique(x)) == len(x)


@pytest.mark.parametrize(
    "method", [None, GEP(public=torch.randn(20, 6), rank=4, clip=0.7, residual_clip=0.3)]
)
def test_the_step_audit_finds_nothing(method: Any) -> None:
    """Variance, tails, correlations, a forked process, sensitivity, and the sampler."""

    def prepare() -> Any:
        changes = {} if method is None else {"method": method}
        return setup(PrivacyEngine(secure_mode=True), criterion=nn.CrossEntropyLoss(), **changes)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    audit = audit_step(prepare, loss)
    assert audit.passed, str(audit)


def test_plan_and_certificate_say_so() -> None:
    engine, model, optimizer, loader = setup(PrivacyEngine(secure_mode=True))
    steps(model, optimizer, loader)
    document = engine.certificate(1e-5)
    assert document["training"]["noise"] == SECURE
    assert document["private"] is True
    assert f"noise       z = 1, {SECURE}" in str(engine.plan)
    usual, *_ = setup(PrivacyEngine())
    assert "noise" not in usual.certificate(1e-5)["training"]
    assert SECURE not in str(usual.plan)


def test_no_seed_brings_a_run_back() -> None:
    found, batches = set(), set()
    for _ in range(3):
        torch.manual_seed(0)
        np.random.seed(0)
        _, model, optimizer, loader = setup(PrivacyEngine(secure_mode=True))
        sizes = steps(model, optimizer, loader, epochs=3)
        found.add(float(weights(model)[0]))
        batches.add(tuple(sizes))
    assert len(found) == 3
    assert len(batches) > 1


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no debug_seed, which says what to draw, beside secure"):
        PrivacyEngine(secure_mode=True, debug_seed=0)
    with pytest.raises(ValueError, match="pass non_private=True, and no secure_mode"):
        setup(PrivacyEngine(secure_mode=True), noise_multiplier=0.0, non_private=True)
    x, y = np.eye(4), [0, 1, 0, 1]
    with pytest.raises(ValueError, match="no random_state, which says what to draw, beside secure"):
        PrivateLogisticRegression(secure_mode=True, random_state=0).fit(x, y)


def test_a_checkpoint_of_the_other_kind_is_refused() -> None:
    engine, model, optimizer, loader = setup(PrivacyEngine(secure_mode=True))
    steps(model, optimizer, loader)
    file = io.BytesIO()
    engine.save_checkpoint(file, module=model, optimizer=optimizer)
    assert str(loader._secret).encode() not in file.getvalue()
    file.seek(0)
    other, model, optimizer, loader = setup(PrivacyEngine())
    with pytest.raises(ValueError, match=r"noise is 'from a cryptographic .* there, None here"):
        other.load_checkpoint(file, module=model, optimizer=optimizer)
    file.seek(0)
    again, model, optimizer, loader = setup(PrivacyEngine(secure_mode=True))
    again.load_checkpoint(file, module=model, optimizer=optimizer)
    steps(model, optimizer, loader)
    assert again.ledger.steps == 8


def drawn(secret: int, draw: Any) -> list[list[int]]:
    source = torch.utils.data.DataLoader(torch.arange(40), batch_size=10)
    loader = PrivateLoader(source, draw, secure=True)
    loader._secret = secret
    return [batch.tolist() for batch in loader]


def test_processes_that_share_the_secret_draw_the_same() -> None:
    draw = PartitionDraw(records=40, batches=4)
    first, same, other = (drawn(secret, draw) for secret in (7, 7, 8))
    assert first == same != other
    assert sorted(itertools.chain(*first)) == list(range(40))


def test_units_are_drawn_and_what_they_bring_tells_nothing_of_the_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, seeds, own = [i // 5 for i in range(40)], [], Units.drawn

    def watched(self: Units, unit: int, seed: list[int]) -> list[int]:
        seeds.append(tuple(seed))
        return own(self, unit, seed)

    monkeypatch.setattr(Units, "drawn", watched)
    engine = PrivacyEngine(secure_mode=True)
    changes = {"unit": ids, "records_per_unit": 2, "sample_rate": 0.5, "expected_batch_size": 4.0}
    engine, model, optimizer, loader = setup(engine, **changes)
    sizes = steps(model, optimizer, loader, epochs=20)
    assert max(sizes) > 2
    assert all(size % 2 == 0 or size == 1 for size in sizes)  # 1 stands in for nobody
    assert loader._secret not in {number for seed in seeds for number in seed}
    assert len(set(seeds)) == len(loader) * 20 - sum(size == 1 for size in sizes)


def test_several_processes_release_one_noise() -> None:
    def run(rank: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine, model, optimizer, loader = setup(PrivacyEngine(secure_mode=True))
            steps(model, optimizer, loader, epochs=2)
        return weights(model).tolist(), engine.ledger.steps, engine.certificate(1e-5)["training"]

    first, second = in_processes(2, run)
    assert first == second
    assert first[1] == 8
    assert first[2]["noise"] == SECURE

    def mixed(rank: int) -> None:
        setup(PrivacyEngine(secure_mode=bool(rank)))

    _, second = in_processes(2, mixed)
    assert "another plan than the first" in second.text


def test_from_a_configuration(tmp_path: Path) -> None:
    write_npz(tmp_path)
    train(config(tmp_path, budget=NOISY))
    files = RunFolder(tmp_path / "run")
    assert json.loads(files.certificate.read_text())["training"]["noise"] == SECURE
    assert verify(files.path).holds
    usual = config(tmp_path, budget={**NOISY, "secure_mode": False})
    assert "secure_mode" not in usual.fixed()["budget"]  # as in folders that do not know of it


def test_linear_models_from_a_configuration(tmp_path: Path) -> None:
    write_npz(tmp_path)
    how = {"method": {"name": "adagrad"}, "model": {"name": "logistic"}}
    for secure in (True, False):
        folder = tmp_path / str(secure)
        output = {"folder": str(folder)}
        train(config(tmp_path, budget={**NOISY, "secure_mode": secure}, output=output, **how))
        training = json.loads((folder / "certificate.json").read_text())["training"]
        assert (training.get("noise") == SECURE) is secure


def test_a_run_goes_on_as_it_began(tmp_path: Path) -> None:
    write_npz(tmp_path)
    train(config(tmp_path, budget=NOISY), stop=lambda: True)
    with pytest.raises(ValueError, match="holds a run with other settings"):
        train(config(tmp_path, budget={**NOISY, "secure_mode": False}), resume=True)
    assert train(config(tmp_path, budget=NOISY), resume=True).status == "finished"


def test_linear_models() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3))
    model = PrivateLogisticRegression(epsilon=2.0, delta=1e-4, secure_mode=True)
    fits = [clone(model).fit(x, x[:, 0] > 0) for _ in range(2)]
    assert fits[0].certificate_["training"]["noise"] == SECURE
    assert not np.allclose(fits[0].coef_, fits[1].coef_)
    usual = PrivateLogisticRegression(epsilon=2.0, delta=1e-4).fit(x, x[:, 0] > 0)
    assert "noise" not in usual.certificate_["training"]


def test_without_noise_sums_stay_as_they_are() -> None:
    """For debugging: z = 0 is no private run, and no number of it may become NaN."""
    sums = {"weight": torch.tensor([[0.1, -3.0]]), "bias": torch.tensor([1e-30])}
    for std in (0.0, torch.tensor(0.0)):
        found = Noise(secure=True).add(sums, std)
        assert all(torch.equal(found[name], sums[name]) for name in sums)
