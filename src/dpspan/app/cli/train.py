"""`dpspan train`: the bar, Ctrl-C, and what is said at the end."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from dpspan.app.cli.app import Json, Quiet, app, err, print_json, say

if TYPE_CHECKING:
    from dpspan.app.run import Progress, Result


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A configuration; `dpspan init` writes one.")],
    resume: Annotated[bool, typer.Option(help="Go on from the folder's checkpoint.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model privately, as CONFIG says."""
    from dpspan.app.config import load_config

    load_config(config)  # what is wrong with it is said before anything slow is imported
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from dpspan.app.run import train as run_training

    epoch = TextColumn("epoch {task.fields[epoch]}")
    spent = TextColumn("ε = {task.fields[epsilon]}{task.fields[accuracy]}")
    columns = (epoch, BarColumn(), MofNCompleteColumn(), spent, TimeRemainingColumn())
    bar = Bar(*columns, console=err(), disable=as_json or quiet)
    task = bar.add_task("", total=None, epoch="…", epsilon="…", accuracy="")
    with _Stopper() as stopper:

        def watch(progress: Progress) -> None:
            stopper.armed = True
            bar.start()  # only now: whatever is wrong with the configuration has been said
            accuracy = (progress.metrics or {}).get("test_accuracy")
            bar.update(
                task,
                total=progress.steps,
                completed=progress.step,
                epoch=f"{min(progress.epoch + 1, progress.epochs)}/{progress.epochs}",
                epsilon=f"{progress.epsilon:.3f}",
                accuracy="" if accuracy is None else f", test accuracy {accuracy:.1%}",
            )

        try:
            result = run_training(config, resume=resume, watch=watch, stop=stopper)
        finally:
            if bar.live.is_started:
                bar.stop()
    if as_json:
        print_json(result.describe())
    else:
        say(_summary(result, config))
    if result.status == "stopped":
        raise typer.Exit(130)


def _summary(result: Result, config: Path) -> str:
    if result.status == "stopped":
        return (
            f"Stopped after {result.step} of {result.steps} steps; the checkpoint is saved. Go on "
            f"with: dpspan train {config} --resume"
        )
    reasons = {
        "budget spent": "as steps that an interruption lost had to be paid for",
        "diverged": "as the weights grew without bound: lower the learning rate",
    }
    early = ""
    if result.status in reasons:
        taken = f"{result.step} of {result.steps} steps"
        early = f" It ended after {taken}, {reasons[result.status]}."
    accuracy = (result.metrics or {}).get("test_accuracy")
    reached = "" if accuracy is None else f", test accuracy {accuracy:.1%}"
    return (
        f"Done: ε = {result.epsilon:.4f} at δ = {result.delta:g}{reached}.{early} Model, metrics "
        f"and certificate are in {result.folder}."
    )


class _Stopper:
    """Asked after each step whether a signal has come."""

    armed = False  # before the first step there is nothing to save
    _asked = False

    def __call__(self) -> bool:
        return self._asked

    def handle(self, number: int, _: Any) -> None:
        """The first signal asks to stop, the second does not ask."""
        if self._asked or not self.armed:
            raise KeyboardInterrupt
        self._asked = True
        say("Stopping after this step. Press Ctrl-C again to stop at once.")

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
