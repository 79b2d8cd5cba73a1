"""`dpspan tune`: its price against dp-accounting's own, what it leaves behind, interruptions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import dp_event, pld, rdp
from typer.testing import CliRunner

import dpspan
from dpspan.accounting.epsilon import account
from dpspan.app import tune as tuning
from dpspan.app.cli import app
from dpspan.app.config import load_config
from dpspan.app.report import render
from dpspan.app.run import RunFolder
from dpspan.app.run.folder import read_json, read_lines
from dpspan.app.run.training import Training
from dpspan.app.tune import geometric, tune, tuning_event
from dpspan.app.verification import verify
from dpspan.engine.checkpoint import load_file
from helpers.digits import config, settings, write_npz

BUDGET = {"epsilon": 3.0, "delta": 1e-3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_npz(tmp_path, samples=300)
    return tmp_path


def three_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "geometric", lambda tries: 3)


# -- the price ------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", [None, 10.0])
@pytest.mark.parametrize("tries", [2, 5, 20])
def test_the_price_is_dp_accountings_own(tries: int, score: float | None) -> None:
    z, q, steps, delta = 4.0, 0.05, 200, 1e-5
    parts: list[Any] = [
        dp_event.SelfComposedDpEvent(
            dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z)), steps
        )
    ]
    parts += [] if score is None else [dp_event.GaussianDpEvent(score)]
    whole = dp_event.RepeatAndSelectDpEvent(dp_event.ComposedDpEvent(parts), tries, 1)
    oracle = rdp.RdpAccountant().compose(whole).get_epsilon(delta)
    event = tuning_event(z, sample_rate=q, steps=steps, tries=tries, score_noise=score)
    ledger = dpspan.Ledger(accountant="rdp")
    ledger.charge(event)
    assert ledger.epsilon(delta) == pytest.approx(oracle, abs=1e-9)
    alone = account([(parts[0], 1)], delta, "rdp").epsilon
    assert ledger.epsilon(delta) > 1.4 * alone  # a search is never for nothing


# By dp-accounting 0.6.0; one such run without a search costs 0.7334.
GOLDEN = {(1, None): 0.7386, (5, None): 1.4253, (5, 10.0): 1.6206}


def test_golden_numbers() -> None:
    found = {
        (tries, score): account(
            [(tuning_event(4.0, sample_rate=0.05, steps=200, tries=tries, score_noise=score), 1)],
            1e-5,
            "rdp",
        ).epsilon
        for tries, score in [(1, None), (5, None), (5, 10.0)]
    }
    assert found == pytest.approx(GOLDEN, abs=1e-3)


def test_pld_cannot_and_the_ledger_says_so() -> None:
    event = tuning_event(4.0, sample_rate=0.05, steps=20, tries=3)
    assert not pld.PLDAccountant().supports(event)
    ledger = dpspan.Ledger(accountant="pld")
    ledger.charge(event)
    spending = ledger.spending(1e-5)
    assert spending.accountant == "rdp"
    assert spending.epsilon == pytest.approx(account([(event, 1)], 1e-5, "rdp").epsilon)
    assert "RepeatAndSelect" in ledger.warnings[0]


def test_the_number_of_tries_has_the_law_that_is_paid_for() -> None:
    n, mean = 20_000, 4
    drawn = Counter(geometric(mean) for _ in range(n))
    for k in range(1, 8):
        expected = (1 / mean) * (1 - 1 / mean) ** (k - 1)
        spread = (expected * (1 - expected) / n) ** 0.5
        assert abs(drawn[k] / n - expected) < 5 * spread
    assert geometric(1) == 1


# -- a search -------------------------------------------------------------------------------------


def test_a_search_leaves_one_run_and_its_price(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_tries(monkeypatch)
    reached: list[float] = []
    noisy = tuning.private_metric

    def spy(right: Any, **options: Any) -> Any:
        assert len(right) == 240  # all private records
        found = noisy(right, **options)
        reached.append(found.value)
        work = folder / "run" / ".tune"
        assert work.stat().st_mode & 0o77 == 0  # for the operator alone
        assert (folder / "run" / "ledger.json").exists()
        assert not (folder / "run" / "model.safetensors").exists()
        return found

    monkeypatch.setattr(tuning, "private_metric", spy)
    found = tune(config(folder, budget=BUDGET), clip=(0.1, 10.0))
    run = RunFolder(folder / "run")
    assert len(reached) == 3
    assert found.score == max(reached)
    assert 2.99 < found.epsilon <= 3.0
    assert 0.1 <= found.found["clip"] <= 10.0
    document = read_json(run.certificate)
    assert document["private"]
    assert document["accountant"]["used"] == document["accountant"]["chosen"] == "rdp"
    assert document["training"]["tuning"]["learning_rate"] == found.found["learning_rate"]
    assert document["training"]["clip"] == found.found["clip"]
    (event,) = document["events"]
    assert event["count"] == 1
    assert event["event"]["kind"] == "RepeatAndSelectDpEvent"
    assert event["event"]["mean"] == 5
    ((charged, _),) = dpspan.Ledger.from_state(read_json(run.ledger)).events
    oracle = rdp.RdpAccountant().compose(charged)
    assert oracle.get_epsilon(1e-3) == pytest.approx(found.epsilon, abs=1e-6)
    assert verify(run.path).holds
    assert all(check.holds for check in verify(run.path).checks)
    kept = {path.name for path in run.path.iterdir()} - {".lock"}
    assert kept == {
        "certificate.json", "config.yaml", "evaluation.json", "ledger.json", "metrics.jsonl",
        "model.safetensors", "run.json",
    }  # fmt: skip
    assert load_config(run.config).method.clip == found.found["clip"]
    (line,) = read_lines(run.metrics)
    assert line["test_accuracy"] == found.metrics["test_accuracy"]
    page = render([run.path], folder / "report.html").read_text()
    assert "A search: the best of a random number of trainings, 5 on average" in page
    alone = rdp.RdpAccountant().compose(charged.event).get_epsilon(1e-3)
    assert document["search"].endswith(f"a single try would have cost ε = {alone:.3g}")
    assert alone < 0.7 * found.epsilon
    assert f"single try would have cost ε = {alone:.3g}." in page
    with pytest.raises(ValueError, match=r"holds a run already\. Choose another output folder"):
        tune(config(folder, budget=BUDGET))


def test_the_best_score_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_tries(monkeypatch)
    tried: list[float] = []

    def score(_: Any, training: Any) -> float:
        tried.append(training.contender.learning_rate)
        return -abs(len(tried) - 2)

    monkeypatch.setattr(tuning._Search, "_score", score)
    found = tune(config(folder, budget=BUDGET), learning_rate=(0.01, 0.1))
    assert found.found == {"learning_rate": tried[1]}
    assert all(0.01 <= rate <= 0.1 for rate in tried)
    assert len(set(tried)) > 1  # of three digits two may be the same


def test_an_error_that_is_not_the_weights_fault_scores_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a record's: which try is released must not depend on that."""
    three_tries(monkeypatch)
    take_steps = Training.take_steps

    def failing(training: Training) -> Iterator[bool]:
        yield next(take_steps(training))
        raise ValueError("a record cannot be read")

    monkeypatch.setattr(Training, "take_steps", failing)
    with pytest.raises(ValueError, match="a record cannot be read"):
        tune(config(folder, budget=BUDGET))
    assert not RunFolder(folder / "run").certificate.exists()


def test_an_interrupted_search_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_tries(monkeypatch)
    made: list[float] = []

    def score(_: Any, training: Any) -> float:
        made.append(float(len(made)))
        if len(made) == 2:
            raise KeyboardInterrupt
        return made[-1]

    monkeypatch.setattr(tuning._Search, "_score", score)
    chosen, run = config(folder, budget=BUDGET), RunFolder(folder / "run")
    with pytest.raises(KeyboardInterrupt):
        tune(chosen)
    before = read_json(run.ledger)
    assert before["steps"] == 1
    assert not run.certificate.exists()
    state = load_file(run.path / ".tune" / "search.safetensors", {"state", "weights"})["state"]
    assert (state["count"], state["done"]) == (3, 1)

    def never(tries: int) -> int:
        raise AssertionError("the number of tries is drawn once")

    monkeypatch.setattr(tuning, "geometric", never)
    with pytest.raises(ValueError, match="a search with other settings, which has been paid for"):
        tune(chosen, tries=7)
    found = tune(chosen)
    assert len(made) == 4  # the interrupted one once more
    assert found.score == 3.0
    assert read_json(run.ledger)["events"] == before["events"]
    assert not (run.path / ".tune").exists()


def test_killed_between_the_draw_and_the_ledger(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_tries(monkeypatch)
    chosen, run = config(folder, budget=BUDGET), RunFolder(folder / "run")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_ledger", killed)
        with pytest.raises(KeyboardInterrupt):
            tune(chosen)
    assert tune(chosen).epsilon <= 3.0
    assert read_json(run.ledger)["steps"] == 1


def test_public_scores_are_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_tries(monkeypatch)
    monkeypatch.setattr(tuning, "private_metric", None)
    found = tune(config(folder, budget=BUDGET), score_on="optin")
    document = read_json(found.folder / "certificate.json")
    assert "GaussianDpEvent(noise_multiplier" in document["events"][0]["text"]
    assert len(document["events"][0]["event"]["event"]["events"]) == 1
    assert document["training"]["tuning"]["scored_on"] == "optin"
    details = [each["detail"] for each in document["public"]]
    assert details == ["measured on", "scores of a search"]
    assert 0 <= found.score <= 1
    assert verify(found.folder).holds


def test_a_rate_that_diverges_loses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_tries(monkeypatch)
    found = tune(config(folder, budget=BUDGET), learning_rate=(1e8, 1e9))
    assert found.score == -1.0
    assert verify(found.folder).holds


def test_pld_is_converted_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_tries(monkeypatch)
    with pytest.warns(UserWarning, match="tune accounts by RDP instead of PLD"):
        tune(config(folder, budget={**BUDGET, "accountant": "pld"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_on": "nobody"}, "score_on to be a name under data.public, got 'nobody'"),
        ({"learning_rate": (1.0, 0.1)}, "learning_rate to be a range, the lower end first"),
        ({"clip": (0.0, 1.0)}, "clip > 0"),
        ({"tries": 0}, "tries to be an integer of at least 1"),
        ({"epsilon": -1.0}, "epsilon > 0"),
    ],
)
def test_refusals(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune(config(folder, budget=BUDGET), **options)
    assert not (folder / "run").exists()


def test_units_are_refused_by_name(folder: Path) -> None:
    data = settings(folder)["data"] | {"unit": "patient"}
    with pytest.raises(ValueError, match=r"tune` protects records, and data\.unit asks for units"):
        tune(config(folder, budget=BUDGET, data=data))


def test_what_it_cannot_do_is_refused_before_anything_is_paid(folder: Path) -> None:
    linear = {"model": {"name": "logistic"}, "method": {"name": "adagrad"}}
    with pytest.raises(ValueError, match=r"the method adagrad in one fit: settle the hyper"):
        tune(config(folder, budget=BUDGET, **linear))
    with pytest.raises(ValueError, match=r"leave evaluate\.noise_multiplier out"):
        data = settings(folder)["data"] | {"test_is_public": False}
        tune(config(folder, budget=BUDGET, data=data, evaluate={"noise_multiplier": 5.0}))
    assert not list(folder.rglob("ledger.json"))


def test_an_epsilon_is_needed(folder: Path) -> None:
    fixed = {"noise_multiplier": 1.0, "delta": 1e-3}
    with pytest.raises(ValueError, match=r"Expected budget\.epsilon, or epsilon="):
        tune(config(folder, budget=fixed))


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_tries(monkeypatch)
    path = folder / "config.yaml"
    path.write_text(json.dumps(settings(folder, budget={**BUDGET, "epsilon": 1.0})))
    arguments = ["tune", str(path), "--epsilon", "3", "--learning-rate", "0.1", "1", "--json"]
    said = CliRunner().invoke(app, arguments)
    assert said.exit_code == 0, said.stderr
    answer = json.loads(said.stdout)
    assert 2.99 < answer["epsilon"] <= 3.0
    assert 0.1 <= answer["found"]["learning_rate"] <= 1
    assert "count" not in said.stdout
