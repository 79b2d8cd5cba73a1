"""Configuration files: what is wrong is said with its line and with what is allowed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

import dpspan
from dpspan.app.config import Config, ConfigError, load_config, parse_config
from dpspan.app.config.methods import _RULES, AnyMethod, ConvexSection, RGPSection
from dpspan.app.config.sections import (
    AnyTrainable,
    ConstantSection,
    CosineSection,
    PatchesSection,
    StepsSection,
)
from dpspan.app.section import BuiltSection
from dpspan.convex.methods import METHODS
from dpspan.mechanisms.carriers import History

GOOD = """\
data:
  classes: [no, yes]
  private: {format: npz, path: d.npz}
  public:
    optin: {format: csv, path: a.csv, inputs: [a, b], label: c, mean: [0, 1]}
    other: {format: idx, path: images.gz, labels: labels.gz}
  test_is_public: true
model: {name: mlp, hidden: [64]}
method:
  name: gep
  public: optin
  rank: 16
budget: {epsilon: 3, delta: 1e-5}
training:
  epochs: 3
  batch_size: 64
  optimizer: {name: sgd, learning_rate: 5e-1}
output: {folder: runs/x}
"""


def test_a_good_one() -> None:
    config = parse_config(GOOD)
    assert config.budget.delta == 1e-5  # YAML 1.1 would take it for a text
    assert config.data.classes == ("no", "yes")  # and these for truth values
    assert config.training.optimizer.learning_rate == 0.5
    assert config.method.rank == 16
    with pytest.raises(ValidationError):
        config.budget.delta = 1.0  # frozen
    assert Config.model_validate(config.model_dump()) == config
    assert "output" not in config.fixed()
    assert "device" not in config.fixed()["training"]
    assert config.fixed()["budget"]["epsilon"] == 3


SELF = "{format: csv, path: x/../a.csv, inputs: [b], label: c}"


@pytest.mark.parametrize("part", ["public.optin", "test"])
def test_private_data_cannot_be_something_else_too(part: str) -> None:
    text = GOOD.replace("{format: npz, path: d.npz}", SELF)
    if part == "test":
        test = "  test: {format: csv, path: a.csv, inputs: [a, b], label: c}\n  test_is_public"
        text = text.replace("path: a.csv", "path: other.csv").replace("  test_is_public", test)
    message = rf"data\.{part}: These are the records of data\.private itself \(a\.csv\)"
    with pytest.raises(ConfigError, match=message):
        parse_config(text)


BAD = {
    "unknown key": (
        "rank: 16",
        "rnak: 16",
        "12: method.*: Unknown key (did you mean 'rank'?). Allowed here: clip",
    ),
    "unknown section": (
        "output:",
        "outputs:",
        "18: *: Unknown key (did you mean 'output'?)",
    ),
    "wrong type": (
        "rank: 16",
        "rank: ten",
        "12: method.rank: Expected a whole number, got a text.",
    ),
    "text for a number": (
        "rank: 16",
        "rank: '16'",
        "12: method.rank: Expected a whole number, got a text.",
    ),
    "too small": (
        "rank: 16",
        "rank: 0",
        "12: method.rank: Expected at least 1.",
    ),
    "not whole": (
        "epochs: 3",
        "epochs: 2.5",
        "15: training.epochs: Expected a whole number",
    ),
    "delta": ("1e-5", "1", "13: budget.delta: Expected a number below 0.1"),
    "infinite": (
        "epsilon: 3",
        "epsilon: .inf",
        "13: budget.epsilon: Expected a finite number.",
    ),
    "unknown method": (
        "name: gep",
        "name: pep",
        "9: method: Expected 'name' to be one of 'dpsgd', 'pdpsgd', 'biased-gep', "
        "'gep', 'rgp', 'mirror', 'gd', 'constrained', 'projected', 'adagrad', 'adagrad-diagonal', "
        "'adagrad-released', 'projected-adagrad', 'projected-adagrad-released'.",
    ),
    "no method": ("  name: gep\n", "", "9: method: Expected 'name' to be one of 'dpsgd', "),
    "no mapping": (
        "model: {name: mlp, hidden: [64]}",
        "model: mlp",
        "8: model: Expected keys and values",
    ),
    "missing": ("  batch_size: 64\n", "", "14: training.batch_size: This key is missing"),
    "missing section": ("output: {folder: runs/x}\n", "", "1: output: This key is missing"),
    "format": (
        "format: npz, ",
        "",
        "3: data.private: Expected 'format' to be one of 'npz', 'idx', 'images', 'csv', "
        "'parquet', 'datasets', it is missing.",
    ),
    "truth": (
        "public: true",
        "public: yes",
        "7: data.test_is_public: Expected true or false, got a text.",
    ),
    "list": ("[64]", "64", "8: model.hidden: Expected a list"),
    "in a list": (
        "inputs: [a, b]",
        "inputs: [a, 2]",
        "5: data.public.*.inputs.1: Expected a text, got a whole number.",
    ),
    "a class twice": ("[no, yes]", "[no, no]", "2: data.classes: Expected every class once."),
    "one class": ("[no, yes]", "[no]", "2: data.classes: "),
    "no such public data": (
        "public: optin",
        "public: opting",
        "11: method.public: Expected the name of a dataset under data.public "
        "(optin, other), got 'opting'.",
    ),
    "public data needed": ("  public: optin\n", "", "9: method: The method gep needs public data"),
    "two prices": (
        "epsilon: 3",
        "epsilon: 3, noise_multiplier: 1",
        "13: budget: Expected epsilon or noise_multiplier, and not both.",
    ),
    "no price": (
        "epsilon: 3, ",
        "",
        "13: budget: Expected epsilon or noise_multiplier, and not both.",
    ),
    "two choices": (
        "output:",
        "choose: {epsilon: 0.1}\noutput:",
        "11: method.public: Leave this out, or `choose`",
    ),
    "random and public": (
        "rank: 16",
        "rank: 16\n  random_subspace: true",
        "11: method.public: A random subspace uses no public data",
    ),
    "random, and of public data": (
        "  public: optin\n  rank: 16",
        "  random_subspace: true\n  rank: 16\n  groups: 2",
        "13: method.groups: This is for directions of public data: leave it out.",
    ),
    "a label to learn from": (
        "label: c",
        "label: b",
        "5: data.public.optin.inputs: Expected no label among the inputs: take it out there.",
    ),
    "records of no unit": (
        "  test_is_public",
        "  records_per_unit: 2\n  test_is_public",
        "7: data.records_per_unit: Expected data.unit beside it: the column with one id a record.",
    ),
    "same key twice": (
        "  rank: 16",
        "  rank: 16\n  rank: 8",
        "13: The key in this line stands in line 12 too.",
    ),
    "not yaml": ("[64]", "[64", "8: This is not YAML"),
    "tab": ("  rank", "\trank", "12: This is not YAML"),
}


@pytest.mark.parametrize("flaw", BAD)
def test_bad_ones(flaw: str) -> None:
    before, after, message = BAD[flaw]
    assert before in GOOD
    with pytest.raises(ConfigError) as caught:
        parse_config(GOOD.replace(before, after, 1), name="c.yaml")
    assert f"c.yaml:{message}" in str(caught.value)


def test_a_threshold_is_between_two_classes() -> None:
    test = "  test: {format: npz, path: e.npz}\n  test_is_public"
    text = GOOD.replace("  test_is_public", test) + "evaluate: {threshold: 0.9}\n"
    assert parse_config(text).evaluate.threshold == 0.9
    for classes in ("3", "[a, b, c]"):
        with pytest.raises(ConfigError, match=r"evaluate\.threshold: .* two classes: leave it out"):
            parse_config(text.replace("[no, yes]", classes))


def test_every_problem_is_said_at_once() -> None:
    text = GOOD.replace("rank: 16", "rank: 0").replace("epochs: 3", "epochs: no")
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[1] for line in lines] == ["12", "15"]


def test_choose_needs_something_to_choose() -> None:
    text = GOOD.replace("  public: optin\n", "") + "choose: {}\n"
    assert parse_config(text).choose.epsilon == 0.1
    with pytest.raises(ConfigError, match="at least 2 datasets"):
        parse_config(
            text.replace("    other: {format: idx, path: images.gz, labels: labels.gz}\n", "")
        )
    with pytest.raises(ConfigError, match="The method dpsgd uses no public data"):
        parse_config(text.replace("name: gep", "name: dpsgd").replace("  rank: 16\n", ""))


def test_files(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"Cannot read the configuration .*no\.yaml: No such file"
    ):
        load_config(tmp_path / "no.yaml")
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="Cannot read the configuration"):
        load_config(path)
    for nothing in ("", "- a\n", "3\n"):
        path.write_text(nothing)
        with pytest.raises(ConfigError):
            load_config(path)
    path.write_text(GOOD)
    assert load_config(path) == parse_config(GOOD)
    path.write_text("data: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(path)


def test_schedules() -> None:
    assert [ConstantSection().factor(step, 10) for step in (0, 9)] == [1, 1]
    cosine = [CosineSection().factor(step, 4) for step in range(4)]
    assert cosine == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)
    rising = [CosineSection(warmup=0.5).factor(step, 4) for step in range(4)]
    assert rising == pytest.approx([1 / 3, 2 / 3, 1, 0.5])
    steps = [StepsSection().factor(step, 8) for step in range(8)]
    assert steps == pytest.approx([1] * 4 + [0.1] * 2 + [0.01] * 2)


def built_sections(base: type[BuiltSection] = BuiltSection) -> Iterator[type[BuiltSection]]:
    for section in base.__subclasses__():
        if hasattr(dpspan, section.__name__.removesuffix("Section")):
            yield section
        yield from built_sections(section)


@pytest.mark.parametrize("section", list(built_sections()), ids=lambda section: section.__name__)
def test_sections_have_the_keys_and_defaults_of_what_they_build(
    section: type[BuiltSection],
) -> None:
    own = {"name", "public", "random_subspace", "private_share", "clip", "warmup"}  # the file's
    built = getattr(dpspan, section.__name__.removesuffix("Section"))
    original = {field.name: field for field in fields(built)}
    for key, field in section.model_fields.items():
        if key in ("clipping", "solver"):
            rule: Any = original[key].default_factory
            assert rule.__name__ == _RULES[field.default]
        elif key not in own and not field.is_required():
            assert field.default == original[key].default, key


def test_every_alternative_is_built_by_its_name() -> None:
    names = {section.__name__ for section in built_sections()}
    unions = (get_args(get_args(union)[0]) for union in (AnyMethod, AnyTrainable))
    others = {section.__name__ for union in unions for section in union} - names
    assert others == {"ConvexSection"}
    assert get_args(ConvexSection.model_fields["name"].annotation) == tuple(METHODS)
    usual = {method.steps for method in METHODS.values()}
    assert usual == {ConvexSection.model_fields["steps"].default}


def test_rgp_as_its_authors_run_it_can_be_written_down() -> None:
    options = {"name": "rgp", "rank": 8, "head_scale": 0.01, "head_rate": 10.0}
    method = RGPSection(**options, carriers="weights").build(None, steps=1)
    assert (method.head_scale, method.head_rate) == (0.01, 10.0)
    assert method.source == History(warmup=None)
    assert RGPSection(warmup=50).build(None, steps=1).source == History(warmup=50)
    assert RGPSection().build(None, steps=1).source == History()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"carriers": "random", "warmup": 5}, "Expected carriers: history"),
        ({"head_rate": 5.0}, "Expected head_scale beside head_rate"),
        ({"head_scale": 0.0}, "greater than 0"),
    ],
)
def test_rgp_options_that_mean_nothing_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RGPSection(**options)


def test_features_have_the_defaults_of_the_layer() -> None:
    original = inspect.signature(dpspan.PatchFeatures.learn).parameters
    for key, field in PatchesSection.model_fields.items():
        if key not in ("name", "public"):
            assert field.default == original[key].default, key


@pytest.mark.parametrize(("key", "value"), [("full_scale", 1.0), ("leftover", False)])
def test_options_of_before_at_their_default_are_taken(key: str, value: object) -> None:
    """Runs of 0.1 wrote down all of them."""
    from dpspan.app.config.methods import RGPSection

    assert RGPSection.model_validate({"name": "rgp", "rank": 2, key: value}).rank == 2
    with pytest.raises(ValidationError, match="Unknown key"):
        RGPSection.model_validate({"name": "rgp", "rank": 2, key: 0.3})
