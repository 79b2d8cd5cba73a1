"""A model for use elsewhere, as safetensors or ONNX, beside a model card that carries its ε."""

import json
import shutil
from pathlib import Path

import safetensors.torch
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import nn

from dpspan.app.data import Target, optional
from dpspan.app.run.evaluation import sentences
from dpspan.app.trained import TrainedRun
from dpspan.support.checks import expect
from dpspan.support.files import replacing


def export(run: TrainedRun, to: str, out: str | Path | None = None) -> tuple[Path, ...]:
    """Write the model in another format, its model card and its certificate; the files written.

    Args:
        run: what `dpspan.load_run` gives.
        to: "safetensors", the weights; or "onnx" (the extra `onnx`), from inputs as the model
            takes them to the probabilities of the classes, or to the number that is predicted.
        out: a folder; `export` in that of the run by default.
    """
    expect(to in _WRITERS, f"a format out of {', '.join(_WRITERS)}", to)
    folder = run.folder / "export" if out is None else Path(out)
    expect(folder.resolve() != run.folder.resolve(), "another folder than the run's", str(folder))
    model, card = folder / f"model.{to}", folder / "MODEL_CARD.md"
    price = folder / "model.certificate.json"  # a report would take certificate.json for a run's
    facts = {key: str(run.certificate[key]) for key in ("private", "epsilon", "delta", "adjacency")}
    target = run.config.data.target
    if target is None:
        facts["classes"] = json.dumps(run.classes)
        facts["threshold"] = str(run.config.evaluate.threshold)
    else:
        facts["target"] = str(target)
    with replacing(model, what="the model") as temporary:
        _WRITERS[to](run, temporary, facts)
    loader = PackageLoader("dpspan.app.report")
    template = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True)
    inputs = getattr(run.config.data.private, "inputs", "one array")
    inputs = inputs if run.preprocessing is None else run.preprocessing.used
    columns = inputs if isinstance(inputs, str) else ", ".join(inputs)
    shown = {key: value for key, value in run.metrics.items() if key.startswith("test_")}
    numbers = [f"{k.replace('_', ' ')}: {v:.4g}" for k, v in shown.items() if isinstance(v, float)]
    results = [*numbers, *sentences({k: v for k, v in shown.items() if isinstance(v, dict)})]
    about = {"certificate": run.certificate, "columns": columns, "results": results}
    text = template.get_template("model_card.md.j2").render(run=run, **about)
    with replacing(card, what="the model card") as temporary:
        temporary.write_text(text, encoding="utf-8")
    copies = {"certificate.json": price}
    if run.preprocessing is not None:
        copies["preprocessing.json"] = folder / "preprocessing.json"
    for name, copy in copies.items():
        shutil.copy(run.folder / name, copy)
    return model, card, *copies.values()


def _safetensors(run: TrainedRun, path: Path, facts: dict[str, str]) -> None:
    safetensors.torch.save_model(run.model, str(path), metadata={"format": "pt", **facts})


class _InUnits(nn.Module):
    """Outputs as numbers between the bounds."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._middle, self._half = (target.low + target.high) / 2, (target.high - target.low) / 2

    def forward(self, outputs: torch.Tensor) -> torch.Tensor:
        return self._middle + self._half * outputs.clamp(-1, 1)


def _onnx(run: TrainedRun, path: Path, facts: dict[str, str]) -> None:
    optional("onnxscript", "Exports to ONNX", "onnx")
    if run.sample_shape is None or run.config.features is not None:
        what = "a run of this dpspan, without a `features` section"
        raise ValueError(f"Exports to ONNX need {what}: export to safetensors instead.")
    tokens = getattr(run.config.data.private, "tokens", False)
    target = run.config.data.target
    last: nn.Module = nn.Softmax(dim=1) if target is None else _InUnits(target)
    output = "probabilities" if target is None else "prediction"
    program = torch.onnx.export(
        nn.Sequential(run.model, last).eval(),
        (torch.zeros(2, *run.sample_shape, dtype=torch.int64 if tokens else torch.float32),),
        input_names=["inputs"],
        output_names=[output],
        dynamic_shapes=({0: torch.export.Dim("records")},),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props.update(facts)
    program.save(path, external_data=False)


_WRITERS = {"safetensors": _safetensors, "onnx": _onnx}
