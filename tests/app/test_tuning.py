"""Comparisons that search learning rates: what is kept, counted and said of it, and going on."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import Subset, TensorDataset

from dpspan import DPSGD, RGP, Budget, Contender, Ledger, PrivacyEngine, Search, Task, compare
from dpspan.accounting.events import pure_event
from dpspan.app.comparison import Comparison, tuning
from dpspan.app.comparison.results import SCORE, Row, Tried
from dpspan.app.comparison.search import FIRST_SEED, Try
from dpspan.app.comparison.tuning import RowSearch, trainings
from dpspan.app.report import render
from dpspan.app.run import training
from dpspan.app.run.folder import RunFolder
from dpspan.app.run.task import in_batches
from dpspan.app.run.training import Training
from dpspan.public.data import PublicData
from dpspan.public.overlap import Encoded, encodings

SEARCH = Search(tries=4, share=0.5, seeds=1)
EACH = 4 + 2  # trainings a row
CONTENDERS = (
    Contender(name="DP-SGD", method=DPSGD(clip=1.0), learning_rate=0.5),
    Contender(name="RGP, rank 1", method=RGP(rank=1, clip=1.0), learning_rate=0.25),
)


def network() -> nn.Module:
    return nn.Linear(4, 2)


def blobs(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    return TensorDataset(torch.randn(count, 4, generator=draw) + 3.0 * labels[:, None], labels)


def task_of(**changes: Any) -> Task:
    settings: dict[str, Any] = {
        "model": network,
        "private": blobs(200, 0),
        "test": blobs(60, 1),
        "batch_size": 50,
        "epochs": 2,
        "budget": Budget(epsilon=5.0, delta=1e-5),
        "test_is_public": True,
        "accountant": "rdp",
    }
    return Task(**settings | changes)


def row_search(out: Path, contender: Contender = CONTENDERS[0], **changes: Any) -> RowSearch:
    return RowSearch(search=SEARCH, task=task_of(**changes), contender=contender, row=out)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison]:
    out = tmp_path_factory.mktemp("searched")
    return out, compare(task_of(), CONTENDERS, out=out, seeds=(0,), search=SEARCH)


def test_every_row_has_as_many_tries_and_all_are_kept(searched: tuple[Path, Comparison]) -> None:
    out, comparison = searched
    for row in comparison.rows:
        assert len(row.tries) == EACH == trainings(out, row.results[0].folder.split("/")[0])
        assert [each.share for each in row.tries] == [0.5] * 4 + [1.0] * 2
        assert {each.seed for each in row.tries} == {FIRST_SEED}
        assert all(0 <= (each.value or 0) <= 1 for each in row.tries)
        assert row.learning_rate in {each.rate for each in row.tries if each.share == 1}
    begun = {min(each.rate for each in row.tries[:4]) for row in comparison.rows}
    assert len(begun) == 2  # each around its own rate
    assert comparison.search_runs == 2 * EACH == trainings(out)


def test_the_runs_have_the_rate_that_was_found(searched: tuple[Path, Comparison]) -> None:
    out, comparison = searched
    for row in comparison.rows:
        settings = read(out / row.results[0].folder / "run.json")["settings"]
        assert settings["learning_rate"] == row.learning_rate
        finals = {each.rate: each.value for each in row.tries if each.share == 1}
        assert finals[row.learning_rate or 0.0] == max(value or 0.0 for value in finals.values())


def test_certificates_say_that_the_search_is_not_counted(
    searched: tuple[Path, Comparison],
) -> None:
    out, comparison = searched
    budget = task_of().budget
    assert isinstance(budget, Budget)
    for row in comparison.rows:
        certificate = read(out / row.results[0].folder / "certificate.json")
        assert tuning.note(EACH) in certificate["warnings"]
        assert certificate["epsilon"] <= budget.epsilon
    whole = read(out / "certificate.json")
    assert tuning.note(2 * EACH) in whole["warnings"]
    assert whole["training"]["search_runs"] == 2 * EACH
    assert whole["steps"] == 2 * 8  # of the runs alone
    assert "by 12 trainings on the private records" in tuning.note(12)
    assert "ε counts none" in tuning.note(12)


def test_what_the_folder_of_a_search_says_is_marked(searched: tuple[Path, Comparison]) -> None:
    out, _ = searched
    files = list(out.glob("*/search/*"))
    assert len(files) == 2 * EACH
    for file in files:
        assert set(read(file)) == {"rate", "share", "seed", SCORE, "settings"}
        assert "seconds" not in file.read_text()
    assert SCORE.startswith("unprivate_")
    assert not list(out.glob("*/search/*.safetensors"))


def test_the_comparison_as_json(searched: tuple[Path, Comparison]) -> None:
    out, comparison = searched
    content = read(out / "comparison.json")
    assert content == json.loads(json.dumps(comparison.to_dict()))
    for row in content["rows"]:
        assert all(SCORE in each for each in row["tries"])
        assert "at_the_end" in row


def test_the_table_says_so(searched: tuple[Path, Comparison]) -> None:
    _, comparison = searched
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(comparison)
    said = " ".join(console.export_text().split())
    assert f"no ε counts the {2 * EACH} trainings that settled learning rates" in said


def test_the_report_says_so_and_shows_scores_when_asked(
    searched: tuple[Path, Comparison], tmp_path: Path
) -> None:
    out, comparison = searched
    shown = render([out], tmp_path / "public.html").read_text()
    assert f"searched by {2 * EACH} more trainings on the private records" in shown
    assert SCORE not in shown
    assert "of the epochs" not in shown
    full = render([out], tmp_path / "all.html", include_unprivate=True).read_text()
    assert full.count(SCORE) == 2 * EACH
    taken = f"RGP, rank 1, learning rate {comparison.rows[1].learning_rate:g} (taken"
    assert taken in full


def test_a_search_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, Try]] = []

    def pretend(self: RowSearch, each: Try) -> None:
        """Rates near 1 are the best."""
        if len(made) == stop:
            raise KeyboardInterrupt
        made.append((self.contender.name, each))
        score = {SCORE: 0.9 - 0.1 * abs(math.log(each.rate))}
        RunFolder(self.row).write_json(self._path(each), score)

    monkeypatch.setattr(RowSearch, "make", pretend)
    arguments: Any = {"out": tmp_path, "seeds": (0,)}
    for stop in (4, 9):
        with pytest.raises(KeyboardInterrupt):
            compare(task_of(), CONTENDERS, **arguments, search=SEARCH)
        assert trainings(tmp_path) == len(made) == stop
    assert not list(tmp_path.rglob("certificate.json"))
    stop = -1
    comparison = compare(task_of(), CONTENDERS, **arguments, search=SEARCH)
    assert len(made) == len(set(made)) == 2 * EACH
    assert [row.learning_rate for row in comparison.rows] == [1.5, 0.75]
    assert compare(task_of(), CONTENDERS, **arguments, search=SEARCH) == comparison
    assert len(made) == 2 * EACH
    # One more try, and the summary of before would tell of less than was done.
    stop = 2 * EACH + 1
    with pytest.raises(KeyboardInterrupt):
        more = dataclasses.replace(SEARCH, tries=5)
        compare(task_of(), CONTENDERS, **arguments, search=more)
    assert not (tmp_path / "certificate.json").exists()
    again = compare(task_of(), comparison_rates(comparison), **arguments)
    assert again.search_runs == 2 * EACH + 1  # whoever asks, and though none was asked for now


def comparison_rates(comparison: Comparison) -> list[Contender]:
    """The contenders, at the rates that were found."""
    rates = [row.learning_rate for row in comparison.rows]
    return [dataclasses.replace(c, learning_rate=r) for c, r in zip(CONTENDERS, rates, strict=True)]


def test_other_settings_are_another_search(tmp_path: Path) -> None:
    each = Try(0.5, 0.5, FIRST_SEED)
    row_search(tmp_path).make(each)
    assert each not in [wanted for _, wanted in row_search(tmp_path).wanted]
    assert each in [wanted for _, wanted in row_search(tmp_path, epochs=3).wanted]
    slower = dataclasses.replace(CONTENDERS[0], schedule=lambda step, steps: 0.5)
    assert each in [wanted for _, wanted in row_search(tmp_path, slower).wanted]
    elsewhere = dataclasses.replace(CONTENDERS[0], learning_rate=1.5)  # the same, begun at 1.5
    assert each not in [wanted for _, wanted in row_search(tmp_path, elsewhere).wanted]


def test_a_try_can_be_made_in_another_process(tmp_path: Path) -> None:
    ((search, each), *_) = row_search(tmp_path).wanted
    there = pickle.loads(pickle.dumps(search))
    there.make(each)
    assert each not in [wanted for _, wanted in search.wanted]


def test_judged_by_records_that_it_did_not_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[set[float], set[float]]] = []
    epochs: list[int] = []
    real = training.measured

    def spy(task: Task, model: nn.Module) -> dict[str, float]:
        parts = [{float(x[0]) for x, _ in part} for part in (task.private, task.test)]  # type: ignore[attr-defined,union-attr]
        seen.append((parts[0], parts[1]))
        epochs.append(task.epochs)
        return real(task, model)

    monkeypatch.setattr(training, "measured", spy)
    for each in (Try(0.5, 0.25, 1), Try(0.5, 0.5, 1), Try(0.5, 1.0, 2)):
        row_search(tmp_path, epochs=6).make(each)
    assert epochs == [2, 3, 6]
    for trained, judged in seen:
        assert (len(trained), len(judged)) == (160, 40)
        assert not trained & judged
    assert seen[0] == seen[1] != seen[2]  # by the seed


def test_a_choice_that_was_paid_for_is_in_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []
    original = PrivacyEngine.make_private

    def spy(self: PrivacyEngine, **arguments: Any) -> Any:
        found.append(arguments["noise_multiplier"])
        return original(self, **arguments)

    monkeypatch.setattr(PrivacyEngine, "make_private", spy)
    ledger = Ledger()
    ledger.charge(pure_event(1.0))
    paying = dataclasses.replace(CONTENDERS[0], paid=ledger.state_dict())
    for contender in (CONTENDERS[0], paying):
        row_search(tmp_path, contender).make(Try(0.5, 1.0, FIRST_SEED))
    assert found[1] > 1.05 * found[0]


class TestWhatDiverges:
    def test_is_on_record_and_never_taken(self, tmp_path: Path) -> None:
        wild = dataclasses.replace(CONTENDERS[0], learning_rate=3e9)
        comparison = compare(task_of(), [wild], out=tmp_path, seeds=(0,), search=SEARCH)
        (row,) = comparison.rows
        assert [each.value for each in row.tries] == [None] * EACH
        assert row.learning_rate == min(each.rate for each in row.tries) < 1e9
        assert row.at_the_end
        assert all(read(path)[SCORE] is None for path in tmp_path.glob("*/search/*.json"))
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(comparison)
        said = " ".join(console.export_text().split())
        assert f"{row.learning_rate:g}*" in said
        assert "* the best rate is at an end of those that were tried" in said
        page = render([tmp_path], tmp_path / "r.html", include_unprivate=True).read_text()
        assert "(taken, at an end of those tried)" in page
        assert page.count('<td class="number">diverged</td>') == EACH

    def test_or_stops_is_a_bad_rate_unless_nothing_was_trained(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps: list[int] = []
        real = Training._piece

        def stops(self: Training, *batch: Any) -> None:
            if len(steps) == last:
                raise ValueError("The gradients of the public samples are all zero.")
            steps.append(1)
            real(self, *batch)

        monkeypatch.setattr(Training, "_piece", stops)
        search, each = row_search(tmp_path), Try(0.5, 0.5, FIRST_SEED)
        last = 0
        with pytest.raises(ValueError, match="all zero"):
            search.make(each)
        assert trainings(tmp_path.parent, tmp_path.name) == 0
        last = 2
        search.make(each)
        assert math.isnan(search._known(each) or 0.0)


@pytest.mark.parametrize(("rate", "marked"), [(0.1, True), (0.3, False), (0.9, True)])
def test_a_rate_at_an_end_is_marked(rate: float, marked: bool) -> None:
    tries = tuple(Tried(r, 0.25, 0, 0.5) for r in (0.3, 0.1, 0.9))
    about: Any = {"name": "x", "private": True, "warm": False, "method": "DPSGD", "results": ()}
    assert Row(**about, learning_rate=rate, tries=tries).at_the_end is marked
    assert not Row(**about, learning_rate=rate).at_the_end


def test_too_few_tries_are_refused_before_anything_is_done(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected a search of at least 3 tries, got 2"):
        compare(task_of(), CONTENDERS, out=tmp_path, search=Search(tries=2))
    assert not list(tmp_path.rglob("*.json"))


def test_a_part_of_what_is_in_memory_is_read_a_batch_at_once() -> None:
    x, y = torch.arange(12.0)[:, None], torch.arange(12)
    public = PublicData.of(torch.full((3, 1), -1.0))
    encoded = Encoded(x, y, public=public, layer="layer", raw=[b""])
    rows = [7, 2, 9, 4, 11]
    for whole in (TensorDataset(x, y), encoded):
        part = Subset(whole, rows)
        loader = in_batches(part, 2)
        assert torch.cat([labels for _, labels in loader]).tolist() == rows
        assert hasattr(loader.dataset, "__getitems__")
        assert encodings(loader.dataset) == encodings(part)
