"""The pictures of a report, as SVG that takes its text colour from the page."""

from __future__ import annotations

import io
import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, StrMethodFormatter

from dpspan.app.report.reading import UNPRIVATE, Run

Groups = Mapping[str, Sequence[Run]]
Curve = list[tuple[float, float]]
Picture = dict[str, Any]  # the drawing, and the words that go with it as text of the page

_INK = "#010203"  # replaced by the colour of the page's text
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a7a2e", "#7f7f7f")
_DASHES = {"--": "5 3", ":": "2 2"}
_LONGEST = 26  # letters of a name beside an axis
_NARROWEST = 0.1  # of an axis with accuracies
_INKED = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")
_STYLE: Any = {
    **dict.fromkeys((*_INKED, "grid.color"), _INK),
    "svg.fonttype": "path",  # outlines: a page's own font would not fit the layout
    "svg.hashsalt": "dpspan",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.15,
    "axes.grid": True,
}


def accuracy_by_epsilon(groups: Groups, key: str) -> Picture | None:
    """What each kind of run had reached when it had spent so much."""
    said = [_measured(key)]
    if any(len(runs) > 1 for runs in groups.values()):
        said.append("Means over seeds.")
    if any(not runs[0].private_steps for runs in groups.values()):
        said.append("A dotted line spends no ε: public data only.")
    if any(runs[0].warm for runs in groups.values()):
        said.append("Dashed lines begin with a warm start on public labels.")
    curves = {name: mean_curve(runs, "epsilon", key) for name, runs in groups.items()}
    title = f"{label(key)} against ε spent"
    return _curves(groups, curves, "ε spent so far", key, ("accuracy", title, " ".join(said)))


def training_curve(groups: Groups, key: str) -> Picture | None:
    """A loss on test records that are public, epoch by epoch."""
    private = {name: runs for name, runs in groups.items() if runs[0].private_steps}
    curves = {name: mean_curve(runs, "epoch", key) for name, runs in private.items()}
    words = ("training", f"{label(key)} in training", _measured(key))
    return _curves(groups, curves, "epoch", key, words)


def _measured(key: str) -> str:
    if key.startswith(UNPRIVATE):
        return "NOT PRIVATE: measured on test records that nobody declared public."
    return "On test records that were declared public, by models that were released: at no cost."


def _curves(
    groups: Groups, curves: Mapping[str, Curve], x: str, key: str, words: tuple[str, str, str]
) -> Picture | None:
    """A line for each curve; None if none has more than a point."""
    if not any(len(curve) > 1 for curve in curves.values()):
        return None

    def drawn(axis: Any) -> None:
        for group, curve in curves.items():
            if curve and not groups[group][0].private_steps:
                axis.axhline(curve[-1][1], color=_INK, linestyle=":", label=group)
            elif curve:
                axis.plot(*zip(*curve, strict=True), **_look(group, groups), label=group)
        axis.set_xlabel(x)
        axis.set_ylabel(label(key))
        _in_percent(axis.yaxis, key)
        if x == "epoch":
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))

    return _picture(*words, drawn)


def mean_curve(runs: Sequence[Run], x: str, y: str) -> Curve:
    """The mean over runs at each point that all of them have."""
    curves = [[(float(line[x]), value) for line, value in run.curve(y)] for run in runs]
    return [
        (statistics.mean(a for a, _ in points), statistics.mean(b for _, b in points))
        for points in zip(*curves, strict=False)
    ]


def every_run(rows: Sequence[tuple[str, list[float]]], key: str) -> Picture:
    """Each run as a dot."""

    def drawn(axis: Any) -> None:
        for index, (_, values) in enumerate(rows):
            colour = _COLOURS[0]
            axis.plot(values, [index] * len(values), "o", color=colour, alpha=0.6, markersize=5)
            axis.plot([statistics.mean(values)], [index], "|", color=colour, markersize=14, mew=2)
        _name_rows(axis, [name for name, _ in rows])
        axis.set_xlabel(label(key))
        _in_percent(axis.xaxis, key)

    caption = "A dot is one run, a bar the mean."
    return _picture("runs", "Every run", caption, drawn, height=1 + 0.3 * len(rows))


def spectrum(groups: Groups) -> Picture | None:
    """How much of the public gradients lies in how many directions."""
    noted = {
        name: [note for note in runs[0].diagnostics if note.get("eigenvalues")]
        for name, runs in groups.items()
    }
    last = {name: notes[-1] for name, notes in noted.items() if notes}
    if not last:
        return None

    def drawn(axis: Any) -> None:
        for name, note in last.items():
            values = sorted(itertools.chain(*note["eigenvalues"]), reverse=True)
            total = sum(values) or 1.0
            shares = [share / total for share in itertools.accumulate(values)]
            axis.plot(range(1, len(shares) + 1), shares, **_look(name, groups), label=name)
        for rank in {sum(note["rank"]) for note in last.values()}:
            axis.axvline(rank, color=_INK, alpha=0.4, linewidth=1)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        axis.set_ylim(0, 1.02)
        axis.set_xlabel("directions")
        axis.set_ylabel("share of the public gradients")

    caption = (
        "The steeper, the fewer directions hold the gradients, here near the end of training. The "
        "upright line is the rank that was used. From public data and released weights."
    )
    return _picture("spectrum", "Spectrum of the public gradients", caption, drawn)


def noise_parts(groups: Groups) -> Picture | None:
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
            bars = {
                row + (list(lengths).index(kind) - (len(lengths) - 1) / 2) * high: lengths[kind]
                for row, lengths in enumerate(parts.values())
                if kind in lengths
            }
            _bars(axis, bars, kind, number, height=high, digits=0)
        _name_rows(axis, parts)
        axis.margins(x=0.15)
        axis.set_xlabel("length of the noise in one step")

    caption = (
        "Added at each step to a sum of gradients, none of them longer than its clip. A smaller "
        f"bar is not yet a better method: what lies outside a subspace may be lost.{missing}"
    )
    return _picture("noise", "Noise, part by part", caption, drawn, height=0.9 + 0.42 * len(parts))


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
        shown = (("gsd", "GSD (smaller is closer)", 0), ("captured_energy", "captured energy", 2))
        for shift, (key, name, colour) in zip((-0.2, 0.2), shown, strict=True):
            bars = {index + shift: row[key] for index, row in enumerate(rows)}
            _bars(axis, bars, name, colour, height=0.38, digits=2)
        _name_rows(axis, [row["name"] for row in rows])
        axis.set_xlim(0, 1.1)

    title = "How close the public candidates are"
    caption = (
        f"Compared with {candidates['stand_in']}, which are public: nothing was asked of private "
        "records here."
    )
    return _picture("gsd", title, caption, drawn, height=0.8 + 0.5 * len(rows))


def _bars(
    axis: Any, bars: Mapping[float, float], name: str, colour: int, *, height: float, digits: int
) -> None:
    """Horizontal bars at their places, each with its value."""
    paint = _COLOURS[colour % len(_COLOURS)]
    drawn = axis.barh(list(bars), list(bars.values()), height, color=paint, label=name)
    texts = [f"{value:.{digits}f}" for value in bars.values()]
    axis.bar_label(drawn, texts, padding=2, fontsize=8)
    axis.grid(axis="y", visible=False)


def _name_rows(axis: Any, names: Mapping[str, object] | Sequence[str]) -> None:
    short = [n if len(n) <= _LONGEST else n[: _LONGEST - 1] + "…" for n in names]
    axis.set_yticks(range(len(short)), short)
    axis.invert_yaxis()


def _in_percent(axis: Any, key: str) -> None:
    if key.endswith("accuracy"):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 1):g}%"))
        low, high = axis.get_view_interval()
        if high - low < _NARROWEST:  # or chance would look like progress
            axis.set_view_interval(high - _NARROWEST, high)


def _look(name: str, groups: Groups) -> dict[str, str]:
    """A method has one colour in all pictures; dashes are for those after a warm start."""
    methods = list(dict.fromkeys(r[0].method for r in groups.values() if r[0].private_steps))
    run = groups[name][0]
    colour = _COLOURS[methods.index(run.method) % len(_COLOURS)]
    return {"color": colour, "linestyle": "--" if run.warm else "-"}


def label(key: str) -> str:
    """A metric in words."""
    return key.replace("_", " ").capitalize()


def _legend(axis: Any) -> list[dict[str, str]]:
    """What matplotlib would put into a legend: text, colour, and dashes in the way of SVG."""
    found = []
    for handle, text in zip(*axis.get_legend_handles_labels(), strict=True):
        line = handle.patches[0] if hasattr(handle, "patches") else handle
        colour = line.get_facecolor() if hasattr(line, "get_facecolor") else line.get_color()
        colour = "currentColor" if colour == _INK else to_hex(colour)
        dashes = _DASHES.get(line.get_linestyle(), "")
        found.append({"text": text, "colour": colour, "dashes": dashes})
    return found if len(found) > 1 else []


def _picture(
    name: str, title: str, caption: str, drawn: Callable[[Any], None], *, height: float = 2.9
) -> Picture:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.5, height), layout="constrained")
        FigureCanvasSVG(figure)
        axis = figure.subplots()
        drawn(axis)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = _inline(buffer.getvalue(), name, title)
    words = {"name": name, "title": title, "caption": caption, "legend": _legend(axis)}
    return {**words, "svg": svg}


def _inline(text: str, name: str, title: str) -> Markup:
    """An SVG for the middle of a page: names of its own, the page's ink, a label for readers.

    It has no fixed size: the page decides.
    """
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    text = text.replace(_INK, "currentColor")
    opening, rest = text.split(">", 1)
    opening = re.sub(r'\b(width|height)="[^"]*"\s?', "", opening)
    label = Markup('role="img" aria-label="{}"').format(title)
    return Markup(f"{opening.replace('<svg ', f'<svg {label} ', 1)}>{rest}")
