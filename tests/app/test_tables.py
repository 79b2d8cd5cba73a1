"""Tables read piece by piece: the numbers of reading them whole, and the first flaw."""

from __future__ import annotations

import csv
import datetime
import decimal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpspan.app import tables
from dpspan.app.data import load
from dpspan.app.tables import Csv, Parquet, Table
from helpers import slow_tables
from helpers.needs import extra

ROWS = 11
COLOURS = ("red", "blue", "None", "1", "1.0", "True", "red")  # one of them twice


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_LINES", 3)
    monkeypatch.setattr(tables, "_BATCH", 4)


def same(source: Table, columns: slow_tables.Columns) -> None:
    """The source gives what the columns say, or names what is wrong with them."""
    known, start = dict(source.categories), 0
    for piece in source.pieces(source.inputs):
        size = len(piece[source.inputs[0]])
        part = {name: values[start : start + size] for name, values in columns.items()}
        found = slow_tables.read(part, source.inputs, known)
        if isinstance(found, tuple):
            where = f"in column '{found[0]}' of .* else in row {start + found[1]}\\. "
            with pytest.raises(ValueError, match=where):
                source.read(2)
            return
        start += size
    expected = slow_tables.read(columns, source.inputs, known)
    if isinstance(expected, tuple):  # pieces that do not fit each other
        with pytest.raises(ValueError, match="Expected vectors of one length"):
            source.read(2)
        return
    inputs, labels, _ = source.read(2)
    assert inputs.dtype == np.float32
    np.testing.assert_array_equal(inputs, expected)
    if source.label is not None:
        assert labels is not None
        whole = np.asarray(columns[source.label])
        assert labels.tolist() == whole.tolist()
        assert (labels.dtype.kind in "biuf") == (whole.dtype.kind in "biuf")


NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(2**63), 2**63 - 1).map(str),
    st.sampled_from([" 7 ", "\u00a01e-3", "1_000", "٣", "nan", "-inf", "1e300", "+.5", "\x1c5"]),
)
FLAWS = st.sampled_from(["", "x", "1,5", "1 2", "0x1", "None", "1__0", "NaN(1)"])
WORDS = st.sampled_from([*COLOURS, " blue ", "green"])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, WORDS, st.sampled_from("01")), min_size=1, max_size=ROWS),
    st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, 1), FLAWS), max_size=2),
    st.sampled_from([("p", "q"), ("q", "p", "c"), ("c", "q"), ("p", "p")]),
    st.sampled_from([",", ";"]),
)
def test_csv(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, ...]],
    flaws: list[tuple[int, int, str]],
    inputs: tuple[str, ...],
    delimiter: str,
) -> None:
    cells = [list(row) for row in rows]
    for row, column, flaw in flaws:
        if row < len(cells):
            cells[row][column] = flaw
    path = tmp_path_factory.mktemp("tables") / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([["p", "q", "c", "y"], *cells])
    known = {"c": COLOURS} if "c" in inputs else {}
    source = Csv(path=path, inputs=inputs, label="y", delimiter=delimiter, categories=known)
    same(source, slow_tables.csv_columns(path, delimiter))


DAY = datetime.date(2020, 1, 1)
PARQUET: dict[str, list[Any]] = {
    "floats": [0.1 * i for i in range(ROWS)],
    "whole": [2**62 + i for i in range(ROWS)],  # more digits than a float32 or a float64 has
    "truths": [i % 2 == 0 for i in range(ROWS)],
    "texts": [str(i) for i in range(ROWS)],
    "decimals": [decimal.Decimal(i) / 4 for i in range(ROWS)],
    "words": ["red", "blue"] * 5 + ["red"],
    "gap": [1.0] * 6 + [None] + [2.0] * 4,
    "early gap": [None] + [1] * 10,
    "days": [DAY] * ROWS,
    "nothing": [None] * ROWS,
    "vectors": [[i, i + 0.5] for i in range(ROWS)],
    "matrices": [[[i, 1.0], [2.0, 3.0]] for i in range(ROWS)],
    "ragged": [[1.0, 2.0]] * 7 + [[1.0]] * 4,
    "ragged within": [[1.0, 2.0]] * 9 + [[1.0], [1.0, 2.0]],
    "missing vector": [[1.0, 2.0]] * 8 + [None, [1.0, 2.0], [1.0, 2.0]],
    "missing first": [None, *[[1.0, 2.0]] * 10],
    "missing last": [[1.0, 2.0]] * 8 + [None] * 3,
    "words in vectors": [["a"]] * ROWS,
    "label": [i % 2 for i in range(ROWS)],
    "truth label": [i % 2 == 1 for i in range(ROWS)],
    "label with gap": [i % 2 for i in range(9)] + [None, 1],
}


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pyarrow = extra("pyarrow")
    from pyarrow import parquet

    path = tmp_path_factory.mktemp("tables") / "a.parquet"
    table = pyarrow.table(PARQUET)
    halves = pyarrow.array(PARQUET["floats"], pyarrow.float32())
    table = table.append_column("narrow", halves)
    table = table.append_column("coded", pyarrow.array(PARQUET["words"]).dictionary_encode())
    parquet.write_table(table, path, row_group_size=5)
    return path


@pytest.mark.parametrize("name", [n for n in (*PARQUET, "narrow", "coded") if "label" not in n])
@pytest.mark.parametrize("known", [None, COLOURS, tuple(map(str, PARQUET["whole"]))])
def test_parquet(parquet: Path, name: str, known: tuple[str, ...] | None) -> None:
    categories = {} if known is None else {name: known}
    source = Parquet(path=parquet, inputs=(name,), label="label", categories=categories)
    same(source, slow_tables.parquet_columns(parquet))


@pytest.mark.parametrize("label", ["label", "truth label", "label with gap", "words", "coded"])
def test_labels_of_parquet(parquet: Path, label: str) -> None:
    columns = slow_tables.parquet_columns(parquet)
    same(Parquet(path=parquet, inputs=("floats", "texts"), label=label), columns)


def test_the_first_flaw_is_named_in_the_order_of_pieces_then_columns(parquet: Path) -> None:
    columns = slow_tables.parquet_columns(parquet)
    for inputs in (("gap", "early gap"), ("early gap", "gap"), ("vectors", "ragged")):
        same(Parquet(path=parquet, inputs=inputs), columns)


def test_categories_of_narrow_floats_are_spelt_as_python_spells_them(parquet: Path) -> None:
    spelt = tuple(map(str, slow_tables.parquet_columns(parquet)["narrow"]))
    assert "0.10000000149011612" in spelt
    inputs, *_ = Parquet(path=parquet, inputs=("narrow",), categories={"narrow": spelt}).read(2)
    np.testing.assert_array_equal(inputs, np.eye(ROWS))


def test_a_table_without_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match="at least one sample"):
        load(Csv(path=tmp_path / "a.csv", inputs=("a",), label="b"), classes=2)
    pyarrow = extra("pyarrow")
    from pyarrow import parquet

    empty = pyarrow.table({"a": pyarrow.array([], pyarrow.float64())})
    parquet.write_table(empty, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="at least one sample"):
        load(Parquet(path=tmp_path / "a.parquet", inputs=("a",)), classes=2)


def test_lines_are_counted_beyond_the_first_piece(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,2\n\n3,"4\n\n"\n5,6\n7,8\n9\n')
    with pytest.raises(ValueError, match="line 9 has 1 values, the header 2"):
        load(Csv(path=path, inputs=("a",)), classes=2)
    path.write_text("a,b\n" + "1,2\n" * 20 + '1,"2"3\n')
    with pytest.raises(ValueError, match="not a readable CSV file: Error"):
        load(Csv(path=path, inputs=("a",)), classes=2)


def test_csv_needs_no_pyarrow(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,y\n1,0\n2,1\n")
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pathlib import Path\nfrom dpspan.app.data import load\n"
        "from dpspan.app.tables import Csv\n"
        "loaded = load(Csv(path=Path('a.csv'), inputs=('a',), label='y'), classes=2)\n"
        "assert loaded.tensors[0].tolist() == [[1.0], [2.0]]"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False).returncode == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_memory_is_that_of_the_numbers(tmp_path: Path, kind: str) -> None:
    """100,000 × 50 numbers are 20 MB as float32; lists of all the values took 300 and more."""
    pyarrow = extra("pyarrow")
    from pyarrow import csv as writer
    from pyarrow import parquet

    values = np.random.default_rng(0).standard_normal((100_000, 50)).round(2)
    table = pyarrow.table({f"c{i}": values[:, i] for i in range(50)})
    path = tmp_path / f"a.{kind}"
    if kind == "csv":
        writer.write_csv(table, path)
    else:
        parquet.write_table(table, path)
    source = {"csv": "Csv", "parquet": "Parquet"}[kind]
    program = (
        "import resource, numpy, torch, pyarrow.parquet, dpspan.public.data\n"
        "from pathlib import Path\nfrom dpspan.app.data import load\n"
        f"from dpspan.app.tables import {source}\n"
        f"source = {source}(path=Path({str(path)!r}), inputs=tuple(f'c{{i}}' for i in range(50)))\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); load(source, classes=2); print((peak() - before) // 1024)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) < 120
