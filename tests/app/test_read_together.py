"""What private, public and test data have to have in common, and what they must not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpspan
from dpspan.app.cli.comparing import _task
from dpspan.app.config import Config, ConfigError
from dpspan.app.run import RunFolder, train
from dpspan.app.run.from_config import make_parts
from helpers.digits import config, digits, settings, write_images, write_npz

BUDGET = {"epsilon": 3.0, "delta": 1e-5}
NOISY = {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"}
WARM = {"public": "optin", "max_epochs": 1}
METHODS: dict[str, dict[str, Any]] = {
    "a warm start": {"warm_start": WARM},
    "a method": {"method": {"name": "gep", "rank": 2, "public": "optin"}},
    "a choice": {"method": {"name": "gep", "rank": 2}, "choose": {"epsilon": 0.5}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_npz(tmp_path)
    return tmp_path


def changed(folder: Path, **arrays: Any) -> None:
    np.savez(folder / "digits.npz", **{**np.load(folder / "digits.npz"), **arrays})


def run_of(folder: Path, data: Any = None, **sections: Any) -> Config:
    whole: Any = {**settings(folder)["data"], **(data or {})}  # type: ignore[dict-item]
    return config(folder, data=whole, **{"budget": NOISY, **sections})


# -- test data that the model is made with --------------------------------------------------------


@pytest.mark.parametrize("user", METHODS)
@pytest.mark.parametrize("copy", ["all", "public ones"])
def test_public_data_are_no_test_data(folder: Path, user: str, copy: str) -> None:
    arrays = np.load(folder / "digits.npz")
    if copy == "public ones":  # and others
        changed(folder, x_test=np.concatenate([arrays["x_public"], arrays["x_test"][60:]]),
                y_test=np.zeros(len(arrays["x_test"]), int))  # fmt: skip
    else:
        changed(folder, x_test=arrays["x_public"][:9], y_test=arrays["y_public"][:9])
    public: Any = dict(settings(folder)["data"]["public"])  # type: ignore[index]
    if user == "a choice":
        public["other"] = {**public["optin"], "inputs": "x_other", "labels": "y_other"}
    made = run_of(folder, {"public": public}, **METHODS[user])
    with pytest.raises(ValueError, match=r"data\.test also occur in data\.public\.optin.* Give"):
        make_parts(made)


def test_nor_are_they_read_from_the_same_place(folder: Path) -> None:
    """Whatever is declared of equal rows."""
    data: Any = settings(folder)["data"]
    same = {"test": data["public"]["optin"], "equal_rows_allowed": True}
    with pytest.raises(
        ConfigError, match=r"data\.test: These are the records of data\.public\.optin"
    ):
        run_of(folder, same, warm_start=WARM)
    run_of(folder, same)


def test_public_data_without_use_may_be_anything(folder: Path) -> None:
    data: Any = settings(folder)["data"]
    make_parts(run_of(folder, {"public": {"optin": data["test"]}}))


def test_nor_is_it_looked_at_by_a_comparison_that_does_not_use_it(folder: Path) -> None:
    data: Any = settings(folder)["data"]
    unused = run_of(folder, {"public": {"optin": data["test"]}}, budget=BUDGET)
    assert _task({"plain": unused}, folder / "out")
    used = run_of(folder, budget=BUDGET, warm_start=WARM)
    arrays = np.load(folder / "digits.npz")
    changed(folder, x_test=arrays["x_public"], y_test=arrays["y_public"])
    with pytest.raises(ValueError, match=r"data\.test also occur in data\.public\.optin"):
        _task({"plain": run_of(folder, budget=BUDGET), "warm": used}, folder / "other")


def test_a_few_equal_rows_are_on_record(folder: Path) -> None:
    arrays = dict(np.load(folder / "digits.npz"))
    arrays["x_test"][:3] = arrays["x_public"][:3]
    changed(folder, x_test=arrays["x_test"])
    with pytest.warns(UserWarning, match=r"3 of the 60 samples of data\.test also occur"):
        train(run_of(folder, warm_start=WARM))
    certificate = json.loads(RunFolder(folder / "run").certificate.read_text())
    assert any("3 of the 60 samples of data.test" in each for each in certificate["warnings"])


def test_copies_in_test_data_that_are_not_public_are_not_on_record(folder: Path) -> None:
    arrays = dict(np.load(folder / "digits.npz"))
    arrays["x_test"][:3] = arrays["x_public"][:3]
    changed(folder, x_test=arrays["x_test"])
    with pytest.warns(UserWarning, match=r"depends on private data: do not publish it"):
        train(run_of(folder, {"test_is_public": False}, warm_start=WARM))
    assert "also occur" not in RunFolder(folder / "run").certificate.read_text()


def test_rows_that_are_declared_equal_are_taken(folder: Path) -> None:
    arrays = np.load(folder / "digits.npz")
    changed(folder, x_test=arrays["x_public"][:9], y_test=arrays["y_public"][:9])
    make_parts(run_of(folder, {"equal_rows_allowed": True}, warm_start=WARM))


# -- by what inputs are divided -------------------------------------------------------------------


@pytest.mark.parametrize("part", ["test", "public"])
def test_pixels_of_two_kinds_are_refused(folder: Path, part: str) -> None:
    values = np.load(folder / "digits.npz")[f"x_{part}"][:, None].astype(np.float32)
    changed(folder, **{f"x_{part}": values})
    with pytest.raises(
        ValueError, match=r"divided by 255 .* by 1: .* write `scale` in both, the same if they are"
    ):
        make_parts(run_of(folder))
    data: Any = settings(folder)["data"]
    stated = {key: {**data[key], "scale": 255.0} for key in ("private", "test")}
    public = {"optin": {**data["public"]["optin"], "scale": 255.0}}
    read = make_parts(run_of(folder, {**stated, "public": public}))
    assert read.test is not None
    assert read.private.scale == read.test.scale == 255.0


@pytest.mark.filterwarnings("ignore:dpspan. data.test and data.private differ in scale")
def test_two_scales_that_are_stated_are_taken(folder: Path) -> None:
    changed(folder, x_test=np.load(folder / "digits.npz")["x_test"][:, None] / 255)
    data: Any = settings(folder)["data"]
    stated = {
        "private": {**data["private"], "scale": 255.0},
        "test": {**data["test"], "scale": 1.0},
    }
    make_parts(run_of(folder, {**stated, "public": {}}))


def test_a_model_predicts_on_the_scale_that_it_was_trained_on(folder: Path) -> None:
    train(run_of(folder))
    run, x = dpspan.load_run("run"), np.load(folder / "digits.npz")["x_test"]
    np.savez("pixels.npz", x_train=x)
    np.savez("floats.npz", x_train=x[:, None].astype(np.float32))
    known = run.predict_proba("pixels.npz")
    np.testing.assert_allclose(run.predict_proba(x[:, None] / 255), known, atol=1e-6)
    with pytest.raises(ValueError, match=r"trained on inputs divided by 255.* floats\.npz .* by 1"):
        run.predict_proba("floats.npz")
    facts = json.loads(RunFolder("run").run.read_text())
    assert facts.pop("scale") == 255.0
    RunFolder("run").run.write_text(json.dumps(facts))  # of before
    dpspan.load_run("run").predict_proba("floats.npz")


# -- what classes are called ----------------------------------------------------------------------


def test_folders_of_images_have_classes_of_the_same_names(tmp_path: Path) -> None:
    x, _ = digits(40)
    for name, part, labels in (("a", slice(20), ("0", "1")), ("b", slice(20, 40), ("2", "0"))):
        for number, label in enumerate(labels):
            write_images(tmp_path / name / label, x[part][number::2], np.full(10, number))
    source = {"format": "images", "channels": 1}
    parts = {"private": {**source, "path": "a"}, "test": {**source, "path": "b"}}
    parts = {key: {**each, "path": str(tmp_path / each["path"])} for key, each in parts.items()}
    with pytest.raises(ValueError, match=r"data\.test .* other names .* List .* in `classes`"):
        make_parts(run_of(tmp_path, {**parts, "public": {}, "classes": 2}))
    parts["test"] = {**parts["test"], "path": str(tmp_path / "c")}
    write_images(tmp_path / "c" / "0", x[20:30], np.zeros(10, int))
    write_images(tmp_path / "c" / "1", x[30:40], np.zeros(10, int))
    make_parts(run_of(tmp_path, {**parts, "public": {}, "classes": 2}))
