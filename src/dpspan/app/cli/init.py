"""`dpspan init`: a configuration for the user's own data and model, to be read and changed.

Of the data, only names are looked at: columns, arrays, folders. No value is.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from dpspan.app.cli.app import Json, Quiet, answer, app, check_exists
from dpspan.support.checks import near

_Keys = dict[str, Any]
_LIKE_AN_ID = re.compile(  # patient_id, user-uuid, SSN, patientID; neither grid nor valid
    r"(?i:(.*[\W_])?(id|uuid|guid|ssn|mrn|email|patient|subject|person|user|customer|client))"
    r"|.*[a-z](ID|Id)"
)


@app.command()
def init(
    data: Annotated[Path | None, typer.Option(help="The private data: a file or folder.")] = None,
    classes: Annotated[str | None, typer.Option(help="Their number, or names: cat,dog.")] = None,
    label: Annotated[str | None, typer.Option(help="Column or array with the labels.")] = None,
    test: Annotated[Path | None, typer.Option(help="Test data like the private data.")] = None,
    public: Annotated[Path | None, typer.Option(help="Public data like the private data.")] = None,
    model: Annotated[str, typer.Option(help="A built-in name, or package.module:factory.")] = "mlp",
    epsilon: Annotated[float, typer.Option(help="ε of the whole run.")] = 3.0,
    delta: Annotated[float, typer.Option(help="δ; well below 1 / records.")] = 1e-5,
    epochs: Annotated[int, typer.Option(help="Epochs.")] = 30,
    batch_size: Annotated[int, typer.Option(help="Expected batch size.")] = 256,
    folder: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/first"),
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("config.yaml"),
    interactive: Annotated[bool, typer.Option(help="Ask for what is missing.")] = False,
    force: Annotated[bool, typer.Option(help="Replace an existing file.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a commented configuration for `dpspan train`."""
    if interactive:
        data = data or Path(typer.prompt("Private data (file or folder)"))
        classes = classes or typer.prompt("Number of classes, or their names (cat,dog)")
    if data is None or classes is None:
        raise ValueError("Expected --data and --classes, or --interactive to be asked for them.")
    if out.exists() and not force:
        raise ValueError(f"{out} exists already: pass --force to replace it, or --out.")
    private = _source(data, label, "train")
    likely = [name for name in _names(private) if _LIKE_AN_ID.fullmatch(name)]
    unit = None
    for name in likely if interactive else ():
        if typer.confirm(f"'{name}' looks like an id. May a person have several records?"):
            unit = name
            if not isinstance(private["inputs"], str):
                private["inputs"] = [each for each in private["inputs"] if each != name]
            break
    own_test = _source(test or data, label, "test")
    if test is None and (own_test.get("inputs"), own_test.get("labels")) != ("x_test", "y_test"):
        own_test = {}  # only an npz file may hold both
    facts = {
        "classes": int(classes) if classes.isdecimal() else re.split(r"\s*,\s*", classes.strip()),
        "private": private,
        "public": _source(public, label, "public") if public else None,
        "test": own_test,
        "model": {"name": "factory", "factory": model} if ":" in model else {"name": model},
        "folder": str(folder),
        "unit": unit,
        "likely_unit": likely[0] if likely else None,
    }
    numbers = {"epsilon": epsilon, "delta": delta, "epochs": epochs, "batch_size": batch_size}
    from jinja2 import StrictUndefined, Template

    from dpspan.app.config import parse_config

    source = Path(__file__).with_name("config.yaml.j2").read_text(encoding="utf-8")
    kept: _Keys = {"trim_blocks": True, "keep_trailing_newline": True}
    flow = {key: value and _flow(value) for key, value in facts.items()}
    text = Template(source, undefined=StrictUndefined, **kept).render(flow | numbers)
    parse_config(text, name=str(out))  # or the flags are wrong, and the error says how
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(f"Cannot write {out}: {error.strerror or error}.") from error
    note = f"Wrote {out}. Read it, change what is marked CHECK, then: dpspan train {out}"
    answer({"config": str(out)}, as_json=as_json, quiet=quiet, note=note)


def _flow(value: Any) -> str:
    """On one line of YAML."""
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _source(path: Path, label: str | None, part: str) -> _Keys:
    """The keys of a source, as far as names tell them."""
    check_exists(path)
    keys: _Keys = {}
    if path.suffix == ".npz":
        kind, keys = "npz", _npz(path, label, part)
    elif path.suffix == ".csv":
        kind, keys = "csv", _columns(path, _csv_names(path), label)
    elif path.suffix in (".parquet", ".pq"):
        from dpspan.app.tables import open_parquet

        kind, keys = "parquet", _columns(path, open_parquet(path).schema_arrow.names, label)
    elif "idx" in path.name or "ubyte" in path.name:
        labels = str(path).replace("images-idx3", "labels-idx1").replace("images", "labels")
        kind, keys = "idx", {"labels": label or labels}
    elif (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        kind, keys = "datasets", _datasets(path, label, part)
    elif path.is_dir():
        kind = "images"
    else:
        raise ValueError(
            f"Cannot tell the format of {path}. Known are npz, csv, parquet, idx, datasets, "
            "images: rename the file, or write the configuration by hand."
        )
    return {"format": kind, "path": str(path), **keys}


def _names(source: _Keys) -> list[str]:
    """Of columns that are no labels, or of arrays."""
    if source["format"] == "npz":
        from dpspan.app.data import array_names

        return array_names(Path(source["path"]))
    return list(source.get("inputs", ()))


def _npz(path: Path, label: str | None, part: str) -> _Keys:
    from dpspan.app.data import array_names

    names = array_names(path)
    inputs = next((n for n in (f"x_{part}", f"X_{part}", "x", "X", "x_train") if n in names), None)
    labels = label or next((n for n in (f"y_{part}", "y", "labels", "y_train") if n in names), None)
    if inputs is None or labels not in names:
        what, cure = f"the {len(names)} arrays of {path}", "Name the inputs x, and pass --label"
        raise ValueError(f"Cannot tell which of {what} are inputs and labels. {cure}.")
    return {"inputs": inputs, "labels": labels}


def _csv_names(path: Path) -> list[str]:
    from dpspan.app.tables import is_number, read_csv

    _, names = next(read_csv(path))
    measured = any(is_number(name) and not name.strip().isdecimal() for name in names)
    if measured or len(set(names)) < len(names):  # columns may well be called 0, 1, 2
        raise ValueError(
            f"The first line of {path} looks like a record: it holds broken numbers, or one value "
            "twice. Put a line with the names of the columns on top, each of its own."
        )
    return names


def _columns(path: Path, names: list[str], label: str | None) -> _Keys:
    if len(names) < 2:
        raise ValueError(f"Expected at least 2 columns in {path}, got {len(names)}.")
    chosen = names[-1] if label is None else label
    if chosen not in names:
        columns = f"the {len(names)} columns of {path}{near(chosen, names)}"
        raise ValueError(f"Expected --label to be one of {columns}.")
    return {"inputs": [name for name in names if name != chosen], "label": chosen}


def _datasets(path: Path, label: str | None, part: str) -> _Keys:
    listing = path / "dataset_dict.json"
    if not listing.exists():
        return {"label": label or "label"}
    try:
        splits = json.loads(listing.read_bytes())["splits"]
        return {"label": label or "label", "split": part if part in splits else splits[0]}
    except (ValueError, TypeError, LookupError):
        raise ValueError(f"{listing} does not list the splits of a dataset.") from None
