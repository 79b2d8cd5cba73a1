"""The private choice among public data, made once for a run and paid from its budget."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpspan.choose import choose_public
from dpspan.config import Config
from dpspan.ledger import Ledger
from dpspan.run.folder import RunFolder, read_json
from dpspan.run.parts import Parts


def chosen_public(
    config: Config, parts: Parts, folder: RunFolder, ledger: Ledger
) -> dict[str, Any]:
    """What was chosen, as in `choice.json`; chosen now if there is no such file.

    The ledger is on the disk before the choice is.
    """
    assert config.choose is not None
    asked = {
        "settings": config.choose.model_dump(mode="json"),
        "candidates": {name: data.digest for name, data in parts.public.items()},
    }
    if folder.choice.exists():
        made: dict[str, Any] = read_json(folder.choice)
        if made.get("asked") != asked:
            raise ValueError(
                f"{folder.choice} was chosen with other settings or other candidates, and has been "
                "paid for. Go back to those, or choose another output folder."
            )
        return made
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
    folder.write_json(folder.ledger, ledger.state_dict())
    made = {
        "chosen": choice.name,
        "epsilon": choice.epsilon,
        "note": choice.note,
        "asked": asked,
    }
    folder.write_json(folder.choice, made)
    return made
