"""The speed and memory part of docs/results.md, from the stored measurements alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import growth

RESULTS = Path(__file__).parent / "results"
MODELS = {
    "cnn": "CNN, 26 k",
    "resnet20": "ResNet-20, 270 k",
    "wrn28-4": "WRN-28-4, 5.9 M",
    "minilm": "MiniLM, 22.7 M",
    "lstm": "LSTM, 105 k",
    "lstm-2-both-ways": "LSTM of two layers, both ways, 599 k",
    "gru": "GRU, 80 k",
    "rnn": "RNN, 30 k",
}
HEAD = """## Speed and memory

One step of each method, as a multiple of the non-private step of the same private samples: time /
peak memory. Methods with public data run the model on those too; "all samples" is what a
non-private step of private and public ones costs. `python -m benchmarks.methods`,
`benchmarks.recurrent`, `benchmarks.floors`, `benchmarks.growth`, `benchmarks.startup` and
`benchmarks.gsd` measure; how, and what the bars were, is in [performance](performance.md). Steps
are timed without loader and accounting, Opacus' ones too. RGP can be faster than the plain step
because the summed gradients of whole weights are never computed.
"""


def page(docs: Path, results: Path = RESULTS) -> str:
    """Tables of methods, growth, bounds, GSD and starts; what was not measured is not there."""
    parts = [HEAD]
    for name in ("methods-cpu", "methods-cuda", "recurrent-cpu", "recurrent-cuda"):
        path = results / f"{name}.json"
        if path.exists():
            parts.append(methods_table(json.loads(path.read_text())))
    for device in ("cpu", "cuda"):
        path = results / f"floors-{device}.json"
        if path.exists():
            parts.append(floors_table(json.loads(path.read_text())))
    for device in ("cpu", "cuda"):
        path = results / f"growth-{device}.json"
        if path.exists():
            found = json.loads(path.read_text())
            parts.append(growth_table(found))
            growth.plot(found, docs / f"growth-{device}.png")
            parts.append(f"![growth of a step](growth-{device}.png)\n")
    bounds = sorted(results.glob("bounds-*.json"))
    parts += [bounds_table(json.loads(path.read_text())) for path in bounds]
    timed = [gsd_line(json.loads(path.read_text())) for path in sorted(results.glob("gsd-*.json"))]
    if timed:
        parts.append(f"**GSD**: {'; '.join(timed)}.\n")
    started = sorted(results.glob("startup-*.json"))
    parts += [startup_table(json.loads(path.read_text())) for path in started]
    return "\n".join(parts) if len(parts) > 1 else ""


def bounds_table(results: dict[str, Any]) -> str:
    """How much longer certified norms are than exact ones, and what rounding costs GEP."""
    rows = results["rows"]
    cells = {(r["model"], r["method"], r["precision"]): r for r in rows if r["method"] != "GEP"}
    precisions = list(dict.fromkeys(precision for _, _, precision in cells))
    lines = [
        f"**How tight the bounds are** ({results['environment']['gpu'] or 'CPU'}; "
        "`python -m benchmarks.bounds`): the largest ratio of a sample's certified norm and its "
        "exact one, in float64 from the same factors. PDP-SGD and mirror descent have DP-SGD's.\n",
        _line(["", *precisions]),
        _line(["---"] * (len(precisions) + 1)),
    ]
    for model, method in dict.fromkeys((model, method) for model, method, _ in cells):
        found = [f"{cells[model, method, p]['largest']:.5f}" for p in precisions]
        lines.append(_line([f"{MODELS.get(model, model)}: {method}", *found]))
    lines += [
        "\nGEP on ResNet-20, k = 1,000 directions of m = 2,000 public gradients, during a run: the "
        "residual's bound, the error of the summed residual, and the share of fresh private "
        "gradients that the directions capture, beside the exact ones'.\n",
        _line(["step", "", "bound / norm", "error of the sum", "directions", "energy", "exact"]),
        _line(["---"] * 7),
    ]
    for r in (r for r in rows if r["method"] == "GEP"):
        found = [f"{r['largest']:.5f}", f"{100 * r['sum_error']:.3f} %", str(r["directions"])]
        energies = [f"{r['energy']:.4f}", f"{r['best_energy']:.4f}"]
        lines.append(_line([f"{r['step']:,}", r["precision"], *found, *energies]))
    return "\n".join([*lines, ""])


def methods_table(results: dict[str, Any]) -> str:
    """Contenders by models."""
    models = results["models"]
    heads = [f"{MODELS.get(m, m)}; {v['batch'].replace(' public', '')}" for m, v in models.items()]
    lines = [f"**{_place(results)}**\n", _line(["", *heads]), _line(["---"] * (len(heads) + 1))]
    names = dict.fromkeys(name for model in models.values() for name in model["contenders"])
    for name in names:
        cells = [_factors(model["contenders"].get(name, {})) for model in models.values()]
        lines.append(_line([name, *cells]))
    plain = [
        f"{MODELS.get(name, name).split(',')[0]} {_milliseconds(model):.1f}"
        for name, model in models.items()
    ]
    lines.append(f"\nThe non-private step in milliseconds: {', '.join(plain)}.")
    for name, model in models.items():
        notes = {k: c["note"] for k, c in model["contenders"].items() if c.get("note")}
        lines += [f"{MODELS.get(name, name)}, {k}: {note}." for k, note in notes.items()]
        if model.get("note"):
            lines.append(f"{MODELS.get(name, name)}: {model['note']}.")
    lines.append("")
    return "\n".join(lines)


def floors_table(results: dict[str, Any]) -> str:
    """Work, floor and time by model and method."""
    best = results["peaks"]
    lines = [
        f"**Floors, {_place(results)}**: products and convolutions at {best['flops'] / 1e12:,.2f} "
        f"TFLOP/s, memory at {best['bytes'] / 1e9:,.0f} GB/s, as measured there; the floor of "
        "a step is the longer of the two, an estimate\n",
        _line(["", "", "GFLOP", "GB", "floor, ms", "measured, ms", "measured / floor"]),
        _line(["---"] * 7),
    ]
    for model, entry in results["models"].items():
        for name, each in entry["contenders"].items():
            floor = max(each["products_ms"], each["memory_ms"])
            bound = "products" if each["products_ms"] > each["memory_ms"] else "memory"
            cells = [
                f"{each['gigaflops']:,.1f}",
                f"{each['gigabytes']:,.2f}",
                f"{floor:,.2f} ({bound})",
                f"{each['milliseconds']:,.2f}",
                f"{each['milliseconds'] / floor:,.1f}",
            ]
            lines.append(_line([MODELS.get(model, model), name, *cells]))
    return "\n".join(lines) + "\n"


def startup_table(results: dict[str, Any]) -> str:
    """Every phase before the first step, by format and number of records."""
    formats, settings = results["formats"], results["settings"]
    sizes = list(dict.fromkeys(size for found in formats.values() for size in found))
    lines = [
        "### Before the first step\n",
        f"**{_place(results)}**: seconds of the processor / largest resident size in MB, libraries "
        f"included; records of {settings['columns']} numbers, {settings['public']:,} public ones "
        "(`python -m benchmarks.startup`). The first `make_private` and the first step include "
        "what happens once in a process.\n",
        _line(["", "", *(f"{int(size):,} records" for size in sizes)]),
        _line(["---"] * (len(sizes) + 2)),
    ]
    for kind, found in formats.items():
        names = dict.fromkeys(name for each in found.values() for name in each["phases"])
        for name in names:
            reached = [found[size]["phases"][name] if size in found else None for size in sizes]
            cells = [
                f"{r['processor_seconds']:.2f} / {r['peak'] / 1e6:,.0f}" if r else ""
                for r in reached
            ]
            lines.append(_line([kind, name, *cells]))
    return "\n".join(lines) + "\n"


def growth_table(results: dict[str, Any]) -> str:
    """Slopes."""
    lines = [f"**Growth, {_place(results)}**: slope of time / of memory in logarithms\n"]
    lines += [_line(["what grows", "from … to", "contender", "slope"]), _line(["---"] * 4)]
    for title, curve in results["curves"].items():
        ends = f"{curve['x'][0]:,} … {curve['x'][-1]:,}"
        for name, slopes in curve["slopes"].items():
            cell = f"{slopes['milliseconds']:.2f} / {slopes['bytes']:.2f}"
            lines.append(_line([title, ends, name, cell]))
    return "\n".join(lines) + "\n"


def gsd_line(results: dict[str, Any]) -> str:
    """Seconds and gigabytes."""
    settings = results["settings"]
    return (
        f"{int(settings['samples']):,} + {int(settings['samples']):,} images, {settings['model']}, "
        f"k = {settings['rank']}: {results['seconds']:.1f} s and "
        f"{results['memory']['peak'] / 1e9:.2f} GB on {_place(results)}"
    )


def _place(results: dict[str, Any]) -> str:
    environment = results["environment"]
    if environment["gpu"]:
        tf32 = results.get("tf32", results.get("settings", {}).get("tf32"))
        return f"{environment['gpu']}{', TF32' if tf32 in (True, 'True') else ''}"
    return f"{environment['cpu']}, {environment['threads']} threads"


def _factors(contender: dict[str, Any]) -> str:
    if "time" not in contender:
        return "does not run" if "reason" in contender else ""
    time, memory = contender["time"]["of_plain"], contender.get("memory", {}).get("of_plain")
    return f"{time:.2f} / {'—' if memory is None else f'{memory:.2f}'}"


def _milliseconds(model: dict[str, Any]) -> float:
    median: float = model["contenders"]["non-private"]["time"]["median"]
    return median


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
