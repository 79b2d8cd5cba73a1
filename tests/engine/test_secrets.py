"""No message shows data: secrets are planted in files of every kind, and given where they do harm.

To every command as its configuration, to every reader as its file, in every wrong way there is
here; neither output, log, exception and traceback, nor any file that is written may hold one.
"""

from __future__ import annotations

import gzip
import json
import logging
import pickle
import shutil
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from dpspan.app.cli import app
from dpspan.app.config import ConfigError, parse_config
from dpspan.app.data import HuggingFace, Idx, ImageFolder, Npz, load
from dpspan.app.tables import Csv, Parquet
from dpspan.convex import (
    PrivateLinearRegression,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    without_public,
)
from dpspan.support.checks import check_count, check_fraction, check_number, expect, shown

WORD = "Zebrowski"  # the name of a patient
NUMBER = 481516.25  # and what was measured; a float32, too
SECRETS = ("Zebrow", "zebrow", "481516")

ROWS = [
    {"name": WORD, "value": NUMBER, "label": 0},
    {"name": "Maier", "value": 2.5, "label": WORD},
    {"name": "Huber", "value": WORD, "label": 1},
]
HEADER = "name,value,label\n"


def csv_text(separator: str = ",") -> str:
    lines = (separator.join(str(value) for value in row.values()) for row in ROWS)
    return HEADER.replace(",", separator) + "\n".join(lines) + "\n"


def parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    from pyarrow import Table
    from pyarrow.parquet import write_table

    write_table(Table.from_pydict(columns), path)


def hugging_face(path: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"value": [NUMBER, 1.0], "name": [WORD, "b"], "label": [7, 1]}).save_to_disk(
        path
    )


def images(path: Path) -> None:
    for number, name in enumerate((WORD, "Maier")):
        (path / name).mkdir(parents=True)
        Image.new("L", (2 + number, 2)).save(path / name / f"{WORD}-{number}.png")


def broken_images(path: Path) -> None:
    (path / "a").mkdir(parents=True)
    (path / "a" / f"{WORD}.png").write_text(csv_text())


TEXTS = {
    "table.csv": csv_text(),
    "semicolons.csv": csv_text(";"),
    "tabs.tsv": csv_text("\t"),
    "no-header.csv": f"{WORD},{NUMBER},1\nMaier,{NUMBER},1\n",
    "ragged.csv": f"{HEADER}{WORD},{NUMBER}\n",
    "quotes.csv": f'{HEADER}"{WORD}" {WORD},{NUMBER},1\n"{WORD}\n',
    "nul.csv": f"{HEADER}{WORD}\0,{NUMBER},1\n",
    "gaps.csv": f"{HEADER}{WORD},,1\n",
    "labels.csv": f"name,value,label\n1,2,{NUMBER}\n",
    "huge-labels.csv": "name,value,label\n1,2,48151600000000000000000000\n",
    "records.json": json.dumps(ROWS),
    "by-name.json": json.dumps({row["name"]: row for row in ROWS}),
    "split.json": json.dumps({"columns": list(ROWS[0]), "data": [list(r.values()) for r in ROWS]}),
    "as-if.json": json.dumps({"data": {WORD: ROWS}, "model": WORD, "budget": {WORD: NUMBER}}),
    "nearly.json": json.dumps(
        {
            "data": {"classes": WORD, "private": {"format": WORD, "path": NUMBER}, "public": ROWS},
            "model": {"name": WORD},
            "method": {"name": "gep", "rank": NUMBER, "clip": WORD},
            "budget": {"epsilon": -NUMBER, "delta": NUMBER, "accountant": WORD},
            "training": {"epochs": NUMBER, "batch_size": -481516, "optimizer": ROWS},
            "output": {"folder": 481516, WORD: 1},
        }
    ),
    "lines.jsonl": "\n".join(json.dumps(row) for row in ROWS),
    "note.txt": f"{WORD} {NUMBER}\n",
    "letter.txt": f"Dear {WORD}:\n\tyour value is {NUMBER}: [\n",
    "key.txt": f"{WORD}: {NUMBER}\n{WORD}: 2\n",
    "alias.txt": f"a: *{WORD}\n",
    "tag.txt": f"a: !{WORD} 3\n",
    "whole.txt": f"a: !!int {WORD}\n",
    "anchor.txt": f"a: &{WORD} 1\nb: &{WORD} 2\nc: '\\{WORD}\n",
    "escape.txt": f'a: "\\{WORD}"\n',
    "empty.txt": "",
}
BYTES: dict[str, bytes] = {
    "latin.csv": f"{HEADER}{WORD}ö,{NUMBER},1\n".encode("latin-1"),
    "utf16.csv": csv_text().encode("utf-16"),
    "pickle.pt": pickle.dumps(ROWS),
    "table.gz": gzip.compress(csv_text().encode()),
    "cut.gz": gzip.compress(csv_text().encode())[:-8],
    "text-idx3-ubyte": b"\0\0\x08\3" + struct.pack(">3I", 481516, 2, 2) + WORD.encode(),
    "header.safetensors": (
        struct.pack("<Q", 60) + json.dumps({WORD: {"dtype": WORD, "shape": 3}}).encode()[:60]
    ).ljust(80),
}
OTHERS: dict[str, Callable[[Path], None]] = {
    "texts.npz": lambda path: np.savez(path, x=np.array([[WORD]]), y=np.array([WORD])),
    "numbers.npz": lambda path: np.savez(path, x=np.full((2, 2), NUMBER), y=[481516, 0]),
    "names.npz": lambda path: np.savez(path, **{WORD: np.full((2, 2), NUMBER)}),
    "nan.npz": lambda path: np.savez(path, x=np.array([[NUMBER, np.nan]]), y=[1]),
    "objects.npz": lambda path: np.savez(path, x=np.array([ROWS]), y=[1]),
    "one.npy": lambda path: np.save(path, np.array([[NUMBER]])),
    "table.parquet": lambda path: parquet(
        path, {"name": [WORD, "b"], "value": [NUMBER, 2.0], "label": [WORD, "1"]}
    ),
    "labels.parquet": lambda path: parquet(
        path, {"name": [1, 2], "value": [NUMBER, 2.0], "label": [481516, 1]}
    ),
    "wide.parquet": lambda path: parquet(path, {WORD: [1], f"{WORD}2": [NUMBER]}),
    "saved": hugging_face,
    "images": images,
    "broken": broken_images,
    "weights.safetensors": lambda path: save_file({WORD: torch.full((2,), NUMBER)}, path),
}
FILES = [*TEXTS, *BYTES, *OTHERS]


def planted(folder: Path, name: str) -> Path:
    path = folder / name
    if name in TEXTS:
        path.write_text(TEXTS[name])
    elif name in BYTES:
        path.write_bytes(BYTES[name])
    else:
        OTHERS[name](path)
    return path


def silent(text: str) -> None:
    for secret in SECRETS:
        assert secret not in text, text


def silent_error(error: BaseException) -> None:
    """The message, and all that a traceback shows."""
    silent("".join(traceback.format_exception(error)))


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> Any:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    yield
    silent(caplog.text)


def said(*arguments: object) -> None:
    """A command that must fail, as users see it and with --debug."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    for debug in ((), ("--debug",)):
        result = CliRunner().invoke(app, [*debug, *(str(argument) for argument in arguments)])
        assert result.exit_code != 0, result.output
        silent(result.output)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            silent_error(result.exception)
    for path in Path().rglob("*"):
        if path.is_file() and before.get(path) != path.stat().st_mtime_ns:
            silent(path.read_bytes().decode("latin-1"))


# -- data where a configuration is meant -----------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_as_a_configuration(tmp_path: Path, name: str) -> None:
    path = planted(tmp_path, name)
    for command in ("train", "choose", "advise"):
        said(command, path)
    said("choose", path, "--unprivate-rank")
    said("compare", path, "--out", "both")
    said("audit", path)
    said("audit", "step", path)
    said("audit", "canaries", path)
    said("report", path)
    with pytest.raises(ConfigError) as caught:
        parse_config(path.read_bytes().decode("latin-1") if path.is_file() else "3")
    silent_error(caught.value)


# -- data in another format than is said -----------------------------------------------------------

SOURCES: dict[str, dict[str, Any]] = {
    "npz": {"format": "npz"},
    "npz of texts": {"format": "npz", "tokens": True},
    "idx": {"format": "idx"},
    "images": {"format": "images"},
    "images without classes": {"format": "images", "labelled": False},
    "csv": {"format": "csv", "inputs": ["value"], "label": "label"},
    "csv of names": {"format": "csv", "inputs": ["name"]},
    "csv of another": {"format": "csv", "inputs": ["Valu"], "label": "labels"},
    "csv of categories": {
        "format": "csv", "inputs": ["name"], "categories": {"name": ["Maier"]},
    },
    "semicolons": {"format": "csv", "inputs": ["name"], "delimiter": ";"},
    "parquet": {"format": "parquet", "inputs": ["value"], "label": "label"},
    "parquet of names": {"format": "parquet", "inputs": ["name"]},
    "parquet of another": {"format": "parquet", "inputs": ["values"]},
    "datasets": {"format": "datasets", "inputs": "value"},
    "datasets of names": {"format": "datasets", "inputs": "name", "label": "value"},
    "datasets of another": {"format": "datasets", "inputs": ["values"], "split": "train"},
}  # fmt: skip
READERS = {
    "npz": Npz, "idx": Idx, "images": ImageFolder, "csv": Csv, "parquet": Parquet,
    "datasets": HuggingFace,
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_every_reader(tmp_path: Path, name: str) -> None:
    path = planted(tmp_path, name)
    for fields in SOURCES.values():
        source = READERS[fields["format"]].model_validate({**fields, "path": path})
        for classes in (2, ("Maier", "Huber")):
            try:
                load(source, classes=classes)
            except (ValueError, OSError) as error:  # and no other
                silent_error(error)


def config(private: dict[str, Any]) -> Path:
    """A sound one, of these private data."""
    np.savez("public.npz", x=np.eye(4)[:, :1], y=[0, 1, 0, 1])
    whole = {
        "data": {
            "classes": 2,
            "private": private,
            "public": {name: {"format": "npz", "path": "public.npz"} for name in "ab"},
            "records": 10,
        },
        "model": {"name": "logistic"},
        "method": {"name": "gep", "rank": 1},
        "choose": {"epsilon": 1.0},
        "budget": {"epsilon": 3.0, "delta": 1e-5, "accountant": "rdp"},
        "training": {
            "epochs": 1,
            "batch_size": 2,
            "optimizer": {"name": "sgd", "learning_rate": 0.5},
        },
        "output": {"folder": "run"},
    }
    Path("c.yaml").write_text(yaml.safe_dump(whole))
    return Path("c.yaml")


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("table.csv", "csv"),
        ("table.csv", "csv of names"),
        ("table.csv", "csv of another"),
        ("labels.csv", "csv"),
        ("no-header.csv", "csv"),
        ("latin.csv", "csv"),
        ("texts.npz", "npz"),
        ("numbers.npz", "npz"),
        ("names.npz", "npz"),
        ("text-idx3-ubyte", "idx"),
        ("table.parquet", "parquet of names"),
        ("saved", "datasets"),
        ("images", "images"),
        ("broken", "images without classes"),
    ],
)
def test_commands_that_read_data(tmp_path: Path, name: str, source: str) -> None:
    fields = {**SOURCES[source], "path": str(planted(tmp_path, name))}
    path = config(fields)
    said("train", path)
    said("choose", path)
    said("choose", path, "--unprivate-rank")
    whole = yaml.safe_load(path.read_text())
    whole["data"]["test"] = whole["data"]["public"]["a"]
    path.write_text(yaml.safe_dump(whole))
    said("compare", path, "--out", "both")
    whole["data"]["private"], whole["data"]["public"]["a"] = whole["data"]["public"]["a"], fields
    path.write_text(yaml.safe_dump(whole))
    said("advise", path)


@pytest.mark.parametrize("name", FILES)
def test_init(tmp_path: Path, name: str) -> None:
    """Columns have names, which it writes down; where they are secrets, it is no table."""
    path = planted(tmp_path, name)
    for label in ("labels", "Name"):
        before = set(Path().iterdir())
        result = CliRunner().invoke(
            app, ["init", "--data", str(path), "--classes", "2", "--label", label]
        )
        silent(result.output)
        if result.exception is not None:
            silent_error(result.exception)
        for written in set(Path().iterdir()) - before:
            silent(written.read_text())
            written.unlink()


# -- data among the files of a run -----------------------------------------------------------------

RUN_FILES = (
    "ledger.json", "checkpoint.safetensors", "certificate.json", "metrics.jsonl", "choice.json",
    "model.safetensors", "comparison.json", "audit.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    x = np.random.default_rng(0).normal(size=(30, 1)).astype(np.float32)
    np.savez(folder / "private.npz", x=x[:20], y=np.arange(20) % 2)
    np.savez(folder / "test.npz", x=x[20:], y=np.arange(10) % 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        path = config({"format": "npz", "path": "private.npz"})
        whole = yaml.safe_load(path.read_text())
        whole["data"]["test"] = {"format": "npz", "path": "test.npz"}
        path.write_text(yaml.safe_dump(whole))
        assert CliRunner().invoke(app, ["train", "c.yaml"]).exit_code == 0
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "table.csv", "latin.csv", "records.json", "by-name.json", "lines.jsonl", "pickle.pt",
        "header.safetensors", "weights.safetensors",
    ],
)  # fmt: skip
def test_among_the_files_of_a_run(tmp_path: Path, finished: Path, name: str) -> None:
    path = planted(tmp_path, name)
    for replaced in RUN_FILES:
        for each in finished.iterdir():
            if each.is_file():
                shutil.copy(each, tmp_path)
        shutil.rmtree("run", ignore_errors=True)
        shutil.copytree(finished / "run", "run")
        shutil.copy(path, Path("run") / replaced)
        for command in (
            ("train", "c.yaml"),
            ("train", "c.yaml", "--resume"),
            ("choose", "c.yaml"),
            ("audit", "run"),
            ("report", "run"),
        ):
            result = CliRunner().invoke(app, ["--debug", *command])
            silent(result.output)
            if result.exception is not None:
                silent_error(result.exception)


# -- arguments -------------------------------------------------------------------------------------

TABLE = [[WORD, 1.0], [NUMBER, 2.0], [3.0, 4.0], [5.0, 6.0]]
VALUES = [
    np.array([NUMBER, 2.0]),
    torch.tensor([NUMBER]),
    [WORD, NUMBER],
    (WORD,),
    {WORD: NUMBER},
    csv_text(),
    {WORD},
    np.array(TABLE, dtype=object),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_arguments(value: Any) -> None:
    silent(shown(value))
    for check in (check_number, check_count, check_fraction):
        with pytest.raises(ValueError, match="Expected x to be a") as caught:
            check("x", value)
        silent_error(caught.value)
    with pytest.raises(ValueError, match="Expected one thing, got a "):
        expect(False, "one thing", value)


def test_settings_are_shown() -> None:
    for setting in (3, 0.5, None, True, "adagrad", float):
        assert shown(setting) == repr(setting)


@pytest.mark.parametrize(
    "estimator",
    [PrivateLogisticRegression, PrivateLinearSVC, PrivateLinearRegression],
    ids=lambda each: each.__name__,
)
def test_estimators(estimator: Any) -> None:
    numbers, labels = np.arange(8.0).reshape(4, 2), np.array([0, 1, 0, 1])
    texts = np.array(TABLE, dtype=object)
    model = estimator(epsilon=3.0, delta=1e-3)
    classes = {} if estimator is PrivateLinearRegression else {"classes": [0, 1]}
    stated = estimator(epsilon=3.0, delta=1e-3, **classes)
    wrong: list[Callable[[], object]] = [
        lambda: model.fit(texts, labels),
        lambda: model.fit(np.array(TABLE), labels),
        lambda: model.fit(numbers, labels, public=texts),
        lambda: model.fit(numbers, labels, public=(numbers + 9, [WORD] * 4)),
        lambda: model.fit(numbers, np.array([NUMBER, 1, 2, np.nan])),
        lambda: stated.fit(numbers, np.array([WORD, "a", "b", NUMBER], dtype=object)),
        lambda: model.fit(numbers, labels).predict(texts),
        lambda: without_public(texts, numbers),
        lambda: estimator(epsilon=np.full(3, NUMBER)).fit(numbers, labels),
        lambda: estimator(clip=np.full(3, NUMBER)).fit(numbers, labels),
        lambda: estimator(scaling=[WORD]).fit(numbers, labels),
        lambda: estimator(method=[WORD]).fit(numbers, labels),
    ]
    for attempt in wrong:
        with pytest.raises((ValueError, TypeError)) as caught:
            attempt()
        silent_error(caught.value)
