"""Commands that use a trained model: `dpspan predict` and `dpspan export`."""

import csv
import io
from pathlib import Path
from typing import Annotated

import typer

from dpspan.app.cli.app import Json, Quiet, answer, app, check_exists
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
    """Predict the class of each record of DATA, with the probabilities of all classes.

    Predictions are about the records in DATA: keep them as those are kept.
    """
    for path in (run, data):
        check_exists(path)
    from dpspan.app.trained import load_run

    trained = load_run(run)
    ids = None if id_column is None else trained.source(data).ids(id_column)
    if id_column is not None and ids is None:
        raise ValueError(f"{data} has no column '{id_column}' to copy: correct --id.")
    probabilities = trained.predict_proba(data)
    predicted = trained.named(probabilities)
    places = range(1, len(predicted) + 1) if ids is None else ids
    header = [id_column or "row", "prediction", *(f"p_{name}" for name in trained.classes)]
    columns = zip(places, predicted.tolist(), probabilities.round(6).tolist(), strict=True)
    rows = [[place, name, *row] for place, name, row in columns]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    note = ""
    if to is not None:
        with replacing(to, what="the predictions") as temporary:
            temporary.write_text(text.getvalue(), encoding="utf-8")
        note = f"Wrote {len(rows)} predictions to {to}. The model: ε = {trained.epsilon:.4g}."
    elif not as_json:
        typer.echo(text.getvalue(), nl=False)
    answer({"columns": header, "rows": rows}, as_json=as_json, quiet=quiet, note=note)


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
    """Write RUN's model for use elsewhere, with a model card and the certificate.

    ε, δ and the classes are in the file's own metadata, too.
    """
    check_exists(run)
    from dpspan.app.export import export
    from dpspan.app.trained import load_run

    files = export(load_run(run), form, out)
    note = f"Wrote {', '.join(file.name for file in files)} to {files[0].parent}."
    answer({"files": [str(file) for file in files]}, as_json=as_json, quiet=quiet, note=note)
