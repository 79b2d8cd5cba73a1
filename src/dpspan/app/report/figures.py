"""The pictures of a report, as SVG that takes its text colour from the page."""

from __future__ import annotations

import io
import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, StrMethodFormatter

from dpspan.app.report.reading import UNPRIVATE, Run

_INK = "#010203"  # replaced by the colour of the page's text
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a7a2e", "#7f7f7f")
_DASHES = {"--": "5 3", ":": "2 2"}
_LONGEST = 26  # letters of a name beside an axis
_NARROWEST = 0.1  # of an axis with accuracies
_STYLE: Any = {
    "svg.fonttype": "path",  # outlines: a page's own font would not fit the layout
    "svg.hashsalt": "dpspan",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _INK,
    "grid.alpha": 0.15,
    "axes.grid": True,
}


@dataclass(frozen=True, kw_only=True)
class Key:
    """A line of a legend."""

    text: str
    colour: str
    dashes: str  # in the way of SVG; empty for none


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing with the words that go with it; the legend is text of the page."""

    name: str
    title: str
    caption: str
    svg: Markup
    legend: tuple[Key, ...]


def accuracy_by_epsilon(groups: Mapping[str, Sequence[Run]], key: str) -> Picture | None:
    """What each kind of run had reached when it had spent so much."""
    curves = {name: mean_curve(runs, "epsilon", key) for name, runs in groups.items()}
    if not any(len(curve) > 1 for curve in curves.values()):
        return None
    return _picture(
        "accuracy", f"{label(key)} against ε spent",
        _how_to_read(groups, key),
        lambda axis: _curves(axis, curves, groups, "ε spent so far", key),
        height=2.9,
    )  # fmt: skip


def _how_to_read(groups: Mapping[str, Sequence[Run]], key: str) -> str:
    """What was measured, and what lines there are."""
    said = [_measured(key)]
    if any(len(runs) > 1 for runs in groups.values()):
        said.append("Means over seeds.")
    if any(not runs[0].private_steps for runs in groups.values()):
        said.append("A dotted line spends no ε: public data only.")
    if any(name != _kind(name) for name in groups):
        said.append("Dashed lines begin with a warm start on public labels.")
    return " ".join(said)


def _measured(key: str) -> str:
    if key.startswith(UNPRIVATE):
        return "NOT PRIVATE: measured on test records that nobody declared public."
    return "On test records that were declared public, by models that were released: at no cost."


def training_curve(groups: Mapping[str, Sequence[Run]], key: str) -> Picture | None:
    """A loss on test records that are public, epoch by epoch."""
    private = {name: runs for name, runs in groups.items() if runs[0].private_steps}
    curves = {name: mean_curve(runs, "epoch", key) for name, runs in private.items()}
    if not any(len(curve) > 1 for curve in curves.values()):
        return None

    def drawn(axis: Any) -> None:
        _curves(axis, curves, groups, "epoch", key)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))

    return _picture(
        "training", f"{label(key)} in training",
        _measured(key),
        drawn, height=2.9,
    )  # fmt: skip


def every_run(rows: Sequence[tuple[str, list[float]]], key: str) -> Picture:
    """Each run as a dot."""

    def drawn(axis: Any) -> None:
        for index, (_, values) in enumerate(rows):
            colour = _COLOURS[0]
            axis.plot(values, [index] * len(values), "o", color=colour, alpha=0.6, markersize=5)
            axis.plot([statistics.mean(values)], [index], "|", color=colour, markersize=14, mew=2)
        axis.set_yticks(range(len(rows)), [_short(name) for name, _ in rows])
        axis.invert_yaxis()
        axis.set_xlabel(label(key))
        _in_percent(axis.xaxis, key)

    return _picture(
        "runs", "Every run", "A dot is one run, a bar the mean.", drawn, height=1 + 0.3 * len(rows)
    )


def spectrum(groups: Mapping[str, Sequence[Run]]) -> Picture | None:
    """How much of the public gradients lies in how many directions."""
    notes = {
        name: [note for note in runs[0].diagnostics if note.get("eigenvalues")]
        for name, runs in groups.items()
    }
    notes = {name: noted for name, noted in notes.items() if noted}
    if not notes:
        return None

    def drawn(axis: Any) -> None:
        for name, noted in notes.items():
            values = sorted((v for part in noted[-1]["eigenvalues"] for v in part), reverse=True)
            total = sum(values) or 1.0
            shares = [share / total for share in itertools.accumulate(values)]
            colour, style = _look(name, groups)
            axis.plot(range(1, len(shares) + 1), shares, style, color=colour, label=name)
        for rank in {sum(noted[-1]["rank"]) for noted in notes.values()}:
            axis.axvline(rank, color=_INK, alpha=0.4, linewidth=1)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        axis.set_ylim(0, 1.02)
        axis.set_xlabel("directions")
        axis.set_ylabel("share of the public gradients")

    return _picture(
        "spectrum", "Spectrum of the public gradients",
        "The steeper, the fewer directions hold the gradients, here near the end of training. The "
        "upright line is the rank that was used. From public data and released weights.",
        drawn, height=2.9,
    )  # fmt: skip


def noise_parts(groups: Mapping[str, Sequence[Run]]) -> Picture | None:
    """The length of the noise in one step, part by part."""
    noises = {name: noise_of(runs[0]) for name, runs in groups.items() if runs[0].private_steps}
    parts = {name: lengths for name, lengths in noises.items() if lengths}
    if sum(map(len, parts.values())) < 2:  # one bar says nothing
        return None
    kinds = list(dict.fromkeys(kind for lengths in parts.values() for kind in lengths))
    unknown = [name for name in noises if name not in parts]
    missing = f" Not noted, and so without a bar: {', '.join(unknown)}." if unknown else ""

    def drawn(axis: Any) -> None:
        high = 0.8 / max(map(len, parts.values()))
        for number, kind in enumerate(kinds):
            here = [
                (row + (list(lengths).index(kind) - (len(lengths) - 1) / 2) * high, lengths[kind])
                for row, lengths in enumerate(parts.values())
                if kind in lengths
            ]
            bars = axis.barh(
                [place for place, _ in here],
                [value for _, value in here], height=high, color=_colour(number), label=kind,
            )  # fmt: skip
            axis.bar_label(bars, [f"{value:.0f}" for _, value in here], padding=2, fontsize=8)
        axis.set_yticks(range(len(parts)), [_short(name) for name in parts])
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel("length of the noise in one step")

    return _picture(
        "noise", "Noise, part by part",
        "Added at each step to a sum of gradients, none of them longer than its clip. A smaller "
        f"bar is not yet a better method: what lies outside a subspace may be lost.{missing}",
        drawn, height=0.9 + 0.42 * len(parts),
    )  # fmt: skip


def noise_of(run: Run) -> dict[str, float]:
    """√ of the expected noise energy of a step, from the method's notes or from its settings."""
    noted = [note["noise_energy"] for note in run.diagnostics if note.get("noise_energy")]
    if noted:
        return {f"{kind} noise": math.sqrt(energy) for kind, energy in noted[-1].items()}
    training = run.certificate["training"]
    if training.get("method") != "DPSGD":
        return {}
    p, z = training["trainable_parameters"], training["noise_multiplier"]
    return {"gradient noise": math.sqrt(p) * z * training["clip"]}


def nearness(candidates: Mapping[str, Any]) -> Picture:
    """GSD and captured energy of the candidates."""
    rows = candidates["rows"]

    def drawn(axis: Any) -> None:
        for shift, key, name in ((-0.2, "gsd", "GSD (smaller is closer)"),
                                  (0.2, "captured_energy", "captured energy")):  # fmt: skip
            places = [index + shift for index in range(len(rows))]
            values = [row[key] for row in rows]
            bars = axis.barh(places, values, height=0.38, label=name,
                             color=_COLOURS[0 if key == "gsd" else 2])  # fmt: skip
            axis.bar_label(bars, [f"{value:.2f}" for value in values], padding=2, fontsize=8)
        axis.set_yticks(range(len(rows)), [_short(row["name"]) for row in rows])
        axis.invert_yaxis()
        axis.set_xlim(0, 1.1)
        axis.grid(axis="y", visible=False)

    return _picture(
        "gsd", "How close the public candidates are",
        f"Compared with {candidates['stand_in']}, which are public: nothing was asked of private "
        "records here.",
        drawn, height=0.8 + 0.5 * len(rows),
    )  # fmt: skip


def mean_curve(runs: Sequence[Run], x: str, y: str) -> list[tuple[float, float]]:
    """The mean over runs at each point that all of them have."""
    points: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        for index, (line, value) in enumerate(run.curve(y)):
            points.setdefault(index, []).append((float(line[x]), value))
    shared = [group for group in points.values() if len(group) == len(runs)]
    return [
        (statistics.mean(a for a, _ in group), statistics.mean(b for _, b in group))
        for group in shared
    ]


def _curves(
    axis: Any,
    curves: Mapping[str, list[tuple[float, float]]],
    groups: Mapping[str, Sequence[Run]],
    x_label: str,
    key: str,
) -> None:
    for name, curve in curves.items():
        if not curve:
            continue
        if not groups[name][0].private_steps:
            axis.axhline(curve[-1][1], color=_INK, linestyle=":", label=name)
            continue
        colour, style = _look(name, groups)
        axis.plot(*zip(*curve, strict=True), style, color=colour, label=name)
    axis.set_xlabel(x_label)
    axis.set_ylabel(label(key))
    _in_percent(axis.yaxis, key)


def _in_percent(axis: Any, key: str) -> None:
    if key.endswith("accuracy"):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 1):g}%"))
        low, high = axis.get_view_interval()
        if high - low < _NARROWEST:  # or chance would look like progress
            axis.set_view_interval(high - _NARROWEST, high)


def _look(name: str, groups: Mapping[str, Sequence[Run]]) -> tuple[str, str]:
    """A method has one colour in all pictures; dashes are for those after a warm start."""
    kinds = list(dict.fromkeys(_kind(n) for n, runs in groups.items() if runs[0].private_steps))
    return _colour(kinds.index(_kind(name))), "--" if name != _kind(name) else "-"


def _kind(name: str) -> str:
    return name.removeprefix("warm start + ")


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _short(name: str) -> str:
    """A name that fits beside an axis."""
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def _keys(axis: Any) -> tuple[Key, ...]:
    """What matplotlib would put into a legend."""
    handles, texts = axis.get_legend_handles_labels()
    found = []
    for handle, text in zip(handles, texts, strict=True):
        line = handle.patches[0] if hasattr(handle, "patches") else handle
        colour = line.get_facecolor() if hasattr(line, "get_facecolor") else line.get_color()
        dashes = _DASHES.get(line.get_linestyle(), "")
        ink = colour == _INK
        found.append(
            Key(text=text, colour="currentColor" if ink else to_hex(colour), dashes=dashes)
        )
    return tuple(found)


def label(key: str) -> str:
    """A metric in words."""
    return key.replace("_", " ").capitalize()


def _picture(name: str, title: str, caption: str, drawn: Any, *, height: float) -> Picture:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.5, height), layout="constrained")
        FigureCanvasSVG(figure)
        axis = figure.subplots()
        drawn(axis)
        legend = _keys(axis)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return Picture(
        name=name,
        title=title,
        caption=caption,
        svg=_inline(buffer.getvalue(), name, title),
        legend=legend if len(legend) > 1 else (),
    )


def _inline(text: str, name: str, title: str) -> Markup:
    """An SVG for the middle of a page: names of its own, the page's ink, a label for readers."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    text = text.replace(_INK, "currentColor")
    text = re.sub(r"<svg ([^>]*?)>", lambda m: f"<svg {_sizes(m[1])}>", text, count=1)
    label = Markup('role="img" aria-label="{}"').format(title)
    return Markup(text.replace("<svg ", f"<svg {label} ", 1))


def _sizes(attributes: str) -> str:
    """Without a fixed width: the page decides."""
    return re.sub(r'\b(width|height)="[^"]*"\s?', "", attributes)
