"""`dpspan tune`: a search for hyperparameters whose whole price is known (Papernot, Steinke 2022).

A number K is drawn from a geometric distribution. K times, hyperparameters are drawn at random, a
model is trained privately with them, and it is scored: by the private records with noise of its own
(`private_metric`), or by public ones. The best model is released, with its hyperparameters and its
score, and nothing else: neither K nor what the other tries were or reached.

Formal guarantee: a try is one mechanism (its steps, and the score), whatever it drew; choosing the
best of so many is dp_accounting's RepeatAndSelectDpEvent of shape 1, which only Rényi accounting
knows. It is on the ledger's file before the first try begins.

What an interrupted search needs to go on (K, the best so far) lies in the hidden folder `.tune`,
for the operator alone. The try that was interrupted is made anew: nobody has seen anything of it.
"""

import math
import secrets
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
import yaml
from dp_accounting import dp_event
from dp_accounting.dp_event import DpEvent
from torch.utils.data import Dataset, TensorDataset

from dpspan.accounting.calibration import calibrate_event
from dpspan.accounting.certificate import certificate, sha256_of
from dpspan.accounting.events import gaussian_event, step_event
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.promises import Budget, weaknesses
from dpspan.accounting.questions import private_metric
from dpspan.app.config import Config, load_config
from dpspan.app.config.methods import ConvexSection
from dpspan.app.run.folder import RunFolder
from dpspan.app.run.from_config import (
    Parts,
    chosen_public,
    contender_of,
    evaluation_of,
    make_parts,
    task_of,
)
from dpspan.app.run.resumable import DIVERGED
from dpspan.app.run.task import Task
from dpspan.app.run.training import Training, measured, outputs_on
from dpspan.engine.checkpoint import load_file, save_file
from dpspan.public.data import PublicData
from dpspan.support.checks import check_count, check_positive, expect
from dpspan.support.processes import refuse_several_processes
from dpspan.support.strict_json import plain

_AROUND = 10.0  # times, to both sides of the configuration's own learning rate
_SCORE_SHARE = 0.1  # of ε, which is what the score of one try would cost by itself
_DIVERGED = -1.0  # the score of weights that grew without bound
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was released: the folder of the best try, its hyperparameters, its score, and ε."""

    folder: Path
    found: dict[str, float]
    score: float
    epsilon: float
    delta: float
    metrics: dict[str, Any]


def tune(
    config: Config | str | Path,
    *,
    epsilon: float | None = None,
    tries: int = 5,
    learning_rate: Range | None = None,
    clip: Range | None = None,
    score_on: str | None = None,
) -> Tuned:
    """Search hyperparameters privately; the search and the model it finds cost ε together.

    Given again after an interruption it goes on, without another draw of the number of tries.

    Args:
        config: what to train, or its file; the model comes into its output folder.
        epsilon: of everything; by default the configuration's.
        tries: how many there are on average. Half of all searches make fewer than 0.7 of that, one
            in a hundred makes more than 4.6 times as many.
        learning_rate: between which rates to draw, evenly on a logarithmic scale; by default
            within a factor of 10 of the configuration's.
        clip: the same for the method's clip, which is fixed without it.
        score_on: the name of labelled data under data.public that models are scored on, for
            nothing. Without it the private records do that, and part of ε pays for it.
    """
    refuse_several_processes()
    config = config if isinstance(config, Config) else load_config(config)
    convex, noise = isinstance(config.method, ConvexSection), config.evaluate.noise_multiplier
    unfit = {
        "protects records, and data.unit asks for units of several": config.data.unit is not None,
        f"trains step by step, and the method {config.method.name} in one fit": convex,
        "compares accuracies, which data.target has not": config.data.target is not None,
        "releases no accuracy of tests (leave evaluate.noise_multiplier out)": noise,
    }
    if why := next((why for why, holds in unfit.items() if holds), None):
        cure = "settle the hyperparameters by `dpspan advise` or on public rows, and train"
        raise ValueError(f"`dpspan tune` {why}: {cure}.")
    budget = config.budget
    epsilon = budget.epsilon if epsilon is None else check_positive("epsilon", epsilon)
    if epsilon is None:
        raise ValueError("Expected budget.epsilon, or epsilon= (--epsilon): what it may all cost.")
    if budget.accountant == "pld" and "accountant" in budget.model_fields_set:
        warnings.warn(
            "dpspan: tune accounts by RDP instead of PLD, which cannot account for the best of "
            "several tries.",
            stacklevel=2,
        )
    changed = {"epsilon": epsilon, "noise_multiplier": None, "accountant": "rdp"}
    config = config.model_copy(update={"budget": budget.model_copy(update=changed)})
    own = config.training.optimizer.learning_rate
    wanted = {"learning_rate": learning_rate or (own / _AROUND, own * _AROUND), "clip": clip}
    space = {name: _range(name, bounds) for name, bounds in wanted.items() if bounds is not None}
    if score_on is not None:
        expect(score_on in config.data.public, "score_on to be a name under data.public", score_on)
    asked = {"space": space, "tries": check_count("tries", tries), "score_on": score_on}
    folder = RunFolder(config.output.folder)
    with folder.locked():
        search = _Search.begun(config, plain(asked), folder)
        while search.state["done"] < search.state["count"]:
            search.try_one()
        return search.release()


def tuning_event(
    noise_multiplier: float,
    *,
    sample_rate: float,
    steps: int,
    tries: float,
    score_noise: float | None = None,
) -> DpEvent:
    """The best of a geometric number of private runs, each with its score if that has noise."""
    run = [dp_event.SelfComposedDpEvent(step_event(noise_multiplier, sample_rate), steps)]
    score = [] if score_noise is None else [gaussian_event(score_noise)]
    return dp_event.RepeatAndSelectDpEvent(
        dp_event.ComposedDpEvent([*run, *score]), float(tries), 1.0
    )


def _range(name: str, bounds: Range) -> Range:
    low, high = (check_positive(name, bound) for bound in bounds)
    expect(low < high, f"{name} to be a range, the lower end first", f"{low:g} to {high:g}")
    return low, high


def geometric(tries: int) -> int:
    """A draw with this mean, exactly and from the operating system: 1, 2, 3, …."""
    count = 1
    while secrets.randbelow(tries):
        count += 1
    return count


@dataclass
class _Search:
    """A search in a folder; `state` and the best weights so far are one file in `.tune`."""

    config: Config
    asked: dict[str, Any]
    folder: RunFolder
    state: dict[str, Any]
    _weights: Any
    _parts: Parts
    _chosen: str | None
    _task: Task
    _ledger: Ledger

    @classmethod
    def begun(cls, config: Config, asked: dict[str, Any], folder: RunFolder) -> Self:
        """Read the data, draw the number of tries and pay for them; or go on with a search."""
        file = _file_in(folder)
        settings = {"config": config.fixed(), **asked}
        state: dict[str, Any] = {"settings": settings, "score_noise": None}
        weights = None
        if goes_on := file.exists():
            saved = load_file(file, {"state", "weights"})
            state, weights = saved["state"], saved["weights"]
            if state["settings"] != settings:
                raise ValueError(
                    f"{folder.path} holds a search with other settings, which has been paid for. "
                    "Go back to those, or choose another output folder."
                )
        elif folder.certified:
            raise ValueError(f"{folder.path} holds a run already. Choose another output folder.")
        folder.refuse_lost_ledger()
        parts = make_parts(config, folder, goes_on=goes_on, pays=True)
        folder.keep_columns(parts.columns)
        if parts.layer is not None and not goes_on:
            parts.layer.save(folder.features)
        choosing = config.choose is not None
        chosen = chosen_public(config, parts, folder)["chosen"] if choosing else None
        test = parts.test.dataset if parts.test is not None and config.data.test_is_public else None
        task = task_of(config, parts.private, test, parts)
        assert isinstance(task.budget, Budget)
        ledger = folder.open_ledger("rdp", task.budget)
        if goes_on and state["done"] and not ledger.events:
            raise ValueError(f"{folder.ledger} is missing: restore it, or choose another folder.")
        search = cls(config, asked, folder, state, weights, parts, chosen, task, ledger)
        search._pay(anew=not goes_on)
        return search

    @property
    def _budget(self) -> Budget:
        assert isinstance(self._task.budget, Budget)
        return self._task.budget

    @cached_property
    def _scores(self) -> Dataset[Any]:
        """The public records that tries are scored on."""
        return _dataset(self._parts.public[self.asked["score_on"]])

    # -- the price, before anything else ------------------------------------------------------

    def _pay(self, *, anew: bool) -> None:
        """Draw noise and number of tries, if it begins; on the disk before they cost."""
        task, ledger, budget = self._task, self._ledger, self._budget
        scored = None if self.asked["score_on"] is None else self._scores
        if anew and scored is None:
            alone = Budget(epsilon=_SCORE_SHARE * budget.epsilon, delta=budget.delta)
            self.state["score_noise"] = calibrate_event(gaussian_event, 1, alone)
        event_of = partial(
            tuning_event,
            sample_rate=task.sample_rate,
            steps=task.steps,
            tries=self.asked["tries"],
            score_noise=self.state["score_noise"],
        )
        if anew:
            self.state["noise_multiplier"] = calibrate_event(
                event_of, 1, budget, accountant="rdp", spent=ledger.events
            )
            self.state |= {"count": geometric(self.asked["tries"]), "done": 0, "best": None}
            _file_in(self.folder).parent.mkdir(mode=0o700, exist_ok=True)
            self._save()
        event = event_of(self.state["noise_multiplier"])
        if all(charged != event for charged, _ in ledger.events):
            ledger.charge(event)
        ledger.warn(*weaknesses(None, budget.delta, task.count))
        self.folder.write_ledger(ledger)

    def _save(self) -> None:
        """All or nothing: a process that dies leaves no weights that belong to another score."""
        save_file(_file_in(self.folder), {"state": self.state, "weights": self._weights})

    # -- a try -----------------------------------------------------------------------------------

    def try_one(self) -> None:
        """Train and score with hyperparameters at random; keep it if it is the best so far."""
        draw, space = secrets.SystemRandom(), self.asked["space"]
        found = {
            name: float(f"{math.exp(draw.uniform(math.log(low), math.log(high))):.3g}")
            for name, (low, high) in space.items()
        }
        config, ledger, task = self._tuned(found), Ledger(accountant="rdp"), self._task
        made = contender_of(
            "a try", config, self._parts.public, steps=task.steps, chosen=self._chosen
        )
        training = Training(task, made, config.training.seed)
        training.prepare(ledger, noise_multiplier=self.state["noise_multiplier"])
        kept = training.take_all_steps()
        document = training.engine.certificate(self._budget.delta)
        training.engine.detach()
        score = self._score(training) if kept else _DIVERGED
        best = self.state["best"]
        if best is None or score > best["score"]:
            self._weights = training.model.state_dict()
            self.state["best"] = {"score": score, "found": found, "certificate": document}
        self.state["done"] += 1
        self._save()

    def _score(self, training: Training) -> float:
        """The accuracy: of public records, or of all private ones with noise."""
        task, noise = self._task, self.state["score_noise"]
        scored = self._scores if noise is None else task.private
        outputs, labels = outputs_on(task, scored, training.model)
        right = (outputs.argmax(1) == labels).cpu()
        if noise is None:
            return float(right.double().mean())
        return private_metric(right, noise_multiplier=noise).value

    def _tuned(self, found: dict[str, float]) -> Config:
        config = self.config
        rate, clip = found["learning_rate"], found.get("clip", config.method.clip)
        optimizer = config.training.optimizer.model_copy(update={"learning_rate": rate})
        training = config.training.model_copy(update={"optimizer": optimizer})
        method = config.method.model_copy(update={"clip": clip})
        return config.model_copy(update={"training": training, "method": method})

    # -- what leaves the process -------------------------------------------------------------------

    def release(self) -> Tuned:
        """The best try as an ordinary run; the rest is removed."""
        folder, ledger, best = self.folder, self._ledger, self.state["best"]
        config, told, delta = self._tuned(best["found"]), best["certificate"], self._budget.delta
        self._put_on_record(told)
        about = {
            **best["found"],
            "searched": self.asked["space"],
            "score": best["score"],
            "scored_on": self.asked["score_on"] or "private records, with noise",
            "score_noise_multiplier": self.state["score_noise"],
            "tries": f"geometric with mean {self.asked['tries']}; how many there were is not told",
        }
        training = {**told["training"], "tuning": about, **self._task.preparation.summary()}
        document = certificate(ledger, delta=delta, training=training)
        document["digests"]["configuration"] = sha256_of(config.fixed())
        spent = {"epsilon": document["epsilon"], "delta": delta}
        line: dict[str, Any] = {"step": self._task.steps, "epoch": self._task.epochs, **spent}
        model = self._task.new_model(config.training.seed)
        model.load_state_dict(self._weights)
        if self._task.test is not None:
            found = measured(self._task, model)
            line |= {self._task.metric(name): value for name, value in found.items()}
        folder.write_ledger(ledger)
        folder.write_certificate(document)
        folder.write_model(model)
        folder.remove(folder.metrics)
        folder.append(folder.metrics, [plain(line)])
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        folder.write_text(folder.config, str(text))
        folder.write_about(config.report)
        results = evaluation_of(config, self._parts).results(self._task, model, {})
        folder.write_json(folder.evaluation, results)
        diverged = best["score"] == _DIVERGED  # each try did
        folder.write_facts(
            settings=config.fixed(),
            seed=config.training.seed,
            status="diverged" if diverged else "finished",
            diverged=DIVERGED if diverged else None,
            sample_shape=self._task.sample_shape,
            scale=self._parts.private.scale,
        )
        shutil.rmtree(_file_in(folder).parent)
        return Tuned(
            folder=folder.path,
            found=best["found"],
            score=best["score"],
            epsilon=document["epsilon"],
            delta=delta,
            metrics=line,
        )

    def _put_on_record(self, told: Mapping[str, Any]) -> None:
        """On the ledger what the best try's certificate tells, and what was done for all."""
        ledger = self._ledger
        self._task.preparation.put_on(ledger)
        if self._task.test is not None:
            tested = PublicData.of(self._task.test, name="test")
            ledger.declare_public(tested.name, tested.digest, tested.count, "measured on")
        for each in told["public"]:
            ledger.declare_public(each["name"], each["sha256"], each["count"], each["detail"])
        if (name := self.asked["score_on"]) is not None:
            scored = self._parts.public[name]
            ledger.declare_public(scored.name, scored.digest, scored.count, "scores of a search")
        ledger.warn(*told["warnings"])
        for reason in told["not_private_because"]:
            ledger.invalidate(reason)


def _file_in(folder: RunFolder) -> Path:
    return folder.path / ".tune" / "search.safetensors"


def _dataset(data: PublicData) -> Dataset[Any]:
    if not data.labelled:
        raise ValueError(f"Expected labels in data.public.{data.name}, to score by, got none.")
    return TensorDataset(*(torch.cat(each) for each in zip(*data.batches, strict=True)))
