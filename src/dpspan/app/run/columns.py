"""From what is planned for columns to their frozen description, made once and kept with the run."""

from collections.abc import Callable
from functools import partial
from typing import Any

from dpspan.accounting.certificate import sha256_of
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.questions import private_quantiles
from dpspan.app.config import DataSection
from dpspan.app.preprocessing import Preprocessing, Values, numbers
from dpspan.app.run.folder import RunFolder, read_json
from dpspan.support.checks import expect


def frozen_columns(
    data: DataSection,
    folder: RunFolder | None = None,
    open_ledger: Callable[[], Ledger] | None = None,
) -> Preprocessing | None:
    """What becomes of columns: as kept in the folder, or found now; None if nothing is planned.

    Releases need a folder, and a ledger, which is on the disk before what was released is. To make
    them again would be one more release.
    """
    if not data.preprocessing:
        return None
    planned = sha256_of(data.model_dump(mode="json")["preprocessing"])
    if folder is not None and folder.preprocessing.exists():
        kept = Preprocessing.of_document(read_json(folder.preprocessing))
        if kept.planned == planned:
            return kept
        if "paid release" in kept.origins():
            paid = f"{folder.preprocessing} was released for another data.preprocessing"
            raise ValueError(f"{paid}. Go back to that one, or choose another output folder.")
    ledger = None
    if data.releases:
        if folder is None or open_ledger is None or folder.certified:
            raise ValueError(
                "Bounds of columns are yet to be released, which `dpspan train` does, in a folder "
                "without a run. State them, or take them from public rows, for anything else."
            )
        ledger = open_ledger()
    ask = partial(_public, data), partial(_released, data, ledger)
    columns = {name: each.frozen(name, *ask) for name, each in data.preprocessing.items()}
    made = Preprocessing(columns=columns, planned=planned)
    if ledger is not None and folder is not None:
        folder.write_ledger(ledger)
        folder.write_json(folder.preprocessing, made.document())
    return made


def _public(data: DataSection, column: str) -> Values:
    known = [value for table in data.public.values() for value in table.ids(column) or ()]
    expect(bool(known), f"a table under data.public with a column '{column}'", None)
    return known


def _released(
    data: DataSection, ledger: Ledger | None, column: str, *wanted: Any, **how: Any
) -> tuple[float, ...]:
    private = data.private.ids(column)
    if private is None:
        raise ValueError(f"{data.private.path} has no column '{column}'.")
    return private_quantiles(numbers(private), *wanted, **how, ledger=ledger)
