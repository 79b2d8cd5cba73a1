"""Advice from public data: nothing private is touched, noise is the real run's, no overclaims."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any, Never

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from typer.testing import CliRunner

from dpspan import DPSGD, GEP, Budget, Ledger, WarmStart, calibrate
from dpspan.accounting.events import pure_event
from dpspan.app.advice import (
    Advice,
    Trial,
    advise,
    conclude,
    default_contenders,
)
from dpspan.app.cli import app
from dpspan.app.comparison import Contender, Task
from dpspan.app.config import load_config
from dpspan.app.run.scene import OnPatches, public_of, scene_of
from dpspan.app.run.task import with_baselines
from dpspan.app.run.training import rehearse
from dpspan.public.data import PublicData
from dpspan.public.fingerprints import fingerprints
from helpers.blobs import blobs, linear


class Untouchable(Dataset[Any]):
    """Private records: whoever looks at them, or counts them, fails."""

    def __len__(self) -> Never:
        raise AssertionError("the private records were counted")

    def __getitem__(self, index: int) -> Never:
        raise AssertionError("a private record was read")


def task_of(public: Any, **changes: Any) -> Task:
    settings_: dict[str, Any] = {
        "model": linear,
        "private": Untouchable(),
        "test": Untouchable(),
        "batch_size": 100,
        "epochs": 2,
        "budget": Budget(epsilon=1.0, delta=1e-5),
        "public": public,
    }
    if public is not None and isinstance(public, tuple):
        settings_["warm_start"] = WarmStart(data=public, max_epochs=3)
    return Task(**(settings_ | changes))


PLAIN = Contender(name="DP-SGD", method=DPSGD(clip=1.0), learning_rate=9.0)


def gep(public: Any) -> Contender:
    method = GEP(public=public, rank=3, clip=1.0)
    return Contender(name="GEP", method=method, learning_rate=9.0)


@pytest.fixture(scope="module")
def advice() -> Advice:
    public = blobs(200, 0)
    return advise(task_of(public), [PLAIN, gep(public[0])], records=400, rates=(0.1, 1.0), folds=3)


class TestAdvise:
    def test_private_records_are_never_touched(self, advice: Advice) -> None:
        names = [trial.name for trial in advice.trials]
        assert names == ["public only", "warm start + DP-SGD", "DP-SGD", "GEP"]
        assert advice.recommended in names

    def test_rates_come_from_the_grid_and_ends_are_marked(self, advice: Advice) -> None:
        for trial in advice.trials:
            if trial.private:
                assert trial.learning_rate in (0.1, 1.0)
                assert trial.at_the_end
            else:
                assert trial.learning_rate is None
            assert len(trial.values) == 2  # the first fold found the rates
        assert any("others are tried" in note for note in advice.notes)

    def test_what_diverges_gets_nothing_right(self) -> None:
        rates = (0.1, 1e12)
        said = advise(task_of(blobs(200, 0)), [PLAIN], records=400, rates=rates, folds=3)
        (plain,) = (trial for trial in said.trials if trial.name == "DP-SGD")
        assert plain.learning_rate == 0.1
        wild = dataclasses.replace(PLAIN, learning_rate=1e12)
        task = task_of(None, private=TensorDataset(*blobs(200, 0)))
        assert math.isnan(rehearse(task, wild, 0, 1.0))

    def test_it_says_what_it_assumes(self, advice: Advice) -> None:
        text = " ".join(advice.sentences())
        assert "An extrapolation: 90 public samples stood in for 400 records" in text
        assert "Assumes that private records resemble the public ones" in text

    def test_it_can_be_printed_and_kept(self, advice: Advice) -> None:
        console = Console(width=120, file=io.StringIO(), record=True)
        console.print(advice)
        text = console.export_text()
        assert f"→ {advice.recommended}" in text
        assert "Rehearsed on public data (ε = 0)" in text
        assert (
            json.loads(json.dumps(dataclasses.asdict(advice)))["recommended"] == advice.recommended
        )

    def test_another_stand_in_leaves_the_public_data_as_it_is(self) -> None:
        public, stand_in = blobs(40, 0), blobs(200, 1, shift=-3.0)
        start = WarmStart(data=public, max_epochs=60, learning_rate=0.1)
        # So little noise that no draw of it can blur what is asserted.
        budget = Budget(epsilon=50.0, delta=1e-5)
        task = task_of(public, warm_start=start, epochs=10, budget=budget)
        advice = advise(task, [PLAIN], records=150, stand_in=stand_in, rates=(1.0,), folds=4)
        assert advice.notes == ()  # as many records as the real run, and its own public data
        free = next(trial for trial in advice.trials if not trial.private)
        plain = next(trial for trial in advice.trials if trial.name == "DP-SGD")
        # The classes are the other way round in the stand-in: public labels mislead there.
        assert free.mean < 0.7 < 0.9 < plain.mean
        assert advice.recommended != "public only"

    def test_the_noise_is_that_of_the_real_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever is paid before, whichever accountant, and as many records as the task says."""
        noises: dict[str, float] = {}

        def note(task: Task, contender: Contender, seed: int, noise: float, rate: float) -> float:
            noises[contender.name] = noise * task_.batch_size / task.batch_size
            return 0.5

        monkeypatch.setattr(sys.modules[advise.__module__], "rehearse", note)
        task_ = task_of(blobs(200, 0), records=400, accountant="rdp")
        ledger = Ledger()
        ledger.charge(pure_event(0.4))
        paying = dataclasses.replace(PLAIN, name="paying", paid=ledger.state_dict())
        advice = advise(task_, [PLAIN, paying], rates=(1.0,), folds=3)
        shared = {"target_delta": 1e-5, "sample_rate": 0.25, "steps": 8, "accountant": "rdp"}
        assert noises["DP-SGD"] == pytest.approx(calibrate(1.0, **shared))
        assert noises["paying"] == pytest.approx(calibrate(1.0, **shared, spent=ledger))
        assert noises["paying"] > 1.1 * noises["DP-SGD"]
        (note_,) = [n for n in advice.notes if "“paying”" in n]
        assert note_.startswith("What these pay beside their steps, ε = 0.403 alone, is taken off")
        assert "“DP-SGD”" not in note_

    @pytest.mark.parametrize("public", [None, blobs(40, 0)[0]])
    def test_without_labels_no_advice_is_free(self, public: Any) -> None:
        with pytest.raises(ValueError, match="Expected labelled public data to rehearse on"):
            advise(task_of(public), [PLAIN], records=400)

    def test_too_small_a_stand_in(self) -> None:
        with pytest.raises(ValueError, match="Expected a stand-in large enough for batches of 8"):
            advise(task_of(blobs(40, 0)), [PLAIN], records=4000)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"folds": 2}, "folds to be an integer of at least 3, got 2"),
            ({"rates": ()}, "at least 1 learning rate, got"),
            ({"rates": (0.0,)}, r"every learning rate > 0 and finite, got 0\.0"),
            ({"records": 0}, "records to be an integer of at least 1"),
        ],
    )
    def test_arguments_are_checked(self, wrong: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            advise(task_of(blobs(40, 0)), [PLAIN], **({"records": 400} | wrong))

    def test_default_contenders(self) -> None:
        names = [c.name for c in default_contenders(task_of(blobs(100, 0)))]
        assert "DP-SGD, clip 1" in names
        assert "GEP, rank 20, clips 1 and 0.2" in names
        assert "warm start + PDP-SGD, rank 50" in names
        bare = [c.name for c in default_contenders(task_of(None))]
        assert bare == ["DP-SGD, clip 1", "DP-SGD, clip 0.3"]


class TestScene:
    @settings(max_examples=30, deadline=None)
    @given(
        count=st.integers(120, 400),
        records=st.integers(100, 5000),
        rate=st.floats(0.2, 0.9),
        noise=st.floats(0.1, 20.0),
        fold=st.integers(0, 5),
    )
    def test_noise_beside_the_mean_gradient_is_that_of_the_real_run(
        self, count: int, records: int, rate: float, noise: float, fold: int
    ) -> None:
        batch = max(1, round(rate * records))
        task = task_of(blobs(20, 0), batch_size=batch, records=records)
        scene = scene_of(task, PublicData.of(blobs(count, 1)), fold=fold, others=None)
        _, _, _, z, _ = scene.job(PLAIN, noise, 0)
        real, rehearsed = noise / batch, z / scene.task.batch_size
        assert rehearsed == pytest.approx(real)
        assert scene.sample_rate == batch / records
        assert len(scene.task.private) <= records  # type: ignore[arg-type]
        assert scene.task.count == len(scene.task.private)  # type: ignore[arg-type]

    def test_parts_share_no_sample(self) -> None:
        source = PublicData.of(blobs(200, 1))
        scene = scene_of(task_of(blobs(20, 0), records=300), source, fold=1, others=None)
        assert scene.public is not None
        private = torch.stack([x for x, _ in scene.task.private])
        test = scene.task.test[:][0]
        ((public, _),) = scene.public.batches
        parts = [set(fingerprints(x)) for x in (private, test, public)]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 200

    def test_copies_of_public_samples_are_left_out(self) -> None:
        stand_in = blobs(200, 1)
        other = PublicData.of((stand_in[0][:60], stand_in[1][:60]))
        scene = scene_of(
            task_of(blobs(20, 0), records=300), PublicData.of(stand_in), fold=0, others=(other,)
        )
        assert scene.public is None
        private = torch.stack([x for x, _ in scene.task.private])
        assert not set(fingerprints(private)) & set(fingerprints(stand_in[0][:60]))

    def test_contenders_get_the_public_part(self) -> None:
        public = blobs(60, 0)
        scene = scene_of(task_of(public, records=60), PublicData.of(public), fold=0, others=None)
        start = WarmStart(data=public)
        original = Contender(
            name="a", method=GEP(public=public[0], rank=50, clip=1.0), learning_rate=1.0,
            warm_start=start,
        )  # fmt: skip
        changed = scene.contender(original)
        assert public_of(changed) == (scene.public, scene.public)
        assert changed.method.rank == 18  # type: ignore[union-attr]
        assert [data.count for data in public_of(original)] == [60, 60]


def pictures(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes that lie or stand, behind noise."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    stripes = (torch.arange(12) % 4 < 2).float() * 2 - 1
    lying = stripes[:, None].expand(12, 12)
    images = torch.where(labels[:, None, None] == 0, lying, lying.T)
    moved = [image.roll((i // 2 % 4,) * 2, (0, 1)) for i, image in enumerate(images)]
    noise = 1.5 * torch.randn(count, 1, 12, 12, generator=draw)
    return torch.stack(moved)[:, None] + noise, labels


def striped() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 2))


def picture_task(public: Any, **changes: Any) -> Task:
    return task_of(public, **({"model": striped, "epochs": 8} | changes))


class TestOnPatches:
    """A layer of public patches, of images: learnt from what plays the public data, seen once."""

    def test_images_get_one_and_nothing_else_does(self) -> None:
        layer = OnPatches.of(picture_task(None), PublicData.of(pictures(40, 0)[0]))
        assert layer is not None
        assert (layer.classes, layer.size) == (2, (3, 4, 5))
        assert OnPatches.of(task_of(None), PublicData.of(blobs(40, 0)[0])) is None
        small = PublicData.of(pictures(40, 0)[0][..., :6])
        assert OnPatches.of(picture_task(None), small) is None
        assert OnPatches.of(picture_task(None, numeric=True), layer.public) is None
        names = [c.name for c in default_contenders(picture_task(pictures(40, 0)))]
        assert "patches + DP-SGD, clip 0.1" in names
        assert "warm start + patches + DP-SGD, clip 0.1" in names

    def test_each_fold_has_a_layer_of_its_own_public_part(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        public = PublicData.of(pictures(120, 0))
        task = picture_task(public, records=100)
        made = OnPatches.of(task, public)
        assert made is not None
        scene = scene_of(task, public, fold=0, others=None)
        assert scene.public is not None
        learnt_from = []
        learnt = OnPatches.learnt
        monkeypatch.setattr(
            OnPatches, "learnt", lambda self: learnt_from.append(self.public) or learnt(self)
        )
        behind = scene.behind(dataclasses.replace(made, filters=12, directions=20))
        assert learnt_from == [scene.public]
        assert behind.public is not None
        assert behind.public.count == scene.public.count
        for before, after in (
            (scene.task.private, behind.task.private),
            (scene.task.test, behind.task.test),
        ):
            x, y = after.tensors
            assert x.shape == (len(before), 20)
            assert torch.equal(y, torch.stack([label for _, label in before]))
            torch.testing.assert_close(x.norm(dim=1), torch.ones(len(x)))
        assert isinstance(behind.task.new_model(0), nn.Linear)
        start = WarmStart(data=public)
        own = Contender(
            name="a", method=DPSGD(clip=0.1), learning_rate=1.0, model=made, warm_start=start
        )
        changed = behind.contender(own)
        assert changed.model is None
        assert public_of(changed) == (behind.public,)
        # With a stand-in the run's own public data make the layer.
        apart = dataclasses.replace(scene, public=None)
        apart.behind(dataclasses.replace(made, filters=12, directions=20))
        assert learnt_from[1:] == [public]

    def test_it_is_rehearsed_with_rates_of_its_own(self) -> None:
        public = PublicData.of(pictures(200, 0))
        budget = Budget(epsilon=20.0, delta=1e-5)
        task = picture_task(public, budget=budget, warm_start=WarmStart(data=public, max_epochs=3))
        made = OnPatches.of(task, public)
        assert made is not None
        layer = dataclasses.replace(made, filters=24, directions=60)
        own = Contender(name="patches", method=DPSGD(clip=0.1), learning_rate=1.0, model=layer)
        said = advise(task, [PLAIN, own], records=200, rates=(0.1, 1.0), folds=3)
        plain, patches = (
            next(t for t in said.trials if t.name == n) for n in ("DP-SGD", "patches")
        )
        assert (patches.layer, plain.layer) == ("patches", None)
        assert patches.learning_rate in (4.0, 40.0)
        assert plain.learning_rate in (0.1, 1.0)
        assert patches.at_the_end
        # Stripes at any place: weights for pixels cannot tell them, patches can.
        assert plain.mean < 0.75 < patches.mean
        assert patches.effort > plain.effort  # of equals the one without public images is simpler


def trial(name: str, values: list[float], method: str | None = "DPSGD") -> Trial:
    return Trial(
        name=name,
        private=method is not None,
        warm=False,
        settings=None if method is None else {"method": method},
        learning_rate=1.0,
        at_the_end=False,
        values=tuple(values),
    )


class TestConclusion:
    FREE = trial("public only", [0.60, 0.61, 0.62], None)
    PLAIN = trial("DP-SGD", [0.80, 0.81, 0.825])
    GEP = trial("GEP", [0.83, 0.80, 0.82], "GEP")

    def test_of_equals_the_simplest(self) -> None:
        said = conclude((self.FREE, self.PLAIN, self.GEP), ())
        assert said.recommended == "DP-SGD"
        assert said.tied == ("GEP",)
        assert not said.sure
        assert "As good, as far as the folds can tell: GEP." in said.sentences()

    def test_a_clear_winner(self) -> None:
        better = trial("GEP", [0.90, 0.91, 0.926], "GEP")
        said = conclude((self.FREE, self.PLAIN, better), ())
        assert said.recommended == "GEP"
        assert said.sure
        assert "Everything else was clearly worse." in said.sentences()

    def test_nothing_private_unless_it_is_clearly_better(self) -> None:
        near = trial("public only", [0.83, 0.79, 0.82], None)
        said = conclude((near, self.PLAIN), ())
        assert said.recommended == "public only"
        assert any("spend no ε" in sentence for sentence in said.sentences())

    def test_the_more_are_tried_the_harder_it_is_to_be_sure(self) -> None:
        free, ahead = trial("public only", [0.60, 0.62, 0.61], None), [0.75, 0.80, 0.70]
        said = conclude((free, trial("DP-SGD", ahead)), ())
        assert said.sure
        many = [trial(f"bad {i}", [0.60, 0.62, 0.61 + 0.001 * i]) for i in range(20)]
        said = conclude((free, trial("DP-SGD", ahead), *many), ())
        assert said.recommended == "DP-SGD"
        assert not said.tied
        assert not said.sure
        assert any("not beyond doubt" in sentence for sentence in said.sentences())

    def test_folds_that_agree(self) -> None:
        free = trial("public only", [0.5, 0.5, 0.5], None)
        assert conclude((free, trial("DP-SGD", [0.75, 0.75, 0.75])), ()).sure
        assert conclude((free, trial("DP-SGD", [0.5, 0.5, 0.5])), ()).recommended == "public only"


def test_the_stand_in_is_a_plain_dataset() -> None:
    scene = scene_of(
        task_of(blobs(20, 0), records=100), PublicData.of(blobs(100, 1)), fold=0, others=()
    )
    assert isinstance(scene.task.test, TensorDataset)


def test_rgp_is_tried_where_it_makes_a_weight_smaller() -> None:
    assert not [c for c in default_contenders(task_of(None)) if "RGP" in c.name]
    wide = task_of(None, model=lambda: nn.Sequential(nn.Linear(4, 50), nn.Linear(50, 2)))
    assert [c.name for c in default_contenders(wide) if "RGP" in c.name]


class TestAdvisedConfiguration:
    """`dpspan advise` writes what it recommends, and `dpspan train` takes it."""

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        x, y = blobs(400, 0)
        for part, rows in (("private", slice(280)), ("public", slice(280, None))):
            np.savez(tmp_path / f"{part}.npz", x=x[rows].numpy(), y=y[rows].numpy())
        return tmp_path

    def advise(
        self, monkeypatch: pytest.MonkeyPatch, wanted: str, *options: str, **sections: Any
    ) -> Any:
        """What the command writes if the contender of that name were the best."""

        def concluded(task: Any, contenders: Any, **_: Any) -> Advice:
            best = next(c for c in with_baselines(task, contenders) if c.name == wanted)
            trial = Trial(
                name=wanted,
                private=best.method is not None,
                warm=best.warm_start is not None,
                settings=None if best.method is None else best.method.describe(),
                learning_rate=0.125,
                at_the_end=False,
                values=(0.9,),
            )
            return Advice(recommended=wanted, sure=True, tied=(), trials=(trial,), notes=())

        monkeypatch.setattr("dpspan.app.advice.advise", concluded)
        part = {"format": "npz"}
        whole = {
            "data": {
                "classes": 2,
                "records": 280,
                "private": {**part, "path": "private.npz"},
                "public": {"optin": {**part, "path": "public.npz"}},
            },
            "model": {"name": "mlp", "hidden": [20]} if "RGP" in wanted else {"name": "logistic"},
            "method": {"name": "dpsgd", "clip": 0.7},
            "budget": {"epsilon": 2.0, "delta": 1e-4, "accountant": "rdp"},
            "training": {
                "epochs": 2,
                "batch_size": 70,
                "optimizer": {"name": "sgd", "learning_rate": 0.5},
            },
            "output": {"folder": "run"},
        }
        Path("c.yaml").write_text(json.dumps(whole | sections))
        said = CliRunner().invoke(app, ["advise", "c.yaml", "--json", *options])
        assert said.exit_code == 0, said.output
        written = json.loads(said.stdout)["config"]
        if written is None:
            return None
        assert Path(written).read_text().startswith("# What `dpspan advise c.yaml` recommends")
        return load_config(written)

    @pytest.mark.parametrize(
        ("name", "method", "warm"),
        [
            ("c", {"name": "dpsgd", "clip": 0.7}, False),
            ("DP-SGD, clip 0.3", {"name": "dpsgd", "clip": 0.3}, False),
            ("warm start + DP-SGD, clip 1", {"name": "dpsgd", "clip": 1.0}, True),
            ("warm start + RGP, rank 2", {"name": "rgp", "rank": 2}, True),  # of a linear
            ("PDP-SGD, rank 24", {"name": "pdpsgd", "rank": 24, "public": "optin"}, False),
            (
                "GEP, rank 60, clips 1 and 0.2",
                {"name": "gep", "rank": 60, "residual_clip": 0.2, "public": "optin"},
                False,
            ),
            ("AdaGrad", {"name": "adagrad", "steps": 30, "learning_rate": 0.125}, False),
            ("AdaGrad, 4 cuts", {"name": "adagrad", "learning_rate": 0.125}, False),
        ],
    )
    def test_says_what_did_best(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        method: dict[str, Any],
        warm: bool,
    ) -> None:
        config = self.advise(monkeypatch, name)
        found = config.method.model_dump()
        assert {key: found[key] for key in method} == method
        assert config.training.optimizer.learning_rate == 0.125
        assert config.training.batch_size == 70
        assert (config.warm_start is not None) == warm
        assert (config.features is not None) == ("cuts" in name)
        with warnings.catch_warnings():  # of ranks beyond what so small a model spans
            warnings.simplefilter("ignore")
            result = CliRunner().invoke(app, ["train", "c-advised.yaml"])
        assert result.exit_code == 0, result.output

    def test_a_layer_of_patches_is_a_section(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x, y = pictures(400, 0)
        for part, rows in (("private", slice(280)), ("public", slice(280, None))):
            np.savez(folder / f"{part}.npz", x=x[rows].numpy(), y=y[rows].numpy())
        training = {
            "epochs": 2,
            "batch_size": 70,
            "optimizer": {"name": "sgd", "learning_rate": 0.5},
            "augment": {"name": "affine"},
            "views": 2,
        }
        model = {"name": "factory", "factory": f"{__name__}:striped"}
        name = "warm start + patches + DP-SGD, clip 0.1"
        config = self.advise(monkeypatch, name, training=training, model=model)
        assert config.features.model_dump(include={"name", "public", "filters", "mirror"}) == {
            "name": "patches", "public": "optin", "filters": 300, "mirror": False,
        }  # fmt: skip
        assert config.model.name == "logistic"
        assert config.method.model_dump(include={"name", "clip"}) == {"name": "dpsgd", "clip": 0.1}
        assert config.training.augment is None
        assert config.warm_start.public == "optin"
        result = CliRunner().invoke(app, ["train", "c-advised.yaml"])
        assert result.exit_code == 0, result.output

    def test_nothing_where_private_training_is_not_worth_it(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.advise(monkeypatch, "public only") is None
        assert not Path("c-advised.yaml").exists()

    def test_a_choice_stays_one(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        two = {name: {"format": "npz", "path": "public.npz"} for name in ("a", "b")}
        private = {"format": "npz", "path": "private.npz"}
        data = {"classes": 2, "records": 280, "private": private, "public": two}
        own = {"name": "gep", "rank": 4}
        sections = {"data": data, "method": own, "choose": {"epsilon": 0.5}}
        config = self.advise(monkeypatch, "PDP-SGD, rank 24", **sections)
        assert config.choose.epsilon == 0.5
        assert config.method.public is None
        config = self.advise(monkeypatch, "DP-SGD, clip 1", "--force", **sections)
        assert config.choose is None

    def test_a_file_that_is_there_is_refused_before_anything_is_tried(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.advise(monkeypatch, "c")
        said = CliRunner().invoke(app, ["advise", "c.yaml"])
        assert said.exit_code == 1
        assert "c-advised.yaml exists already: pass --force to replace it, or --out." in said.stderr
        assert self.advise(monkeypatch, "c", "--out", "d.yaml") is not None
        assert Path("d.yaml").exists()
