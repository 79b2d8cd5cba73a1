"""Comparisons: honest baselines, equal budgets, resumable, and sums that count every release."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import Dataset, TensorDataset

from dpspan import DPSGD, GEP, Budget, Ledger, WarmStart
from dpspan.accounting.epsilon import account
from dpspan.accounting.events import event_from_json, pure_event
from dpspan.app.comparison import (
    Comparison,
    Contender,
    Result,
    Row,
    Task,
    compare,
    folder_of,
    verdicts,
    with_baselines,
)
from dpspan.app.comparison.results import difference
from dpspan.app.config.sections import StepsSection
from dpspan.app.report import render
from dpspan.app.run import RunFolder
from dpspan.app.run.folder import locked as run_lock
from dpspan.app.run.folder import read_lines
from dpspan.app.run.training import Training
from helpers.blobs import blobs, linear
from helpers.processes import CONTEXT

COMPARE = sys.modules[compare.__module__]
BUDGET = Budget(epsilon=5.0, delta=1e-5)


def deep_network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


class _Scale(nn.Module):
    """A frozen layer."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def _scaled_network(factor: float) -> nn.Module:
    return nn.Sequential(_Scale(factor), nn.Linear(4, 2))


def task_of(**changes: Any) -> Task:
    settings: dict[str, Any] = {
        "model": linear,
        "private": TensorDataset(*blobs(200, 0)),
        "test": TensorDataset(*blobs(60, 1)),
        "batch_size": 50,
        "epochs": 2,
        "budget": BUDGET,
        "public": blobs(20, 2),
        "test_is_public": True,
    }
    settings.update(changes)
    if settings["public"] is not None and "warm_start" not in settings:
        settings["warm_start"] = WarmStart(data=settings["public"], max_epochs=3)
    return Task(**settings)


PLAIN = Contender(name="DP-SGD", method=DPSGD(clip=1.0), learning_rate=0.5)


def killed_when_written(task: Task, out: Path, writer: str) -> None:
    """A process of its own: it ends when something is there and before the folder says so."""
    real = getattr(RunFolder, writer)

    def killed(self: RunFolder, *arguments: Any) -> None:
        real(self, *arguments)
        if read(self.ledger)["steps"]:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(RunFolder, writer, killed)
    compare(task, [PLAIN], out=out, seeds=(0,))


def trained(task: Task, contender: Contender, out: Path) -> RunFolder:
    """One run, in its folder."""
    COMPARE.train(task, contender, 0, RunFolder(out))
    return RunFolder(out)


def row(comparison: Comparison, name: str) -> Row:
    return next(row for row in comparison.rows if row.name == name)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison]:
    out = tmp_path_factory.mktemp("compared")
    return out, compare(task_of(), [PLAIN], out=out, seeds=(0, 1))


def test_no_file_tells_how_long_steps_took(compared: tuple[Path, Comparison]) -> None:
    """That depends on how many records were drawn."""
    out, _ = compared
    texts = [path for path in out.rglob("*.json*") if path.name != "certificate.json"]
    assert len(texts) > 4
    for path in texts:
        assert "seconds" not in path.read_text(), path


def test_no_generator_is_left_at_the_seed_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed would seed those of all GPUs, which nobody puts back."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    first, again = (task_of().new_model(3) for _ in range(2))
    assert seeded == []
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.weight, again.weight)


def test_what_is_trained_on_private_records_is_not_free(tmp_path: Path) -> None:
    """The baseline of public data alone would certify ε = 0."""
    x, y = blobs(200, 0)  # the private records
    task = task_of(public=(x[:20], 1 - y[:20]))
    with pytest.raises(ValueError, match=r"20 of the 20 samples .* also occur in the private"):
        compare(task, [PLAIN], out=tmp_path, seeds=(0,))
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("certificate.json"))


class TestBaselines:
    def test_public_labels_bring_public_only_and_a_warm_start(self) -> None:
        task = task_of(warm_start=None)
        assert [c.name for c in with_baselines(task, [PLAIN])] == [
            "public only",
            "warm start + DP-SGD",
            "DP-SGD",
        ]

    def test_what_is_there_is_not_added_twice(self) -> None:
        task = task_of()
        start = task.start
        mine = [
            Contender(name="free", warm_start=start),
            PLAIN,
            Contender(name="warm", method=DPSGD(), learning_rate=1.0, warm_start=start),
        ]
        assert [c.name for c in with_baselines(task, mine)] == ["free", "DP-SGD", "warm"]

    @pytest.mark.parametrize("public", [None, blobs(20, 2)[0]])
    def test_without_public_labels_nothing_is_added(self, public: Any) -> None:
        task = task_of(public=public, warm_start=None)
        assert with_baselines(task, [PLAIN]) == (PLAIN,)

    def test_dp_sgd_must_take_part(self) -> None:
        gep = Contender(
            name="GEP", method=GEP(public=blobs(20, 2)[0], rank=2, clip=1.0), learning_rate=1.0
        )
        with pytest.raises(ValueError, match="Expected DP-SGD among the contenders"):
            with_baselines(task_of(), [gep])

    def test_names_must_differ(self) -> None:
        with pytest.raises(ValueError, match="a name of its own, got 'DP-SGD'"):
            with_baselines(task_of(), [PLAIN, PLAIN])

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"method": DPSGD()}, "Expected a learning_rate for 'x'"),
            ({}, "Expected a method or a warm_start for 'x'"),
            (
                {"method": DPSGD(), "learning_rate": -1.0},
                "learning_rate > 0 and finite, got -1.0",
            ),
            ({"method": DPSGD(), "learning_rate": 1.0, "momentum": 1.0}, "momentum < 1, got 1.0"),
            (
                {"method": DPSGD(), "learning_rate": 1.0, "momentum": 0.5, "optimizer": Adam},
                "Expected momentum without an optimizer, got both for 'x'",
            ),
            (
                {"method": DPSGD(), "learning_rate": 1.0, "optimizer": lambda p, lr: None},
                "Expected optimizer to make a torch optimizer, got None",
            ),
            (
                {"method": DPSGD(), "learning_rate": 1.0, "schedule": lambda step, steps: -1.0},
                r"Expected a schedule of finite factors >= 0, got -1\.0",
            ),
        ],
    )
    def test_contenders_are_checked(self, wrong: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Contender(name="x", **wrong)


class TestRuns:
    def test_every_run_leaves_its_folder(self, compared: tuple[Path, Comparison]) -> None:
        tmp_path, comparison = compared
        assert [row.name for row in comparison.rows] == [
            "public only",
            "warm start + DP-SGD",
            "DP-SGD",
        ]
        for row in comparison.rows:
            for result in row.results:
                folder = tmp_path / result.folder
                assert {path.name for path in folder.glob("[!.]*")} == {
                    "run.json",
                    "evaluation.json",
                    "ledger.json",
                    "metrics.jsonl",
                    "certificate.json",
                    "model.safetensors",
                    *(["checkpoint.safetensors"] if row.private else []),
                }
                facts = read(folder / "run.json")
                assert (facts["format"], facts["version"]) == ("dpspan.run", 2)
                assert (facts["seed"], facts["status"]) == (result.seed, "finished")
                assert (facts["settings"]["warm_start"] is not None) == row.warm
                certificate = read(folder / "certificate.json")
                lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
                assert certificate["private"] is True
                assert certificate["epsilon"] == result.epsilon == lines[-1]["epsilon"]
                assert lines[-1]["test_accuracy"] == result.value
                if row.private:
                    assert BUDGET.epsilon - 1e-3 <= result.epsilon <= BUDGET.epsilon
                else:
                    assert result.epsilon == 0
                    assert certificate["events"] == []
                    assert certificate["public"][0]["count"] == 20
        assert {path.name for path in tmp_path.rglob(".*")} == {".lock"}
        again = read(tmp_path / "comparison.json")
        assert again == json.loads(json.dumps(comparison.to_dict()))
        assert again["verdicts"] == verdicts(comparison) != []

    def test_seeds_give_other_weights_and_noise_is_never_seeded(self, tmp_path: Path) -> None:
        task = task_of(public=None)
        first = compare(task, [PLAIN], out=tmp_path / "a", seeds=(0,))
        second = compare(task, [PLAIN], out=tmp_path / "b", seeds=(0,))
        weights = [
            (tmp_path / n / first.rows[0].results[0].folder / "model.safetensors").read_bytes()
            for n in ("a", "b")
        ]
        assert weights[0] != weights[1]
        assert second.rows[0].epsilon == first.rows[0].epsilon

    def test_what_is_finished_is_not_released_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task, done = task_of(), []

        def interrupted(*job: Any) -> Any:
            if len(done) == 2:
                raise KeyboardInterrupt
            done.append(job[1].name)
            real(*job)

        real = COMPARE.train
        monkeypatch.setattr(COMPARE, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compare(task, [PLAIN], out=tmp_path, seeds=(0,))
        assert done == ["public only", "warm start + DP-SGD"]
        assert not (tmp_path / "comparison.json").exists()
        kept = folder_of(tmp_path, "warm start + DP-SGD", 0) / "model.safetensors"
        before, done[:] = kept.read_bytes(), []
        compare(task, [PLAIN], out=tmp_path, seeds=(0,))
        assert done == ["DP-SGD"]
        assert kept.read_bytes() == before

    def test_no_summary_tells_less_than_was_released(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task = task_of(public=None, accountant="rdp")
        compare(task, [PLAIN], out=tmp_path, seeds=(0,))
        done: list[int] = []

        def interrupted(*job: Any) -> Any:
            if done:
                raise KeyboardInterrupt
            done.append(job[2])
            real(*job)

        real = COMPARE.train
        monkeypatch.setattr(COMPARE, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compare(task, [PLAIN], out=tmp_path, seeds=(0, 1, 2))
        assert folder_of(tmp_path, "DP-SGD", 1).exists()
        assert {path.name for path in tmp_path.iterdir()} == {".lock", "dp-sgd"}

    def test_a_run_that_cannot_be_written_leaves_its_price(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError("No space left on device")

        task = task_of(public=None, accountant="rdp")
        with monkeypatch.context() as small:
            small.setattr(RunFolder, "write_model", full)
            with pytest.raises(OSError, match="No space left"):
                compare(task, [PLAIN], out=tmp_path, seeds=(0,))
        run = RunFolder(folder_of(tmp_path, "DP-SGD", 0))
        assert read(run.ledger)["steps"] == 8
        assert not run.finished
        other = dataclasses.replace(PLAIN, learning_rate=0.7)
        with pytest.raises(ValueError, match=r"learning_rate is 0\.5 there, 0\.7 here"):
            compare(task, [other], out=tmp_path, seeds=(0,))
        renamed = dataclasses.replace(other, name="other")
        compare(task, [renamed], out=tmp_path, seeds=(0,))
        whole = read(tmp_path / "certificate.json")
        assert whole["steps"] == 16
        assert any("a run was charged whose model is not here" in w for w in whole["warnings"])

    @pytest.mark.parametrize("writer", ["write_model", "write_ledger", "append"])
    def test_a_killed_run_goes_on_and_is_paid_once(self, tmp_path: Path, writer: str) -> None:
        task = task_of(public=None, accountant="rdp", epochs=3)
        arguments = (task, tmp_path, writer)
        process = CONTEXT.Process(target=killed_when_written, args=arguments)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        run = RunFolder(folder_of(tmp_path, "DP-SGD", 0))
        spent = read(run.ledger)["steps"]
        assert spent == {"write_model": 12, "write_ledger": 4, "append": 4}[writer]
        comparison = compare(task, [PLAIN], out=tmp_path, seeds=(0,))
        whole = read(tmp_path / "certificate.json")
        assert whole["steps"] == read(run.ledger)["steps"] == 12  # the budget is a hard stop
        lost = 4 if writer == "write_ledger" else 0  # what came after it was not there
        assert read_lines(run.metrics)[-1]["step"] == 12 - lost
        assert read(run.run)["status"] == ("budget spent" if lost else "finished")
        assert any("4 steps were charged" in w for w in whole["warnings"]) == bool(lost)
        (result,) = row(comparison, "DP-SGD").results
        assert result.status == read(run.run)["status"]
        assert ("DP-SGD (1 budget spent)" in _printed(comparison)) == bool(lost)
        page = render([tmp_path], tmp_path / "r.html").read_text()
        assert (">DP-SGD (1 budget spent)" in page) == bool(lost)
        assert result.epsilon <= BUDGET.epsilon
        assert compare(task, [PLAIN], out=tmp_path, seeds=(0,)) == comparison  # and no more

    def test_a_run_that_released_nothing_may_change_its_settings(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task = task_of(public=None, accountant="rdp")

        def mistaken(*_: Any) -> None:
            raise RuntimeError("a mistake")

        with monkeypatch.context() as patched:
            patched.setattr(Training, "_piece", mistaken)
            with pytest.raises(RuntimeError, match="a mistake"):
                compare(task, [PLAIN], out=tmp_path, seeds=(0,))
        other = dataclasses.replace(PLAIN, learning_rate=0.7)
        compare(task, [other], out=tmp_path, seeds=(0,))
        assert read(tmp_path / "certificate.json")["steps"] == 8

    def test_one_process_at_a_time(self, tmp_path: Path) -> None:
        with (
            RunFolder(tmp_path).locked(),
            pytest.raises(RuntimeError, match="Another process is training in"),
        ):
            compare(task_of(public=None), [PLAIN], out=tmp_path, seeds=(0,))

    def test_a_worker_that_outlived_its_call_is_not_forgotten(self, tmp_path: Path) -> None:
        """It would release more than the certificate of this call counts."""
        task = task_of(public=None, accountant="rdp")
        run = RunFolder(folder_of(tmp_path, "other", 0))
        run.path.mkdir(parents=True)
        run.write_facts(settings={"paid": None}, status=None)
        refused = pytest.raises(RuntimeError, match=r"Another process is training in .*other")
        with run_lock(run.path), refused:
            compare(task, [PLAIN], out=tmp_path, seeds=(0,))
        assert not (tmp_path / "certificate.json").exists()
        compare(task, [PLAIN], out=tmp_path, seeds=(0,))

    @pytest.mark.parametrize("name", ["config.yaml", "checkpoint.safetensors", "model.safetensors"])
    def test_the_folder_of_a_run_is_left_alone(self, tmp_path: Path, name: str) -> None:
        files = {tmp_path / file for file in (name, "certificate.json", "metrics.jsonl")}
        for path in files:
            path.write_text("of the run")
        with pytest.raises(ValueError, match="holds a run, whose certificate would be replaced"):
            compare(task_of(public=None), [PLAIN], out=tmp_path, seeds=(0,))
        assert {path for path in tmp_path.iterdir() if path.name != ".lock"} == files
        assert {path.read_text() for path in files} == {"of the run"}

    def test_other_settings_in_the_same_folder_are_refused(self, tmp_path: Path) -> None:
        task = task_of(public=None)
        compare(task, [PLAIN], out=tmp_path, seeds=(0,))
        faster = Contender(name="DP-SGD", method=DPSGD(clip=1.0), learning_rate=0.7)
        with pytest.raises(ValueError, match=r"learning_rate is 0.5 there, 0.7 here"):
            compare(task, [faster], out=tmp_path, seeds=(0,))

    def test_a_model_of_its_own(self, tmp_path: Path) -> None:
        def scaled(factor: float) -> Contender:
            return Contender(
                name="frozen scale + DP-SGD",
                method=DPSGD(clip=1.0),
                learning_rate=0.5,
                model=functools.partial(_scaled_network, factor),
            )

        task = task_of()
        made = compare(task, [PLAIN, scaled(2.0)], out=tmp_path, seeds=(0,))
        names = [r.name for r in made.rows]
        assert names == ["public only", "warm start + DP-SGD", "DP-SGD", "frozen scale + DP-SGD"]
        assert [r.own_model for r in made.rows] == [False, False, False, True]
        weights = load_file(tmp_path / "frozen-scale-dp-sgd" / "seed-0" / "model.safetensors")
        assert weights["0.scale"].item() == 2.0
        # It is no plain DP-SGD: that is still compared with it, and asked for.
        assert any("the best other row against DP-SGD: “frozen" in s for s in verdicts(made))
        with pytest.raises(ValueError, match="Expected DP-SGD among the contenders"):
            compare(task, [scaled(2.0)], out=tmp_path / "alone")
        with pytest.raises(ValueError, match=r"frozen is '?\w+'? there"):
            compare(task, [PLAIN, scaled(3.0)], out=tmp_path, seeds=(0,))

    def test_names_that_share_a_folder_are_refused(self, tmp_path: Path) -> None:
        twin = Contender(name="DP SGD", method=DPSGD(clip=2.0), learning_rate=0.5)
        with pytest.raises(ValueError, match=r"letters or digits, .*got 'DP-SGD', 'DP SGD'\."):
            compare(task_of(), [PLAIN, twin], out=tmp_path)
        nameless = Contender(name="!", method=DPSGD(clip=2.0), learning_rate=0.5)
        with pytest.raises(ValueError, match=r"got '!'\. Rename yours"):
            compare(task_of(), [PLAIN, nameless], out=tmp_path)

    def test_names_in_any_script(self) -> None:
        assert folder_of(Path("out"), "日本", 0) == Path("out/日本/seed-0")
        assert folder_of(Path("out"), "warm_start + DP-SGD!", 0) == Path(
            "out/warm-start-dp-sgd/seed-0"
        )

    def test_seeds_are_checked(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="at least 1 seed, none of them twice"):
            compare(task_of(), [PLAIN], out=tmp_path, seeds=(1, 1))

    def test_a_diverged_run_is_a_result(self, tmp_path: Path) -> None:
        method = GEP(public=blobs(20, 2)[0], rank=2, clip=1.0)
        wild = Contender(name="GEP", method=method, learning_rate=1e30)
        task = task_of(public=None, model=deep_network)
        comparison = compare(task, [PLAIN, wild], out=tmp_path, seeds=(0,))
        (result,) = row(comparison, "GEP").results
        assert result.status == "diverged"
        assert result.diverged == "the weights grew without bound: lower the learning rate"
        assert "GEP (1 diverged)" in _printed(comparison)

    def test_errors_of_private_records_are_not_taken_for_divergence(self, tmp_path: Path) -> None:
        class Broken(Dataset[Any]):
            def __len__(self) -> int:
                return 200

            def __getitem__(self, index: int) -> Any:
                raise ValueError("record 17 is broken")

        with pytest.raises(ValueError, match="record 17 is broken"):
            compare(task_of(public=None, private=Broken()), [PLAIN], out=tmp_path, seeds=(0,))
        run = RunFolder(folder_of(tmp_path, "DP-SGD", 0))
        assert not run.finished
        assert read(run.ledger)["steps"] == 0

    def test_only_classifiers(self, tmp_path: Path) -> None:
        x, _ = blobs(60, 1)
        task = task_of(public=None, test=TensorDataset(x, x[:, :1]))
        with pytest.raises(ValueError, match="Expected a classifier"):
            compare(task, [PLAIN], out=tmp_path, seeds=(0,))

    def test_private_test_records_are_named_so(self, tmp_path: Path) -> None:
        comparison = compare(task_of(test_is_public=False), [PLAIN], out=tmp_path, seeds=(0,))
        assert "NOT PRIVATE" in verdicts(comparison)[0]
        assert comparison.unprivate
        for path in [*tmp_path.rglob("*.json"), *tmp_path.rglob("*.jsonl")]:
            assert '"test_accuracy' not in path.read_text()
            assert '"value"' not in path.read_text()
        assert "NOT PRIVATE" in " ".join(_printed(comparison).split())
        assert f"the best of them, costs ε = {comparison.epsilon_together:.2f}" in " ".join(
            _printed(comparison).split()
        )
        for name in ("DP-SGD", "public only"):
            certificate = read(folder_of(tmp_path, name, 0) / "certificate.json")
            assert any(warning.startswith("unprivate:") for warning in certificate["warnings"])

    def test_test_records_are_private_unless_declared_public(self) -> None:
        data = TensorDataset(*blobs(20, 0))
        task = Task(model=linear, private=data, test=data, batch_size=5, epochs=1, budget=BUDGET)
        assert not task.test_is_public

    @pytest.mark.slow
    def test_in_processes(self, tmp_path: Path) -> None:
        comparison = compare(task_of(), [PLAIN], out=tmp_path, seeds=(0, 1), jobs=2)
        assert all(len(row.results) == 2 for row in comparison.rows)


def halved(step: int, steps: int) -> float:
    return 1.0 if step < steps / 2 else 0.5


class Watched:
    """Makes an optimizer that notes its rates after each call of step that did something."""

    def __init__(self, make: Callable[..., Optimizer]) -> None:
        self._make = make
        self.rates: list[Any] = []
        self.calls = 0

    def __call__(self, parameters: Any, lr: float) -> Optimizer:
        made = self._make(parameters, lr=lr)
        made.register_step_post_hook(self._note)
        return made

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        self.calls += 1
        if optimizer.param_groups[0]["params"][0].grad is not None:
            rates = tuple(group["lr"] for group in optimizer.param_groups)
            self.rates.append(rates if len(rates) > 1 else rates[0])


def contender_with(optimizer: Any) -> Contender:
    return Contender(
        name="a", method=DPSGD(), learning_rate=0.1, optimizer=optimizer, schedule=halved
    )


class TestSteps:
    def test_any_optimizer_and_schedule(self, tmp_path: Path) -> None:
        adam = Watched(Adam)
        run = trained(task_of(public=None, accountant="rdp"), contender_with(adam), tmp_path)
        assert adam.rates == [0.1] * 4 + [0.05] * 4  # 2 epochs of 4 steps
        assert read(run.certificate)["steps"] == 8

    def test_rates_of_groups_keep_their_ratio(self, tmp_path: Path) -> None:
        def grouped(parameters: Any, lr: float) -> Optimizer:
            first, *others = parameters
            return SGD([{"params": [first], "lr": 10 * lr}, {"params": others}], lr=lr)

        sgd, task = Watched(grouped), task_of(public=None, epochs=1, accountant="rdp")
        trained(task, contender_with(sgd), tmp_path)
        assert sgd.rates == [(1.0, 0.1)] * 2 + [(0.5, 0.05)] * 2

    def test_they_tell_runs_apart(self) -> None:
        changes: list[dict[str, Any]] = [
            {},
            {"momentum": 0.9},
            {"optimizer": Adam},
            {"optimizer": functools.partial(Adam, weight_decay=0.1)},
            {"optimizer": lambda p, lr: Adam(p, lr=lr, betas=(0.5, 0.9))},
            {"optimizer": lambda p, lr: Adam(p, lr=lr, betas=(0.6, 0.9))},
            {"schedule": lambda step, steps: 1 - step / steps},
            {"schedule": StepsSection(at=(0.51,)).factor},
            {"schedule": StepsSection(at=(0.52,)).factor},
        ]

        def described() -> list[str]:
            contenders = [
                Contender(name="a", method=DPSGD(), learning_rate=0.1, **c) for c in changes
            ]
            return [json.dumps(contender.describe()) for contender in contenders]

        assert described() == described()
        assert len(set(described())) == len(changes)

    def test_a_batch_in_pieces_is_one_step(self, tmp_path: Path) -> None:
        adam = Watched(Adam)
        task = task_of(public=None, epochs=1, physical_batch_size=7, accountant="rdp")
        run = trained(task, contender_with(adam), tmp_path)
        assert read(run.certificate)["steps"] == read_lines(run.metrics)[-1]["step"] == 4
        assert adam.calls > 4
        assert adam.rates == [0.1, 0.1, 0.05, 0.05]

    def test_no_private_record_meets_weights_that_diverged(self, tmp_path: Path) -> None:
        met: list[float] = []

        def note(layer: nn.Module, _: Any) -> None:
            if layer.training:
                met.append(float(layer.weight.detach().abs().max()))  # type: ignore[operator]

        def watched() -> nn.Module:
            layer = linear()
            layer.register_forward_pre_hook(note)
            return layer

        wild = Contender(name="a", method=DPSGD(), learning_rate=1e12)
        run = trained(task_of(public=None, model=watched, accountant="rdp"), wild, tmp_path)
        assert read(run.certificate)["steps"] == 1
        assert max(met) < 1e6
        assert read(run.run)["diverged"] is not None

    def test_models_are_trained_where_they_are_told_to(self, tmp_path: Path) -> None:
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            trained(task_of(public=None, device="meta"), PLAIN, tmp_path)


class TestPrice:
    def test_public_number_of_records(self, tmp_path: Path) -> None:
        task = task_of(public=None, records=500)  # of about 500, there are 200
        compare(task, [PLAIN], out=tmp_path, seeds=(0,))
        certificate = read(folder_of(tmp_path, "DP-SGD", 0) / "certificate.json")
        (entry,) = certificate["events"]
        assert entry["event"]["sampling_probability"] == 0.1
        assert entry["count"] == 20
        assert certificate["training"]["expected_batch_size"] == 50
        del certificate["training"]["weights_sha256"]  # random letters and digits
        assert "200" not in json.dumps(certificate["training"])
        with pytest.raises(ValueError, match="records is 500 there, 400 here"):
            compare(task_of(public=None, records=400), [PLAIN], out=tmp_path, seeds=(0,))

    def test_the_accountant_of_the_task(self, tmp_path: Path) -> None:
        task = task_of(accountant="rdp")
        comparison = compare(task, [PLAIN], out=tmp_path, seeds=(0,))
        for path in tmp_path.rglob("certificate.json"):
            assert read(path)["accountant"]["chosen"] == "rdp"
        spent = read(folder_of(tmp_path, "DP-SGD", 0) / "certificate.json")
        events = [(event_from_json(e["event"]), e["count"]) for e in spent["events"]]
        assert account(events, BUDGET.delta, "rdp").epsilon == pytest.approx(5.0, abs=2e-3)
        assert row(comparison, "DP-SGD").epsilon == spent["epsilon"]

    def test_runs_about_something_else_are_not_taken_for_done(self, tmp_path: Path) -> None:
        compare(task_of(public=None, about={"data": "a"}), [PLAIN], out=tmp_path, seeds=(0,))
        with pytest.raises(ValueError, match=r"about is {'data': 'a'} there, {'data': 'b'} here"):
            compare(task_of(public=None, about={"data": "b"}), [PLAIN], out=tmp_path, seeds=(0,))

    def test_together_counts_every_run(self, compared: tuple[Path, Comparison]) -> None:
        tmp_path, comparison = compared
        events = [
            (event_from_json(entry["event"]), entry["count"])
            for row in comparison.rows
            for result in row.results
            for entry in read(tmp_path / result.folder / "certificate.json")["events"]
        ]
        expected = account(events, BUDGET.delta, "pld").epsilon
        assert comparison.epsilon_together == pytest.approx(expected, rel=1e-6)
        assert comparison.epsilon_together > BUDGET.epsilon
        whole = read(tmp_path / "certificate.json")
        assert whole["epsilon"] == comparison.epsilon_together
        assert whole["steps"] == sum(count for _, count in events)

    @pytest.mark.parametrize(("shared", "choices"), [(True, 1), (False, 2)])
    def test_a_shared_choice_counts_once_and_equal_ones_twice(
        self, tmp_path: Path, shared: bool, choices: int
    ) -> None:
        def state() -> dict[str, Any]:
            ledger = Ledger()
            ledger.charge(pure_event(0.1))
            return ledger.state_dict()

        one = state()
        contenders = [
            Contender(name=n, method=DPSGD(clip=1.0), learning_rate=0.5, paid=p)
            for n, p in (("a", one), ("b", one if shared else state()))
        ]
        comparison = compare(task_of(public=None), contenders, out=tmp_path, seeds=(0,))
        for row in comparison.rows:  # each run pays for the choice within its own budget
            spent = read(tmp_path / row.results[0].folder / "certificate.json")
            assert spent["events"][0]["event"]["kind"] == "DiscreteLaplaceDpEvent"
            assert spent["epsilon"] <= BUDGET.epsilon
        whole = read(tmp_path / "certificate.json")
        kinds = [e for e in whole["events"] if e["event"]["kind"] == "DiscreteLaplaceDpEvent"]
        assert sum(entry["count"] for entry in kinds) == choices

    def test_a_run_on_public_data_pays_for_nobody(self, tmp_path: Path) -> None:
        ledger, task = Ledger(), task_of(accountant="rdp")
        ledger.charge(pure_event(0.1))
        free = Contender(name="free", warm_start=task.start, paid=ledger.state_dict())
        user = Contender(
            name="a", method=DPSGD(), learning_rate=0.5, warm_start=task.start, paid=free.paid
        )
        compare(task, [free, user], out=tmp_path, seeds=(0,))
        kinds = [e["event"]["kind"] for e in read(tmp_path / "certificate.json")["events"]]
        assert kinds.count("DiscreteLaplaceDpEvent") == 1

    def test_steps_that_equal_what_was_paid_are_still_counted(
        self, compared: tuple[Path, Comparison]
    ) -> None:
        # The earlier release and the steps are one merged event: only the shared part is left out.
        spent = read(folder_of(compared[0], "DP-SGD", 0) / "ledger.json")
        ledger = Ledger()
        (entry,) = spent["events"]
        ledger.charge(event_from_json(entry["event"]), 3)
        state, together = ledger.state_dict(), Ledger()
        longer = {**spent, "events": [{**entry, "count": 8}]}
        COMPARE._add(together, longer, state, {COMPARE._known_as(state)})
        assert together.steps == 5

    def test_runs_of_an_earlier_call_still_count(self, tmp_path: Path) -> None:
        task = task_of(public=None)
        more = compare(task, [PLAIN], out=tmp_path, seeds=(0, 1))
        fewer = compare(task, [PLAIN], out=tmp_path, seeds=(0,))
        assert [len(c.rows[0].results) for c in (more, fewer)] == [2, 1]
        assert fewer.epsilon_together == more.epsilon_together

    def test_a_choice_made_in_the_folder_counts_once_whoever_uses_it(self, tmp_path: Path) -> None:
        ledger = Ledger(budget=BUDGET)
        ledger.charge(pure_event(0.5))
        tmp_path.joinpath("ledger.json").write_text(json.dumps(ledger.state_dict()))
        task = task_of(public=None, accountant="rdp")
        method = DPSGD(clip=1.0)
        user = Contender(
            name="a", method=method, learning_rate=0.5, paid=read(tmp_path / "ledger.json")
        )

        def choices() -> int:
            events = read(tmp_path / "certificate.json")["events"]
            return sum(e["count"] for e in events if "Laplace" in e["event"]["kind"])

        compare(task, [PLAIN], out=tmp_path, seeds=(0,))
        assert choices() == 1  # nobody used it, and it was made all the same
        both = compare(task, [PLAIN, user], out=tmp_path, seeds=(0,))
        assert choices() == 1
        fewer = compare(task, [PLAIN], out=tmp_path, seeds=(0,))
        assert choices() == 1
        assert fewer.epsilon_together == pytest.approx(both.epsilon_together, rel=1e-9)

    def test_another_choice_is_another_release(self, tmp_path: Path) -> None:
        def contender() -> Contender:
            ledger = Ledger()
            ledger.charge(pure_event(0.1))
            return Contender(name="a", method=DPSGD(), learning_rate=0.5, paid=ledger.state_dict())

        task = task_of(public=None)
        compare(task, [contender()], out=tmp_path, seeds=(0,))
        with pytest.raises(ValueError, match="a run with other settings \\(paid is"):
            compare(task, [contender()], out=tmp_path, seeds=(0,))

    def test_other_public_data_is_another_setting(self) -> None:
        first, second = (
            Contender(
                name="GEP", method=GEP(public=blobs(20, s)[0], rank=2, clip=1.0), learning_rate=1.0
            )
            for s in (2, 3)
        )
        assert first.describe() != second.describe()
        assert first.describe() == first.describe()


def _row(name: str, values: list[float], **changes: Any) -> Row:
    settings: dict[str, Any] = {"private": True, "warm": False, "method": "DPSGD"} | changes
    results = tuple(
        Result(seed=i, epsilon=1.0 if settings["private"] else 0.0, value=v, folder="")
        for i, v in enumerate(values)
    )
    return Row(name=name, learning_rate=1.0, results=results, **settings)


def _comparison(*rows: Row) -> Comparison:
    return Comparison(
        metric="test_accuracy",
        epsilon=1.0,
        delta=1e-5,
        epochs=2,
        batch_size=10,
        rows=rows,
        epsilon_together=3.0,
    )


def _printed(comparison: Comparison) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(comparison)
    return console.export_text()


class TestVerdicts:
    LOW, HIGH = [0.60, 0.61, 0.62], [0.90, 0.91, 0.92]

    @pytest.mark.parametrize(
        ("private", "public", "said"),
        [
            (HIGH, LOW, "Private training is worth its ε here. “DP-SGD” beats “public only” by 30"),
            (LOW, HIGH, "not shown to be worth its ε here. “DP-SGD” is behind “public only” by 30"),
            (LOW, [0.55, 0.60, 0.66], "not shown to be worth its ε"),
        ],
    )
    def test_whoever_wins(self, private: list[float], public: list[float], said: str) -> None:
        rows = _row("public only", public, private=False, method=None), _row("DP-SGD", private)
        assert said in verdicts(_comparison(*rows))[0]

    def test_the_best_of_many_must_be_further_ahead(self) -> None:
        first, second = _row("a", [0.90, 0.92, 0.94]), _row("b", [0.85, 0.87, 0.89])
        assert difference(first, second)[0]
        assert not difference(first, second, picked_from=10)[0]

    def test_one_seed_tells_nothing(self) -> None:
        assert not difference(_row("a", [0.9]), _row("b", [0.1]))[0]

    def test_seeds_that_agree(self) -> None:
        assert difference(_row("a", [0.9, 0.9]), _row("b", [0.1, 0.1]))[0]
        assert not difference(_row("a", [0.9, 0.9]), _row("b", [0.9, 0.9]))[0]

    def test_methods_are_compared_from_the_same_start(self) -> None:
        said = verdicts(
            _comparison(
                _row("DP-SGD", self.LOW),
                _row("GEP", self.HIGH, method="GEP"),
                _row("warm start + DP-SGD", self.HIGH, warm=True),
                _row("warm start + GEP", self.LOW, warm=True, method="GEP"),
            )
        )
        assert "From scratch, the best other row against DP-SGD: “GEP” beats “DP-SGD”" in said[0]
        assert "“warm start + GEP” is behind “warm start + DP-SGD” by 30.0 points" in said[1]
        assert "“warm start + DP-SGD” beats “DP-SGD” by 30.0 points" in said[2]


class TestResults:
    def test_mean_and_deviation(self) -> None:
        row = _row("a", [0.5, 0.6, 0.7])
        assert row.mean == pytest.approx(0.6)
        assert row.deviation == pytest.approx(0.1)
        assert _row("a", [0.5]).deviation is None

    def test_table_and_picture(self, tmp_path: Path) -> None:
        comparison = _comparison(_row("DP-SGD", [0.5, 0.6, 0.7]))
        text = " ".join(_printed(comparison).split())
        assert "60.0 ± 10.0" in text
        assert "50.0% … 70.0%" in text
        assert "publishing every run, or the best of them, costs ε = 3.00" in text
        assert comparison.plot(tmp_path / "plot.png").stat().st_size > 5000

    def test_verdicts_on_private_test_records_are_called_so(self) -> None:
        row = _row("DP-SGD", [0.5, 0.6, 0.7])
        open_to_all = _comparison(row)
        for_the_operator = dataclasses.replace(open_to_all, metric="unprivate_test_accuracy")
        assert "verdicts" in open_to_all.to_dict()
        assert "verdicts" not in for_the_operator.to_dict()
        assert "unprivate_verdicts" in for_the_operator.to_dict()
