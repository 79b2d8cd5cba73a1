"""The experiments on tables and on dimensions: their data, their choices and what they print."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import dimension, leads, regimes, spectra, tables
from experiments.catalogue import load
from experiments.runner import Place, Results

TABLES, DIMENSION, SPECTRA = load("tables"), load("dimension"), load("noisy-adagrad")
REGIMES = load("regimes-tables")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small tables in the form of the real ones; the first feature numbers the rows."""
    rng = np.random.default_rng(0)
    for name in (*TABLES.tables, tables.TUNED_ON):
        x = rng.standard_normal((1500, 6)).astype(np.float32)
        y = (x[:, 1] + 0.5 * rng.standard_normal(1500) > 0).astype(np.uint8)
        x[:, 0] = np.arange(1500) / 1000
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y)
    tables.load.cache_clear()
    return tmp_path


@pytest.mark.parametrize("table", ["a9a", "bank_additional_full"])
def test_private_public_and_test_rows_are_apart(folder: Path, table: str) -> None:
    split = tables.load(folder, table, 3)
    assert sparse.issparse(split.x) == (table in tables.ZERO_ONE)
    parts = [split.x, split.public.x, split.x_test]
    numbers = [np.asarray(tables_first(part)) for part in parts]
    assert [len(n) for n in numbers] == [700, 500, 300]
    assert len(np.unique(np.round(np.concatenate(numbers), 6))) == 1500
    other = tables.load(folder, table, 4)
    assert not np.array_equal(tables_first(other.x), numbers[0])


def tables_first(x) -> np.ndarray:
    return (x.toarray() if sparse.issparse(x) else x)[:, 0]


def test_features_are_scaled_by_public_rows(folder: Path) -> None:
    split = tables.load(folder, "adult", 0)
    np.testing.assert_allclose(split.public.x[:, 2:].mean(0), 0, atol=0.02)  # but for the cut
    assert np.abs(split.x).max() <= 3.0
    assert np.abs(split.x[:, 2:].mean(0)).max() > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("method", [*tables.OURS, tables.BOOSTED, *tables.OPEN])
def test_every_row_of_the_table_runs(folder: Path, method: str) -> None:
    if method == tables.BOOSTED:
        pytest.importorskip("interpret")
    row = tables.work(tables.Run("adult", method, 3.0, 0, 0), TABLES, Place(data=folder), None)
    assert row["auc"] > 0.7
    if method in tables.OURS:
        assert 2.99 <= row["epsilon_spent"] <= 3.0
        assert row["private"] is True


def test_the_best_setting_of_the_search_is_taken(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    for choice, good in enumerate((0.6, 0.9, 0.7, 0.8)):
        for seed in tables.TUNING_SEEDS:
            run = tables.Run(tables.TUNED_ON, "DP-GD", 1.0, choice, seed)
            results.add({**vars(run), "accuracy": good, "auc": good})
    assert tables.best_choice(4, "DP-GD", 1.0, results) == 1


def table_rows() -> list[dict]:
    return [
        {
            "table": "adult",
            "method": method,
            "epsilon": epsilon,
            "seed": seed,
            "accuracy": 0.8 + seed / 100,
            "auc": 0.9,
            "records": 32061,
            "features": 107,
        }
        for method, epsilon in (("DP-GD", 1.0), ("DP-GD", 3.0), (tables.OPEN[1], 0.0))
        for seed in range(2)
    ]


def dimension_rows() -> list[dict]:
    return [
        {"method": "DP-GD", "p": p, "excess_risk": risk, "seconds_per_step": p / 1e6}
        for p, risk in ((100, 0.01), (100, 0.03), (1000, 0.04), (1000, 0.04))
    ]


def test_the_table_of_tables() -> None:
    text = tables.markdown(table_rows(), ("DP-GD", tables.OPEN[1]))
    assert "| DP-GD | 80.5 / 90.0 | 80.5 / 90.0 |" in text
    assert "**adult**, n = 32,061, p = 107" in text
    cell = "80.5 ± 0.7 / 90.0 ± 0.0"
    assert f"| DP-GD | {cell} | {cell} |" in text
    assert f"| without privacy | {cell} | {cell} |" in text


@pytest.mark.slow
@pytest.mark.parametrize("method", dimension.METHODS)
def test_dimensions(method: str) -> None:
    run = dimension.Run(method, 60, DIMENSION.rates[method][1], 0)
    row = dimension.work(run, Place(data=Path()))
    assert 0 < row["excess_risk"] < 0.2
    assert 0.999 <= row["epsilon"] <= 1.0
    assert row["seconds_per_step"] > 0


def test_without_privacy_nothing_depends_on_the_dimension() -> None:
    small, large = dimension.problem_of(30, 1), dimension.problem_of(300, 1)
    assert small.least_risk() == pytest.approx(large.least_risk())
    np.testing.assert_allclose(large.embedding @ large.embedding.T, np.eye(10), atol=1e-12)


def test_the_table_of_dimensions() -> None:
    text = dimension.markdown(dimension_rows())
    assert "| DP-GD | 20.0 ± 10.0 | 40.0 ± 0.0 | 2 |" in text
    assert "| DP-GD | 0.1 | 1 | 10 |" in text


@pytest.mark.slow
def test_plots(tmp_path: Path) -> None:
    tables.plot(table_rows(), ("DP-GD", tables.OPEN[1]), tmp_path / "tables.png")
    dimension.plot(dimension_rows(), tmp_path / "dimension.png")
    for path in tmp_path.glob("*.png"):
        assert path.stat().st_size > 5_000
    assert len(list(tmp_path.glob("*.png"))) == 2


@pytest.mark.parametrize("method", [spectra.PUBLIC_ONLY, *spectra.METHODS])
def test_spectra(method: str) -> None:
    run = spectra.Run(n=300, m=60, k=5, steps=5, method=method, rate=0.5)
    row = spectra.work(run, Place(data=Path()))
    assert 0 < row["excess_risk"] < np.log(2)
    assert row["spent"] == 0 if method == spectra.PUBLIC_ONLY else 0.99 <= row["spent"] <= 1


@pytest.mark.parametrize("separable", [False, True])
def test_nothing_in_the_ball_has_less_than_the_least_risk(separable: bool) -> None:
    problem, least = spectra.problem_of(200, 20, 1.0, separable, 0)
    theta = problem.least(slice(0, 200))
    assert np.linalg.norm(theta) <= problem.radius * (1 + 1e-9)
    rng = np.random.default_rng(1)
    for _ in range(200):
        other = theta + 0.1 * problem.radius * rng.standard_normal(spectra.P) / spectra.P**0.5
        other *= min(1.0, problem.radius / np.linalg.norm(other))
        assert problem.risk(other) >= least - 1e-4


def test_one_setting_is_changed_at_a_time() -> None:
    base = vars(spectra.Setting())
    for title, columns in spectra.sweeps(SPECTRA).items():
        changed = {name for _, each in columns for name, v in vars(each).items() if v != base[name]}
        assert changed - {"separable"} <= {changed_by(title)}, title


def changed_by(title: str) -> str:
    names = {"how": "gamma", "directions": "k", "public": "m", "records,": "n"}
    return names.get(title.split()[0], "steps")


def test_the_best_private_row_of_a_sweep_is_bold(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    for setting in spectra.settings(SPECTRA):
        for risk, method in enumerate((spectra.PUBLIC_ONLY, *spectra.METHODS)):
            for run in spectra.reported(SPECTRA, setting, method, results):
                if run.seed < 2:
                    results.add({**vars(run), "excess_risk": risk / 1000})
    page = spectra.page(SPECTRA, results, tmp_path)
    assert page.count("**1.0 ± 0.0**") == sum(map(len, spectra.sweeps(SPECTRA).values()))
    assert "| DP-GD | **1.0 ± 0.0** |" in page
    assert "| public rows only | 0.0 ± 0.0 |" in page


@pytest.mark.parametrize("method", [regimes.PUBLIC_ONLY, *regimes.METHODS])
def test_a_fit_of_so_many_records(folder: Path, method: str) -> None:
    run = regimes.Run("adult", 200, 100, method, epsilon=5.0, rate=1.0, seed=0)
    row = regimes.work(run, Place(data=folder))
    assert row["auc"] > 0.6
    assert (
        row["epsilon_spent"] == 0
        if method == regimes.PUBLIC_ONLY
        else 4.9 < row["epsilon_spent"] <= 5
    )


def test_a_lead_is_paired_by_seed() -> None:
    other = {("a", 0): 80.0, ("a", 1): 90.0, ("b", 0): 70.0, ("b", 1): 70.0}
    own = {("a", 0): 81.0, ("a", 1): 93.0, ("b", 0): 72.0, ("b", 1): 72.0}
    ahead, error = leads.lead(own, other)
    assert ahead == pytest.approx(2.0)
    assert error == pytest.approx(0.5)  # the variance of table a is 2, of its mean 1; of b's 0


def test_the_map(tmp_path: Path) -> None:
    """AdaGrad ahead of all at ε = 8, behind the simple ones at ε = 0.1, and one place not run."""
    results, missing = Results(tmp_path / "results.jsonl"), (300, 0.5)
    for at in regimes.places(REGIMES):
        for method in (regimes.PUBLIC_ONLY, *regimes.METHODS):
            for run in regimes.reported(REGIMES, at, method, results):
                noise = 0.001 * ((run.seed * 7 + len(run.table)) % 3)
                gain = 0.03 if at[1] > 1 else -0.03
                auc = 0.8 + noise * (method == "AdaGrad") + gain * (method == "AdaGrad")
                auc -= 0.1 * (method not in ("AdaGrad", "DP-GD"))
                if at != missing or method == regimes.PUBLIC_ONLY:
                    results.add({**vars(run), "auc": auc})
    page = regimes.page(REGIMES, results, tmp_path)
    rows = {line.split(" | ")[0]: line.split(" | ")[1:] for line in page.splitlines()}
    first = rows["| 300"]
    assert first[0].startswith("DP-GD is ahead of AdaGrad -2.9 ± 0.0")
    assert first[1] == "—"
    assert first[3].startswith("**AdaGrad** +3.1 ± 0.0 (83.1; DP-GD)")
    assert (tmp_path / "regimes.png").stat().st_size > 5_000
