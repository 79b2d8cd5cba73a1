"""`dpspan init`: a configuration for the user's own data and model, to be read and changed.

Of private and test data, only names are looked at: columns, arrays, folders. No value is.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dpspan.app.cli.app import Json, Quiet, answer, app, check_exists
from dpspan.support.checks import spelt_otherwise
from dpspan.support.files import replacing

_Keys = dict[str, Any]
_LIKE_AN_ID = re.compile(  # patient_id, user-uuid, SSN, patientID; neither grid nor valid
    r"(?i:(.*[\W_])?(id|uuid|guid|ssn|mrn|email|patient|subject|person|user|customer|client))"
    r"|.*[a-z](ID|Id)"
)


@app.command()
def init(
    data: Annotated[Path | None, typer.Option(help="The private data: a file or folder.")] = None,
    classes: Annotated[str | None, typer.Option(help="Their number, or names: cat,dog.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Range of labels that are numbers, instead: 0,200.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Column or array with the labels.")] = None,
    dictionary: Annotated[Path | None, typer.Option(help="CSV that describes columns.")] = None,
    unit: Annotated[str | None, typer.Option(help="Column of ids, for several a person.")] = None,
    records: Annotated[int | None, typer.Option(help="About how many, if you may tell.")] = None,
    test: Annotated[Path | None, typer.Option(help="Test data like the private data.")] = None,
    test_is_public: Annotated[bool, typer.Option(help="Anybody may see results.")] = False,
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
    problems, between = list[str](), None
    if interactive:
        data = data or Path(typer.prompt("Private data (file or folder)"))
        if target is None:
            classes = classes or typer.prompt("Number of classes, or their names (cat,dog)")
    if data is None or (classes is None) == (target is None):
        wanted = "--data and --classes (or --target, where labels are numbers)"
        problems.append(f"Expected {wanted}, or --interactive to be asked for them.")
    if out.exists() and not force:
        problems.append(f"{out} exists already: pass --force to replace it, or --out.")
    sources = _sources({"train": data, "public": public, "test": test}, label, problems)
    private, columns = sources.get("train", {}), _Keys()
    likely = [name for name in _names(private) if _LIKE_AN_ID.fullmatch(name)]
    for name in likely if interactive and unit is None else ():
        if typer.confirm(f"'{name}' looks like an id. May a person have several records?"):
            unit = name
            break
    with _noted(problems):
        between = None if target is None else _range(target)
    with _noted(problems):
        if dictionary is not None:
            columns = _described(_names(private), dictionary, private.get("label"))
    with _noted(problems):
        _check_unit(unit, private)
    if problems:
        raise ValueError("\n".join(problems))
    columns |= {unit: {"kind": "id"}} if unit in columns else {}
    for each in (s for s in sources.values() if s["format"] in ("csv", "parquet")):
        names = [name for name in each.pop("inputs") if name not in (*likely, unit)]
        each |= {} if columns else {"inputs": names}  # an id would be learnt by heart
    facts = {
        "classes": None if classes is None else _classes(classes),
        "target": between,
        "private": private,
        **{part: sources.get(part) for part in ("public", "test")},
        "model": {"name": "factory", "factory": model} if ":" in model else {"name": model},
        "convex": model in ("logistic", "linear") and public is None,  # it has no warm start
        "folder": str(folder),
        "unit": unit,
        "likely_unit": likely[0] if likely else None,
        "test_is_public": test_is_public,
        "records": records,
    }
    numbers = {"epsilon": epsilon, "delta": delta, "epochs": epochs, "batch_size": batch_size}
    _write(out, facts, numbers, columns)
    note = f"Wrote {out}. Read it, change what is marked CHECK, then: dpspan train {out}"
    answer({"config": str(out)}, as_json=as_json, quiet=quiet, note=note)


def _write(out: Path, facts: _Keys, numbers: _Keys, columns: _Keys) -> None:
    """The file, if it is a configuration: else the flags are wrong, and the error says how."""
    from jinja2 import StrictUndefined, Template

    from dpspan.app.config import parse_config

    source = Path(__file__).with_name("config.yaml.j2").read_text(encoding="utf-8")
    kept: _Keys = {"trim_blocks": True, "keep_trailing_newline": True}
    flow: _Keys = {key: value and _flow(value) for key, value in facts.items()}
    flow["columns"] = [_flow({name: keys})[1:-1] for name, keys in columns.items()]
    text = Template(source, undefined=StrictUndefined, **kept).render(flow | numbers)
    parse_config(text, name=str(out))
    with replacing(out, what="the configuration") as temporary:
        temporary.write_text(text, encoding="utf-8")


def _classes(text: str) -> int | list[str]:
    return int(text) if text.isdecimal() else re.split(r"\s*,\s*", text.strip())


def _range(text: str) -> _Keys:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise ValueError("Expected --target to be two numbers, such as 0,200.") from None
    return {"low": low, "high": high}


def _sources(
    paths: dict[str, Path | None], label: str | None, problems: list[str]
) -> dict[str, _Keys]:
    """What is at these paths, private data, public and test; an npz file may hold test data too."""
    sources, data = dict[str, _Keys](), paths["train"]
    both = paths["test"] is None and data is not None and data.suffix == ".npz"
    for part, path in (paths | ({"test": data} if both else {})).items():
        with _noted(problems):
            sources |= {} if path is None else {part: _source(path, label, part)}
    if both and sources.get("test", {}).get("inputs") != "x_test":
        sources.pop("test", None)
    return sources


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """Go on after an error: all of them are told together."""
    try:
        yield
    except (ValueError, OSError) as error:
        problems.append(str(error))


def _described(names: list[str], dictionary: Path, label: str | None) -> _Keys:
    """What becomes of the columns of these names."""
    from dpspan.app.dictionary import read_dictionary

    known = {name: {"kind": "id"} for name in names if _LIKE_AN_ID.fullmatch(name)}
    known |= read_dictionary(dictionary)
    if lost := [name for name in known if name not in (*names, label)]:
        raise ValueError(f"{dictionary} describes columns that are not there: {', '.join(lost)}.")
    if new := [str(place) for place, name in enumerate(names, 1) if name not in known]:
        where = f"input columns number {', '.join(new)}"  # unnamed: a first line may be a record
        raise ValueError(f"{dictionary} lacks {where}: add them, as `drop` if they are of no use.")
    return {name: known[name] for name in names}


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
    elif path.suffix in (".csv", ".tsv", ".txt"):
        from dpspan.app.tables import delimiter_of

        kind, keys = "csv", _columns(path, _csv_names(path), label)
        keys |= {} if delimiter_of(path) == "," else {"delimiter": delimiter_of(path)}
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
    if source.get("format") == "npz":
        from dpspan.app.data import array_names

        return array_names(Path(source["path"]))
    return list(source.get("inputs", ()))


def _check_unit(unit: str | None, private: _Keys) -> None:
    """ValueError if there are no such ids; the columns of `datasets` are not looked at."""
    names = _names(private)
    if unit is not None and unit not in names and private.get("format") not in (None, "datasets"):
        there = f"of {private['path']}{spelt_otherwise(unit, names)}, and not the label"
        raise ValueError(f"Expected --unit to be a column (or array) {there}.")


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
    from dpspan.app.tables import delimiter_of, is_number, read_csv

    _, names = next(read_csv(path, delimiter_of(path)))
    short = re.compile(r"\s*\d{1,5}\s*")  # columns may well be called 0, 1, 2 or 2020
    measured = any(is_number(name) and not short.fullmatch(name) for name in names)
    if measured or len(set(names)) < len(names) or re.search(r"^\s*\[|[{}]", ",".join(names)):
        raise ValueError(
            f"The first line of {path} looks like a record: it holds numbers, or one value twice, "
            "or braces. Put a line with the names of the columns on top, each of its own."
        )
    return names


def _columns(path: Path, names: list[str], label: str | None) -> _Keys:
    if len(names) < 2:
        raise ValueError(f"Expected at least 2 columns in {path}, got {len(names)}.")
    chosen = names[-1] if label is None else label
    if chosen not in names:
        columns = f"the {len(names)} columns of {path}{spelt_otherwise(chosen, names)}"
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
