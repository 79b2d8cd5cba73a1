"""What the documentation tells people to type."""

from __future__ import annotations

import ast
import doctest
import json
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import dpspan
from dpspan.accounting import certificate
from dpspan.app.cli import app
from dpspan.app.comparison import results
from dpspan.engine import checkpoint
from dpspan.public import patches
from helpers.needs import extra
from helpers.training import setup, train

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
# Every entry of the reference, with what stands below it
REFERENCE = {
    entry.split(maxsplit=1)[0]: entry
    for page in sorted((DOCS / "reference").glob("*.md"))
    for entry in page.read_text().split("\n::: ")[1:]
}
# What functions take and give back, shown where they are called, and what they raise; a base class.
SHOWN_ELSEWHERE = {
    "CanaryAudit", "Choice", "Contender", "LowRank", "MembershipResult", "PrivateMetric",
    "StepAudit", "SubspaceMethod", "Task", "TrainedRun", "export",
}  # fmt: skip

# Figures that come from elsewhere than the experiments, by page: the demo and other commands
DEMO = {"61.1 ± 1.8", "79.7 ± 4.1", "88.4 ± 0.6", "94.4 ± 0.5"}
ELSEWHERE = {
    "README.md": {*DEMO, "96.9 ± 0.3"},
    "columns.md": {"93.9 ± 1.7", "91.3 ± 2.3", "95.8 ± 1.8", "84.0 ± 1.0"},
    "rgp.md": {"54.4 ± 1.7"},  # at another learning rate than the best
    "tuning.md": {
        "72.7 ± 5.3", "91.4 ± 1.9", "91.2 ± 0.8", "87.3 ± 2.3", "88.4 ± 2.7", "91.6 ± 1.6",
        "91.0 ± 1.3", "92.6 ± 2.0", "52.8 ± 5.2", "87.5 ± 1.9",
    },
    "units.md": {"87.2 ± 0.1", "86.5 ± 0.3"},
    "which-method.md": {
        *DEMO, "85.3 ± 2.2", "77.5 ± 4.3", "79.7 ± 0.5", "95.3 ± 1.0", "97.8 ± 0.0",
        "55.3 ± 0.7", "55.4 ± 0.9",  # standard errors
    },
}  # fmt: skip


def blocks(page: Path) -> list[str]:
    return [part.split("```")[0] for part in page.read_text().split("```python\n")[1:]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_python_with_names_that_exist(page: Path) -> None:
    for block in blocks(page):
        for said in names(ast.parse(block)):
            pkgutil.resolve_name(said)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_results(page: Path) -> None:
    """A mean and its deviation that a page gives are what the stored results say today."""
    found, known = (
        set(re.findall(r"\d+\.\d ± \d+\.\d", each.read_text()))
        for each in (page, DOCS / "results.md")
    )
    assert found - known == ELSEWHERE.get(page.name, set())


def names(tree: ast.Module) -> Iterator[str]:
    """Everything of dpspan that a block imports, or reaches by dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpspan"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("dpspan."):
            yield ast.unparse(node)


def test_names_that_do_not_exist_are_found() -> None:
    block = "from dpspan.choose import resolution\ndpspan.PEP(clip=dpspan.convex.Huber)"
    assert list(names(ast.parse(block))) == [
        "dpspan.choose.resolution",
        "dpspan.PEP",
        "dpspan.convex.Huber",
        "dpspan.convex",
    ]
    with pytest.raises(AttributeError):
        pkgutil.resolve_name("dpspan.PEP")


def test_links_of_the_readme_lead_somewhere() -> None:  # those of docs are mkdocs' to check
    links = re.findall(r"\]\(([^)#]+)|src=\"([^\"]+)", (ROOT / "README.md").read_text())
    assert len(links) > 20
    for link in map("".join, links):
        assert (ROOT / link).exists(), link


# -- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("target", REFERENCE)
def test_examples(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = pkgutil.resolve_name(target)
    # Empty globals: what an example uses, it imports.
    below = "".join(re.findall(r"^```pycon\n(.*?)^```$", REFERENCE[target], re.M | re.S))
    example = doctest.DocTestParser().get_doctest(below, {}, target, None, None)
    assert example.examples or exempt(found)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert not said, "".join(said)


def exempt(found: Any) -> bool:
    return found.__name__ in SHOWN_ELSEWHERE or issubclass(found, Exception)


def test_every_public_name_is_in_the_reference() -> None:
    there = [pkgutil.resolve_name(target) for target in REFERENCE]
    public = {name: getattr(dpspan, name) for name in dpspan.__all__ if name != "convex"}
    assert [name for name, value in public.items() if value not in there] == []


# -- blocks that are run --------------------------------------------------------------------------


def test_a_certificate_is_checked_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model, optimizer, loader = setup()
    train(model, optimizer, loader)
    monkeypatch.chdir(tmp_path)
    engine.write_certificate("certificate.json", 1e-5)
    (block,) = blocks(DOCS / "certificate.md")
    *before, last = ast.parse(block).body
    names: dict[str, Any] = {}
    exec(compile(ast.Module(before, []), "certificate.md", "exec"), names)
    assert isinstance(last, ast.Expr)
    epsilon = eval(compile(ast.Expression(last.value), "certificate.md", "eval"), names)
    document = json.loads(Path("certificate.json").read_text())
    assert epsilon == pytest.approx(document["epsilon"], rel=1e-9)
    assert set(document) - {"format", "version", "created"} <= set(
        (DOCS / "certificate.md").read_text().replace("`", " ").replace(",", " ").split()
    )


def test_the_quickstart_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in blocks(DOCS / "quickstart.md"):
        exec(compile(block, "quickstart.md", "exec"), names)
    assert len(Path("patients.csv").read_text().splitlines()) == 401
    assert 2.999 < names["engine"].get_epsilon() <= 3.0
    assert json.loads(Path("certificate.json").read_text())["private"]
    x, y = names["public"]
    assert (names["model"](x).argmax(1) == y).float().mean() > 0.85  # 77 % are benign


def test_mapped_records_are_trained_on_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra("datasets")
    pyarrow = extra("pyarrow")
    from pyarrow import parquet

    monkeypatch.chdir(tmp_path)
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0)).numpy()
    columns = {f"c{i}": column for i, column in enumerate(x.T)}
    parquet.write_table(
        pyarrow.table({**columns, "label": (x[:, 0] > 0).astype(int)}), "records.parquet"
    )
    names: dict[str, Any] = {}
    for block in blocks(DOCS / "many-records.md"):
        exec(compile(block, "many-records.md", "exec"), names)
    assert names["engine"].ledger.steps == 4
    torch.testing.assert_close(names["private"][:]["x"], torch.from_numpy(x))
    files = [Path(each["filename"]) for each in names["private"].cache_files]
    assert {file.parent for file in files} == {tmp_path / "records"}  # mapped, and not in memory


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_these_options(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    for command, rest in re.findall(r"^    dpspan (\w+)([^#\n]*)", text, re.MULTILINE):
        said = CliRunner().invoke(app, [command, "--help"], terminal_width=200)
        assert said.exit_code == 0, f"dpspan {command}"
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in said.output, f"dpspan {command} {option}"


def test_targets_of_make_exist() -> None:
    there = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"(?:`|^    )make ([a-z-]+)", page.read_text(), re.M)) <= there


def test_one_version_everywhere() -> None:
    changes = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert changes[0] == "Unreleased"
    released = re.fullmatch(r"([\d.]+) \((\d{4}-\d\d-\d\d)\)", changes[1])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert released is not None
    assert released.groups() == (citation["version"], citation["date-released"])
    assert dpspan.__version__ == citation["version"]
    assert len(citation["references"]) == 5


def test_the_oldest_versions_are_those_that_are_asked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = dict(line.split(">=") for line in project["dependencies"])
    text = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8")
    oldest = dict(re.findall(r"^([\w-]+)==([\d.]+)$", text, re.M))
    for name, version in wanted.items():
        assert f"{oldest[name]}.".startswith(f"{version}."), name


def test_files_have_the_formats_that_the_page_on_versions_says() -> None:
    text = (DOCS / "versions.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([\w ]+?) \(.*?\| .*?\| (.*?) \|", text, re.M))
    assert rows["certificate"] == f"`{certificate.FORMAT}`, {certificate.VERSION}"
    assert rows["ledger"] == str(dpspan.Ledger().state_dict()["version"])
    assert rows["checkpoint"] == f"`{checkpoint._STATE}`"
    assert rows["comparison"] == f"`{results.FORMAT}`"
    assert rows["layer of patches"] == f"`{patches._FORMAT}`, without a number"
    engine, *_ = setup()
    assert rows["state of the engine"] == f"`{engine.state_dict()['format']}`"
