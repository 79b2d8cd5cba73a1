"""What becomes of columns: every number by hand, and nothing of a row in any message."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from dpspan.accounting.certificate import certificate
from dpspan.accounting.ledger import Ledger
from dpspan.app.config import Config, parse_config
from dpspan.app.data import load
from dpspan.app.preprocessing import Categorical, Date, Preprocessing
from dpspan.app.run import train
from dpspan.app.run.from_config import make_parts
from dpspan.app.section import ConfigError
from dpspan.app.tables import Csv
from dpspan.app.verification import verify
from dpspan.public.data import PublicData

COLUMNS: dict[str, Any] = {
    "id": {"kind": "id"},
    "age": {"kind": "numeric", "low": 0, "high": 100, "fill": 40, "origin": "data dictionary"},
    "pressure": {"kind": "numeric", "low": 60, "high": 180, "indicator": True},
    "ward": {"kind": "categorical", "values": ["A", "B"]},
    "sex": {"kind": "categorical", "values": ["f", "m"], "indicator": True},
    "seen": {"kind": "date", "low": "2020-01-01", "high": "2020-01-11"},
    "note": {"kind": "drop"},
}
TABLE: dict[str, Any] = {
    "age": ["50", "", "250"],
    "pressure": ["120", "SECRET", "-inf"],
    "ward": ["A", "SECRET", ""],
    "sex": ["m", "NA", "SECRET"],
    "seen": ["2020-01-06", "2020-01-11T23:00", "SECRET"],
}
ROWS = [
    [0.0, 0.0, 0.0, 1, 0, 0, 0, 1, 0, 0, 0.0],
    [-0.2, 0.0, 1.0, 0, 0, 1, 0, 0, 0, 1, 1.0],
    [1.0, -1.0, 0.0, 0, 0, 1, 0, 0, 1, 0, 0.0],
]


def described(**changes: Any) -> Preprocessing:
    return Preprocessing.model_validate({"columns": COLUMNS | changes})


def test_every_number() -> None:
    made = described().transform(TABLE)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, ROWS, atol=1e-6)
    assert described().feature_names == [
        "age", "pressure", "pressure missing", "ward=A", "ward=B", "ward other",
        "sex=f", "sex=m", "sex other", "sex missing", "seen",
    ]  # fmt: skip
    assert described().used == ["age", "pressure", "ward", "sex", "seen"]


def test_values_of_other_types_are_the_same_values() -> None:
    table: dict[str, Any] = {
        "age": np.array([50, np.nan, 250]),
        "pressure": [120, [1, 2], -(10**400)],
        "ward": ["A ", None, float("nan")],
        "sex": np.array(["m", "", "x"]),
        "seen": [datetime.date(2020, 1, 6), datetime.datetime(2020, 1, 11, 23), None],
    }
    rows = np.array(ROWS)
    rows[2, 1:3] = 0.0, 1.0  # beyond float64: a gap
    np.testing.assert_allclose(described().transform(table), rows, atol=1e-6)


def test_rows_are_made_one_by_one() -> None:
    whole = described().transform(TABLE)
    for place in range(3):
        alone = {name: values[place : place + 1] for name, values in TABLE.items()}
        np.testing.assert_array_equal(described().transform(alone)[0], whole[place])


def test_dates_in_a_form_of_their_own() -> None:
    seen = {**COLUMNS["seen"], "format": "%d.%m.%Y", "fill": "2020-01-01"}
    made = described(seen=seen).transform(TABLE | {"seen": ["06.01.2020", "2020-01-06", "1.1.20"]})
    np.testing.assert_allclose(made[:, -1], [0.0, -1.0, -1.0])


@pytest.mark.parametrize("values", [["1", "2"], ["1.0", "2.0"]])
def test_whole_numbers_that_gaps_made_fractions_of(values: list[str]) -> None:
    made = described(ward={"kind": "categorical", "values": values})
    wards = [1.0, np.float32(2), float("nan")]
    for column in (wards, np.array(wards)):
        found = made.transform(TABLE | {"ward": column})
        np.testing.assert_array_equal(found[:, 3:6], np.eye(3))
    whole: Any = np.array([1, 2, 3]) if "1" in values else ["1.0", "2.0", "3.0"]
    np.testing.assert_array_equal(made.transform(TABLE | {"ward": whole})[:, 3:6], np.eye(3))


def test_public_rows_spell_whole_numbers_as_others_do() -> None:
    column = Categorical(kind="categorical", origin="public rows")
    nobody: Any = None
    made = column.frozen("ward", lambda _: np.array([2.0, 1.0, np.nan]), nobody, nobody)
    assert made.values == ("1", "2")


@pytest.mark.parametrize(("low", "high", "days"), [(0.1, 0.9, 1), (0.9, 1.2, 2), (0.0, 0.0, None)])
def test_days_that_lie_near_each_other(
    monkeypatch: pytest.MonkeyPatch, low: float, high: float, days: int | None
) -> None:
    day, nobody = datetime.date(2020, 1, 6), cast("Any", None)
    near = tuple(day.toordinal() + part for part in (low, (low + high) / 2, high))
    monkeypatch.setattr("dpspan.accounting.questions.private_quantiles", lambda *_, **__: near)
    column = Date.model_validate(COLUMNS["seen"] | {"origin": "paid release", "epsilon": 0.1})
    made: Any = column.frozen("seen", nobody, lambda _: [], Ledger())
    found = (column.low, column.high) if days is None else (day, day + datetime.timedelta(days))
    assert (made.low, made.high) == found
    assert made.low <= made.fill <= made.high
    public = Date(kind="date", origin="public rows")
    two = public.frozen("seen", lambda _: [day, day + datetime.timedelta(1)], nobody, nobody)
    assert (two.low, two.high) == (day, day + datetime.timedelta(1))
    with pytest.raises(ValueError, match="several values of 'seen' in public rows") as caught:
        public.frozen("seen", lambda _: [day, day], nobody, nobody)
    assert "2020" not in str(caught.value)


def test_json_there_and_back() -> None:
    one = described()
    again = Preprocessing.of_document(json.loads(json.dumps(one.document())))
    assert again == one
    assert again.digest == one.digest != described(note={"kind": "id"}).digest
    assert one.summary()["origins"] == {
        "data dictionary": ["age"],
        "configuration": ["pressure", "ward", "sex", "seen"],
    }


@pytest.mark.parametrize(
    "document",
    [
        "SECRET",
        None,
        {"format": "dpspan.preprocessing", "version": 2, "columns": {}},
        {"format": "dpspan.preprocessing", "version": 1},
        {"format": "dpspan.preprocessing", "version": 1, "columns": {"SECRET": {"kind": "SECRET"}}},
    ],
)
def test_no_description(document: Any) -> None:
    with pytest.raises(ValueError, match="description of columns") as caught:
        Preprocessing.of_document(document)
    assert "SECRET" not in str(caught.value)
    assert caught.value.__context__ is None


def test_all_missing_columns_are_named_at_once() -> None:
    table = {name: values for name, values in TABLE.items() if name not in ("age", "ward")}
    with pytest.raises(ValueError, match=r"does not have: 'age' \(did you mean 'Age'\?\), 'ward'"):
        described().transform(table | {"Age": TABLE["age"]})


# -- in a configuration ---------------------------------------------------------------------------


def configuration(folder: Path, **data: Any) -> str:
    """YAML, of which JSON is a part."""
    source = {"format": "csv", "path": str(folder / "p.csv"), "label": "ill"}
    whole = {
        "data": {"classes": ["no", "yes"], "private": source, "preprocessing": COLUMNS} | data,
        "model": {"name": "logistic"},
        "method": {"name": "dpsgd", "clip": 1.0},
        "budget": {"epsilon": 3.0, "delta": 1e-3, "accountant": "rdp"},
        "training": {
            "epochs": 2,
            "batch_size": 8,
            "optimizer": {"name": "sgd", "learning_rate": 0.1},
        },
        "output": {"folder": str(folder / "run")},
    }
    return json.dumps(whole, indent=1)


def write_table(path: Path, rows: int = 40, **columns: str) -> None:
    header = "id,age,pressure,ward,sex,seen,note,ill"
    lines = []
    for row in range(rows):
        values = {
            "id": f"P{row}",
            "age": str(row),
            "pressure": str(60 + row) if row % 5 else "",
            "ward": "AB?"[row % 3],
            "sex": "fm"[row % 2],
            "seen": f"2020-01-{1 + row % 11:02}",
            "note": "SECRET",
            "ill": "yes" if row % 2 else "no",
        }
        lines.append(",".join((values | columns).values()))
    path.write_text("\n".join([header, *lines]) + "\n")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"preprocessing": {}}, "Expected `inputs` here, or a description of columns"),
        (
            {"private": {"format": "csv", "path": "a", "inputs": ["age"], "label": "ill"}},
            "Leave inputs, categories, scale, mean and std out here",
        ),
        (
            {"private": {"format": "csv", "path": "a", "std": 2.0}},
            "Leave inputs, categories, scale, mean and std out here",
        ),
        ({"test": {"format": "npz", "path": "a", "inputs": "x"}}, "Expected a table"),
        ({"unit": "age"}, "Labels and data.unit are no inputs"),
        (
            {"private": {"format": "csv", "path": "a", "label": "age"}},
            "Labels and data.unit are no inputs",
        ),
        ({"preprocessing": {"id": {"kind": "id"}}}, "at least one column"),
        (
            {"preprocessing": {"age": {"kind": "numeric", "low": 2, "high": 1}}},
            "lower bound below the upper",
        ),
        *(
            ({"preprocessing": {"seen": COLUMNS["seen"] | {"low": low}}}, "Expected a day, such as")
            for low in (math.inf, 1.5, "01.01.2020", 5, True)
        ),
        (
            {"preprocessing": {"age": {"kind": "numeric", "low": 0, "high": 1, "fill": 3}}},
            "`fill` between them",
        ),
        ({"preprocessing": {"age": {"kind": "categorical", "values": ["a", "a"]}}}, "value once"),
        ({"preprocessing": {"age": {"kind": "number"}}}, "Expected 'kind' to be one of 'numeric'"),
    ],
)
def test_descriptions_that_cannot_be(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(configuration(tmp_path, **data))
    assert message in str(caught.value)


def test_a_run_keeps_and_certifies_it(tmp_path: Path) -> None:
    write_table(tmp_path / "p.csv")
    config = parse_config(configuration(tmp_path))
    assert train(config).status == "finished"
    run = tmp_path / "run"
    kept = Preprocessing.of_document(json.loads((run / "preprocessing.json").read_text()))
    assert kept.columns == described().columns
    stated = json.loads((run / "certificate.json").read_text())["training"]["preprocessing"]
    assert stated == kept.summary()
    assert all(check.holds for check in verify(run).checks)
    (run / "preprocessing.json").write_text("{}")
    assert [check.name for check in verify(run).checks if not check.holds] == ["columns"]
    again: Config = parse_config((run / "config.yaml").read_text())
    assert again == config
    for file in run.iterdir():
        assert b"SECRET" not in file.read_bytes()


def test_a_column_of_which_nothing_can_be_read_is_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "p.csv", age="1;5 SECRET", ward="SECRET")
    source = Csv(path=tmp_path / "p.csv", label="ill")
    with pytest.raises(ValueError, match=r"in columns 'age', 'ward' of .*csv is what") as caught:
        source.prepared(described())
    assert "SECRET" not in str(caught.value)
    write_table(tmp_path / "p.csv", rows=3, ward="C")  # a few may well be others
    assert source.prepared(described())[0].shape == (3, 11)


# -- found in public rows, or released ------------------------------------------------------------

PLANS: dict[str, Any] = {
    "age": {"kind": "numeric", "origin": "public rows"},
    "pressure": {
        "kind": "numeric",
        "origin": "paid release",
        "low": 0,
        "high": 300,
        "epsilon": 0.5,
    },
    "ward": {"kind": "categorical", "origin": "public rows"},
    "seen": {"kind": "date", "origin": "public rows"},
    "sex": COLUMNS["sex"] | {"values": ["f", "m", "x"]},  # tells public rows
}


def planned(folder: Path, **data: Any) -> Config:
    write_table(folder / "p.csv", rows=90)
    write_table(folder / "public.csv", rows=60, sex="x")
    public = {"clinic": {"format": "csv", "path": str(folder / "public.csv"), "label": "ill"}}
    return parse_config(
        configuration(folder, **({"preprocessing": PLANS, "public": public} | data))
    )


def test_what_public_rows_and_releases_tell(tmp_path: Path) -> None:
    config = planned(tmp_path)
    train(config)
    run = tmp_path / "run"
    kept = Preprocessing.of_document(json.loads((run / "preprocessing.json").read_text()))
    age, pressure, ward, seen, _ = (kept.columns[name].model_dump(mode="json") for name in PLANS)
    assert (age["low"], age["fill"], age["high"]) == (0.025 * 59, 29.5, 0.975 * 59)
    assert ward["values"] == ["A", "B"]  # '?' is a gap
    assert (seen["low"], seen["fill"], seen["high"]) == ("2020-01-01", "2020-01-05", "2020-01-11")
    assert 0 <= pressure["low"] <= pressure["fill"] <= pressure["high"] <= 300
    document = json.loads((run / "certificate.json").read_text())
    origins = {
        "public rows": ["age", "ward", "seen"],
        "paid release": ["pressure"],
        "configuration": ["sex"],
    }
    assert document["training"]["preprocessing"]["origins"] == origins
    first, steps = document["events"]
    assert first["count"] == 3  # three quantiles, which share ε
    assert "0.1666" in first["text"]
    assert steps["count"] == document["steps"] - 3
    assert document["epsilon"] <= 3.0  # all of it together
    (public,) = document["public"]
    clinic, labels = config.data.public["clinic"], config.data.labels
    rows = load(clinic, classes=labels, preprocessing=kept).tensors
    assert public["sha256"] == PublicData.of(rows).digest
    assert (public["name"], public["count"]) == ("clinic", 60)
    assert public["detail"] == "bounds and values of columns"


def test_a_release_is_made_once_and_paid_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = planned(tmp_path), tmp_path / "run"
    monkeypatch.setattr("dpspan.app.run.from_config._load", lambda *_, **__: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            train(config)
        ledger = json.loads((run / "ledger.json").read_text())
        assert ledger["steps"] == 3
        released = (run / "preprocessing.json").read_text()
    assert (run / "preprocessing.json").read_text() == released
    other = planned(tmp_path, preprocessing=PLANS | {"note": {"kind": "drop"}})
    with pytest.raises(ValueError, match="was released for another"):
        train(other)


def test_bounds_are_not_used_without_their_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the ledger is lost, or the description was copied to another folder."""
    config, run = planned(tmp_path), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("dpspan.app.run.from_config._load", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config)
    paid = (run / "ledger.json").read_text()
    (run / "ledger.json").unlink()
    with pytest.raises(ValueError, match=r"ledger\.json is missing, or lacks the price"):
        train(config)
    (run / "ledger.json").write_text(json.dumps(Ledger().state_dict()))
    with pytest.raises(ValueError, match=r"ledger\.json is missing, or lacks the price"):
        train(config)
    (run / "ledger.json").write_text(paid)
    train(config)
    assert verify(run).holds
    document = json.loads((run / "certificate.json").read_text())
    ledger = Ledger.from_state(json.loads((run / "ledger.json").read_text()))
    unpaid = Ledger(accountant="pld")
    for event, count in ledger.events[1:]:
        unpaid.charge(event, count)
    without = certificate(unpaid, delta=document["delta"], training=document["training"])
    (tmp_path / "alone.json").write_text(json.dumps(without))
    (problem,) = (c.detail for c in verify(tmp_path / "alone.json").checks if c.holds is False)
    assert "bounds of columns were bought, and no event is their price" in problem


def test_bounds_that_cost_nothing_are_found_anew_until_a_run_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {k: v for k, v in PLANS.items() if k != "pressure"}
    config = planned(tmp_path, preprocessing=free)
    with monkeypatch.context() as patch:
        patch.setattr("dpspan.app.run.from_config.Run.start", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config)
    before = (tmp_path / "run" / "preprocessing.json").read_text()
    write_table(tmp_path / "public.csv", rows=30, sex="x")
    train(config)
    assert (tmp_path / "run" / "preprocessing.json").read_text() != before


def test_nothing_is_kept_of_public_rows_that_are_private(tmp_path: Path) -> None:
    config = planned(
        tmp_path, preprocessing={k: v for k, v in PLANS.items() if k not in ("pressure", "sex")}
    )
    with pytest.raises(ValueError, match="also occur in the private data"):
        train(config)
    assert not (tmp_path / "run" / "preprocessing.json").exists()


def test_records_that_bounds_make_equal_are_not_called_copies(tmp_path: Path) -> None:
    write_table(tmp_path / "p.csv", age="150", seen="2020-01-01", pressure="90")
    write_table(tmp_path / "test.csv", age="151", seen="2019-12-31", pressure="90")
    source = {"format": "csv", "path": str(tmp_path / "test.csv"), "label": "ill"}
    config = parse_config(configuration(tmp_path, test=source, test_is_public=True))
    with pytest.raises(
        ValueError, match=r"\(equal as data\.preprocessing makes them, e\.g\. sample"
    ):
        make_parts(config)


def test_releases_are_not_made_in_passing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="yet to be released"):
        make_parts(planned(tmp_path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"unit": "id"}, "Released bounds protect one record"),
        (
            {"preprocessing": {"age": COLUMNS["age"] | {"origin": "paid release"}}},
            "Expected `epsilon` with `origin: paid release`",
        ),
        (
            {"preprocessing": {"age": COLUMNS["age"] | {"epsilon": 0.1}}},
            "Expected `epsilon` with `origin: paid release`",
        ),
        ({"preprocessing": {"age": {"kind": "numeric"}}}, "Expected `low` and `high`, or neither"),
        (
            {"preprocessing": {"age": PLANS["age"] | {"low": 3}}},
            "Expected `low` and `high`, or neither",
        ),
        ({"preprocessing": {"ward": {"kind": "categorical"}}}, "Expected `values`, or"),
        (
            {"preprocessing": {"pressure": PLANS["pressure"] | {"low": 400}}},
            "lower bound below the upper",
        ),
    ],
)
def test_plans_that_cannot_be(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path, **data)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("age", {"age": "7"}, "several values of 'age'"),
        ("ward", {"ward": "?"}, r"1 to 100 values of 'ward' in public rows.*, got 0"),
        ("seen", {"seen": "SECRET"}, "several values of 'seen'"),
    ],
)
def test_public_rows_that_do_not_tell(
    tmp_path: Path, name: str, values: dict[str, str], message: str
) -> None:
    config = planned(tmp_path, preprocessing={name: PLANS[name]})
    write_table(tmp_path / "public.csv", **values)
    with pytest.raises(ValueError, match=message):
        make_parts(config)


def test_public_test_data_are_on_the_certificate(tmp_path: Path) -> None:
    write_table(tmp_path / "p.csv")
    write_table(tmp_path / "test.csv", rows=7, age="99")
    test = {"format": "csv", "path": str(tmp_path / "test.csv"), "label": "ill"}
    train(parse_config(configuration(tmp_path, test=test, test_is_public=True)))
    document = json.loads((tmp_path / "run" / "certificate.json").read_text())
    (declared,) = document["public"]
    assert (declared["name"], declared["count"], declared["detail"]) == ("test", 7, "measured on")
    assert len(declared["sha256"]) == 64
