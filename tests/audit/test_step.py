"""The audit of a step finds planted bugs, by their kind, and nothing in a sound step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from dpspan import (
    DPSGD,
    GEP,
    PDPSGD,
    RGP,
    AdaptiveClipping,
    AutomaticClipping,
    BiasedGEP,
    ConstantMixing,
    MirrorDescent,
    PrivacyEngine,
)
from dpspan.audit import StepAudit, audit_step, noise
from dpspan.engine.sampling import PartitionDraw, PoissonDraw
from dpspan.mechanisms import dpsgd, gep, mirror, rgp, subspace_method
from dpspan.mechanisms.dpsgd import DPSGDMechanism
from dpspan.mechanisms.noise import Noise
from helpers.training import data, network

G = torch.Generator().manual_seed(7)
PUBLIC = torch.randn(20, 6, generator=G)
LABELS = torch.arange(20) % 2
METHODS = {
    "DPSGD": DPSGD(clip=0.7),
    "automatic": DPSGD(clip=0.7, clipping=AutomaticClipping()),
    "PDPSGD": PDPSGD(public=PUBLIC, rank=4, clip=0.7),
    "BiasedGEP": BiasedGEP(public=PUBLIC, rank=4, clip=0.7),
    "GEP": GEP(public=PUBLIC, rank=4, clip=0.7, residual_clip=0.3),
    "RGP": RGP(rank=2, clip=0.7),
    "mirror": MirrorDescent(public=(PUBLIC, LABELS), clip=0.7, mixing=ConstantMixing(share=0.5)),
}
# Its std falls to a fraction within the steps that are looked at.
FALLING = DPSGD(clip=100.0, clipping=AdaptiveClipping(quantile=0.1, rate=1.0))


PLANTED = [
    name if name in ("DPSGD", "GEP") else pytest.param(name, marks=pytest.mark.slow)
    for name in METHODS
]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def audited(method: Any = METHODS["DPSGD"], **changes: Any) -> StepAudit:
    loss_of = changes.pop("loss", loss)
    make = changes.pop("module", network)
    loader = changes.pop("data_loader", DataLoader(data(), batch_size=10))
    seed = changes.pop("debug_seed", None)

    def prepare() -> Any:
        engine, model = PrivacyEngine(debug_seed=seed), make()
        return engine, *engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            criterion=nn.CrossEntropyLoss(),
            method=method,
            **{"noise_multiplier": 1.3, **changes},
        )

    return audit_step(prepare, loss_of)


def found(audit: StepAudit) -> set[str]:
    return {check.part for check in audit.findings}


def said(audit: StepAudit) -> str:
    return "\n".join(map(str, audit.findings))


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_found_in_a_sound_step(name: str) -> None:
    audit = audited(METHODS[name])
    assert audit.passed, said(audit)
    added = [c.measured for c in audit.checks if "of a canary" in c.name]
    assert 0.95 < max(added) < 1.05  # the clip was reached


def test_nor_where_the_clip_falls() -> None:
    audit = audited(FALLING)
    assert audit.passed, said(audit)


def test_few_numbers_are_not_called_correlated() -> None:
    """Products of few normal numbers have long tails: what is compared must be normal itself."""
    rng, largest = np.random.default_rng(0), []
    for _ in range(2000):
        products = noise._Products()
        for _ in range(2):
            products.add([*rng.standard_normal((2, 2)), rng.standard_normal(5)])
        largest.append(products.largest()[0])
    # Six values a time, so 12,000: one beyond 5 would come up in a hundred such tests.
    assert 3 < max(map(abs, largest)) < 5


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"poisson_sampling": False},
        {"max_physical_batch_size": 3},
        {"sample_rate": 1.0, "expected_batch_size": 40.0},
        {"module": dropout},
        {"noise_multiplier": 0.3},
        {"data_loader": DataLoader(data(500), batch_size=7)},
    ],
    ids=["partition", "pieces", "all records", "dropout", "little noise", "small rate"],
)
def test_nor_in_other_settings(changes: dict[str, Any]) -> None:
    audit = audited(**changes)
    assert audit.passed, said(audit)


def test_nor_where_records_are_words() -> None:
    """Whole numbers only, and a batch of a dictionary."""
    g = torch.Generator().manual_seed(3)
    words = torch.randint(12, (40, 5), generator=g)
    records = [{"words": w, "label": int(w[0]) % 2} for w in words]

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(12, 6), nn.Linear(6, 2)

        def forward(self, words: Tensor) -> Tensor:
            return self.head(self.embedding(words).mean(1))

    audit = audited(
        data_loader=DataLoader(records, batch_size=10),
        module=Bag,
        loss=lambda m, b: nn.functional.cross_entropy(m(b["words"]), b["label"]),
    )
    assert audit.passed, said(audit)
    assert any("other records" in check.name for check in audit.checks)


# -- noise ------------------------------------------------------------------------------------


def change_noise(patch: pytest.MonkeyPatch, change: Callable[..., Tensor]) -> None:
    normal = Noise.normal
    patch.setattr(Noise, "normal", lambda self, like, std: change(normal(self, like, std), std))


@pytest.mark.parametrize("name", PLANTED)
def test_a_tenth_of_the_noise_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change_noise(monkeypatch, lambda noise, std: noise * 0.9)
    audit = audited(METHODS[name])
    assert {"noise", "sensitivity"} <= found(audit)
    assert "of what was asked for: 0.9" in said(audit) or "of what was asked for: 0.8" in said(
        audit
    )


def test_a_release_that_asks_for_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for is there: only beside the canaries it is too little."""
    release = DPSGDMechanism.release
    monkeypatch.setattr(
        DPSGDMechanism,
        "release",
        lambda self, total, noise, z: release(self, total, noise, 0.9 * z),
    )
    audit = audited()
    assert found(audit) == {"sensitivity"}
    assert max(check.measured for check in audit.findings) == pytest.approx(1 / 0.9, abs=0.03)


def test_noise_off(monkeypatch: pytest.MonkeyPatch) -> None:
    change_noise(monkeypatch, lambda noise, std: noise * 0)
    assert {"noise", "sensitivity"} <= found(audited())


def test_noise_that_is_replayed_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng

    def replayed(self: Noise, count: int) -> np.ndarray:
        return generator(id(self) % 1000).standard_normal(count)

    monkeypatch.setattr(Noise, "_on_cpu", replayed)
    audit = audited()
    assert found(audit) == {"noise"} or "correlation" in said(audit)
    assert "correlation of" in said(audit)


def test_noise_that_is_replayed_in_the_next_run() -> None:
    """As with a debug_seed; only the steps of different runs are alike."""
    audit = audited(debug_seed=5)
    assert found(audit) == {"noise"}
    assert "of run 1 and step" in said(audit)


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="processes do not fork here")
def test_noise_that_a_forked_process_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpspan.mechanisms.noise.os.getpid", lambda: 1)
    audit = audited()
    assert found(audit) == {"noise"}
    assert "a forked process and its parent" in said(audit)


def test_noise_that_parts_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(self: Noise, parts: dict[str, Tensor], std: float) -> dict[str, Tensor]:
        most = max(part.numel() for part in parts.values())
        noise = self.normal(torch.empty(most), std)
        return {n: x + noise[: x.numel()].view_as(x) for n, x in parts.items()}

    monkeypatch.setattr(Noise, "add", shared)
    assert "correlation of two parts" in said(audited())


def test_a_part_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Noise.add

    def forgetful(self: Noise, parts: dict[str, Tensor], std: float) -> dict[str, Tensor]:
        return {**add(self, parts, std), "2.bias": parts["2.bias"]}

    monkeypatch.setattr(Noise, "add", forgetful)
    assert "std of 2.bias, of what was asked for: 0 " in said(audited())


def test_one_number_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among 74 that have a little more, so that the variance is right."""

    def change(noise: Tensor, std: float) -> Tensor:
        noise = noise * (74 / 73) ** 0.5
        noise.view(-1)[:1] = 0
        return noise

    change_noise(monkeypatch, change)
    assert "variance of a number in" in said(audited())


def test_noise_of_another_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right variance, no tails."""
    change_noise(monkeypatch, lambda noise, std: torch.sign(noise) * std)
    audit = audited()
    assert found(audit) == {"noise"}
    assert "kurtosis" in said(audit)
    assert "beyond 3 std" in said(audit)


# -- sensitivity ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANTED)
def test_a_tenth_of_clip_too_much(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dpsgd, gep, mirror, rgp, subspace_method):
        if hasattr(module, "clip_factors"):
            factors = module.clip_factors
            monkeypatch.setattr(module, "clip_factors", lambda *a, f=factors: 1.1 * f(*a))
    audit = audited(METHODS[name])
    assert found(audit) == {"sensitivity"}
    # Canaries near a subspace lose a little there; the noise's std is known to 0.7 % or better.
    assert max(check.measured for check in audit.findings) == pytest.approx(1.1, abs=0.06)


def test_only_gradients_that_are_not_finite_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(rule: Any, norms: Tensor, clip: float) -> Tensor:
        return torch.where(norms.isfinite(), (clip / norms).clamp(max=1.0), 1.0)

    combine = dpsgd.PerSampleGradients.combine
    monkeypatch.setattr(dpsgd, "clip_factors", careless)
    monkeypatch.setattr(
        dpsgd.PerSampleGradients, "combine", lambda self, w, **k: combine(self, w, finite=True)
    )
    audit = audited()
    assert found(audit) == {"sensitivity"}
    assert {"NaN"} <= {k for c in audit.findings for k in ("NaN", "huge") if k in c.name}


def test_a_collation_that_mixes_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(records: list[Any]) -> Any:
        x, y = default_collate(records)
        return (x + x.roll(1, 0)) / 2, y

    monkeypatch.setattr("dpspan.engine.admission._mixes", lambda *_: False)
    audit = audited(data_loader=DataLoader(data(), batch_size=10, collate_fn=mixed))
    assert found(audit) == {"sensitivity"}
    assert "others moved by a canary" in said(audit)


# -- sampler ----------------------------------------------------------------------------------

Epoch = Callable[[Any, np.random.Generator], Iterator[Tensor]]


def shuffled(self: Any, generator: np.random.Generator) -> Iterator[Tensor]:
    yield from torch.from_numpy(generator.permutation(self.records)).chunk(self.steps_per_epoch)


def fixed_size(self: Any, generator: np.random.Generator) -> Iterator[Tensor]:
    for _ in range(self.steps_per_epoch):
        size = round(self.records * self.sample_rate)
        yield torch.from_numpy(generator.permutation(self.records)[:size])


def the_same_every_epoch(self: Any, generator: np.random.Generator) -> Iterator[Tensor]:
    fixed = np.random.default_rng(3)
    for _ in range(self.steps_per_epoch):
        yield torch.from_numpy(np.flatnonzero(fixed.random(self.records) < self.sample_rate))


def one_always(self: Any, generator: np.random.Generator) -> Iterator[Tensor]:
    for _ in range(self.steps_per_epoch):
        drawn = generator.random(self.records) < self.sample_rate
        drawn[0] = True
        yield torch.from_numpy(np.flatnonzero(drawn))


def with_replacement(self: Any, generator: np.random.Generator) -> Iterator[Tensor]:
    for _ in range(self.steps_per_epoch):
        size = generator.binomial(self.records, self.sample_rate)
        yield torch.from_numpy(generator.integers(self.records, size=size))


@pytest.mark.parametrize(
    "epoch", [shuffled, fixed_size, the_same_every_epoch, one_always, with_replacement]
)
def test_batches_that_are_not_poisson(epoch: Epoch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoissonDraw, "epoch", epoch)
    assert found(audited()) == {"sampler"}


def test_a_partition_into_equal_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionDraw, "epoch", shuffled)
    assert found(audited(poisson_sampling=False)) == {"sampler"}


def test_what_it_says() -> None:
    audit = audited()
    document = audit.describe()
    assert document["passed"] is True
    assert document["unprivate"] is True
    assert {check["part"] for check in document["checks"]} == {"sensitivity", "noise", "sampler"}
    assert all(line.startswith(("ok", "note")) for line in str(audit).splitlines())


def test_refusals() -> None:
    with pytest.raises(ValueError, match="Expected a run with noise to audit, got 0"):
        audited(noise_multiplier=0.0, non_private=True)
    with pytest.raises(ValueError, match="Expected each record to be its own unit, got 'unit'"):
        audited(unit=[i // 2 for i in range(40)], records_per_unit=2)
