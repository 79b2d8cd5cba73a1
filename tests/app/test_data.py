"""Data from files: every format gives the same tensors, and every flaw a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dpspan.app.data import HuggingFace, Idx, ImageFolder, Loaded, Npz, Source, load
from dpspan.app.tables import Csv, Parquet
from helpers.digits import digits, write_csv, write_idx, write_images
from helpers.needs import extra

N = 40
X, Y = digits(N)
EXPECTED = torch.from_numpy(X).unsqueeze(1).float() / 255
NAMES = tuple(f"class{i}" for i in range(10))


def same(source: Source, classes: Any = 10, order: Any = slice(None)) -> None:
    loaded = load(source, classes=classes)
    inputs, labels = loaded.tensors
    assert loaded.outputs == 10
    assert loaded.labelled
    assert loaded.shape == tuple(inputs.shape[1:])
    torch.testing.assert_close(inputs.flatten(1), EXPECTED[order].flatten(1))
    assert labels.tolist() == Y[order].tolist()
    assert labels.dtype == torch.int64
    assert len(loaded.dataset) == N


def test_npz(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=X, y=Y, last=X[..., None], floats=X / 255, names=np.array(NAMES)[Y])
    same(Npz(path=path))
    same(Npz(path=path, inputs="last", layout="channels_last"))
    same(Npz(path=path, inputs="floats"))
    same(Npz(path=path, labels="names"), classes=NAMES)
    assert load(Npz(path=path), classes=10).shape == (1, 8, 8)
    assert load(Npz(path=path, inputs="floats"), classes=10).shape == (8, 8)
    assert load(Npz(path=path, inputs="floats", layout="add_channel"), classes=10).shape == (
        1,
        8,
        8,
    )
    unlabelled = load(Npz(path=path, labels=None), classes=10)
    assert not unlabelled.labelled
    assert len(unlabelled.tensors) == 1


def test_copies_are_found_whatever_the_scaling(tmp_path: Path) -> None:
    floats = X[3:6] / 255
    np.savez(tmp_path / "a.npz", x=X[:10], y=Y[:10], tokens=X[:10].astype(np.int64))
    np.savez(tmp_path / "b.npz", x=X[8:12], scaled=floats[:, None].astype(np.float32), y=Y[:3])
    private = load(Npz(path=tmp_path / "a.npz", mean=0.5, std=0.2), classes=10)

    def copies(source: Source, other: Loaded = private) -> list[int]:
        return load(source, classes=10).copies_of(other)

    same_file = {"path": tmp_path / "a.npz", "labels": None}
    for scaling in ({}, {"mean": 0.5, "std": 0.2 + 1e-7}, {"scale": 1.0}):
        assert copies(Npz(**same_file, **scaling)) == list(range(10))
        assert copies(Npz(path=tmp_path / "b.npz", labels=None, **scaling)) == [0, 1]
    done = Npz(path=tmp_path / "b.npz", inputs="scaled", mean=0.5, std=0.2)
    assert copies(done) == [0, 1, 2]  # divided by 255 in the file already
    tokens = load(Npz(**same_file, inputs="tokens", tokens=True), classes=10)
    assert copies(Npz(**same_file, inputs="tokens", std=3.0), tokens) == list(range(10))
    np.savez(tmp_path / "c.npz", x=X[20:30], y=Y[20:30])
    assert copies(Npz(path=tmp_path / "c.npz", mean=0.5, std=0.2)) == []


def test_which_sources_read_the_same_records(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    table = Csv(path=Path("a.csv"), inputs=("p",), mean=1.0)
    assert table.records == Csv(path=tmp_path / "b" / ".." / "a.csv", inputs=("q", "r")).records
    assert table.records != Csv(path=Path("b.csv"), inputs=("p",)).records
    assert Npz(path=Path("a")).records != Npz(path=Path("a"), inputs="x_test").records
    halves = (HuggingFace(path=Path("a"), split=name) for name in ("train", "test"))
    assert len({half.records for half in halves}) == 2


def test_tokens_stay_whole(tmp_path: Path) -> None:
    tokens = np.arange(12, dtype=np.int32).reshape(4, 3)
    np.savez(tmp_path / "t.npz", x=tokens, y=np.arange(4) % 2)
    inputs, _ = load(Npz(path=tmp_path / "t.npz", tokens=True), classes=2).tensors
    assert inputs.dtype == torch.int64
    assert inputs.tolist() == tokens.tolist()


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx(tmp_path: Path, ending: str) -> None:
    images = write_idx(tmp_path / f"images-idx3-ubyte{ending}", X)
    labels = write_idx(tmp_path / f"labels-idx1-ubyte{ending}", Y)
    same(Idx(path=images, labels=labels))
    assert load(Idx(path=images), classes=10).shape == (1, 8, 8)


def test_image_folder(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", X, Y)
    order = np.lexsort((np.arange(N), Y))  # by class, then by name
    same(ImageFolder(path=folder, channels=1), order=order)
    same(ImageFolder(path=folder, channels=1), classes=NAMES, order=order)
    backwards = load(ImageFolder(path=folder, channels=1), classes=NAMES[::-1])
    assert sorted(backwards.tensors[1].tolist()) == sorted((9 - Y).tolist())
    resized = load(ImageFolder(path=folder, size=(6, 5)), classes=10)
    assert resized.shape == (3, 6, 5)
    anywhere = load(ImageFolder(path=folder, channels=1, labelled=False), classes=10)
    assert not anywhere.labelled
    assert len(anywhere.dataset) == N


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_grey_images_of_more_than_8_bits_are_refused(tmp_path: Path, mode: str) -> None:
    """Pillow would take all of their values from 255 on for white."""
    kind = {"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]
    (tmp_path / "a").mkdir()
    deep = Image.fromarray(np.full((4, 4), 4000).astype(kind))
    assert deep.mode == mode
    deep.save(tmp_path / "a" / "0.tif")
    for channels in (1, 3):
        source = ImageFolder(path=tmp_path, channels=channels, labelled=False)
        with pytest.raises(ValueError, match=r"Image 1 of .* more than 8 bits .* `scale: 65535`"):
            load(source, classes=2)


def test_csv(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", X, Y)
    pixels = tuple(f"p{i}" for i in range(64))
    same(Csv(path=path, inputs=pixels, label="digit", scale=255.0))
    two = load(Csv(path=path, inputs=("p12", "p3"), scale=255.0), classes=10)
    torch.testing.assert_close(two.tensors[0], EXPECTED.flatten(1)[:, [12, 3]])
    assert not two.labelled


def test_categories_become_indicators(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("city;age;ill\nBern;30;no\nBasel;41.5;yes\n")
    source = Csv(
        path=path, inputs=("city", "age"), label="ill", delimiter=";",
        categories={"city": ("Basel", "Bern", "Chur")}, mean=(0.0, 0.0, 0.0, 40.0), std=10.0,
    )  # fmt: skip
    loaded = load(source, classes=("no", "yes"))
    expected = torch.tensor([[0, 0.1, 0, -1.0], [0.1, 0, 0, 0.15]])
    torch.testing.assert_close(loaded.tensors[0], expected)
    assert loaded.tensors[1].tolist() == [0, 1]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = extra("pyarrow")
    from pyarrow import parquet

    columns = {f"p{i}": X.reshape(N, -1)[:, i] for i in range(64)}
    names = np.array(NAMES)[Y]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({**columns, "digit": Y, "name": names}), path)
    same(Parquet(path=path, inputs=tuple(columns), label="digit", scale=255.0))
    same(Parquet(path=path, inputs=tuple(columns), label="name", scale=255.0), classes=NAMES)
    parquet.write_table(pyarrow.table({"a": [1.0, None], "b": [0, 1]}), path)
    with pytest.raises(ValueError, match=r"numbers in column 'a' .* something else in row 2"):
        load(Parquet(path=path, inputs=("a",), label="b"), classes=2)
    with pytest.raises(ValueError, match="no column 'c' among its 2"):
        load(Parquet(path=path, inputs=("c",)), classes=2)


@pytest.mark.parametrize(
    ("names", "labels", "codes"),
    [
        (("1", "0"), [0, 1, 1], [1, 0, 0]),
        (("1", "2", "-1"), [2, -1, 1], [1, 2, 0]),
        (("1", "0"), [0.0, 1.0, 1.0], [1, 0, 0]),  # as gaps in a column make of them
        (("1", "0"), [False, True, True], [1, 0, 0]),
        (("True", "False"), [False, True, True], [1, 0, 0]),
        (("false", "true"), [False, True, True], [0, 1, 1]),
        (("no", "yes"), [False, True, True], [0, 1, 1]),
        (("cat", "dog", "owl"), [2, 0, 1], [2, 0, 1]),
    ],
)
def test_numbers_that_are_names_of_classes(
    tmp_path: Path, names: tuple[str, ...], labels: list[Any], codes: list[int]
) -> None:
    """As in a file of texts, where `classes: ['1', '0']` says that 1 comes first."""
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2)), y=labels)
    assert load(Npz(path=tmp_path / "a.npz"), classes=names).tensors[1].tolist() == codes
    if set(map(str, labels)) <= {*names}:
        lines = "".join(f"1,{label}\n" for label in labels)
        (tmp_path / "a.csv").write_text("x,y\n" + lines)
        read = load(Csv(path=tmp_path / "a.csv", inputs=("x",), label="y"), classes=names)
        assert read.tensors[1].tolist() == codes


def test_a_number_that_no_class_is_called(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2)), y=[1, 2, 0])
    with pytest.raises(ValueError, match=r"out of \['1', '2'\] in .*, got another at sample 2"):
        load(Npz(path=tmp_path / "a.npz"), classes=("1", "2"))


def test_a_column_of_vectors(tmp_path: Path) -> None:
    pyarrow = extra("pyarrow")
    from pyarrow import parquet

    path, vectors = tmp_path / "a.parquet", [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    parquet.write_table(pyarrow.table({"v": vectors, "label": [0, 1]}), path)
    loaded = load(Parquet(path=path, inputs=("v",), label="label"), classes=2)
    assert loaded.shape == (1, 3)
    parquet.write_table(pyarrow.table({"v": [[1.0], [4.0, 5.0]], "label": [0, 1]}), path)
    with pytest.raises(ValueError, match="Expected numbers in column 'v'"):
        load(Parquet(path=path, inputs=("v",), label="label"), classes=2)


def test_hugging_face(tmp_path: Path) -> None:
    datasets = extra("datasets")
    images = [Image.fromarray(image) for image in X]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))}
    )
    made = datasets.Dataset.from_dict({"image": images, "label": Y.tolist()}, features=features)
    made.save_to_disk(tmp_path / "one")
    same(HuggingFace(path=tmp_path / "one"))
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "several")
    same(HuggingFace(path=tmp_path / "several", split="train"))
    with pytest.raises(ValueError, match=r"has 1 splits\. Name one as `split`"):
        load(HuggingFace(path=tmp_path / "several"), classes=10)
    with pytest.raises(ValueError, match="no column 'text'"):
        load(HuggingFace(path=tmp_path / "one", inputs="text"), classes=10)


def test_scaling_is_by_constants_only(tmp_path: Path) -> None:
    """A record's tensor does not depend on the other records."""
    np.savez(tmp_path / "all.npz", x=X, y=Y)
    np.savez(tmp_path / "few.npz", x=X[:3], y=Y[:3])
    settings = {"scale": 2.0, "mean": 3.0, "std": (4.0,)}
    everyone = load(Npz(path=tmp_path / "all.npz", **settings), classes=10).tensors[0]
    few = load(Npz(path=tmp_path / "few.npz", **settings), classes=10).tensors[0]
    assert torch.equal(everyone[:3], few)
    torch.testing.assert_close(few, (torch.from_numpy(X[:3]).unsqueeze(1) / 2 - 3) / 4)


def npz(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "bad.npz", **arrays)
    return folder / "bad.npz"


def text(folder: Path, content: str) -> Path:
    (folder / "bad.csv").write_text(content)
    return folder / "bad.csv"


def idx(folder: Path, content: bytes) -> Path:
    (folder / "bad").write_bytes(content)
    return folder / "bad"


def images(folder: Path, *sizes: tuple[int, int]) -> Path:
    for number, size in enumerate(sizes):
        (folder / "images" / f"c{number}").mkdir(parents=True)
        Image.new("L", size).save(folder / "images" / f"c{number}" / "a.png")
    return folder / "images"


BAD = {
    "missing": (lambda f: Npz(path=f / "no.npz"), r"There is nothing at .*no\.npz"),
    "not npz": (lambda f: Npz(path=text(f, "hello")), "not a readable npz file"),
    "no array": (lambda f: Npz(path=npz(f, a=X, y=Y)), "no array 'x' among its 2"),
    "lengths": (lambda f: Npz(path=npz(f, x=X, y=Y[:5])), "one label for each of the 40 samples"),
    "flat": (lambda f: Npz(path=npz(f, x=Y, y=Y)), r"inputs of shape \(samples, …\)"),
    "texts": (lambda f: Npz(path=npz(f, x=np.array([["a"]]), y=[0])), "Expected numbers as inputs"),
    "empty": (lambda f: Npz(path=npz(f, x=X[:0], y=Y[:0])), "at least one sample"),
    "label": (lambda f: Npz(path=npz(f, x=X, y=Y + 1)), r"from 0 to 9 .*, got another at sample"),
    "negative": (lambda f: Npz(path=npz(f, x=X, y=-Y)), r"from 0 to 9 .*, got another at"),
    "nan": (
        lambda f: Npz(path=npz(f, x=np.where(X > 200, np.nan, 1.0), y=Y)),
        "samples in .* hold NaN or infinity",
    ),
    "half label": (lambda f: Npz(path=npz(f, x=X, y=Y + 0.5)), "List the names of the classes"),
    "tokens": (lambda f: Npz(path=npz(f, x=X / 2, y=Y), tokens=True), "whole numbers as tokens"),
    "mean": (lambda f: Npz(path=npz(f, x=X, y=Y), mean=(0.0, 1.0)), "mean to be one number, or 1"),
    "std": (lambda f: Npz(path=npz(f, x=X, y=Y), std=0.0), "Expected std > 0"),
    "idx": (lambda f: Idx(path=idx(f, b"\1\2\3\4")), "not an IDX file"),
    "cut idx": (lambda f: Idx(path=idx(f, b"\0\0\x08\1\0\0\0\5ab")), "not a complete IDX file"),
    "idx labels": (lambda f: Idx(path=write_idx(f / "x", X), labels=f / "y"), "nothing at .*y"),
    "file": (lambda f: ImageFolder(path=text(f, "")), "Expected a folder of images"),
    "folders": (lambda f: ImageFolder(path=images(f, (2, 2))), r"10 classes .* got 1\. List"),
    "no images": (lambda f: ImageFolder(path=f, labelled=False), "There are no images"),
    "column": (lambda f: Csv(path=text(f, "a,b\n1,2\n"), inputs=("c",)), "no column 'c' among"),
    "twice": (lambda f: Csv(path=text(f, "a,a\n1,2\n"), inputs=("a",)), "two columns 'a'"),
    "numeric": (
        lambda f: Csv(path=text(f, "a,b\n1,2\nx,3\n"), inputs=("a", "b")),
        r"numbers in column 'a' .*got something else in row 2. Describe the column",
    ),
    "gap": (lambda f: Csv(path=text(f, "a,b\n1,2\n,3\n"), inputs=("a",)), "else in row 2"),
    "ragged": (lambda f: Csv(path=text(f, "a,b\n1,2\n1\n"), inputs=("a",)), "line 3 has 1 values"),
    "category": (
        lambda f: Csv(path=text(f, "a\nx\n"), inputs=("a",), categories={"a": ("y",)}),
        r"one of \['y'\] in column 'a' .*got something else in row 1",
    ),
    "no input": (
        lambda f: Csv(path=text(f, "a,b\n1,2\n"), inputs=("a",), categories={"b": ("2",)}),
        "categories of columns among inputs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("flaw", BAD)
def test_flaws(tmp_path: Path, flaw: str) -> None:
    make, message = BAD[flaw]
    with pytest.raises((ValueError, OSError), match=message):
        load(make(tmp_path), classes=10)


def test_names_of_classes(tmp_path: Path) -> None:
    path = npz(tmp_path, x=X, y=np.array(NAMES)[Y])
    with pytest.raises(ValueError, match=r"Expected labels out of \['a', 'b'\] .*, got another"):
        load(Npz(path=path), classes=("a", "b"))
    with pytest.raises(ValueError, match="List the names of the classes"):
        load(Npz(path=path), classes=10)
    with pytest.raises(ValueError, match=r"images of one size .* Set `size: \[height, width\]`"):
        load(ImageFolder(path=images(tmp_path, (2, 2), (3, 2))), classes=2)


@pytest.mark.parametrize("room", ["config", "data", "report", "cli"])
def test_every_part_can_be_imported_first(room: str) -> None:
    ran = subprocess.run([sys.executable, "-c", f"import dpspan.app.{room}"], check=False)
    assert ran.returncode == 0
