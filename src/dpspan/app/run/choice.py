"""The private choice among public data, made once for a run and paid from its budget."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpspan.accounting.ledger import Ledger
from dpspan.app.config import Config
from dpspan.app.run.folder import RunFolder, read_json
from dpspan.app.run.run_inputs import Parts
from dpspan.choose import choose_public


def chosen_public(
    config: Config, parts: Parts, folder: RunFolder, ledger: Ledger
) -> dict[str, Any]:
    """What was chosen, as in `choice.json`; chosen now if there is no such file.

    The ledger is on the disk before the choice is. A run that has begun chooses no more: what it
    has certified would leave the choice out.
    """
    assert config.choose is not None
    asked = {
        "settings": config.choose.model_dump(mode="json"),
        "candidates": {name: data.digest for name, data in parts.public.items()},
    }
    if config.features is not None:
        asked["features"] = config.features.model_dump(mode="json")
    if folder.choice.exists():
        made: dict[str, Any] = read_json(folder.choice)
        if made.get("asked") != asked:
            raise ValueError(
                f"{folder.choice} was chosen with other settings or other candidates, and has been "
                "paid for. Go back to those, or choose another output folder."
            )
        return made
    if folder.certified:
        raise ValueError(
            f"{folder.path} holds a run that was made without {folder.choice.name}, and a choice "
            "made now would be missing from its certificate. Restore that file if it was lost, or "
            "choose another output folder."
        )
    settings = config.choose
    choice = choose_public(
        parts.model,
        nn.CrossEntropyLoss(),
        parts.loader(config.training.batch_size),
        parts.public,
        ledger=ledger,
        epsilon=settings.epsilon,
        rank=settings.rank,
        samples=settings.samples,
        mechanism=settings.mechanism,
        records=config.data.records,
        seed=config.training.seed,
    )
    folder.write_ledger(ledger)
    made = {
        "chosen": choice.name,
        "epsilon": choice.epsilon,
        "note": choice.note,
        "asked": asked,
    }
    folder.write_json(folder.choice, made)
    return made
