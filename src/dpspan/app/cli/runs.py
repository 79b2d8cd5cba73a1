"""Commands about one run: `dpspan train`, `choose`, `report`, `verify`, `predict` and `export`."""

from __future__ import annotations

import csv
import io
import os
import signal
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dpspan.app.cli.app import Json, Quiet, answer, app, check_exists, four_digits, say
from dpspan.support.checks import expect
from dpspan.support.files import replacing

if TYPE_CHECKING:
    from dpspan.app.run import Progress, Result

_Finished = Annotated[Path, typer.Argument(help="The folder of a finished run.")]
_EARLY = {
    "budget spent": "as steps that an interruption lost had to be paid for",
    "diverged": "as the weights grew without bound: lower the learning rate",
}


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A configuration; `dpspan init` writes one.")],
    resume: Annotated[bool, typer.Option(help="Go on from the folder's checkpoint.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model privately, as CONFIG says.

    Several processes train one model together: `torchrun --nproc-per-node 4 -m dpspan train …`.
    """
    from dpspan.app.config import load_config

    load_config(config)  # what is wrong with it is said before anything slow is imported
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from dpspan.app.run import train as run_training
    from dpspan.app.run.evaluation import sentences

    epoch = TextColumn("epoch {task.fields[epoch]}")
    spent = TextColumn("ε ≤ {task.fields[epsilon]}{task.fields[accuracy]}")
    columns = (epoch, BarColumn(), MofNCompleteColumn(), spent, TimeRemainingColumn())
    speaks = os.environ.get("RANK", "0") == "0"  # of several processes the first
    hidden, console = as_json or quiet or not speaks, Console(stderr=True)
    bar = Bar(*columns, console=console, disable=hidden or not console.is_terminal)
    task = bar.add_task("", total=None, epoch="…", epsilon="…", accuracy="")
    stopper, said = _Stopper(), set[int]()  # epochs

    def watch(progress: Progress) -> None:
        stopper.armed = True
        if not hidden and not said:
            say(progress.plan)
        elif not (hidden or console.is_terminal or progress.epoch in said):  # a file has no bar
            price = f"ε ≤ {progress.epsilon:.3f}{_accuracy(progress)}"
            say(f"epoch {progress.epoch}/{progress.epochs}, step {progress.step}, {price}")
        said.add(progress.epoch)
        bar.start()  # only now: whatever is wrong with the configuration has been said
        bar.update(
            task,
            total=progress.steps,
            completed=progress.step,
            epoch=f"{min(progress.epoch + 1, progress.epochs)}/{progress.epochs}",
            epsilon=f"{progress.epsilon:.3f}",
            accuracy=_accuracy(progress),
        )

    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, stopper.handle))
        stack.callback(lambda: bar.stop() if bar.live.is_started else None)
        result = run_training(config, resume=resume, watch=watch, stop=stopper)
    if speaks:
        found, summary = sentences(result.evaluation), _summary(result, config)
        answer(result.describe(), *found, as_json=as_json, note=summary)
    if result.status == "stopped":
        raise typer.Exit(130)


def _accuracy(progress: Progress) -> str:
    accuracy = (progress.metrics or {}).get("test_accuracy")
    return "" if accuracy is None else f", test accuracy {accuracy:.1%}"


def _summary(result: Result, config: Path) -> str:
    taken = f"{result.step} of {result.steps} steps"
    if result.status == "stopped":
        return (
            f"Stopped after {taken}; the checkpoint is saved. Go on with: dpspan train {config} "
            "--resume"
        )
    why = _EARLY.get(result.status)
    early = f" It ended after {taken}, {why}." if why else ""
    return (
        f"Done: ε = {four_digits(result.epsilon)} at δ = {result.delta:g}{_accuracy(result)}."
        f"{early} Model, metrics and certificate are in {result.folder}."
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


@app.command(name="choose")
def choose_command(
    config: Annotated[Path, typer.Argument(help="A configuration with data.public.")],
    unprivate_rank: Annotated[
        bool,
        typer.Option("--unprivate-rank", help="Show a table instead. It is NOT private."),
    ] = False,
    rank: Annotated[int, typer.Option(help="Directions to compare in the table.")] = 16,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose among the public data of CONFIG, privately, as its `choose` section says.

    The choice is kept in the output folder, and the run that trains there pays for it. That a table
    was looked at instead is kept there too: the certificate and the report will say so.
    """
    from dpspan.app.config import load_config

    settings = load_config(config)
    if unprivate_rank and not settings.data.public:
        raise ValueError("There is nothing to rank: name datasets under data.public.")
    if settings.choose is None and not unprivate_rank:
        cure = "Add one, such as `choose: {epsilon: 0.1}`, or look at a table by --unprivate-rank"
        raise ValueError(f"{config} has no `choose` section. {cure}, which is not private.")
    from dpspan.app.run import RunFolder
    from dpspan.app.run.from_config import chosen_public, make_parts

    folder = RunFolder(settings.output.folder)
    if unprivate_rank:
        from torch import nn

        from dpspan.choose.gsd import LOOKED_AT, rank_public

        parts = make_parts(settings, folder)
        with folder.locked():
            folder.warn(LOOKED_AT)  # on record before anybody sees the table
        data, seed = (parts.private.tensors, parts.public), settings.training.seed
        ranking = rank_public(parts.model, nn.CrossEntropyLoss(), *data, rank=rank, seed=seed)
        answer(ranking.to_dict(), ranking, as_json=as_json)
        return
    with folder.locked():
        folder.refuse_lost_ledger()
        choice = chosen_public(settings, make_parts(settings, folder, pays=True), folder)
    made = f"Chosen with ε = {choice['epsilon']:g}: {choice['chosen']}"
    note = f"{choice['note']} `dpspan train {config}` uses it, and pays for it."
    answer(choice, made, as_json=as_json, quiet=quiet, note=note)


@app.command(name="report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    to: Annotated[
        Path | None, typer.Option("--out", help="The page; report.html in the first folder.")
    ] = None,
    include_unprivate: Annotated[
        bool,
        typer.Option("--include-unprivate", help="Show what is not private; never publish it."),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a page about RUNS, to show to others."""
    for run in runs:
        check_exists(run)
    from dpspan.app.report import render

    path = render(runs, to or runs[0] / "report.html", include_unprivate)
    answer({"report": str(path)}, as_json=as_json, quiet=quiet, note=f"Wrote {path}.")


@app.command(name="verify")
def verify_command(
    path: Annotated[
        Path | None, typer.Argument(metavar="RUN|CERTIFICATE", help="A folder, or the file alone.")
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of certificates instead.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compute ε again from the events, and compare weights, configuration and ledger.

    Exit code 1 if something does not agree.
    """
    if schema:
        from dpspan.accounting.schema import certificate_schema

        answer(certificate_schema(), as_json=True)
        return
    if path is None:
        raise ValueError("Expected the folder of a run, or a certificate.json, to verify.")
    check_exists(path)
    from dpspan.app.verification import verify

    found = verify(path)
    marks = {True: "agrees", False: "DIFFERS", None: "not compared"}
    lines = [f"{marks[check.holds]:<13} {check.name}: {check.detail}" for check in found.checks]
    if not found.private:
        lines.append("NOT PRIVATE   by its own account: see not_private_because")
    answer({**asdict(found), "holds": found.holds}, *lines, as_json=as_json)
    if not found.holds:
        raise typer.Exit(1)


@app.command(name="predict")
def predict_command(
    run: _Finished,
    data: Annotated[Path, typer.Argument(help="Records, as in training; labels are not needed.")],
    to: Annotated[
        Path | None, typer.Option("--out", help="A CSV file; without it they are printed.")
    ] = None,
    id_column: Annotated[
        str | None, typer.Option("--id", help="A column of DATA to copy, to tell rows by.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict each record's class and probabilities, or its number; keep them as safe as DATA."""
    check_exists(run)
    check_exists(data)
    from dpspan.app.trained import load_run

    trained = load_run(run)
    ids = None if id_column is None else trained.source(data).ids(id_column)
    expect(ids is not None or not id_column, f"--id to be a column of {data}", id_column)
    header = [id_column or "row", "prediction", *(f"p_{name}" for name in trained.classes)]
    if trained.classes:
        probabilities = trained.predict_proba(data)
        both = zip(trained.named(probabilities), probabilities.round(6).tolist(), strict=True)
        cells = [[str(name), *each] for name, each in both]
    else:
        cells = [[float(f"{number:.6g}")] for number in trained.predict(data)]
    places = range(1, len(cells) + 1) if ids is None else ids
    expect(len(places) == len(cells), "--id to name one value for each record", id_column)
    rows = [[place, *each] for place, each in zip(places, cells, strict=True)]
    text, note = io.StringIO(), f"Wrote {len(rows)} predictions to {to}."
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    if to is not None:
        with replacing(to, what="the predictions") as temporary:
            temporary.write_text(text.getvalue(), encoding="utf-8")
    elif not as_json:
        typer.echo(text.getvalue(), nl=False)
    answer({"columns": header, "rows": rows}, as_json=as_json, quiet=quiet or not to, note=note)


@app.command(name="export")
def export_command(
    run: _Finished,
    form: Annotated[str, typer.Option("--to", help="safetensors or onnx.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="A folder; `export` in RUN by default.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write RUN's model for use elsewhere, with a model card; its metadata hold ε, too."""
    check_exists(run)
    from dpspan.app.export import export
    from dpspan.app.trained import load_run

    files = export(load_run(run), form, out)
    note = f"Wrote {', '.join(file.name for file in files)} to {files[0].parent}."
    answer({"files": [str(file) for file in files]}, as_json=as_json, quiet=quiet, note=note)
