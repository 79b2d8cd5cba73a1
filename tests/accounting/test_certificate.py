"""The certificate: strict JSON, true to the ledger, written whole or not at all."""

import datetime
import importlib.metadata
import json
import math
import os
import platform

import numpy as np
import pytest
import torch
from dp_accounting import dp_event, pld
from dp_accounting.dp_event import GaussianDpEvent

from dpspan.accounting.certificate import certificate, write_certificate
from dpspan.accounting.events import event_from_json, step_event
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.promises import Budget

DELTA = 1e-5
TRAINING = {"method": {"name": "DP-SGD", "clip": 1.0}, "sampling": "Poisson, q = 0.025"}


def ledger_with(*runs, **options):
    ledger = Ledger(**options)
    for event, count in runs:
        ledger.charge(event, count)
    return ledger


def names(folder):
    return [path.name for path in folder.iterdir()]


def strict(document):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(json.dumps(document, allow_nan=False), parse_constant=refuse)


def test_it_says_what_was_spent_and_how():
    event = step_event(18, 0.025)
    ledger = ledger_with((event, 1200), budget=Budget(epsilon=0.2, delta=DELTA))
    ledger.declare_public("mnist-100", "ab" * 32, 100, "labelled")
    ledger.warn("one warning")
    document = strict(certificate(ledger, delta=DELTA, training=TRAINING))
    assert (document["format"], document["version"]) == ("dpspan.certificate", 1)
    assert document["private"] is True
    assert document["not_private_because"] == []
    assert document["epsilon"] == pytest.approx(0.1541, abs=1e-3)
    assert document["epsilon"] == ledger.epsilon()
    assert document["delta"] == DELTA
    assert document["budget"] == {"epsilon": 0.2, "delta": DELTA}
    assert document["adjacency"] == "add or remove one record"
    assert document["accountant"]["chosen"] == document["accountant"]["used"] == "pld"
    assert document["accountant"]["fallback"] is False
    assert document["training"] == TRAINING
    assert document["steps"] == 1200
    assert [entry["count"] for entry in document["events"]] == [1200]
    assert "1200 × PoissonSampledDpEvent" in document["events"][0]["text"]
    assert event_from_json(document["events"][0]["event"]) == event
    assert document["public"] == [
        {"name": "mnist-100", "count": 100, "sha256": "ab" * 32, "detail": "labelled"}
    ]
    assert document["warnings"] == ["one warning"]


def test_epsilon_can_be_recomputed_from_the_document():
    ledger = ledger_with((GaussianDpEvent(40.0), 2), (step_event(5, 1e-4), 20_000))
    document = strict(certificate(ledger, delta=DELTA, training={}))
    interval = document["accountant"]["value_discretization_interval"]
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    for entry in document["events"]:
        accountant.compose(event_from_json(entry["event"]), entry["count"])
    assert accountant.get_epsilon(DELTA) == pytest.approx(document["epsilon"], rel=1e-9)


def test_when_and_where_it_was_made():
    document = certificate(Ledger(), delta=DELTA, training={})
    created = datetime.datetime.fromisoformat(document["created"])
    assert created.utcoffset() == datetime.timedelta(0)
    assert abs(datetime.datetime.now(datetime.UTC) - created) < datetime.timedelta(minutes=1)
    versions = document["versions"]
    assert versions["python"] == platform.python_version()
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert versions["numpy"] == np.__version__
    assert versions["dp-accounting"] == importlib.metadata.version("dp-accounting")
    assert set(versions) == {"python", "platform", "dpspan", "torch", "dp-accounting", "numpy"} | {
        "scipy",
        "scikit-learn",
    }


def test_delta_defaults_to_the_budget():
    ledger = ledger_with((GaussianDpEvent(5.0), 1), budget=Budget(epsilon=9.0, delta=1e-7))
    assert certificate(ledger, training={})["delta"] == 1e-7
    with pytest.raises(ValueError, match="Expected delta"):
        certificate(Ledger(), training={})


def test_infinite_epsilon_is_a_word_and_not_private():
    ledger = ledger_with((dp_event.NonPrivateDpEvent(), 1))
    document = strict(certificate(ledger, delta=DELTA, training={}))
    assert document["epsilon"] == "infinity"
    assert document["private"] is False
    assert document["not_private_because"] == ["no finite ε covers what was released"]


def test_an_invalidated_run_is_not_private_whatever_its_epsilon():
    ledger = ledger_with((GaussianDpEvent(5.0), 1))
    ledger.invalidate("the noise came from a fixed seed")
    document = certificate(ledger, delta=DELTA, training={})
    assert document["private"] is False
    assert document["not_private_because"] == ["the noise came from a fixed seed"]
    assert math.isfinite(document["epsilon"])


def test_a_fallback_is_reported():
    ledger = ledger_with((dp_event.ZCDpEvent(0.1), 1))
    document = certificate(ledger, delta=DELTA, training={})
    accountant = document["accountant"]
    assert (accountant["chosen"], accountant["used"]) == ("pld", "rdp")
    assert accountant["fallback"] is True
    assert accountant["value_discretization_interval"] is None
    assert len(document["warnings"]) == 1
    assert "rdp accountant" in document["warnings"][0]


def test_training_becomes_plain_values():
    training = {"clip": np.float32(0.5), "shape": (1, np.int64(2)), "limit": math.inf, 3: None}
    document = strict(certificate(Ledger(), delta=DELTA, training=training))
    assert document["training"] == {"clip": 0.5, "shape": [1, 2], "limit": "infinity", "3": None}


@pytest.mark.parametrize("value", [math.nan, torch.zeros(2), {1, 2}])
def test_training_that_is_not_plain_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"training\.method\[1\]\.clip"):
        certificate(Ledger(), delta=DELTA, training={"method": [0, {"clip": value}]})


def test_writing_makes_the_folder_and_replaces_the_old_file(tmp_path):
    path = tmp_path / "runs" / "a" / "certificate.json"
    for steps in (1, 2):
        ledger = ledger_with((GaussianDpEvent(5.0), steps))
        document = certificate(ledger, delta=DELTA, training=TRAINING)
        assert write_certificate(str(path), document) == path
        assert json.loads(path.read_text(encoding="utf-8")) == document
    assert names(path.parent) == ["certificate.json"]


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    path = tmp_path / "certificate.json"
    write_certificate(path, {"epsilon": 1.0})

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space left on device") as error:
        write_certificate(path, {"epsilon": 2.0})
    assert str(path) in str(error.value)
    assert json.loads(path.read_text(encoding="utf-8")) == {"epsilon": 1.0}
    assert names(tmp_path) == ["certificate.json"]


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    path = tmp_path / "file" / "certificate.json"
    with pytest.raises(OSError, match="Choose a folder that can be written to") as error:
        write_certificate(path, {})
    assert str(path) in str(error.value)


def test_a_document_that_is_not_json_is_not_written(tmp_path):
    path = tmp_path / "certificate.json"
    with pytest.raises(ValueError, match=r"document\.epsilon"):
        write_certificate(path, {"epsilon": math.nan})
    assert names(tmp_path) == []


def test_what_is_not_private_is_refused():
    training = {"settings": {"unprivate_loss": 0.3}}
    with pytest.raises(ValueError, match=r"training.settings.unprivate_loss .* without noise"):
        certificate(Ledger(), delta=DELTA, training=training)
