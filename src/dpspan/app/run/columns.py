"""From the plan of columns to their frozen description, made once and kept in the run's folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dpspan.accounting.certificate import sha256_of
from dpspan.accounting.ledger import Ledger
from dpspan.accounting.questions import private_quantiles
from dpspan.app.config import DataSection
from dpspan.app.planned import Planned
from dpspan.app.preprocessing import Preprocessing, Values, numbers
from dpspan.app.run.folder import RunFolder, read_json
from dpspan.app.tables import Table


def frozen_columns(
    data: DataSection, folder: RunFolder | None, open_ledger: Callable[[], Ledger] | None
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
        if any(column.origin == "paid release" for column in kept.columns.values()):
            paid = f"{folder.preprocessing} was released for another data.preprocessing"
            raise ValueError(f"{paid}. Go back to that one, or choose another output folder.")
    ledger = None
    if data.releases:
        if folder is None or open_ledger is None:
            raise ValueError(
                "Bounds of columns are yet to be released, which `dpspan train` does: train first, "
                "or state the bounds."
            )
        if folder.certified:
            begun = f"{folder.path} holds a run that was made without {folder.preprocessing.name}"
            raise ValueError(f"{begun}. Restore that file, or choose another output folder.")
        ledger = open_ledger()
    evidence = _Evidence(data, ledger)
    columns = {
        name: plan.frozen(name, evidence) if isinstance(plan, Planned) else plan
        for name, plan in data.preprocessing.items()
    }
    made = Preprocessing.model_validate({"columns": columns, "planned": planned})
    if ledger is not None and folder is not None:
        folder.write_ledger(ledger)
        folder.write_json(folder.preprocessing, made.document())
    return made


@dataclass(frozen=True)
class _Evidence:
    data: DataSection
    ledger: Ledger | None

    def public(self, column: str) -> Values:
        tables = [each for each in self.data.public.values() if isinstance(each, Table)]
        known = [table for table in tables if column in table.columns]
        if not known:
            raise ValueError(f"No table under data.public has a column '{column}' to learn from.")
        return [value for table in known for value in _values(table, column)]

    def quantiles(
        self, column: str, wanted: tuple[float, ...], bounds: tuple[float, float], epsilon: float
    ) -> tuple[float, ...]:
        assert isinstance(self.data.private, Table)
        private = numbers(_values(self.data.private, column))
        return private_quantiles(
            private, wanted, bounds=bounds, epsilon=epsilon, ledger=self.ledger
        )


def _values(table: Table, column: str) -> Sequence[Any]:
    return [value for piece in table.pieces([column]) for value in piece[column]]
