"""A private `Trainer`: the same training without noise, and nothing private in what it writes."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpspan
from dpspan.accounting.calibration import calibrate_event
from dpspan.frameworks import private_fit
from dpspan.mechanisms.noise import Noise
from dpspan.support.errors import UnsupportedModule
from helpers.needs import extra

transformers: Any = extra("transformers")
extra("accelerate")

from dpspan.frameworks.transformers import Privacy, PrivateTrainer  # noqa: E402

N, VOCABULARY = 24, 40
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 16}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}


def classifier(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    off = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = transformers.BertConfig(**SIZES, **LAYERS, **off)
    return transformers.BertForSequenceClassification(config).double()


def masked_model() -> Any:
    return transformers.BertForMaskedLM(classifier().config).double()


def language_model() -> Any:
    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, **off, bos_token_id=1, eos_token_id=1)
    return transformers.GPT2LMHeadModel(config).double()


def translator() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_ff": 16, "d_kv": 4, "num_layers": 1, "num_heads": 2}
    special = {"pad_token_id": 0, "decoder_start_token_id": 0, "dropout_rate": 0.0}
    config = transformers.T5Config(vocab_size=VOCABULARY, **sizes, **special)
    return transformers.T5ForConditionalGeneration(config).double()


def sentences(n: int = N, length: int = 7) -> list[dict[str, Any]]:
    """Of one length, with a label each."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (n, length), generator=g)
    return [{"input_ids": row, "labels": int(row[0] > 20)} for row in ids]


def texts(n: int = N) -> list[dict[str, Any]]:
    """Of different lengths."""
    g = torch.Generator().manual_seed(0)
    lengths = [3 + i % 5 for i in range(n)]
    rows = [torch.randint(2, VOCABULARY, (length,), generator=g) for length in lengths]
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows]


def padded(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    """To the longest of them, as Hugging Face's collators do."""
    longest = max(len(record["input_ids"]) for record in records)

    def rows(name: str, fill: int) -> Tensor:
        return torch.tensor([r[name] + [fill] * (longest - len(r[name])) for r in records])

    ids = rows("input_ids", 0)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": rows("labels", -100),
    }


def to_fixed_length(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    blank = {"input_ids": [0] * 8, "labels": [-100] * 8}
    return {name: x[:-1] for name, x in padded([*records, blank]).items()}


def arguments(folder: Path, **changes: Any) -> Any:
    options = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 4,
        "optim": "sgd",
        "learning_rate": 0.1,
        "warmup_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(str(folder), **{**options, **changes})


PRIVACY = Privacy(epsilon=8.0, delta=1e-3, accountant="rdp")  # faster than PLD


def trainer(folder: Path, model: Any = None, privacy: Privacy = PRIVACY, **changes: Any) -> Any:
    names = {"train_dataset", "eval_dataset", "data_collator", "callbacks", "compute_loss_func"}
    parts = {name: changes.pop(name) for name in names & changes.keys()}
    parts = {"train_dataset": sentences(), **parts}
    model = classifier() if model is None else model
    return PrivateTrainer(model, arguments(folder, **changes), privacy=privacy, **parts)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


@pytest.fixture(autouse=True)
def _calibrated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most runs here have the same noise."""

    def calibrate(make_event: Any, count: int, budget: Any, *, accountant: str) -> float:
        key = (str(make_event(1.0)), count, budget, accountant)
        if key not in KNOWN:
            KNOWN[key] = calibrate_event(make_event, count, budget, accountant=accountant)
        return KNOWN[key]

    monkeypatch.setattr(private_fit, "calibrate_event", calibrate)


KNOWN: dict[Any, float] = {}


@pytest.fixture
def noiseless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noise, "normal", lambda _, like, std: torch.zeros_like(like).double())


# -- the same training ----------------------------------------------------------------------------


@pytest.mark.usefixtures("noiseless")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_records_without_noise_and_clip_are_the_plain_trainer(
    tmp_path: Path, smoothing: float
) -> None:
    changes = {"label_smoothing_factor": smoothing, "lr_scheduler_type": "cosine"}
    changes = {**changes, "max_grad_norm": 1e6}
    # In one piece: where a model does not count tokens, the Trainer adds up means of pieces.
    whole = {"per_device_train_batch_size": N, "gradient_accumulation_steps": 1}
    options = arguments(tmp_path / "plain", **changes, **whole)
    plain = transformers.Trainer(classifier(), options, train_dataset=sentences())
    plain.train()
    ours = trainer(tmp_path / "private", **changes)
    # A smoothed sum is divided by a number, and batches of one size don't tell that it is theirs.
    told = (
        pytest.warns(UserWarning, match="loss could not be checked") if smoothing else nullcontext()
    )
    with told:
        ours.train()
    assert ours.state.global_step == plain.state.global_step == 4
    assert ours.engine.ledger.steps == 4
    start = weights(classifier())
    assert float((weights(ours.model) - start).norm()) > 0.01
    torch.testing.assert_close(weights(ours.model), weights(plain.model), rtol=1e-9, atol=1e-12)


def clipped_mean(losses: list[Tensor], model: nn.Module, clip: float) -> dict[str, Tensor]:
    """One record at a time, by plain autograd."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in trained.items()}
    for loss in losses:
        found = torch.autograd.grad(loss, list(trained.values()), retain_graph=True)
        norm = torch.cat([g.flatten() for g in found]).norm()
        for name, gradient in zip(trained, found, strict=True):
            total[name] += gradient * min(1.0, clip / float(norm)) / len(losses)
    return total


MODELS = {"decoder": language_model, "encoder": masked_model, "encoder and decoder": translator}
CURRENT = int(transformers.__version__.split(".")[0]) >= 5


@pytest.mark.usefixtures("noiseless")
@pytest.mark.parametrize("kind", MODELS)
def test_the_loss_of_a_text_is_the_mean_over_its_own_tokens(tmp_path: Path, kind: str) -> None:
    if kind == "encoder and decoder" and not CURRENT:
        pytest.skip("the T5 of transformers 4 is refused")
    model, clip = MODELS[kind](), 0.5
    losses = [model(**padded([record])).loss for record in texts()]
    expected = clipped_mean(losses, model, clip)
    assert max(float(g.norm()) for g in expected.values()) > 0.01
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    given = {"train_dataset": texts(), "data_collator": to_fixed_length}
    changes = {"warmup_steps": 0, "lr_scheduler_type": "constant", "max_grad_norm": clip}
    trainer(tmp_path, model, **given, **changes, num_train_epochs=1).train()
    for name, parameter in model.named_parameters():
        moved = (before[name] - parameter.detach()) / 0.1
        torch.testing.assert_close(moved, expected[name], rtol=1e-5, atol=1e-7, msg=name)


WAYS = {
    "bfloat16": ({"bf16": True}, 0.01),
    "bfloat16, smoothed": ({"bf16": True, "label_smoothing_factor": 0.1}, 0.01),
    "workers": ({"dataloader_num_workers": 1}, 1e-6),
    "compiled": ({"torch_compile": True, "torch_compile_backend": "aot_eager"}, 1e-4),
}


@pytest.mark.usefixtures("noiseless")
@pytest.mark.filterwarnings("ignore:dpspan. the loss could not be")  # by pieces of one size
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way == "compiled")) for way in WAYS]
)
def test_other_ways_to_compute_it(tmp_path: Path, way: str) -> None:
    changes, slack = WAYS[way]
    start = weights(classifier().float())
    moved = {}
    same = {name: x for name, x in changes.items() if name == "label_smoothing_factor"}
    for name, more in ("plain", same), (way, changes):
        ours = trainer(tmp_path / name, classifier().float(), **more, num_train_epochs=2)
        ours.train()
        moved[name] = weights(ours.model) - start
    error = float((moved[way] - moved["plain"]).norm() / moved["plain"].norm())
    assert error < slack
    assert error > 0 or "bfloat16" not in way


def test_methods_that_use_public_data(tmp_path: Path) -> None:
    public = torch.utils.data.DataLoader(sentences(40)[N:], batch_size=16)
    method = dpspan.GEP(public=public, rank=4, clip=1.0, public_labels="real")
    common = {"epsilon": 8.0, "delta": 1e-3, "accountant": "rdp", "method": method}
    with pytest.raises(ValueError, match="Expected a criterion or a loss for the public samples"):
        trainer(tmp_path, privacy=Privacy(**common)).train()
    privacy = Privacy(**common, criterion=nn.CrossEntropyLoss())
    ours = trainer(tmp_path, privacy=privacy, num_train_epochs=1)
    ours.train()
    assert "GEP: public gradients" in str(ours.engine.ledger.public)


def test_a_loss_that_divides_by_the_tokens_of_the_batch_is_refused(tmp_path: Path) -> None:
    def mean_over_tokens(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
        logits = outputs["logits"][:, :-1]
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:])

    given = {"train_dataset": texts(), "data_collator": to_fixed_length}
    model = language_model()
    model.transformer.wte.weight.data.mul_(50)  # or all tokens have nearly the same loss
    ours = trainer(tmp_path, model, **given, compute_loss_func=mean_over_tokens)
    with pytest.raises(ValueError, match="mixes samples" if CURRENT else None):
        ours.train()
    assert ours.engine.ledger.steps == 0


def test_dynamic_padding_trains_and_is_on_the_certificate(tmp_path: Path) -> None:
    given = {"train_dataset": texts(), "data_collator": padded}
    small = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    ours = trainer(tmp_path, language_model(), **given, **small, num_train_epochs=1)
    with pytest.warns(UserWarning, match="padding must be masked"):
        ours.train()
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert any("padding must be masked" in each for each in certificate["warnings"])


# -- what is written ------------------------------------------------------------------------------


def everything_written(folder: Path) -> str:
    return "\n".join(
        path.read_text() for path in folder.rglob("*") if path.suffix in (".json", ".jsonl")
    )


def test_logs_tell_epsilon_and_nothing_private(tmp_path: Path) -> None:
    told: list[dict[str, float]] = []

    class Listener(transformers.TrainerCallback):
        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            told.append(dict(logs))

    often = {"logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "epoch"}
    given = {"eval_dataset": sentences(10, length=6), "callbacks": [Listener()]}
    ours = trainer(tmp_path, classifier(0.1), **often, **given, skip_memory_metrics=False)
    ours.evaluate()
    assert "unprivate_eval_loss" in told.pop()
    result = ours.train()
    ours.evaluate()
    assert {"unprivate_eval_loss", "epsilon"} <= told.pop().keys()
    assert len(told) == 9  # four steps, as many evaluations, and the end
    spent = [line["epsilon"] for line in told]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(8.0, abs=1e-2)
    of_steps = [line for line in told if "learning_rate" in line]
    assert all(set(line) == {"learning_rate", "epoch", "epsilon"} for line in of_steps)
    measured = [line for line in told if "unprivate_eval_loss" in line]
    assert len(measured) == 4
    assert not any(name.startswith("eval") for line in told for name in line)
    assert math.isnan(result.training_loss)
    assert set(result.metrics) == {"epoch", "epsilon"}
    written = everything_written(tmp_path)
    assert "unprivate: results on evaluation data not declared public" in written
    for word in ("train_loss", '"loss"', "grad_norm", "runtime", "per_second", "mem_cpu"):
        assert word not in written.replace("unprivate_eval_runtime", "").replace(
            "unprivate_eval_samples_per_second", ""
        ).replace("unprivate_eval_steps_per_second", ""), word
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["total_flos"] == state["num_input_tokens_seen"] == 0
    assert not list(tmp_path.rglob("rng_state*"))
    assert json.loads((tmp_path / "checkpoint-4" / "certificate.json").read_text())["private"]


def test_metrics_of_private_batches_are_marked_if_asked_for(tmp_path: Path) -> None:
    marked = Privacy(epsilon=8.0, delta=1e-3, accountant="rdp", unprivate_metrics=True)
    ours = trainer(tmp_path, privacy=marked, logging_steps=1)
    result = ours.train()
    assert 0.3 < result.training_loss < 1.5  # ln 2, about
    assert 0.3 < ours.state.log_history[0]["unprivate_loss"] < 1.5
    assert any("private batches" in each for each in ours.engine.ledger.warnings)


def test_public_evaluation_data_keep_their_names_and_may_decide(tmp_path: Path) -> None:
    public = Privacy(epsilon=8.0, delta=1e-3, accountant="rdp", eval_is_public=True)
    often = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    data = {"eval_dataset": sentences(10, length=6)}
    ours = trainer(tmp_path, privacy=public, **often, **data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of weights that changed between steps
        ours.train()
    assert "eval_loss" in ours.state.log_history[0]
    assert not any("unprivate" in each for each in ours.engine.ledger.warnings)
    (known,) = json.loads((tmp_path / "certificate.json").read_text())["public"]
    assert (known["name"], known["count"]) == ("eval_dataset", 10)
    assert known["detail"] == "measured on"
    with pytest.raises(ValueError, match="exact copies"):
        trainer(tmp_path / "copies", privacy=public, eval_dataset=sentences()[:3]).train()
    two = {"a": sentences(10, length=6), "b": sentences(4, length=5)}
    ours = trainer(tmp_path / "two", privacy=public, eval_dataset=two)
    ours.train()
    names = [each.name for each in ours.engine.ledger.public]
    assert names == ["eval_dataset.a", "eval_dataset.b"]
    unknown = trainer(tmp_path / "none", privacy=public)
    unknown.train()
    assert any("could not be read" in each for each in unknown.engine.ledger.warnings)


def test_what_is_reported_elsewhere_is_the_same(tmp_path: Path) -> None:
    extra("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ours = trainer(tmp_path, report_to=["tensorboard"], logging_steps=1)
    ours.train()
    (path,) = {p.parent for p in tmp_path.rglob("events.out.*")}
    found = EventAccumulator(str(path)).Reload().Tags()["scalars"]
    assert set(found) == {"train/learning_rate", "train/epoch", "train/epsilon"}


# -- going on -------------------------------------------------------------------------------------

SAVING = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 5}


class Interrupted(Exception):
    pass


class StopAfter(transformers.TrainerCallback):
    """As a process that dies in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == self.step:
            raise Interrupted


def released(folder: Path) -> int:
    return int(json.loads((folder / "ledger.json").read_text())["steps"])


def test_a_run_that_was_interrupted_goes_on_with_the_books_as_they_are(tmp_path: Path) -> None:
    first = trainer(tmp_path, classifier(), **SAVING, callbacks=[StopAfter(3)])
    with pytest.raises(Interrupted):
        first.train()
    assert released(tmp_path) == 3
    assert (tmp_path / "checkpoint-2").exists()
    second = trainer(tmp_path, classifier(), **SAVING)
    second.train(resume_from_checkpoint=True)
    # One step was lost, and stays charged: the budget pays for five in all.
    assert released(tmp_path) == second.engine.ledger.steps == 5
    assert second.state.global_step == 4
    assert second.engine.get_epsilon() <= 8.0
    assert any("1 steps were charged" in each for each in second.engine.ledger.warnings)
    assert second.engine.noise_multiplier == first.engine.noise_multiplier
    # The same process may do so as well.
    third = trainer(tmp_path / "same", classifier(), **SAVING, callbacks=[StopAfter(4)])
    with pytest.raises(Interrupted):
        third.train()
    third.remove_callback(StopAfter)
    third.train(resume_from_checkpoint=str(tmp_path / "same" / "checkpoint-2"))
    assert (third.state.global_step, third.engine.ledger.steps) == (3, 5)


class StopOnceSaved(transformers.TrainerCallback):
    def on_save(self, *_: Any, **__: Any) -> None:
        raise Interrupted


@pytest.mark.usefixtures("noiseless")
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    """Weights, optimizer and schedule; all records take part in every step."""
    adam = {"optim": "adamw_torch", "learning_rate": 0.01, "max_grad_norm": 1e6}
    whole = trainer(tmp_path / "whole", classifier(), **SAVING, **adam)
    whole.train()
    begun = trainer(tmp_path / "part", classifier(), **SAVING, **adam, callbacks=[StopOnceSaved()])
    with pytest.raises(Interrupted):
        begun.train()
    resumed = trainer(tmp_path / "part", classifier(), **SAVING, **adam)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.engine.ledger.steps == 5
    torch.testing.assert_close(weights(resumed.model), weights(whole.model), rtol=1e-6, atol=1e-9)


def test_an_epoch_goes_on_in_the_middle(tmp_path: Path) -> None:
    three = {"gradient_accumulation_steps": 1, "eval_strategy": "epoch"}  # steps an epoch
    given = {**SAVING, **three, "eval_dataset": sentences(4), "num_train_epochs": 2}
    with pytest.raises(Interrupted):
        trainer(tmp_path, **given, callbacks=[StopOnceSaved()]).train()
    resumed = trainer(tmp_path, **given)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.engine.ledger.steps == resumed.state.global_step == 6
    measured = [line for line in resumed.state.log_history if "unprivate_eval_loss" in line]
    assert [(line["step"], line["epoch"]) for line in measured] == [(3, 1.0), (6, 2.0)]


@pytest.mark.parametrize("size", [1, 3])
def test_a_resumed_run_of_which_nothing_is_left_ends_with_a_certificate(
    tmp_path: Path, size: int
) -> None:
    """The process was killed after the last step, and before the last checkpoint."""
    given = {**SAVING, "gradient_accumulation_steps": size, "num_train_epochs": 2 * size}
    trainer(tmp_path, **given).train()
    (tmp_path / "certificate.json").unlink()
    last = max(int(each.name.split("-")[1]) for each in tmp_path.glob("checkpoint-*"))
    for step in (2, 4):
        resumed = trainer(tmp_path, **given)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.engine.ledger.steps == last
        assert resumed.state.global_step == step
        certificate = json.loads((tmp_path / "certificate.json").read_text())
        assert any("steps were charged" in each for each in certificate["warnings"])


def test_a_folder_with_a_run_is_not_used_again(tmp_path: Path) -> None:
    trainer(tmp_path, **SAVING).train()
    with pytest.raises(ValueError, match="tells of a private run"):
        trainer(tmp_path, **SAVING).train()
    (tmp_path / "ledger.json").unlink()
    with pytest.raises(ValueError, match="is missing, or leaves out releases"):
        trainer(tmp_path, **SAVING).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_a_killed_process_leaves_what_the_next_one_needs(tmp_path: Path) -> None:
    """In processes of their own: kill -9 in the middle of training."""
    script = Path(__file__).with_name("train_and_be_killed.py")
    begun = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "--kill-after", "3"], capture_output=True
    )
    assert begun.returncode == -signal.SIGKILL, begun.stderr.decode()
    assert released(tmp_path) == 3
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert released(tmp_path) == 5
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert certificate["private"]
    assert certificate["epsilon"] <= 8.0


def test_a_step_is_on_record_even_if_training_is_interrupted_right_after_it(tmp_path: Path) -> None:
    class Interrupt(transformers.TrainerCallback):
        """Ctrl-C in the first moment after the weights have moved."""

        def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
            hooks = optimizer.optimizer._optimizer_step_post_hooks
            handle = optimizer.optimizer.register_step_post_hook(self.interrupt)
            hooks.move_to_end(handle.id, last=False)

        def interrupt(self, *_: Any) -> None:
            raise KeyboardInterrupt

    private = trainer(
        tmp_path,
        callbacks=[Interrupt()],
        per_device_train_batch_size=N,
        gradient_accumulation_steps=1,
    )
    with pytest.raises(KeyboardInterrupt):
        private.train()
    assert released(tmp_path) == private.engine.ledger.steps == 1


def test_checkpointed_layers_are_refused_by_a_sentence(tmp_path: Path) -> None:
    model = classifier()
    model.gradient_checkpointing_enable()
    with pytest.raises(dpspan.CaptureError, match="gradient checkpointing"):
        trainer(tmp_path, model).train()


# -- what is refused ------------------------------------------------------------------------------

REFUSED = {
    "fp16": ({"fp16": True}, "use bf16"),
    "batch size": ({"auto_find_batch_size": True}, "per_device_train_batch_size to what fits"),
    "checkpointing": ({"gradient_checkpointing": True}, "raise gradient_accumulation_steps"),
    "tokens": ({"include_num_input_tokens_seen": True}, "counts the tokens"),
    "lomo": ({"optim": "lomo"}, "during the backward pass"),
    "neftune": ({"neftune_noise_alpha": 5.0}, "by the longest text of a batch"),
    "best": ({"metric_for_best_model": "loss"}, "eval_is_public=True"),
    "plateau": (
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
        "eval_is_public=True",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_cannot_be_private(tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **changes)


@pytest.mark.parametrize(("name", "value"), [("world_size", 2), ("n_gpu", 2)])
def test_several_devices(
    tmp_path: Path, name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.TrainingArguments, name, value)
    with pytest.raises(ValueError, match="one process without torchrun"):
        trainer(tmp_path)


def test_samplers_other_losses_and_searches(tmp_path: Path) -> None:
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    grouped = {"train_sampling_strategy": "group_by_length"}
    if "group_by_length" in names:  # before transformers 5
        grouped = {"group_by_length": True}
    with pytest.raises(ValueError, match="LengthGroupedSampler, and private batches are Poisson"):
        trainer(tmp_path, **grouped).train()
    with pytest.raises(RuntimeError, match="release for each trial"):
        trainer(tmp_path).hyperparameter_search()
    with pytest.raises(ValueError, match="Give one of the two"):
        stated = Privacy(epsilon=8.0, delta=1e-3, method=dpspan.DPSGD(clip=0.1))
        trainer(tmp_path, privacy=stated, max_grad_norm=0.5).train()

    class Own(PrivateTrainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(sentences(), batch_size=8)

    with pytest.raises(RuntimeError, match="not drawn privately"):
        Own(classifier(), arguments(tmp_path), privacy=PRIVACY, train_dataset=sentences()).train()
    assert not list(tmp_path.rglob("ledger.json"))


def test_a_model_that_mixes_records(tmp_path: Path) -> None:
    class Centred(transformers.BertForSequenceClassification):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
            logits = super().forward(input_ids=input_ids).logits
            logits = logits - logits.mean(0)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    model = Centred(classifier().config).double()
    with pytest.raises((UnsupportedModule, ValueError)):  # transformers 4 does not say which layer
        trainer(tmp_path, model).train()
    assert released(tmp_path) == 0


def test_the_clip_is_where_people_expect_it(tmp_path: Path) -> None:
    clips = {}
    for name, method, norm in (
        ("the default", dpspan.DPSGD(), None),
        ("of the arguments", dpspan.DPSGD(), 0.3),
        ("of the method", dpspan.DPSGD(clip=0.1), None),
        ("switched off", dpspan.DPSGD(clip=0.1), 0.0),
    ):
        changes = {} if norm is None else {"max_grad_norm": norm}
        privacy = Privacy(epsilon=8.0, delta=1e-3, accountant="rdp", method=method)
        ours = trainer(tmp_path / name, privacy=privacy, **changes, num_train_epochs=1)
        ours.train()
        clips[name] = ours.engine.plan.method.clip_norm
    assert list(clips.values()) == [1.0, 0.3, 0.1, 0.1]
