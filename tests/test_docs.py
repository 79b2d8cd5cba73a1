"""What the documentation tells people to type."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from training import setup, train

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: Path) -> list[str]:
    return [part.split("```")[0] for part in page.read_text().split("```python\n")[1:]]


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_every_block_is_python(page: Path) -> None:
    for block in blocks(page):
        ast.parse(block)


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
