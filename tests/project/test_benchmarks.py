"""The benchmarks: every contender takes a step, and the tables say what was measured."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import (
    contenders,
    floors,
    growth,
    measure,
    methods,
    page,
    recurrent,
    secure,
    startup,
    tuning,
)
from benchmarks.problems import PROBLEMS

from helpers.needs import extra

CASE = methods.Case(8, 8, 4)


@pytest.mark.parametrize("graphs", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_takes_a_step(name: str, graphs: bool) -> None:
    problem = PROBLEMS["mlp-64"]
    model = problem.model("cpu")
    before = [p.detach().clone() for p in model.parameters()]
    data = problem.data(16, "cpu")
    methods.step_of(model, *data, 1.0, case=CASE, method=name, graphs=graphs).step()
    assert all(
        not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )


def test_a_subspace_that_is_kept_is_timed_over_a_whole_cycle() -> None:
    problem = PROBLEMS["mlp-64"]
    name = "GEP, subspace kept for 10 steps"
    data = problem.data(16, "cpu")
    made = methods.step_of(problem.model("cpu"), *data, 1.0, case=CASE, method=name)
    assert made.steps == 10
    once = methods.step_of(problem.model("cpu"), *data, 1.0, case=CASE, method="GEP")
    assert once.steps == 1


@pytest.mark.filterwarnings("ignore")  # Opacus' own
@pytest.mark.parametrize("name", ["opacus hooks", "dpspan"])
def test_recurrent_steps_are_clipping_in_a_loop(name: str) -> None:
    for problem in recurrent.RECURRENT:
        factory = recurrent.FACTORIES[name]
        assert measure.disagreement(factory, PROBLEMS[problem], 4, "cpu") < 1e-3


def test_the_private_samples_come_first() -> None:
    seen = []

    def of(model: Any, x: torch.Tensor, y: torch.Tensor, noise: float) -> Any:
        seen.append((len(x), len(y)))
        return None

    x = torch.zeros(30, 1)
    methods.on_private(torch.nn.Identity(), x, x, 0.0, case=methods.Case(20, 10, 1), of=of)
    assert seen == [(20, 20)]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_slope_is_the_power(power: float) -> None:
    xs = [8, 16, 32, 64]
    assert growth.slope(xs, [3.0 * x**power for x in xs]) == pytest.approx(power, abs=1e-9)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_thing_grows_at_a_time(device: str) -> None:
    for names, points in growth.curves(device).values():
        assert set(names) <= set(methods.METHODS)
        xs = [point.x for point in points]
        assert xs == sorted(xs)
        varied = [
            len({getattr(point.case, name) for point in points})
            for name in ("private", "public", "rank")
        ]
        varied.append(len({point.problem for point in points}))
        assert sorted(varied) == [1, 1, 1, len(points)]
        for point in points:
            assert point.case.rank <= point.case.public
            expected = sum(p.numel() for p in PROBLEMS[point.problem].model("cpu").parameters())
            if point.problem.startswith("mlp"):
                assert point.x == expected


def measured(**contenders: Any) -> dict[str, Any]:
    return {
        "environment": {"gpu": None, "cpu": "A processor", "threads": 2},
        "models": {"cnn": {"batch": "8 + 8 public, k = 4", "contenders": contenders}},
    }


def test_the_table_of_methods() -> None:
    plain = {"time": {"median": 20.0, "of_plain": 1.0}, "memory": {"of_plain": 1.0}}
    slow = {
        "time": {"median": 50.0, "of_plain": 2.5},
        "memory": {"of_plain": 1.25},
        "note": "alone",
    }
    text = page.methods_table(
        measured(**{"non-private": plain, "GEP": slow, "other": {"reason": "no"}})
    )
    assert "**A processor, 2 threads**" in text
    assert "| GEP | 2.50 / 1.25 |" in text
    assert "| other | does not run |" in text
    assert "CNN, 26 k, GEP: alone." in text
    assert "The non-private step in milliseconds: CNN 20.0." in text


def test_the_table_of_growth() -> None:
    slopes = {"GEP": {"milliseconds": 1.04, "bytes": 0.5}}
    curve = {"x": [8, 64], "slopes": slopes, "points": []}
    text = page.growth_table({**measured(), "curves": {"samples": curve}})
    assert "| samples | 8 … 64 | GEP | 1.04 / 0.50 |" in text


def test_the_table_of_bounds() -> None:
    row = {"model": "cnn", "method": "DP-SGD", "step": 0, "median": 1.0, "largest": 1.001}
    gep = {"sum_error": 0.002, "directions": 7, "energy": 0.9, "best_energy": 0.91}
    rows = [{**row, "precision": "TF32"}, {**row, **gep, "method": "GEP", "precision": "TF32"}]
    lines = page.bounds_table({"environment": {"gpu": "H200"}, "rows": rows}).splitlines()
    assert "| CNN, 26 k: DP-SGD | 1.00100 |" in lines
    assert "| 0 | TF32 | 1.00100 | 0.200 % | 7 | 0.9000 | 0.9100 |" in lines


def test_the_table_of_what_comes_before_the_first_step() -> None:
    phase = {"seconds": 3.0, "processor_seconds": 1.25, "peak": 2.5e9}
    results = {
        **measured(),
        "settings": {"columns": 50, "public": 2000},
        "formats": {
            "csv": {size: {"phases": {"copies": phase}} for size in ("100", "1000")},
            "arrow": {"1000": {"phases": {"copies": phase}}},
        },
    }
    lines = page.startup_table(results).splitlines()
    assert lines[0] == "### Before the first step"
    assert lines[4] == "|  |  | 100 records | 1,000 records |"
    assert "| csv | copies | 1.25 / 2,500 | 1.25 / 2,500 |" in lines
    assert "| arrow | copies |  | 1.25 / 2,500 |" in lines


@pytest.mark.parametrize("kind", startup.FORMATS)
def test_every_phase_before_the_first_step_is_measured(kind: str, tmp_path: Path) -> None:
    extra("datasets")
    extra("pyarrow")
    startup.write(tmp_path / f"private.{kind}", 300, 0)
    startup.write(tmp_path / f"public.{kind}", 50, 1)
    found = startup.phases(tmp_path, kind, torch.get_num_threads())["phases"]
    assert {"read private", "read public", "make_private", "first step"} <= found.keys()
    for phase in found.values():
        assert phase["peak"] > 1e8  # torch alone
        assert phase["processor_seconds"] >= 0
        assert 0 < phase["seconds"] < 60


def test_nothing_measured_is_no_page(tmp_path: Path) -> None:
    assert page.page(tmp_path, tmp_path) == ""


def test_a_memory_that_could_not_be_measured() -> None:
    unknown = {"time": {"median": 1.0, "of_plain": 1.0}, "memory": {"reason": "out of memory"}}
    assert page._factors(unknown) == "1.00 / —"
    assert math.isnan(growth.slope([1, 2, 4, 8], [1.0, 1.0, float("nan"), 1.0]))


class TestFloors:
    def test_products_and_bytes_are_counted(self) -> None:
        a, b = torch.randn(8, 16), torch.randn(16, 4)
        flops, moved = floors.work(lambda: (a @ b).add_(1.0))
        assert flops == 2 * 8 * 16 * 4
        product = 4 * (8 * 16 + 16 * 4 + 8 * 4)
        assert moved == product + 2 * 4 * 8 * 4  # the sum reads and writes its tensor

    def test_views_and_expanded_tensors_move_what_is_there(self) -> None:
        a = torch.randn(6, 5)
        assert floors.work(lambda: a.T.reshape(5, 3, 2)[1:].unsqueeze(0)) == (0, 0)
        assert floors.work(lambda: a.T.reshape(30)) == (0, 2 * 4 * 30)  # a copy
        one = torch.ones(1)
        _, moved = floors.work(lambda: one.expand(100).clone())
        assert moved == 4 + 400

    def test_what_is_overwritten_or_not_picked_is_not_read(self) -> None:
        a, b, table = torch.zeros(10), torch.ones(10), torch.ones(1000, 2)
        assert floors.work(lambda: a.fill_(1.0)) == (0, 40)
        assert floors.work(lambda: a.copy_(b)) == (0, 80)
        rows = torch.tensor([3, 5])
        assert floors.work(lambda: table.index_select(0, rows)) == (0, 3 * 16)

    def test_groups_of_a_convolution_count_as_samples_do(self) -> None:
        x, grad = torch.randn(5, 3, 8, 8), torch.randn(5, 4, 6, 6)
        rest = (None, (1, 1), (0, 0), (1, 1), False, (0, 0))
        backward = torch.ops.aten.convolution_backward

        def together() -> None:
            backward(grad, x, torch.zeros(4, 3, 3, 3), *rest, 1, (True, True, False))

        def apart() -> None:
            parts = grad.view(1, 20, 6, 6), x.view(1, 15, 8, 8), torch.zeros(20, 3, 3, 3)
            backward(*parts, *rest, 5, (True, True, False))

        assert floors.work(together)[0] == floors.work(apart)[0] == 2 * 2 * 5 * 36 * 4 * 27

    def test_a_private_step_does_more_than_a_plain_one(self) -> None:
        problem = PROBLEMS["mlp-64"]
        data = problem.data(16, "cpu")
        plain = floors.work(contenders.plain_step(problem.model("cpu"), *data, 1.0).step)
        private = floors.work(contenders.dpspan_step(problem.model("cpu"), *data, 1.0).step)
        assert private[1] > plain[1]
        assert private[0] >= plain[0] // 2

    def test_the_table_names_what_bounds_a_step(self) -> None:
        each = {"gigaflops": 1.0, "gigabytes": 2.0, "milliseconds": 9.0}
        found = {
            "one": {**each, "products_ms": 3.0, "memory_ms": 1.0},
            "two": {**each, "products_ms": 1.0, "memory_ms": 4.5},
        }
        results = {
            "environment": {"gpu": "a GPU"},
            "settings": {"tf32": True},
            "peaks": {"flops": 4e14, "bytes": 4e12},
            "models": {"cnn": {"batch": "8", "contenders": found}},
        }
        lines = page.floors_table(results).splitlines()
        assert "400.00 TFLOP/s, memory at 4,000 GB/s" in lines[0]
        assert lines[4] == "| CNN, 26 k | one | 1.0 | 2.00 | 3.00 (products) | 9.00 | 3.0 |"
        assert lines[5] == "| CNN, 26 k | two | 1.0 | 2.00 | 4.50 (memory) | 9.00 | 2.0 |"


def test_the_page_on_tuning_says_what_was_measured() -> None:
    page_on_tuning = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
    results = json.loads(tuning.RESULTS.read_text())
    assert len(results) == 4
    for row in tuning.cells(results):
        assert f"| {' | '.join(row)} |" in page_on_tuning
    assert all(
        each["epsilon"] <= 3 for result in results for each in result.values() if "epsilon" in each
    )


def test_a_search_is_compared_on_real_records(tmp_path: Path) -> None:
    tuning.write_data(tmp_path, seed=0)
    task, contender = tuning.parts(tmp_path, clip=30.0, clipping="adaptive")
    assert len(task.private) == 1097
    assert contender.method.clip == 30.0


def test_the_cost_of_the_secure_mode_is_measured_in_turn() -> None:
    (row,) = secure.measure(["mlp-64"], rounds=1)
    assert row["noise"]["ratio"] > 1
    assert row["step"]["secure"] > 0
    assert secure.table([row]).row_count == 1


def test_the_page_says_what_the_secure_mode_cost() -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "benchmarks/results/secure-cpu.json").read_text())["rows"]
    page = (root / "docs/privacy.md").read_text()
    for row in rows:
        step = row["step"]
        assert f"| {step['usual']:.0f} → {step['secure']:.0f} | {step['ratio']:.2f} |" in page
