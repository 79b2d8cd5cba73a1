"""Sections of a configuration, and YAML files read for people: every complaint has its line.

No complaint shows what the file holds: somebody will give the private data where a configuration
is meant. So of keys only those are named that a configuration has, and of values only the kind.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Never, TypeVar

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

import dpspan
from dpspan.support.checks import near
from dpspan.support.errors import DPSpanError

Model = TypeVar("Model", bound=BaseModel)
_Path = tuple[str | int, ...]


class Section(BaseModel):
    """Base of all sections. Values are taken as they are written: '3' is not a number."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
    if_used: ClassVar[tuple[str, ...]] = ()  # settings that older folders do not know

    @pydantic.model_serializer(mode="wrap")
    def _as_before(self, dump: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        usual = {k: fields[k].get_default(call_default_factory=True) for k in self.if_used}
        used = any(getattr(self, key) != value for key, value in usual.items())
        return {k: v for k, v in dump(self).items() if used or k not in self.if_used}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        """Before anything else: a misspelt key is why another one is missing."""
        for key in map(str, values if isinstance(values, dict) else ()):
            if key not in cls.model_fields:
                hint, allowed = near(key, cls.model_fields), ", ".join(cls.model_fields)
                refuse(key, f"Unknown key{hint}. Allowed here: {allowed}.", kind="unknown_key")
        return values


def refuse(at: str, message: str, kind: str = "refused") -> Never:
    """What is wrong with the section being validated, at this path of keys below it."""
    raise PydanticCustomError(kind, "{message}", {"message": message, "at": at})


class BuiltSection(Section):
    """Keys that are arguments of something public in dpspan: `XSection` builds `dpspan.X`.

    It is imported when it is built: a mistake in a configuration does not wait for torch. So keys
    and defaults are stated here once more; a test compares them with the original.
    """

    of_the_file: ClassVar[tuple[str, ...]] = ("name", "public")  # keys that are no arguments

    def arguments(self) -> dict[str, Any]:
        given = {key: value for key, value in self if key not in self.of_the_file}
        return {k: v.built() if isinstance(v, BuiltSection) else v for k, v in given.items()}

    def built(self, **more: Any) -> Any:
        """What the section describes, with more arguments, or others."""
        original = getattr(dpspan, type(self).__name__.removesuffix("Section"))
        return original(**{**self.arguments(), **more})


# YAML has lists and texts only; strict sections would refuse them.
File = Annotated[Path, Field(strict=False)]
Texts = Annotated[tuple[str, ...], Field(strict=False)]
Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)]
Numbers = Annotated[tuple[float, ...], Field(strict=False)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


class ConfigError(DPSpanError, ValueError):
    """A configuration that cannot be used; the message has one line for each problem."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers and truth values: 1e-5 is a number, and `no` is a text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012


for _tag, _pattern in (
    ("null", "~|null|Null|NULL|"),
    ("merge", "<<"),
    ("bool", "true|false"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), None
    )


def read_text(path: str | Path) -> str:
    """What a file says; ConfigError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ConfigError(f"Cannot read the configuration {path}: {reason}.") from None


def parse(text: str, model: type[Model], *, name: str) -> Model:
    """The text as a checked model; `name` is what errors call it."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines = _lines(node, name)  # before `<<:` is put in
        values = {} if node is None else loader.construct_document(node)
    except ConfigError:
        raise
    except Exception as error:  # a tag such as !!int has errors of its own
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = name if mark is None else f"{name}:{mark.line + 1}"
        raise ConfigError(
            f"{where}: This is not YAML, or not here: look for tabs, for brackets and quotes that "
            "are not closed, and for aliases that nothing defines."
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{name}:1: Expected keys and values, such as 'data:', got {_kind(values)}. Is this a "
            "configuration? `dpspan init` writes one."
        )
    try:
        return model.model_validate(values)
    except ValidationError as error:
        complete = _with_allowed_tags(error, model, values)
    schema = model.model_json_schema()
    sections = (schema, *schema.get("$defs", {}).values())
    known = {key for section in sections for key in section.get("properties", ())}
    problems: dict[tuple[str, int], str] = {}
    for found in complete.errors():
        place, line = _place(lines, found, known)
        # Of a value that could be several things, one complaint will do.
        problems.setdefault((place, line), f"{name}:{line}: {place}: {sentence(found)}")
    raise ConfigError("\n".join(problems.values()))


def _with_allowed_tags(error: ValidationError, model: type[Model], values: Any) -> ValidationError:
    """pydantic names the alternatives only if the key that chooses one is there: so put it in."""
    for problem in error.errors():
        if problem["type"] == "union_tag_not_found" and isinstance(problem["input"], dict):
            problem["input"][problem["ctx"]["discriminator"].strip("'")] = None
    try:
        model.model_validate(values)
    except ValidationError as again:
        return again
    return error


def _lines(node: Any, name: str, at: _Path = ()) -> dict[_Path, int]:
    """The line of every key, by its path; one that stands twice is refused, not overwritten."""
    parts: list[tuple[Any, Any, Any]] = []
    if isinstance(node, yaml.MappingNode):
        parts = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        parts = [(index, value, value) for index, value in enumerate(node.value)]
    found: dict[_Path, int] = {}
    for part, first, value in parts:
        path, line = (*at, part), first.start_mark.line + 1
        if path in found:
            twice = f"The key in this line stands in line {found[path]} too"
            raise ConfigError(f"{name}:{line}: {twice}. Keep one of the two.")
        found |= {path: line, **_lines(value, name, path)}
    return found


def _place(
    lines: Mapping[_Path, int], problem: Mapping[str, Any], known: set[str]
) -> tuple[str, int]:
    """The path of keys, without pydantic's names of alternatives, and the line.

    A key of the file alone is a star, unless the file was found to be a configuration.
    """
    context = problem.get("ctx", {})
    path: _Path = ()
    names: list[str] = []
    for part in (*problem["loc"], *context.get("at", "").split(".")):
        if (*path, part) in lines:
            path = (*path, part)
            named = part in known or isinstance(part, int) or problem["type"] == "refused"
            names.append(str(part) if named else "*")
    if problem["type"] == "missing":
        names.append(str(problem["loc"][-1]))
    return ".".join(names) or "(the whole file)", lines.get(path, 1)


_KINDS: Mapping[type, str] = {
    type(None): "nothing",
    bool: "a truth value",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "keys and values",
}


# Kinds of problems in our words: pydantic's name classes, and tell numbers of entries.
_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "date_from_datetime_parsing": "a day, such as 2024-12-31",
    "date_from_datetime_inexact": "a day, such as 2024-12-31",
    "date_type": "a day, such as 2024-12-31",
    "string_type": "a text",
    "string_too_short": "a text of at least {min_length} characters",
    "string_too_long": "a text of at most {max_length} characters",
    "path_type": "a path",
    "tuple_type": "a list, [… , …]",
    "list_type": "a list, [… , …]",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
    "literal_error": "{expected}",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "at most {le:g}",
}


def sentence(problem: Mapping[str, Any]) -> str:
    """What was expected; of what was found only the kind."""
    kind, context = problem["type"], problem.get("ctx", {})
    got = f", got {_kind(problem['input'])}"
    if kind == "missing":
        return "This key is missing, and has no default."
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        key = str(context["discriminator"]).strip("'")
        if "tag" not in context:
            return f"Expected keys and values, '{key}' among them{got}."
        found = ", it is missing" if context["tag"] == "None" else ""
        return f"Expected '{key}' to be one of {context['expected_tags']}{found}."
    if kind in _EXPECTED:
        return f"Expected {_EXPECTED[kind].format(**context)}{got * kind.endswith('_type')}."
    return f"{problem['msg'].removesuffix('.')}."


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "something else")
