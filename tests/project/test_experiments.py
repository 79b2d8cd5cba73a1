"""The experiments: their files, data and runs, and the page that is made of the results."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import one_run, pages
from experiments.catalogue import load, names
from experiments.data import ImagesSection, OptIn, OtherFile, UniformNoise
from experiments.missing import lacks
from experiments.one_run import Run, train
from experiments.runner import Place, Results
from experiments.samples import Choice, samples_of
from experiments.schema import Search, TrainingExperiment
from experiments.sweep import CellSearch, all_cells, reported, sweep

from dpspan.app.section import ConfigError, parse
from dpspan.mechanisms.gep import GEPMechanism

ROOT = Path(__file__).parents[2]
TINY = """
title: A tiny experiment
paper: nobody
about: Two classes of squares.
data:
  name: images
  file: squares
  classes: 2
  records: 120
  held_out: 40
  public:
    opt-in: {source: opt-in, samples: 20, labelled: true}
    noise: {source: noise, samples: 16}
model: {name: mlp, hidden: [4]}
training: &plain {epochs: 2, batch_size: 30, optimizer: {name: sgd}}
targets: {epsilon: [2.0, 8.0]}
seeds: 2
attack: true
rows:
  non-private:
    method: non-private
    rates: [0.1, 0.5]
  public only:
    method: public only
    warm_start: &warm {public: opt-in, max_epochs: 20, learning_rate: 0.05}
  DP-SGD:
    method: {name: dpsgd}
    rates: [0.1, 0.5]
    paper: {8.0: 91.5}
  warm start + GEP:
    method: {name: gep, public: noise, rank: 3}
    warm_start: *warm
    rates: DP-SGD
  pre-trained:
    method: public only
    pretraining: {file: colour, classes: 3, samples: 24, epochs: 2, augment: {name: affine}}
    warm_start: *warm
  AdaGrad:
    method: {name: noisy-adagrad, steps: 5}
    model: {name: logistic}
    rates: [1.0]
    targets: [8.0]
  patches:
    method: {name: dpsgd}
    model: {name: patches, public: noise, filters: 4, size: [3, 4], directions: 6}
    rates: [1.0]
  patches + GEP:
    method: {name: gep, public: noise, rank: 3}
    model: {name: patches, public: noise, filters: 4, size: [3], directions: 6}
    rates: patches
  DP-SGD, views:
    method: {name: dpsgd}
    training:
      epochs: {2.0: 1, 8.0: 2}
      batch_size: 30
      optimizer: {name: adam}
      views: 2
      average_weights: 0.5
      low_pass: 0.5
    rates: [0.01]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bright and dark squares; the first pixel and the last number the image."""
    path = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    parts: dict[str, Any] = {}
    for name, count in (("train", 200), ("test", 60)):
        y = np.arange(count) % 2
        x = (rng.integers(0, 100, (count, 10, 10)) + 150 * y[:, None, None]).astype(np.uint8)
        x[:, 0, 0] = np.arange(count)
        parts |= {f"x_{name}": x, f"y_{name}": y}
    np.savez(path / "squares.npz", **parts)
    colour = rng.integers(0, 255, (30, 20, 20, 3)).astype(np.uint8)
    np.savez(path / "colour.npz", x_train=colour, y_train=np.arange(30) % 3)
    return path


@pytest.fixture(scope="module")
def tiny() -> TrainingExperiment:
    return parse(TINY, TrainingExperiment, name="tiny.yaml")


@pytest.fixture(scope="module")
def swept(
    tiny: TrainingExperiment, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    results = Results(tmp_path_factory.mktemp("results") / "tiny.jsonl")
    place = Place(data=folder, commit="abc")
    for row, target in all_cells(tiny):
        for run in CellSearch.of("tiny", tiny, row, target, results).wanted:
            results.add(train(run, tiny, place))
    for row, target in all_cells(tiny):
        for run in reported("tiny", tiny, row, target, results, 2):
            results.add(train(run, tiny, place))
    return results


class TestSamples:
    def choice(self, tiny: TrainingExperiment, row: str, folder: Path, **other: Any) -> Choice:
        said = {"seed": 0, "hold_out": False, **other}
        return Choice.of(tiny.data, tiny.rows[row], **said, place=Place(data=folder))

    def test_runs_that_differ_in_their_training_only_share_them(
        self, tiny: TrainingExperiment, folder: Path
    ) -> None:
        one = samples_of(self.choice(tiny, "DP-SGD", folder))
        assert samples_of(self.choice(tiny, "DP-SGD, views", folder)) is one

    @pytest.mark.parametrize(
        ("row", "other", "said"),
        [
            ("patches", "patches", {"seed": 1}),
            ("patches", "patches", {"hold_out": True}),
            ("patches", "patches + GEP", {}),  # another size of patches, and nothing else
            ("DP-SGD", "warm start + GEP", {}),  # copies of its public data are left out
            ("public only", "pre-trained", {}),
        ],
    )
    def test_others_do_not(
        self, row: str, other: str, said: dict[str, Any], tiny: TrainingExperiment, folder: Path
    ) -> None:
        one, two = self.choice(tiny, row, folder), self.choice(tiny, other, folder, **said)
        assert samples_of(one) is not samples_of(two)


class TestFiles:
    @pytest.mark.parametrize("name", names())
    def test_every_experiment_can_be_read(self, name: str) -> None:
        experiment = load(name)
        assert experiment.seeds >= 3
        assert experiment.title

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            (
                "public: noise",
                "public: nose",
                "Expected public data under data.public",
            ),
            (
                "    targets: [8.0]",
                "    targets: [4.0]",
                r"AdaGrad: Expected targets among \[2.0, 8.0\]",
            ),
            ("rates: DP-SGD", "rates: SGD", "Expected rates or another row's name, got 'SGD'"),
            ("targets: {epsilon: [2.0, 8.0]}", "targets: {}", "Expected epsilon or noise_multi"),
            (
                "    warm_start: &warm {public: opt-in, max_epochs: 20, learning_rate: 0.05}\n",
                "",
                "aliases that nothing defines",
            ),
            ("public: noise, rank: 3", "rank: 3", "Expected method.public"),
            (
                "directions: 6}\n    rates: [1.0]",
                "directions: 6}\n    rates: [1.0]\n    trainable: {name: bias}",
                "Expected no pretraining or trainable behind a frozen layer",
            ),
            ("epochs: {2.0: 1, 8.0: 2}", "epochs: {2.0: 1}", r"Expected epochs at \[2.0, 8.0\]"),
            ("    rates: [1.0]\n", "    rates: [1.0]\n    warm_start: *warm\n", "no warm_start"),
            ("name: gep", "name: gap", "Expected 'name' to be one of .*'gep'"),
        ],
    )
    def test_mistakes_are_told(self, old: str, new: str, message: str) -> None:
        assert old in TINY
        with pytest.raises(ConfigError, match=message):
            parse(TINY.replace(old, new), TrainingExperiment, name="tiny.yaml")

    def test_the_digest_tells_settings_apart(self, tiny: TrainingExperiment) -> None:
        same = ("paper: {8.0: 91.5}", "paper: {8.0: 1}"), ("rates: [0.1, 0.5]", "rates: [0.1]")
        other = ("epochs: 2,", "epochs: 3,"), ("hidden: [4]", "hidden: [5]"), ("20, lab", "21, lab")
        for expected, changes in ((True, same), (False, other)):
            for old, new in changes:
                changed = parse(TINY.replace(old, new), TrainingExperiment, name="t")
                digests = [e.digest("warm start + GEP") for e in (tiny, changed)]
                assert (digests[0] == digests[1]) is expected, new

    def test_public_data_of_other_rows_are_part_of_the_settings(
        self, tiny: TrainingExperiment
    ) -> None:
        """They are neither private nor tested on in any row."""
        more = "    more: {source: opt-in, samples: 5}\n    noise:"
        seen = "    test: {source: file, file: squares, part: test, samples: 9}\n    noise:"
        for added in (more, seen):
            other = parse(TINY.replace("    noise:", added), TrainingExperiment, name="t")
            assert other.digest("DP-SGD") != tiny.digest("DP-SGD")


class TestData:
    def numbers(self, x: torch.Tensor) -> set[int]:
        return {round((float(v) + 1) * 127.5) for v in x[:, 0, 0, 0]}

    def test_private_public_held_out_and_test_images_are_apart(self, folder: Path) -> None:
        public = {"ours": OptIn(samples=20, labelled=True), "more": OptIn(samples=10)}
        section = ImagesSection(file="squares", classes=2, records=100, held_out=30, public=public)
        data = section.load(folder, seed=3, hold_out=False)
        parts = [data.private.x, data.held_out.x]
        parts += [each.batches[0][0] for each in data.public.values()]
        found = [self.numbers(part) for part in parts]
        assert [len(part) for part in found] == [100, 30, 20, 10]
        assert len(set().union(*found)) == 160
        assert data.public["ours"].labelled
        assert not data.public["more"].labelled
        again = section.load(folder, seed=4, hold_out=False)
        assert self.numbers(again.private.x) != found[0]

    def test_all_images_are_private_unless_some_are_held_out(self, folder: Path) -> None:
        section = ImagesSection(file="squares", classes=2, held_out=50)
        whole = section.load(folder, seed=0, hold_out=False)
        assert (len(whole.private), len(whole.held_out)) == (200, 0)
        part = section.load(folder, seed=1, hold_out=True)
        assert (len(part.private), len(part.held_out)) == (150, 50)
        assert not self.numbers(part.private.x) & self.numbers(part.held_out.x)

    def test_what_is_public_of_the_test_images_is_not_tested_on(self, folder: Path) -> None:
        test = OtherFile(file="squares", part="test", samples=15)
        section = ImagesSection(file="squares", classes=2, public={"test": test})
        data = section.load(folder, seed=0, hold_out=False)
        assert self.numbers(data.test.x) == set(range(15, 60))
        assert self.numbers(data.public["test"].batches[0][0]) == set(range(15))

    def test_public_images_take_the_form_of_the_private_ones(self, folder: Path) -> None:
        public = {"colour": OtherFile(file="colour"), "noise": UniformNoise(samples=8)}
        section = ImagesSection(file="squares", classes=2, public=public)
        data = section.load(folder, seed=0, hold_out=False)
        shapes = {name: tuple(d.batches[0][0].shape) for name, d in data.public.items()}
        assert shapes == {"colour": (30, 1, 10, 10), "noise": (8, 1, 10, 10)}
        assert data.shape == (1, 10, 10)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"put absent\.npz with x_train, y_train there"):
            ImagesSection(file="absent").load(tmp_path, seed=0, hold_out=False)


class TestRuns:
    def test_a_row_has_what_was_spent_and_where(self, swept: Results) -> None:
        for row in swept.rows:
            assert row["made"]["commit"] == "abc"
            assert row["made"]["versions"]["torch"] == version("torch")
            private = row["target"] is not None
            assert ("certificate" in row) is (private and not row["tuning"])
            if private:
                assert row["target"] - 0.01 < row["epsilon"] <= row["target"]
        free = {row["row"]: row["epsilon"] for row in swept.rows if row["target"] is None}
        assert free == {"non-private": None, "public only": 0.0, "pre-trained": 0.0}

    def test_bfloat16_is_used_and_said(
        self, tiny: TrainingExperiment, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []

        class Noting(torch.nn.CrossEntropyLoss):
            def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                seen.extend([input.dtype] * input.requires_grad)
                return super().forward(input, target)

        monkeypatch.setattr(one_run, "CRITERION", Noting())
        run = Run("tiny", "non-private", None, 0.1, 0, False, tiny.digest("non-private"))
        row = train(run, tiny, Place(data=folder, commit="abc", bf16=True))
        assert set(seen) == {torch.bfloat16}
        assert row["made"]["bf16"]

    def test_the_warm_start_and_the_public_data_are_on_the_certificate(
        self, swept: Results
    ) -> None:
        row = next(r for r in swept.rows if r["row"] == "warm start + GEP" and not r["tuning"])
        text = json.dumps(row["certificate"])
        assert "noise" in text
        assert "opt-in" in text

    def test_pre_training_is_on_record(
        self, tiny: TrainingExperiment, folder: Path, swept: Results
    ) -> None:
        before = "    pretraining: {file: squares, classes: 2, samples: 90}\n"
        rates = "    rates: [0.1, 0.5]\n    paper"
        text = TINY.replace(rates, before + rates)
        changed = parse(text, TrainingExperiment, name="t")
        row = train(Run("tiny", "DP-SGD", 8.0, 0.1, 0, False, "x"), changed, Place(data=folder))
        (public,) = row["certificate"]["public"]
        assert public["name"] == "squares, pre-training"
        data = changed.data.load(folder, seed=0, hold_out=True)
        copies = sum(round((float(v) + 1) * 127.5) < 90 for v in data.private.x[:, 0, 0, 0])
        assert copies > 0
        assert row["records"] == 120 - copies

    def test_what_is_tested_is_the_average_and_the_certificate_says_so(
        self, swept: Results
    ) -> None:
        runs = [run for run in swept.rows if run["row"] == "DP-SGD, views"]
        assert runs
        assert all(("unaveraged" in run) == (run["row"] == "DP-SGD, views") for run in swept.rows)
        for run in runs:
            if not run["tuning"]:
                done = run["certificate"]["training"]["post_processing"]
                assert done == {"low_pass": 0.5, "average_weights": 0.5}

    def test_nothing_without_noise_is_smoothed(self) -> None:
        training = (
            "    training: {epochs: 1, batch_size: 9, optimizer: {name: sgd}, low_pass: 0.5}\n"
        )
        text = TINY.replace("    method: non-private\n", "    method: non-private\n" + training)
        with pytest.raises(ConfigError, match="Expected no average_weights or low_pass"):
            parse(text, TrainingExperiment, name="tiny.yaml")

    def test_a_run_that_is_cut_short_goes_on(
        self, tiny: TrainingExperiment, folder: Path, tmp_path: Path, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(one_run, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
        place = Place(data=folder, checkpoints=tmp_path)
        run = Run("tiny", "DP-SGD", 8.0, 0.5, 0, False, tiny.digest("DP-SGD"))
        saved, real = [], one_run._Kept.save

        def save(self: Any, epoch: int) -> None:
            real(self, epoch)
            saved.append(epoch)
            if saved == [1]:
                raise KeyboardInterrupt

        monkeypatch.setattr(one_run._Kept, "save", save)
        with pytest.raises(KeyboardInterrupt):
            train(run, tiny, place)
        assert len(list(tmp_path.glob("*.safetensors"))) == 1
        found = train(run, tiny, place)
        assert saved == [1, 2]  # the first epoch was not trained again
        assert sum(e["count"] for e in found["certificate"]["events"]) == 8
        assert found["epsilon"] <= 8.0

    def test_a_run_that_diverges_is_a_result(self, tiny: TrainingExperiment, folder: Path) -> None:
        run = Run("tiny", "non-private", None, 1e30, 0, False, "x")
        row = train(run, tiny, Place(data=folder))
        assert row["diverged"]
        assert 0 <= row["accuracy"] <= 1
        assert "unprivate_membership" not in row

    def test_a_search_goes_on_where_training_stops(
        self, tiny: TrainingExperiment, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Public gradients that are all zero after some steps, as those of dead units are."""
        run = Run("tiny", "warm start + GEP", 8.0, 0.01, 0, True, "x")
        plain, steps = GEPMechanism.clipped_sum, []

        def later(self: Any, gradients: Any) -> Any:
            steps.append(1)
            if len(steps) > whole[0]:
                raise ValueError("The gradients of the public samples are all zero.")
            return plain(self, gradients)

        monkeypatch.setattr(GEPMechanism, "clipped_sum", later)
        whole = [3]
        row = train(run, tiny, Place(data=folder))
        assert row["stopped"] == "The gradients of the public samples are all zero."
        assert "diverged" not in row
        assert 0 < row["epsilon"] < 8.0  # of three steps
        # A reported run is whole or none; and a mistake in the settings is no result.
        for tuning, whole[0] in ((False, 3), (True, 0)):
            steps.clear()
            with pytest.raises(ValueError, match="all zero"):
                train(replace(run, tuning=tuning), tiny, Place(data=folder))

    def test_rows_learn(self, swept: Results) -> None:
        reached = [r["accuracy"] for r in swept.rows if r["row"] == "public only"]
        reached += [r["accuracy"] for r in swept.rows if r["row"] == "AdaGrad"]
        assert min(reached) > 0.9
        assert all("balanced_accuracy" in row for row in swept.rows)

    def test_a_search_takes_the_best_rate(self, tmp_path: Path, tiny: TrainingExperiment) -> None:
        results = Results(tmp_path / "r.jsonl")
        search = CellSearch.of("tiny", tiny, "warm start + GEP", 8.0, results)
        assert [run.row for run in search.wanted] == ["DP-SGD", "DP-SGD"]
        for run, reached in zip(search.wanted, (0.2, 0.9), strict=True):
            results.add({**vars(run), "accuracy": reached})
        assert (search.wanted, search.best) == ([], 0.5)
        runs = reported("tiny", tiny, "warm start + GEP", 8.0, results, 2)
        assert [(run.row, run.rate, run.seed) for run in runs] == [
            ("warm start + GEP", 0.5, 0),
            ("warm start + GEP", 0.5, 1),
        ]

    def test_a_grid_grows_until_its_best_rate_is_inside(
        self, tmp_path: Path, tiny: TrainingExperiment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        results, place = Results(tmp_path / "r.jsonl"), Place(data=tmp_path)
        tried: list[float] = []

        def make(runs: list[Run], *_: Any) -> None:
            for run in runs:
                if results.of(run) is None:
                    tried.extend([run.rate] * run.tuning)
                    results.add({**vars(run), "accuracy": 1 / (1 + abs(math.log(run.rate / 9.0)))})

        monkeypatch.setattr("experiments.sweep.execute", make)
        growing = tiny.model_copy(update={"search": Search(tries=8)})
        sweep("tiny", growing, results, place, ["DP-SGD"], targets=[8.0])
        search = CellSearch.of("tiny", growing, "DP-SGD", 8.0, results)
        rates = [run.rate for run in search.tried]
        assert sorted({*tried}) == rates
        assert search.best in rates[1:-1]
        assert len(tried) == len({*tried}) == 8  # of two rows that share them
        few = tiny.model_copy(update={"search": Search(tries=3)})
        assert len(CellSearch.of("tiny", few, "DP-SGD", 8.0, results).tried) == 3

    def test_a_rate_that_diverged_is_the_worst(
        self, tmp_path: Path, tiny: TrainingExperiment
    ) -> None:
        """Its accuracy is that of guessing, which may be more than another has learnt."""
        results = Results(tmp_path / "r.jsonl")
        search = CellSearch.of("tiny", tiny, "DP-SGD", 8.0, results)
        for run, more in zip(search.wanted, ({}, {"diverged": True}), strict=True):
            results.add({**vars(run), "accuracy": 0.4 + 0.1 * bool(more), **more})
        assert search.best == 0.1

    def test_the_best_of_short_runs_are_decided_between_in_full(
        self, tmp_path: Path, tiny: TrainingExperiment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Short runs prefer 2, long ones 1 on average, though not with the first seed."""
        results, place = Results(tmp_path / "r.jsonl"), Place(data=tmp_path)
        made: list[Run] = []

        def reached(run: Run) -> float:
            if run.share is not None:
                return {1.0: 0.8, 2.0: 0.9}.get(run.rate, 0.1)
            return 0.5 + 0.1 * (run.rate == 1.0) - 0.2 * (run.rate == 1.0 and run.seed == 1000)

        def make(runs: list[Run], *_: Any) -> None:
            for run in dict.fromkeys(runs):
                if results.of(run) is None:
                    made.append(run)
                    results.add({**vars(run), "accuracy": reached(run)})

        monkeypatch.setattr("experiments.sweep.execute", make)
        search = Search(tries=4, share=0.25, finalists=2, seeds=3)
        row = tiny.rows["DP-SGD"].model_copy(
            update={"rates": (0.5, 1.0, 2.0, 4.0), "search": search}
        )
        two_stages = tiny.model_copy(update={"rows": {"DP-SGD": row}})
        assert two_stages.digest("DP-SGD") == tiny.digest("DP-SGD")
        (lacking,) = [lack for lack in lacks("tiny", two_stages, results) if lack.target == 8.0]
        assert (lacking.tries, lacking.finals, lacking.runs, lacking.minutes) == (4, 6, 2, None)
        sweep("tiny", two_stages, results, place, targets=[8.0])
        assert not [lack for lack in lacks("tiny", two_stages, results) if lack.target == 8.0]
        short = [run for run in made if run.share == 0.25]
        full = [run for run in made if run.tuning and run.share is None]
        assert {run.rate for run in short} == {0.5, 1.0, 2.0, 4.0}
        assert {(run.rate, run.seed) for run in full} == {
            (rate, seed) for rate in (1.0, 2.0) for seed in (1000, 1001, 1002)
        }
        assert {run.rate for run in made if not run.tuning} == {1.0}

    def test_what_is_missing_has_its_minutes(
        self, tmp_path: Path, tiny: TrainingExperiment
    ) -> None:
        """By the epochs of what is there: a quarter of a run took a minute, so a run takes four."""
        results = Results(tmp_path / "r.jsonl")
        row = tiny.rows["DP-SGD"].model_copy(
            update={"search": Search(tries=3, share=0.25, finalists=2, seeds=1)}
        )
        one = tiny.model_copy(update={"rows": {"DP-SGD": row}})
        for run in CellSearch.of("tiny", one, "DP-SGD", 8.0, results).wanted:
            results.add({**vars(run), "accuracy": run.rate, "seconds": 60.0})
        (lack,) = [lack for lack in lacks("tiny", one, results) if lack.target == 8.0]
        assert (lack.tries, lack.finals, lack.runs) == (1, 2, 2)
        assert lack.minutes == pytest.approx(1 + 2 * 4 + 2 * 4)

    def test_the_search_can_be_left_out(
        self, tmp_path: Path, tiny: TrainingExperiment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[Run] = []
        monkeypatch.setattr("experiments.sweep.execute", lambda runs, *_: made.extend(runs))
        results = Results(tmp_path / "r.jsonl")
        first, second = CellSearch.of("tiny", tiny, "DP-SGD", 8.0, results).wanted
        results.add({**vars(second), "accuracy": 0.9})
        assert first.rate != second.rate
        sweep("tiny", tiny, results, Place(data=tmp_path), ["DP-SGD"], None, [8.0], searching=False)
        own = [(run.rate, run.tuning) for run in made if run.row == "DP-SGD"]
        assert own == 2 * [(second.rate, False)]

    def test_what_is_there_is_not_repeated(
        self, swept: Results, tiny: TrainingExperiment, folder: Path
    ) -> None:
        before = len(swept.rows)
        sweep("tiny", tiny, swept, Place(data=folder / "nowhere"))
        assert len(swept.rows) == before

    def test_some_rows_at_some_targets(
        self, tiny: TrainingExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[Run] = []
        results, place = Results(tmp_path / "r.jsonl"), Place(data=tmp_path)

        def make(runs: list[Run], *_: Any) -> None:
            made.extend(runs)
            for run in runs:
                results.add({**vars(run), "accuracy": 0.5})

        monkeypatch.setattr("experiments.sweep.execute", make)
        sweep("tiny", tiny, results, place, ["DP-SGD", "public"], targets=[8.0])
        assert {(run.row, run.target) for run in made} == {
            ("DP-SGD", 8.0),
            ("DP-SGD, views", 8.0),
            ("public only", None),
        }

    @pytest.mark.slow
    def test_missing_runs_are_made_in_other_processes(
        self, tiny: TrainingExperiment, folder: Path, tmp_path: Path
    ) -> None:
        results = Results(tmp_path / "tiny.jsonl")
        sweep("tiny", tiny, results, Place(data=folder, jobs=2), ["public"], 2)
        assert [row["seed"] for row in Results(tmp_path / "tiny.jsonl").rows] in ([0, 1], [1, 0])


class TestPages:
    def test_a_table(self, swept: Results, tiny: TrainingExperiment) -> None:
        lines = pages.training_table("tiny", tiny, swept).splitlines()
        assert lines[0] == "|  | public data | ε = 2 | ε = 8 | attack |"
        table = {cells[1].strip(): cells for line in lines[2:] if (cells := line.split("|"))[1:]}
        assert table["DP-SGD"][4].strip().endswith("†\\* (91.5)")
        assert table["warm start + GEP"][2].strip() == "noise, opt-in (labelled)"
        assert table["patches"][2].strip() == "noise"
        assert table["warm start + GEP"][3].strip().endswith("‡")  # DP-SGD's rate
        assert table["AdaGrad"][3].strip() == ""  # it is not run at that ε
        pre_training = "opt-in (labelled), colour, pre-training (labelled)"
        assert table["pre-trained"][2].strip() == pre_training
        own = [r for r in swept.rows if r["row"] == "public only"]
        mean = 100 * np.mean([r["accuracy"] for r in own])
        assert table["public only"][3].strip().startswith(f"{mean:.1f}")

    def test_results_of_other_settings_are_not_shown(self, swept: Results) -> None:
        changed = parse(TINY.replace("hidden: [4]", "hidden: [9]"), TrainingExperiment, name="t")
        assert "DP-SGD" not in pages.training_table("tiny", changed, swept)

    def test_distances_of_other_settings_are_not_shown(self, tmp_path: Path) -> None:
        experiment = load("choosing-fashion")
        results = Results(tmp_path / "r.jsonl")
        row = {"name": "MNIST", **{f"unprivate_{key}": 0.25 for key in pages.MEASURES}}
        for seed, settings in enumerate((experiment.distance_digest(), "of another rank")):
            results.add(
                {
                    "model": "probe",
                    "settings": settings,
                    "seed": seed,
                    "choice": f"choice {seed}",
                    "unprivate_ranking": {"rows": [row]},
                }
            )
        table = pages.distance_table("choosing-fashion", experiment, results)
        assert "choice 0" in table
        assert "choice 1" not in table
        assert "| MNIST | 0.25 |" in table

    def test_targets_without_results_are_left_out(
        self, swept: Results, tiny: TrainingExperiment, tmp_path: Path
    ) -> None:
        results = Results(tmp_path / "r.jsonl")
        for row in swept.rows:
            if row["target"] != 2.0:
                results.add(row)
        table = pages.training_table("tiny", tiny, results)
        assert "ε = 8" in table
        assert "ε = 2" not in table

    def test_a_search_alone_has_no_section(self, tmp_path: Path) -> None:
        search = {"row": "PDP-SGD", "target": 18.0, "rate": 0.1, "tuning": True, "accuracy": 0.5}
        Results(tmp_path / "pdpsgd-settings.jsonl").add(search)
        assert "Figures 5 and 6" not in pages.render(tmp_path, tmp_path).read_text()

    def test_the_page_is_what_the_results_say(self, tmp_path: Path) -> None:
        page = pages.render(ROOT / "experiments" / "results", tmp_path)
        written = (ROOT / "docs" / "results.md").read_text()
        assert page.read_text() == written, "run `make results`"
        for picture in tmp_path.glob("*.png"):
            assert (ROOT / "docs" / picture.name).exists()

    def test_a_run_is_of_its_experiment(self) -> None:
        for path in (ROOT / "experiments" / "results").glob("*.jsonl"):
            assert path.stem in names()


def test_a_run_is_a_key() -> None:
    run = Run("e", "r", None, 0.1, 0, False, "d")
    assert hash(run) == hash(Run("e", "r", None, 0.1, 0, False, "d"))
