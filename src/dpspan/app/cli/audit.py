"""`dpspan audit`: attack the model of a run by membership inference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpspan.app.cli.app import Json, Quiet, app, check_exists, out, print_json, say
from dpspan.support.strict_json import plain

_NOTE = "unprivate: an audit (membership inference) of the model was made on private records"


@app.command(name="audit")
def audit_command(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Can the members of RUN's training data be told by their loss? The answer is NOT private.

    It is kept in audit.json, and RUN's certificate and reports will say that it was asked for.
    """
    check_exists(run)
    from dataclasses import asdict

    from dpspan.app.config import load_config
    from dpspan.app.run.folder import RunFolder
    from dpspan.app.run.from_config import load_weights, make_parts
    from dpspan.audit import membership_inference

    folder = RunFolder(run)
    if not folder.model.exists():
        raise FileNotFoundError(f"{run} holds no finished run: there is no {folder.model.name}.")
    if (run / "run.json").exists() and not folder.config.exists():
        raise ValueError(
            f"{run} is a run of a comparison, which leaves no {folder.config.name} to find its "
            "records by. Audit what `dpspan train` makes of that configuration: one more release."
        )
    settings = load_config(folder.config)
    kept = folder.kept_features(wanted=settings.features is not None)
    parts = make_parts(settings, features=kept)
    if parts.test is None:
        raise ValueError(
            "The attack compares private records with others of the same kind: name such data "
            f"under data.test of {folder.config}."
        )
    load_weights(parts.model, folder.model)
    result = membership_inference(
        parts.model, parts.private.tensors, parts.test.tensors, seed=settings.training.seed
    )
    outcome = {f"unprivate_{name}": value for name, value in asdict(result).items()}
    with folder.locked():
        folder.warn(_NOTE)  # on record before anybody sees the outcome
        folder.write_json(folder.audit, plain(outcome))
    if as_json:
        print_json({"private": False, **outcome})
        return
    low, high = result.confidence
    out().print(
        f"NOT PRIVATE, for your eyes only: the attack tells {result.success_rate:.1%} right "
        f"(95 % interval {low:.1%} to {high:.1%}; guessing gives 50 %), AUC {result.auc:.3f}. A "
        "high rate proves a leak; a rate near 50 % proves nothing, as better attacks may succeed.",
        soft_wrap=True,
    )
    if not quiet:
        say(f"{folder.audit} holds this, and must not be published; the certificate mentions it.")
