"""The reference of configuration keys and commands, written from the code: `make reference`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from dpspan.app.cli import app
from dpspan.app.config import Config

NOTE = (
    "<!-- Written by tools/reference.py from the code: change it there, then `make reference`. -->"
)
WORDS = {
    "string": "text", "integer": "whole number", "number": "number", "boolean": "true or false",
    "null": "nothing", "object": "keys and values", "array": "list",
}  # fmt: skip
LIMITS = {
    "minimum": "≥ {:g}", "exclusiveMinimum": "> {:g}", "maximum": "≤ {:g}",
    "exclusiveMaximum": "< {:g}", "minItems": "({:g} or more)",
}  # fmt: skip


def pages() -> dict[str, str]:
    """The pages by their names under docs/reference."""
    return {"configuration.md": configuration(), "commands.md": commands()}


# -- configuration --------------------------------------------------------------------------------


def configuration() -> str:
    """Every section with its keys, each described where it is first used."""
    schema = Config.model_json_schema()
    lines = [
        "# Configuration keys", "", NOTE, "",
        "A configuration is a YAML file; `dpspan init` writes one.",
        "Keys without a default must be there, and unknown ones are refused.", "",
        *table(schema),
    ]  # fmt: skip
    for key, part in schema["properties"].items():
        lines += ["", f"## `{key}`", "", *sections(part, schema["$defs"], key, set())]
    return "\n".join(lines).rstrip() + "\n"


def sections(
    part: Mapping[str, Any], known: Mapping[str, Any], path: str, seen: set[str]
) -> Iterator[str]:
    """What can stand at a path, and then what can stand below it."""
    for name, tag in references(part):
        if name in seen:
            continue
        seen.add(name)
        found = known[name]
        if tag is not None:
            yield from (f"### `{path}: {{{tag[0]}: {' | '.join(tag[1])}}}`", "")
        elif "." in path:
            yield from (f"### `{path}`", "")
        yield from (*text(found.get("description", "")), "", *table(found), "")
        for key, below in found.get("properties", {}).items():
            yield from sections(below, known, f"{path}.{key}", seen)


def references(part: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, list[str]] | None]]:
    """The sections a value may be, with the key that chooses among them and its values."""
    if "$ref" in part:
        yield part["$ref"].rsplit("/", 1)[1], None
    chooser = part.get("discriminator")
    if chooser is not None:
        for each in part["oneOf"]:
            values = [value for value, ref in chooser["mapping"].items() if ref == each["$ref"]]
            yield each["$ref"].rsplit("/", 1)[1], (chooser["propertyName"], values)
    for each in part.get("anyOf", ()):
        yield from references(each)
    if isinstance(part.get("additionalProperties"), dict):
        yield from references(part["additionalProperties"])


def table(section: Mapping[str, Any]) -> list[str]:
    """Its keys, what they take, and their defaults."""
    lines = ["| key | what it takes | default |", "|---|---|---|"]
    for key, part in section.get("properties", {}).items():
        needed = key in section.get("required", ())
        default = "" if needed else f"`{shown(part.get('default', {}))}`"
        lines.append(f"| `{key}` | {kind(part)} | {default} |")
    return lines if len(lines) > 2 else ["No keys."]


def shown(value: Any) -> str:
    """A default as YAML has it."""
    if isinstance(value, dict):
        return "as below" if value else "{}"
    if isinstance(value, bool):  # 0 and 1 are equal to these, and are no truth values
        return str(value).lower()
    return "null" if value is None else str(value)


def kind(part: Mapping[str, Any]) -> str:
    """What a value may be, in words."""
    if "$ref" in part:
        return "a section"
    if "discriminator" in part:
        return f"a section, by its `{part['discriminator']['propertyName']}`"
    if "anyOf" in part:
        return ", or ".join(dict.fromkeys(kind(each) for each in part["anyOf"]))
    if "const" in part or "enum" in part:
        return " \\| ".join(f"`{value}`" for value in part.get("enum", [part.get("const")]))
    if isinstance(part.get("additionalProperties"), dict):
        return f"names, each with {kind(part['additionalProperties'])}"
    if part.get("format") == "path":
        return "path"
    limits = [words.format(part[limit]) for limit, words in LIMITS.items() if limit in part]
    items = part.get("items") or {}
    inner = f" of {kind(items)}s" if items else ""
    return " ".join([WORDS.get(part.get("type", ""), "anything") + inner, *limits])


def text(docstring: str) -> list[str]:
    """One sentence a line; a paragraph stays one."""
    paragraphs = [" ".join(part.split()) for part in docstring.split("\n\n")]
    return "\n\n".join(part.replace(". ", ".\n") for part in paragraphs).split("\n")


# -- commands -------------------------------------------------------------------------------------


def commands() -> str:
    """Every command with its arguments and options."""
    root = typer.main.get_command(app)
    lines = [
        "# Commands", "", NOTE, "",
        "Results go to stdout, as JSON with `--json`; everything else goes to stderr.",
        "A command ends with 0, with 1 after an error that one sentence explains, and with 130 "
        "after Ctrl-C.", "", "## `dpspan`", "", *options(root),
    ]  # fmt: skip
    for name, command in walk("dpspan", root):
        lines += ["", f"## `{name}`", "", *text(command.help or ""), "", *options(command)]
    return "\n".join(lines).rstrip() + "\n"


def walk(name: str, group: Any) -> Iterator[tuple[str, Any]]:
    """All commands below, by their full names."""
    for key, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from walk(f"{name} {key}", command)
        elif not command.hidden:
            yield f"{name} {key}", command


def options(command: Any) -> list[str]:
    """A table of its arguments and options."""
    lines = ["| argument or option | meaning | default |", "|---|---|---|"]
    for each in command.params:
        if getattr(each, "hidden", False) or each.name.endswith("_completion"):  # the shell's
            continue
        argument = each.param_type_name == "argument"
        called = (each.metavar or each.name.upper()) if argument else " ".join(each.opts)
        plain = each.default if isinstance(each.default, int | float | str | Path) else None
        default = "" if plain is None or plain is False else f"`{plain}`"
        meaning = (getattr(each, "help", None) or "").replace("|", "\\|")
        lines.append(f"| `{called.replace('|', ' or ')}` | {meaning} | {default} |")
    return lines


if __name__ == "__main__":
    for file, content in pages().items():
        (Path(sys.argv[1]) / file).write_text(content, encoding="utf-8")
