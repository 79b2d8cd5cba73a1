"""Lightning's loop, private: automatic and manual optimization, the same training without noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import dpspan
from dpspan.mechanisms.noise import Noise
from helpers.needs import extra
from helpers.training import N, data, network, weights

lightning: Any = extra("pytorch_lightning")

from dpspan.frameworks.lightning import Privacy, PrivateTraining  # noqa: E402

PRIVACY = Privacy(epsilon=8.0, delta=1e-3, accountant="rdp", method=dpspan.DPSGD(clip=1e6))
HELD_OUT = DataLoader([(x.double(), y) for x, y in data(60)][N:], batch_size=20)


@pytest.fixture
def noiseless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noise, "normal", lambda _, like, std: torch.zeros_like(like).double())


class Automatic(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network().double()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.seen.append(len(batch[0]))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Manual(Automatic):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.seen.append(len(batch[0]))
        scheduler.step()


class Unnamed(Automatic):
    """The loop calls two parts, and never the module."""

    def __init__(self) -> None:
        super().__init__()
        first, middle, last = self.net
        self.net, self.body, self.head = None, nn.Sequential(first, middle), last

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.body(x)), y)


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    given = {"max_epochs": 4, "accelerator": "cpu", **quiet, **options}
    return lightning.Trainer(default_root_dir=str(folder), callbacks=[*callbacks], **given)


def loader(batch: int = N) -> DataLoader[Any]:
    return DataLoader([(x.double(), y) for x, y in data()], batch_size=batch)


@pytest.mark.usefixtures("noiseless")
@pytest.mark.parametrize("physical", [None, 7])
@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_all_records_without_noise_and_clip_are_plain_training(
    tmp_path: Path, kind: Any, physical: int | None
) -> None:
    expected, found = kind(), kind()
    trainer(tmp_path).fit(expected, loader())
    private = PrivateTraining(PRIVACY, physical=physical)
    fitted = trainer(tmp_path, private)
    fitted.fit(found, loader())
    assert private.engine.ledger.steps == 4
    assert fitted.global_step == 4 or kind is Manual
    assert found.seen == [N] * 4 if physical is None else [*[7] * 5, 5] * 4
    if kind is Manual and physical is not None:  # whose loop steps the schedule in every piece
        return
    torch.testing.assert_close(weights(found), weights(expected), rtol=1e-6, atol=1e-9)
    assert json.loads((tmp_path / "certificate.json").read_text())["private"]
    assert "training_step" not in vars(found)
    assert "log" not in vars(found)


def test_logs_tell_epsilon_and_nothing_private(tmp_path: Path) -> None:
    class Listener(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            self.log("of_a_callback", 1.0)

    module, private = Automatic(), PrivateTraining(PRIVACY)
    logger = lightning.loggers.CSVLogger(str(tmp_path))
    fitted = trainer(tmp_path, private, Listener(), logger=logger, log_every_n_steps=1)
    fitted.fit(module, loader(), HELD_OUT)
    assert set(fitted.logged_metrics) == {"unprivate_val_loss", "epsilon"}
    assert float(fitted.callback_metrics["epsilon"]) == pytest.approx(8.0, abs=1e-2)
    logger.save()
    (written,) = tmp_path.rglob("metrics.csv")
    names = set(written.read_text().splitlines()[0].split(","))
    assert names == {"epoch", "step", "epsilon", "unprivate_val_loss"}
    ledger = (tmp_path / "ledger.json").read_text()
    assert "unprivate: results on evaluation data not declared public" in ledger
    fitted.validate(module, HELD_OUT, verbose=False)
    assert "unprivate_val_loss" in fitted.logged_metrics

    told = Privacy(epsilon=8.0, delta=1e-3, unprivate_metrics=True, eval_is_public=True)
    fitted = trainer(tmp_path / "told", PrivateTraining(told), max_epochs=1)
    fitted.fit(Automatic(), loader(), HELD_OUT)
    assert {"unprivate_train_loss", "val_loss"} <= set(fitted.callback_metrics)


class Interrupted(Exception):
    pass


class StopAfter(lightning.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise Interrupted


class StopBefore(lightning.Callback):
    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 2:
            raise Interrupted


@pytest.mark.usefixtures("noiseless")
def test_a_resumed_fit_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    saving = lightning.callbacks.ModelCheckpoint(str(tmp_path / "saved"), every_n_train_steps=2)
    whole = Automatic()
    trainer(tmp_path / "whole", PrivateTraining(PRIVACY)).fit(whole, loader())
    with pytest.raises(Interrupted):
        interrupted = (PrivateTraining(PRIVACY), saving, StopBefore())
        trainer(tmp_path / "part", *interrupted).fit(Automatic(), loader())
    (path,) = (tmp_path / "saved").glob("*.ckpt")
    with pytest.raises(ValueError, match="tells of a private run"):
        trainer(tmp_path / "part", PrivateTraining(PRIVACY)).fit(Automatic(), loader())
    resumed, private = Automatic(), PrivateTraining(PRIVACY)
    trainer(tmp_path / "part", private).fit(resumed, loader(), ckpt_path=str(path))
    assert private.engine.ledger.steps == 4
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=1e-6, atol=1e-9)


def test_an_epoch_goes_on_in_the_middle_and_lost_steps_stay_charged(tmp_path: Path) -> None:
    saving = lightning.callbacks.ModelCheckpoint(str(tmp_path / "saved"), every_n_train_steps=2)
    with pytest.raises(Interrupted):
        interrupted = (PrivateTraining(PRIVACY), saving, StopAfter(3))
        trainer(tmp_path, *interrupted, max_epochs=2).fit(Automatic(), loader(10))
    (path,) = (tmp_path / "saved").glob("*.ckpt")
    module, private = Automatic(), PrivateTraining(PRIVACY)
    resumed = trainer(tmp_path, private, max_epochs=2)
    resumed.fit(module, loader(10), ckpt_path=str(path))
    # Two epochs of four steps: the third step was lost, and is paid for.
    assert private.engine.ledger.steps == 8
    assert resumed.global_step == 7
    assert any("1 steps were charged" in each for each in private.engine.ledger.warnings)


@pytest.mark.parametrize("options", [{}, {"min_epochs": 4}, {"min_steps": 4}])
@pytest.mark.parametrize("after", [1, 2])
def test_a_resumed_fit_of_which_nothing_is_left_ends_with_a_certificate(
    tmp_path: Path, after: int, options: dict[str, int]
) -> None:
    """The process was killed after the last step, and before the last checkpoint."""
    given = {"every_n_train_steps": after, "save_top_k": -1}
    saving = lightning.callbacks.ModelCheckpoint(str(tmp_path / "saved"), **given)
    twice = {"max_epochs": 2}  # of four steps each
    trainer(tmp_path, PrivateTraining(PRIVACY), saving, **twice).fit(Automatic(), loader(10))
    (tmp_path / "certificate.json").unlink()
    paths = [tmp_path / "saved" / f"epoch={(n - 1) // 4}-step={n}.ckpt" for n in (4, 6)]
    for path in paths:
        module, private = Automatic(), PrivateTraining(PRIVACY)
        resumed = trainer(tmp_path, private, max_epochs=4, **options)
        resumed.fit(module, loader(10), HELD_OUT, ckpt_path=str(path))
        assert (module.seen, private.engine.ledger.steps) == ([], 8)
        certificate = json.loads((tmp_path / "certificate.json").read_text())
        assert any("steps were charged" in each for each in certificate["warnings"])


def test_a_callback_that_resumed_a_fit_begins_another_one(tmp_path: Path) -> None:
    saving = lightning.callbacks.ModelCheckpoint(str(tmp_path / "saved"), every_n_train_steps=2)
    with pytest.raises(Interrupted):
        interrupted = (PrivateTraining(PRIVACY), saving, StopBefore())
        trainer(tmp_path / "a", *interrupted).fit(Automatic(), loader())
    (path,) = map(str, (tmp_path / "saved").glob("*.ckpt"))
    private = PrivateTraining(PRIVACY)

    def begins(folder: str) -> None:
        trainer(tmp_path / folder, private, max_epochs=2).fit(Automatic(), loader())
        assert private.engine.ledger.steps == 2

    with pytest.raises(Interrupted):
        trainer(tmp_path / "a", private, StopAfter(3)).fit(Automatic(), loader(), ckpt_path=path)
    begins("after an error")
    trainer(tmp_path / "a", private).fit(Automatic(), loader(), ckpt_path=path)
    begins("after the end")
    trainer(tmp_path / "a", private).validate(Automatic(), HELD_OUT, ckpt_path=path, verbose=False)
    begins("after a look")


def test_a_module_whose_parts_are_called_is_trained_and_says_so(tmp_path: Path) -> None:
    private = PrivateTraining(PRIVACY)
    with pytest.warns(UserWarning, match="not called as a whole"):
        trainer(tmp_path, private, max_epochs=1).fit(Unnamed(), loader())
    assert private.engine.ledger.steps == 1


def test_bfloat16(tmp_path: Path) -> None:
    private = PrivateTraining(PRIVACY, physical=15)
    trainer(tmp_path, private, precision="bf16-mixed", max_epochs=1).fit(Automatic(), loader())
    assert private.engine.ledger.steps == 1


REFUSED = {
    "accumulation": ({"accumulate_grad_batches": 2}, "PrivateTraining physical="),
    "clip by value": (
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        "bounds no record",
    ),
    "precision": ({"precision": "bf16-true"}, "use one of 32-true, 64-true, bf16-mixed"),
    "no end": ({"max_epochs": -1}, "set max_epochs or max_steps"),
    "two clips": ({"gradient_clip_val": 1.0}, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_private_is_refused(tmp_path: Path, name: str) -> None:
    options, message = REFUSED[name]
    private = PrivateTraining(PRIVACY)
    if message is None:  # the method's own counts
        trainer(tmp_path, private, **options).fit(Automatic(), loader())
        assert private.engine.plan.method.clip == 1e6
        return
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, private, **options).fit(Automatic(), loader())
    assert not (tmp_path / "ledger.json").exists()


def test_a_schedule_of_accumulation_is_refused_before_the_first_step(tmp_path: Path) -> None:
    schedule = lightning.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})
    with pytest.raises(ValueError, match="GradientAccumulationScheduler counts batches"):
        trainer(tmp_path, PrivateTraining(PRIVACY), schedule).fit(Automatic(), loader())
    assert not (tmp_path / "ledger.json").exists()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", ["LearningRateFinder", "BatchSizeFinder"])
def test_finders_that_train_without_privacy_are_refused(
    tmp_path: Path, name: str, first: bool
) -> None:
    """They run before the fit, without other callbacks, and the first goes by the raw loss."""

    class WithData(Automatic):
        lr, batch_size = 0.1, 8

        def train_dataloader(self) -> DataLoader[Any]:
            return loader()

    callbacks = [PrivateTraining(PRIVACY), getattr(lightning.callbacks, name)()]
    module = WithData()
    with pytest.raises(ValueError, match=f"{name} trains without privacy"):
        trainer(tmp_path, *(callbacks[::-1] if first else callbacks)).fit(module)
    assert module.seen == []


def test_choices_by_private_evaluation_data_are_refused(tmp_path: Path) -> None:
    stop = lightning.callbacks.EarlyStopping("val_loss")
    with pytest.raises(ValueError, match="EarlyStopping decides by evaluation data"):
        trainer(tmp_path, PrivateTraining(PRIVACY), stop).fit(Automatic(), loader(), HELD_OUT)
    public = Privacy(epsilon=8.0, delta=1e-3, accountant="rdp", eval_is_public=True)
    trainer(tmp_path, PrivateTraining(public), stop).fit(Automatic(), loader(), HELD_OUT)


PUBLIC = Privacy(epsilon=8.0, delta=1e-3, accountant="rdp", eval_is_public=True)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(HELD_OUT.dataset)


def test_public_evaluation_data_are_on_the_certificate_and_hold_no_copies(tmp_path: Path) -> None:
    for name, loaders, known in (
        ("one", HELD_OUT, [60 - N]),
        ("two", [HELD_OUT, DataLoader(HELD_OUT.dataset, batch_size=3)], [60 - N] * 2),
        ("a stream", [HELD_OUT, DataLoader(Stream(), batch_size=20)], [60 - N]),
        ("none", None, []),
    ):
        fitted = trainer(tmp_path / name, PrivateTraining(PUBLIC), max_epochs=1)
        fitted.fit(Several(), loader(), loaders)
        document = json.loads((tmp_path / name / "certificate.json").read_text())
        assert [each["count"] for each in document["public"]] == known
        assert all(each["detail"] == "measured on" for each in document["public"])
        told = any("could not be read before training" in each for each in document["warnings"])
        assert told == (name not in ("one", "two"))
    copies = DataLoader([*HELD_OUT.dataset, *list(loader().dataset)[:2]], batch_size=20)
    for loaders in (copies, [HELD_OUT, copies]):
        private = PrivateTraining(PUBLIC)
        with pytest.raises(ValueError, match=r"2 of the .*exact copies"):
            trainer(tmp_path / "copies", private).fit(Several(), loader(), loaders)
    assert not (tmp_path / "copies" / "ledger.json").exists()


class Several(Automatic):
    """With several loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))


def test_other_loaders_and_optimizers_are_refused(tmp_path: Path) -> None:
    class Two(Automatic):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    with pytest.raises(ValueError, match="is a list"):
        trainer(tmp_path, PrivateTraining(PRIVACY)).fit(Automatic(), [loader()])
    module = Two()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="2 optimizers"):
        trainer(tmp_path, PrivateTraining(PRIVACY)).fit(module, loader())


def test_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning.Trainer, "world_size", 2)
    with pytest.raises(ValueError, match=r"Trainer\(devices=1\)"):
        trainer(tmp_path, PrivateTraining(PRIVACY)).fit(Automatic(), loader())
