"""Commands that use a trained model: `dpspan predict` and `dpspan export`."""

import csv
import io
from pathlib import Path
from typing import Annotated

import typer

from dpspan.app.cli.app import Json, Quiet, answer, app, check_exists
from dpspan.support.checks import expect
from dpspan.support.files import replacing

_Run = Annotated[Path, typer.Argument(help="The folder of a finished run.")]


@app.command(name="predict")
def predict_command(
    run: _Run,
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
    run: _Run,
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
