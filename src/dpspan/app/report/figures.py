"""The pictures of a report, as SVG that takes its text colour from the page; words are there."""

import io
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, StrMethodFormatter

from dpspan.app.comparison.results import label
from dpspan.app.report.reading import Found, Run

Groups = Mapping[str, Sequence[Run]]
Picture = dict[str, Any]  # the drawing, and its legend as text of the page

_INK = "#010203"  # of report.mplstyle; replaced by the colour of the page's text
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a7a2e", "#7f7f7f")
_SHADES = (0.75, 0.4, 0.2)  # of bars: a colour is a method's, in all pictures
_DASHES = {"--": "5 3", ":": "2 2"}
_LONGEST = 26  # letters of a name beside an axis
_NARROWEST = 0.1  # of an axis with accuracies


@matplotlib.rc_context(fname=Path(__file__).with_name("report.mplstyle"))
def pictures(
    found: Found, metric: str | None, loss: str | None, values: Mapping[str, list[float]]
) -> dict[str, Picture]:
    """All that there is something to draw for, by name; `values` are what each group reached."""
    groups = found.groups
    private = {name: runs for name, runs in groups.items() if runs[0].private_steps}
    finite = all(math.isfinite(run.epsilon) for runs in private.values() for run in runs)
    several = len(found.runs) > 1 and any(values.values())
    axes = {
        "bounds": _bounds(private) if private and finite else None,
        "accuracy": _curves(groups, groups, "epsilon", metric) if metric else None,
        "runs": _every_run(values, groups, metric) if metric and several else None,
        "training": _curves(groups, private, "epoch", loss) if loss else None,
        "gsd": _nearness(found.candidates["rows"]) if found.candidates else None,
        "spectrum": _spectrum(groups),
        "noise": _noise_parts(private),
    }
    return {name: _picture(name, axis) for name, axis in axes.items() if axis is not None}


def _curves(groups: Groups, drawn: Groups, x: str, y: str) -> Any:
    """A line for each group that is drawn; None if none has more than a point."""
    curves = {name: _mean_curve(runs, x, y) for name, runs in drawn.items()}
    if not any(len(curve) > 1 for curve in curves.values()):
        return None
    axis = _axis()
    for name, curve in curves.items():
        if curve and not groups[name][0].private_steps:
            axis.axhline(curve[-1][1], **_look(name, groups), label=name)
        elif curve:
            axis.plot(*zip(*curve, strict=True), **_look(name, groups), label=name)
    axis.set_ylabel(label(y))
    _in_percent(axis.yaxis, y)
    axis.set_xlabel({"epsilon": "ε spent so far"}.get(x, x))
    if x == "epoch":
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return axis


def _mean_curve(runs: Sequence[Run], x: str, y: str) -> list[tuple[float, float]]:
    """The mean over runs at each point that all of them have."""
    curves = [[(float(line[x]), value) for line, value in run.curve(y)] for run in runs]
    return [
        (statistics.mean(a for a, _ in points), statistics.mean(b for _, b in points))
        for points in zip(*curves, strict=False)
    ]


def _every_run(values: Mapping[str, list[float]], groups: Groups, key: str) -> Any:
    """Each run as a dot."""
    rows = {name: reached for name, reached in values.items() if reached}
    axis = _axis(height=1 + 0.3 * len(rows))
    for index, (name, reached) in enumerate(rows.items()):
        colour = _look(name, groups)["color"]
        axis.plot(reached, [index] * len(reached), "o", color=colour, alpha=0.6, markersize=5)
        axis.plot([statistics.mean(reached)], [index], "|", color=colour, markersize=14, mew=2)
    _name_rows(axis, rows)
    axis.set_xlabel(label(key))
    _in_percent(axis.xaxis, key)
    return axis


def _bounds(groups: Groups) -> Any:
    """From what ε is at least, as an audit has measured, to what it is at most, as was proved."""
    rows: dict[tuple[str, ...], list[str]] = {}  # those that promise the same share one
    for name, runs in groups.items():
        audited = [run.audit_bound for run in runs if run.audit_bound is not None]
        most = f"≤ {max(run.epsilon for run in runs):.3g}"
        rows.setdefault((most, *(f"≥ {bound:.3g}" for bound in audited[:1])), []).append(name)
    axis = _axis(height=0.75 + 0.3 * len(rows))
    for index, bounds in enumerate(rows):
        ends = [float(text[2:]) for text in bounds]
        look = {"color": _INK, "markersize": 14, "mew": 3, "linewidth": 3}
        axis.plot(ends, [index] * len(ends), "|-", **look)
        for text, value in zip(bounds, ends, strict=True):
            place = {"ha": "center", "textcoords": "offset points", "fontsize": 8}
            axis.annotate(text, (value, index), (0, 9), **place)
    _name_rows(axis, [n[0] if len(n) == 1 else f"{len(n)} rows" for n in rows.values()])
    axis.set_xlim(0, 1.15 * axis.get_xlim()[1])
    axis.set_ylim(len(rows) - 0.5, -0.8)
    axis.set_xlabel("ε")
    return axis


def _spectrum(groups: Groups) -> Any:
    """How much of the public gradients lies in how many directions, near the end of training."""
    noted = {
        name: [note for note in runs[0].diagnostics if note.get("eigenvalues")]
        for name, runs in groups.items()
    }
    last = {name: notes[-1] for name, notes in noted.items() if notes}
    if not last:
        return None
    axis = _axis()
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
    return axis


def _noise_parts(groups: Groups) -> Any:
    """The length of the noise in one step, part by part."""
    parts = {name: runs[0].noise for name, runs in groups.items() if runs[0].noise}
    if sum(map(len, parts.values())) < 2:  # one bar says nothing
        return None
    axis = _bars(parts, height=0.9 + 0.42 * len(parts), digits=0)
    axis.margins(x=0.15)
    axis.set_xlabel("length of the noise in one step")
    return axis


def _nearness(rows: Sequence[Mapping[str, Any]]) -> Any:
    shown = {"gsd": "GSD (smaller is closer)", "captured_energy": "captured energy"}
    near = {row["name"]: {text: row[key] for key, text in shown.items()} for row in rows}
    axis = _bars(near, height=0.8 + 0.5 * len(rows), digits=2)
    axis.set_xlim(0, 1.1)
    return axis


def _bars(rows: Mapping[str, Mapping[str, float]], *, height: float, digits: int) -> Any:
    """Horizontal bars with their values, in each row one for each kind that it has."""
    axis, high = _axis(height), 0.8 / max(map(len, rows.values()))
    for number, kind in enumerate(dict.fromkeys(itertools.chain(*rows.values()))):
        bars = {
            row + (list(values).index(kind) - (len(values) - 1) / 2) * high: values[kind]
            for row, values in enumerate(rows.values())
            if kind in values
        }
        shade = {"color": _INK, "alpha": _SHADES[number % len(_SHADES)]}
        drawn = axis.barh(list(bars), list(bars.values()), high, label=kind, **shade)
        axis.bar_label(drawn, fmt=f"%.{digits}f", padding=2, fontsize=8)
    axis.grid(axis="y", visible=False)
    _name_rows(axis, rows)
    return axis


def _name_rows(axis: Any, names: Iterable[str]) -> None:
    short = [n if len(n) <= _LONGEST else n[: _LONGEST - 1] + "…" for n in names]
    axis.set_yticks(range(len(short)), short, parse_math=False)  # a name with $ is no formula
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
    if not run.private_steps:
        return {"color": _INK, "linestyle": ":"}
    colour = _COLOURS[methods.index(run.method) % len(_COLOURS)]
    return {"color": colour, "linestyle": "--" if run.warm else "-"}


def _legend(axis: Any) -> list[dict[str, Any]]:
    """What matplotlib would put into a legend: text, colour, and dashes in the way of SVG."""
    found = []
    for handle, text in zip(*axis.get_legend_handles_labels(), strict=True):
        line = handle.patches[0] if hasattr(handle, "patches") else handle
        colour = line.get_facecolor() if hasattr(line, "get_facecolor") else line.get_color()
        colour = "currentColor" if to_hex(colour) == _INK else to_hex(colour)
        dashes = _DASHES.get(line.get_linestyle(), "")
        entry = {"text": text, "colour": colour, "dashes": dashes, "opacity": line.get_alpha() or 1}
        found.append(entry)
    return found if len(found) > 1 else []


def _in_words(axis: Any) -> str:
    """What the picture shows, for those who do not see it: ends of lines, values of rows."""
    said: dict[str, list[str]] = {}
    rows = {index: tick.get_text() for index, tick in enumerate(axis.get_yticklabels())}
    percent = "accuracy" in f"{axis.get_xlabel()} {axis.get_ylabel()}".lower()

    def number(value: float) -> str:
        return f"{100 * value:.1f} %" if percent else f"{value:.3g}"

    for line in axis.lines:
        name, x, y = line.get_label(), line.get_xdata(), line.get_ydata()
        if not name.startswith("_"):
            said[name] = [f"ends at {number(float(y[-1]))}"]
        elif len(set(y)) == 1 and float(y[0]) in rows and line.get_marker() != "None":
            said.setdefault(rows[int(y[0])], []).extend(number(float(value)) for value in x)
    for bars in axis.containers:
        for bar in bars.patches:
            row = rows[round(bar.get_y() + bar.get_height() / 2)]
            said.setdefault(row, []).append(f"{bars.get_label()} {number(bar.get_width())}")
    return "; ".join(f"{name}: {', '.join(values)}" for name, values in said.items())


def _axis(height: float = 2.9) -> Any:
    return Figure(figsize=(4.5, height), layout="constrained").subplots()


def _picture(name: str, axis: Any) -> Picture:
    """For the middle of a page, which decides on its size: names of its own, the page's ink."""
    buffer = io.StringIO()
    axis.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    _, tag, drawn = buffer.getvalue().partition("<svg")
    text = re.sub(r"<metadata>.*?</metadata>", "", tag + drawn, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    text = text.replace(_INK, "currentColor")
    opening, rest = text.split(">", 1)
    opening = re.sub(r'\b(width|height)="[^"]*"\s?', "", opening)
    labels = f'aria-labelledby="title-{name}" aria-describedby="words-{name}"'
    opening = opening.replace("<svg ", f'<svg role="img" {labels} ', 1)
    drawing = Markup(f"{opening}>{rest}")
    return {"svg": drawing, "legend": _legend(axis), "words": _in_words(axis)}
