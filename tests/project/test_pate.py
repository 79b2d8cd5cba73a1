"""PATE among the experiments: what its guarantee rests on, and what its table says."""

from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from experiments import pate, pate_data, pate_table
from experiments.catalogue import load
from experiments.pate_data import Pictures, Setting, Source
from experiments.runner import Place, Results
from scipy import stats

from dpspan.accounting.ledger import Ledger
from dpspan.accounting.promises import Budget
from dpspan.app.section import ConfigError, parse
from dpspan.support.errors import BudgetExceeded
from dpspan.support.secure import SecureGenerator

EXPERIMENT = load("pate")
assert isinstance(EXPERIMENT, pate_table.PateExperiment)
TEACHERS, CLASSES = 5, 3


# -- what one record changes ----------------------------------------------------------------------


class Records:
    """A few records, with what stands for the fingerprint of each."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((count, 4)).astype(np.float32)
        self.y = rng.integers(CLASSES, size=count)
        self.prints = [row.tobytes() for row in self.x]
        self.images = rng.standard_normal((40, 4)).astype(np.float32)

    def learn(self, kept: list[int], parts: np.ndarray) -> np.ndarray:
        return pate.learn_teachers(self.x[kept], self.y[kept], parts, TEACHERS, CLASSES)

    def hashed(self, kept: list[int]) -> np.ndarray:
        return pate.parts_of([self.prints[i] for i in kept], TEACHERS, 7)


@pytest.mark.parametrize("count", [6, 40])  # with six of them some parts have one record, or none
def test_a_record_moves_one_vote_of_each_image_at_most(count: int) -> None:
    """Of all neighbours: each record taken out of the others, which is also each one put in."""
    records = Records(count)
    everything = list(range(count))
    parts = records.hashed(everything)
    teachers = records.learn(everything, parts)
    votes = pate.count_votes(teachers, records.images)
    assert (votes.sum(1) == TEACHERS).all()
    longest = 0.0
    for out in everything:
        rest = [i for i in everything if i != out]
        assert (records.hashed(rest) == parts[rest]).all()
        others = records.learn(rest, records.hashed(rest))
        changed = [t for t in range(TEACHERS) if not np.array_equal(others[t], teachers[t])]
        assert changed == [parts[out]]
        moved = np.linalg.norm(votes - pate.count_votes(others, records.images), axis=1)
        assert moved.max() <= pate.SENSITIVITY + 1e-12
        longest = max(longest, moved.max())
    assert longest == pytest.approx(math.sqrt(2))  # so the bound is not too large


def test_a_partition_by_place_would_change_many_teachers() -> None:
    records = Records(40)
    everything, rest = list(range(40)), list(range(1, 40))
    before = records.learn(everything, np.arange(40) % TEACHERS)
    after = records.learn(rest, np.arange(39) % TEACHERS)
    assert sum(not np.array_equal(a, b) for a, b in zip(before, after, strict=True)) == TEACHERS


def test_parts_are_about_equal_and_change_with_the_seed() -> None:
    prints = [i.to_bytes(8) for i in range(20_000)]
    parts = pate.parts_of(prints, 100, 0)
    sizes = np.bincount(parts, minlength=100)
    assert stats.chisquare(sizes).pvalue > 1e-4
    assert (parts != pate.parts_of(prints, 100, 1)).mean() > 0.95


def test_a_teacher_without_records_votes_for_the_first_class() -> None:
    records = Records(10)
    teachers = records.learn(list(range(10)), np.zeros(10, np.int64))
    assert (pate.count_votes(teachers, records.images)[:, 0] >= TEACHERS - 1).all()


# -- noise and its price --------------------------------------------------------------------------


def test_every_answer_is_charged_before_it_is_given() -> None:
    """ε against dp-accounting by hand, and against the closed form of Gaussian mechanisms."""
    sigma, asked, delta = 60.0, 300, 1e-5
    ledger = Ledger()
    votes = np.zeros((asked, 10), np.int64)
    pate.answer(votes, sigma / math.sqrt(2), ledger, SecureGenerator())
    assert ledger.events == ((GaussianDpEvent(sigma / math.sqrt(2)), asked),)
    by_hand = PLDAccountant().compose(GaussianDpEvent(sigma / math.sqrt(2)), asked)
    assert ledger.epsilon(delta) == pytest.approx(by_hand.get_epsilon(delta), rel=1e-3)
    mu, epsilon = math.sqrt(2 * asked) / sigma, ledger.epsilon(delta)
    exact = stats.norm.cdf(mu / 2 - epsilon / mu)
    exact -= math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    assert exact == pytest.approx(delta, rel=0.02)


def test_nothing_is_answered_beyond_the_budget() -> None:
    class NoNoise(SecureGenerator):
        def standard_normal(self, *_: object, **__: object) -> np.ndarray:
            raise AssertionError("noise was drawn")

    ledger = Ledger(budget=Budget(epsilon=1.0, delta=1e-5))
    with pytest.raises(BudgetExceeded):
        pate.answer(np.zeros((100, 10), np.int64), 5.0, ledger, NoNoise())
    assert ledger.steps == 0


def test_the_noise_of_a_run_keeps_to_its_epsilon() -> None:
    z = pate_table.noise_of(500, 2.0, 1e-5)
    assert 1.99 < PLDAccountant().compose(GaussianDpEvent(z), 500).get_epsilon(1e-5) <= 2.0


def test_noise_has_its_standard_deviation() -> None:
    votes, z = np.full((3000, 10), 25), 4.0
    noise = pate.with_noise(votes, z, SecureGenerator(key=[0])) - votes
    squares = float((noise**2).sum()) / (2 * z**2)
    law = stats.chi2(noise.size)
    assert law.ppf(1e-5) < squares < law.isf(1e-5)


# -- the student ----------------------------------------------------------------------------------


def test_a_ridge_regression_has_the_penalty_of_the_least_error_left_out() -> None:
    rng = np.random.default_rng(1)
    for count in (12, 60):  # fewer rows than columns, and more
        x = rng.standard_normal((count, 20))
        told = pate.one_hot((x[:, 0] + rng.standard_normal(count) > 0).astype(int), 2)

        def fit(rows: np.ndarray, targets: np.ndarray, penalty: float) -> np.ndarray:
            gram = rows.T @ rows + penalty * np.eye(20)
            return np.linalg.solve(gram, rows.T @ (targets - 0.5))

        def left_out(penalty: float, x: np.ndarray = x, told: np.ndarray = told) -> float:
            others = [np.delete(np.arange(len(x)), i) for i in range(len(x))]
            guessed = [x[i] @ fit(x[o], told[o], penalty) for i, o in enumerate(others)]
            return float(((np.array(guessed) - (told - 0.5)) ** 2).sum())

        best = min(pate.PENALTIES, key=left_out)
        np.testing.assert_allclose(pate.Ridge(x).learn(told), fit(x, told, best), atol=1e-5)


def test_labels_are_spread_as_by_the_closed_form() -> None:
    images = np.random.default_rng(2).standard_normal((50, 5)).astype(np.float32)
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    similar = pate.similarity(images)
    assert abs(similar - similar.T).max() < 1e-6
    assert similar.diagonal().max() == 0
    told = pate.one_hot(np.array([0, 1, 2, 1]), 3)
    begun = np.zeros((50, 3))
    begun[:4] = told - 1 / 3
    exact = 0.3 * np.linalg.solve(np.eye(50) - 0.7 * similar.toarray(), begun)
    np.testing.assert_allclose(pate.spread_labels(similar, told, 0.7), exact, atol=1e-6)


def test_answers_are_passed_on_to_images_that_look_alike() -> None:
    rng = np.random.default_rng(3)
    centres = np.eye(3, 8, dtype=np.float32)[np.arange(300) % 3]
    images = centres + 0.05 * rng.standard_normal((300, 8)).astype(np.float32)
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    answers = np.arange(60) % 3
    answers[:6] = 0  # noise made four of them wrong
    student = pate.Student(images, images)
    weights = student.learn(answers, 3, passed_on=0.9)
    assert ((images @ weights).argmax(1) == np.arange(300) % 3).all()
    alone = student.learn(answers, 3, passed_on=0.0)
    np.testing.assert_array_equal(alone, pate.Ridge(images[:60]).learn(pate.one_hot(answers, 3)))


def test_a_student_sees_public_images_and_answers_alone(
    folder: Path, tiny: pate_table.PateExperiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other private records, other labels of public images: with the same answers the same."""
    assert list(inspect.signature(pate.Student).parameters) == ["images", "looks"]
    given = {"self", "answers", "classes", "passed_on"}
    assert set(inspect.signature(pate.Student.learn).parameters) == given
    real = pate_data.samples_of(source_of(folder, tiny, hold_out=False))
    other = dataclasses.replace(
        real, x=-real.x, y=9 - real.y, prints=real.prints[::-1], known=9 - real.known
    )
    monkeypatch.setattr(pate_table, "answer", lambda votes, *_: np.arange(len(votes)) % 10)
    scores = []
    for samples in (real, other):
        clear()
        monkeypatch.setattr(pate_table, "samples_of", lambda _, samples=samples: samples)
        classified, _ = pate_table._pate(run_of(tiny), 1e-5, Source(Path("x"), hold_out=False))
        scores.append(classified(real.judged_x))
    np.testing.assert_array_equal(*scores)
    clear()


# -- data, runs and the page ----------------------------------------------------------------------


def clear() -> None:
    for cached in (pate_data.samples_of, pate_table.votes_of, pate_table.student_of):
        cached.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images of ten kinds of stripes; the third private one is also the first public one."""
    rng = np.random.default_rng(4)
    waves = np.sin(np.outer(np.arange(1, 11), np.linspace(0, 6, 12)))

    def images(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(10, size=count).astype(np.uint8)
        x = 128 + 60 * waves[y][:, :, None] + 8 * rng.standard_normal((count, 12, 12))
        return x.clip(0, 255).astype(np.uint8), y

    (x, y), (test_x, test_y) = images(400), images(60)
    x[2] = test_x[np.random.default_rng(0).permutation(60)[0]]
    np.savez(tmp_path / "mnist.npz", x_train=x, y_train=y, x_test=test_x, y_test=test_y)
    monkeypatch.setattr(pate_data.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(pate_data, "HELD_OUT", 100)
    clear()
    return tmp_path


@pytest.fixture
def tiny() -> pate_table.PateExperiment:
    setting = {"file": "mnist", "public": {"file": "mnist", "part": "test", "samples": 40}}
    features = EXPERIMENT.features.model_copy(update={"filters": 8, "size": (3,), "directions": 20})
    return EXPERIMENT.model_copy(
        update={
            "settings": {"tiny": Setting.model_validate(setting)},
            "features": features,
            "training": EXPERIMENT.training.model_copy(update={"epochs": 2, "batch_size": 100}),
            "epsilons": (8.0,),
            "seeds": 2,
            "teachers": (2, 4),
            "queries": (20, 40, 80),
            "passed_on": (0.0, 0.9),
            "rates": (1.0, 5.0),
        }
    )


def source_of(folder: Path, tiny: pate_table.PateExperiment, *, hold_out: bool) -> Source:
    made = pate_data.features_of(folder, tiny.features, tiny.settings["tiny"])
    return Source(made, hold_out)


def run_of(tiny: pate_table.PateExperiment) -> pate_table.Run:
    return pate_table.tries(tiny, "tiny", pate_table.PATE, 8.0)[-1]


def test_private_public_held_out_and_test_images_are_apart(
    folder: Path, tiny: pate_table.PateExperiment
) -> None:
    pictures = Pictures.of(folder, tiny.settings["tiny"])
    assert (len(pictures.private), len(pictures.public), len(pictures.test)) == (399, 40, 20)
    sets = [{each.numpy().tobytes() for each in x} for x in (pictures.public, pictures.test.x)]
    sets.append({each.numpy().tobytes() for each in pictures.private.x})
    assert sum(map(len, sets)) == len(set.union(*sets)) == 459
    everything = pate_data.samples_of(source_of(folder, tiny, hold_out=False))
    clear()
    searched = pate_data.samples_of(source_of(folder, tiny, hold_out=True))
    assert (len(everything.x), len(everything.judged_x)) == (399, 20)
    assert (len(searched.x), len(searched.judged_x)) == (299, 100)
    rows = {row.tobytes() for row in everything.x}
    held = {row.tobytes() for row in searched.judged_x}
    assert {row.tobytes() for row in searched.x} == rows - held
    by_print = dict(zip(everything.prints, everything.x, strict=True))
    found = np.stack([by_print[each] for each in searched.prints])
    np.testing.assert_array_equal(found, searched.x)


def test_a_search_and_its_runs(
    folder: Path, tiny: pate_table.PateExperiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(runs: list, results: Results, task, *_: object) -> None:  # in this process
        for each in runs:
            results.add(task(each))

    monkeypatch.setattr(pate_table, "execute", here)
    results = Results(folder / "pate.jsonl")
    pate_table.run(tiny, results, Place(data=folder, commit="x"))
    searched = [row for row in results.rows if row["tuning"]]
    assert len(searched) == 2 * 2 * 2 + 2  # 80 answers need 80 images
    found = {(row["row"], row["seed"]): row for row in results.rows if not row["tuning"]}
    assert set(found) == {(row, s) for row in ("PATE", "DP-SGD") for s in (0, 1)}
    for row in results.rows:
        assert 7.9 < row["epsilon"] <= 8.0
        assert row["records"] == (299 if row["tuning"] else 399)
    for seed in (0, 1):
        row = found["PATE", seed]
        assert sum(row["answers"]) == row["queries"]
        best = max(r["accuracy"] for r in searched if r["row"] == "PATE")
        chosen = next(r for r in searched if r["row"] == "PATE" and r["accuracy"] == best)
        assert [row[k] for k in ("teachers", "queries")] == [
            chosen[k] for k in ("teachers", "queries")
        ]
    page = pate_table.page(tiny, results)
    assert "| DP-SGD | " in page
    assert f"- PATE at ε = 8: {chosen['teachers']} teachers, {chosen['queries']} answers" in page
    assert "\\*" in page  # two rates have nothing between them
    clear()


def test_the_end_of_a_grid_is_told() -> None:
    name = next(n for n, setting in EXPERIMENT.settings.items() if setting.public.samples == 5000)
    run = pate_table.Run(name, "PATE", 2.0, 250, 500, 0.9, 0.0, 0, False, "")
    grown = [
        dataclasses.replace(run, **change)
        for change in ({}, {"queries": 5000}, {"queries": min(EXPERIMENT.queries)})
    ]
    assert [pate_table.at_an_end(EXPERIMENT, each) for each in grown] == [False, False, True]
    ends = ({"teachers": 2000}, {"teachers": 60}, {"passed_on": max(EXPERIMENT.passed_on)})
    for change in ends:
        assert pate_table.at_an_end(EXPERIMENT, dataclasses.replace(run, **change))
    linear = dataclasses.replace(run, row="DP-SGD", teachers=0, queries=0, passed_on=0.0)
    rates = {r: dataclasses.replace(linear, rate=r) for r in EXPERIMENT.rates}
    told = [rate for rate, each in rates.items() if pate_table.at_an_end(EXPERIMENT, each)]
    assert told == [min(EXPERIMENT.rates), max(EXPERIMENT.rates)]


def test_an_empty_cell_has_a_dash(tmp_path: Path) -> None:
    page = pate_table.page(EXPERIMENT, Results(tmp_path / "none.jsonl"))
    assert "| PATE | — | — |" in page


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("passed_on: [0.0,", "passed_on: [1.0,", "passed_on"),
        ("epochs: 30", "epochs: 0", "epochs"),
        ("teachers: [", "teacher: [", "teacher"),
    ],
)
def test_mistakes_are_told(old: str, new: str, message: str) -> None:
    text = (Path(pate_table.__file__).parent / "pate.yaml").read_text()
    assert old in text
    with pytest.raises(ConfigError, match=message):
        parse(text.replace(old, new), pate_table.PateExperiment, name="pate.yaml")
