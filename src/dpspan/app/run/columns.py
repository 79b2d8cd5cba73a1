"""From what is planned for columns to their frozen description, made once and kept with the run."""

from collections.abc import Iterable
from functools import partial

from dpspan.accounting.certificate import sha256_of
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.promises import Budget
from dpspan.app.config import Config
from dpspan.app.data import Source
from dpspan.app.preprocessing import Preprocessing, Values
from dpspan.app.run.folder import ANEW, RunFolder, read_json
from dpspan.app.run.task import FixedNoise
from dpspan.support.checks import expect


def frozen_columns(
    config: Config, folder: RunFolder | None = None, *, pays: bool = False
) -> Preprocessing | None:
    """What becomes of columns: as kept in the folder, or found now; None if nothing is planned.

    A release is on the ledger, and that on the disk, before anything else. It is made once: to make
    it again would be one more.
    """
    data = config.data
    if not data.preprocessing:
        return None
    planned = sha256_of(data.model_dump(mode="json")["preprocessing"])
    if folder is not None and folder.preprocessing.exists():
        kept = Preprocessing.of_document(read_json(folder.preprocessing))
        if kept.planned == planned and data.releases:
            if not read_json(folder.ledger, {"events": ()})["events"]:
                price = f"the price of the bounds in {folder.preprocessing}"
                raise ValueError(f"{folder.ledger} is missing, or lacks {price}. {ANEW}")
            return kept
        if kept.planned == planned and folder.certified:
            return kept  # with a run behind them; else public rows may have changed
        if any(column.origin == "paid release" for column in kept.columns.values()):
            paid = f"{folder.preprocessing} was released for another data.preprocessing"
            raise ValueError(f"{paid}. Go back to that one, or choose another output folder.")
    ledger = Ledger()
    if data.releases:
        if folder is None or not pays or folder.certified:
            raise ValueError(
                "Bounds of columns are yet to be released, which `dpspan train` does, in a folder "
                "without a run. State them, or take them from public rows, for anything else."
            )
        ledger = folder.open_ledger(config.budget.accountant, budget_of(config))
    ask = partial(_values, data.public.values()), partial(_values, [data.private]), ledger
    columns = {name: each.frozen(name, *ask) for name, each in data.preprocessing.items()}
    made = Preprocessing(columns=columns, planned=planned)
    if data.releases and folder is not None:
        folder.write_ledger(ledger)
        folder.keep_columns(made)
    return made


def budget_of(config: Config) -> Budget | FixedNoise:
    """What a run may spend, or the noise that it has whatever that costs."""
    section = config.budget
    if section.epsilon is not None:
        return Budget(epsilon=section.epsilon, delta=section.delta)
    assert section.noise_multiplier is not None  # one of the two is given
    return FixedNoise(noise_multiplier=section.noise_multiplier, delta=section.delta)


def _values(sources: Iterable[Source], column: str) -> Values:
    known = [value for source in sources for value in source.ids(column) or ()]
    expect(bool(known), f"a column '{column}' with values, in data.public or data.private", None)
    return known
