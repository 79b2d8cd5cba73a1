"""From what is planned for columns to their frozen description, made once and kept with the run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dpspan.accounting.certificate import sha256_of
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.questions import private_quantiles
from dpspan.app.config import DataSection
from dpspan.app.preprocessing import Preprocessing, numbers
from dpspan.app.run.folder import RunFolder, read_json
from dpspan.app.tables import Table


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
    evidence = _Evidence(data, ledger)
    columns = {name: each.frozen(name, evidence) for name, each in data.preprocessing.items()}
    made = Preprocessing(columns=columns, planned=planned)
    if ledger is not None and folder is not None:
        folder.write_ledger(ledger)
        folder.write_json(folder.preprocessing, made.document())
    return made


@dataclass(frozen=True)
class _Evidence:
    data: DataSection
    ledger: Ledger | None

    def public(self, column: str) -> Sequence[Any]:
        tables = [each for each in self.data.public.values() if isinstance(each, Table)]
        known = [value for table in tables for value in table.ids(column) or ()]
        if not known:
            raise ValueError(f"No table under data.public has a column '{column}' to learn from.")
        return known

    def released(self, column: str, wanted: Sequence[float], **how: Any) -> tuple[float, ...]:
        private = self.data.private.ids(column)
        if private is None:
            raise ValueError(f"{self.data.private.path} has no column '{column}'.")
        return private_quantiles(numbers(private), wanted, **how, ledger=self.ledger)
