"""`dpspan audit`: the step before a first run, canaries in a rehearsal, an attack on a model."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dpspan.app.cli.app import Json, Quiet, answer, app, check_exists

_AUDITED = "unprivate: an audit (membership inference) of the model was made on private records"
_STEP = "unprivate: an audit of the step was made on private records before the training"
_FOR_YOU = "NOT PRIVATE, for your eyes only"

ConfigFile = Annotated[Path, typer.Argument(help="A configuration; `dpspan init` writes one.")]


class _Audits(TyperGroup):
    """Takes `dpspan audit RUN`, as it was in 0.1, for `dpspan audit membership RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [word for word in args if not word.startswith("-")]
        if words and not set(words) & set(self.commands):
            now = "`dpspan audit RUN` is now `dpspan audit membership RUN`"
            warnings.warn(f"dpspan: {now}, and will be gone in the next release.", stacklevel=2)
            args = ["membership", *args]
        return super().parse_args(ctx, args)


audit = typer.Typer(cls=_Audits, no_args_is_help=True)
app.add_typer(audit, name="audit", help="Is it as private as it says? Measured, not proved.")


def _rehearsal(config: Path, *, stand_ins: bool = False) -> Any:
    from dpspan.app.config import load_config

    settings = load_config(config)  # what is wrong with it is said before anything slow is imported
    from dpspan.app.run import RunFolder
    from dpspan.app.run.rehearsal import Rehearsal

    folder = RunFolder(settings.output.folder)
    return Rehearsal.from_config(settings, folder, stand_ins=stand_ins)


@audit.command()
def step(config: ConfigFile, as_json: Json = False, quiet: Quiet = False) -> None:
    """One step of CONFIG's run: sensitivity, noise and sampler against what is declared.

    For use before a first run; it takes seconds. Nothing is trained or kept, but what it says may
    depend on private records, and the output folder's ledger will mention it. Exit code 1 if
    something was found.
    """
    rehearsal = _rehearsal(config)
    from dpspan.audit import audit_step

    result = audit_step(rehearsal.prepare, rehearsal.loss)
    with rehearsal.folder.locked():
        rehearsal.folder.warn(_STEP)  # on record before anybody sees the outcome
    found = len(result.findings)
    said = f"{found} of {len(result.checks)} checks failed" if found else "Nothing was found"
    end = "Do not train with this." if found else "That proves nothing: it measured one step."
    shown = f"{result}\n{_FOR_YOU}: {said}. {end}"
    answer(result.describe(), shown, as_json=as_json, quiet=quiet)
    if found:
        raise typer.Exit(1)


@audit.command()
def canaries(
    config: ConfigFile,
    count: Annotated[
        int | None, typer.Option("--canaries", min=10, help="How many of each kind.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """A rehearsal of CONFIG's run with canaries: ε is at least so much, with 95 % confidence.

    It is made with records of noise in the place of the private ones, so that the outcome may be
    published: the run's certificate and reports show it. Its model is thrown away. Exit code 1 if
    more was measured than the run's ledger declares.
    """
    rehearsal = _rehearsal(config, stand_ins=True)
    from dpspan.audit import audit_canaries

    result = audit_canaries(
        rehearsal.prepare,
        rehearsal.loss,
        steps=rehearsal.steps,
        delta=rehearsal.delta,
        canaries=count,
        like=rehearsal.like,
    )
    outcome = result.describe()
    del outcome["unprivate"]  # nobody's record was used
    kept = {key: value for key, value in outcome.items() if key != "epsilon"}
    at_least = {"epsilon_at_least": result.epsilon, "confidence": 0.95, "of": rehearsal.of}
    with rehearsal.folder.locked():
        rehearsal.folder.write_audit(canaries={**at_least, **kept})
    bounds = (
        f"ε ≥ {result.epsilon:.2f} from the released gradients (if the noise is Gaussian "
        f"{result.gaussian:.2f}), ε ≥ {result.black_box:.2f} from the final model alone"
    )
    how = f"each with 95 % confidence, {result.canaries} canaries, δ = {result.delta:g}"
    verdict = "as declared" if result.passed else "MORE THAN DECLARED: do not train with this"
    said = f"{bounds}; {how}. Declared: ε = {result.declared:.2f}, so {verdict}."
    answer(outcome, said, as_json=as_json, quiet=quiet)
    if not result.passed:
        raise typer.Exit(1)


@audit.command()
def membership(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Can the members of RUN's training data be told by their loss? The answer is NOT private.

    It is kept in audit.json, and RUN's certificate and reports will say that it was asked for.
    """
    check_exists(run)
    from dpspan.app.config import load_config
    from dpspan.app.run import RunFolder
    from dpspan.app.run.from_config import make_parts, task_of
    from dpspan.app.run.models import load_weights
    from dpspan.audit import membership_inference

    folder = RunFolder(run)
    if not folder.model.exists():
        raise FileNotFoundError(f"{run} holds no finished run: there is no {folder.model.name}.")
    if folder.run.exists() and not folder.config.exists():
        raise ValueError(
            f"{run} is a run of a comparison, which leaves no {folder.config.name} to find its "
            "records by. Audit what `dpspan train` makes of that configuration: one more release."
        )
    settings = load_config(folder.config)
    parts = make_parts(settings, folder, goes_on=True)
    if parts.test is None:
        others = f"others of the same kind: name such data under data.test of {folder.config}"
        raise ValueError(f"The attack compares private records with {others}.")
    load_weights(parts.model, folder.model)
    result = membership_inference(
        parts.model,
        parts.private.tensors,
        parts.test.tensors,
        criterion=task_of(settings, parts.private, None).criterion,
        seed=settings.training.seed,
    )
    outcome = {f"unprivate_{name}": value for name, value in asdict(result).items()}
    with folder.locked():
        folder.warn(_AUDITED)  # on record before anybody sees the outcome
        folder.write_audit(**outcome)
    low, high = result.confidence
    found = (
        f"{_FOR_YOU}: the attack tells {result.success_rate:.1%} right "
        f"(95 % interval {low:.1%} to {high:.1%}; guessing gives 50 %), AUC {result.auc:.3f}. A "
        "high rate proves a leak; a rate near 50 % proves nothing, as better attacks may succeed."
    )
    note = f"{folder.audit} holds this, and must not be published; the certificate mentions it."
    answer({"private": False, **outcome}, found, as_json=as_json, quiet=quiet, note=note)
