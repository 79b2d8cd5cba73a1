"""`dpspan account`: of ε, noise multiplier and epochs, the third from the other two."""

import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.table import Table

import dpspan
from dpspan.accounting.promises import check_promised_delta, warn_of_weaknesses
from dpspan.app.cli.app import Json, Quiet, answer, app, four_digits
from dpspan.support.checks import check_count, expect

_MAY = "; may be repeated."
_MOST_EPOCHS = 10**6


@app.command(name="account")
def account_command(
    delta: Annotated[float, typer.Option(help="δ; well below 1 / number of records.")],
    records: Annotated[int | None, typer.Option(help="Number of private records.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help=f"Expected batch size{_MAY}")] = None,
    sample_rate: Annotated[
        list[float] | None, typer.Option(help="q, instead of records and batch size.")
    ] = None,
    epochs: Annotated[list[int] | None, typer.Option(help=f"Epochs{_MAY}")] = None,
    noise_multiplier: Annotated[list[float] | None, typer.Option(help=f"z{_MAY}")] = None,
    epsilon: Annotated[list[float] | None, typer.Option(help=f"ε{_MAY}")] = None,
    accountant: Annotated[str, typer.Option(help="pld or rdp.")] = "pld",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What training costs: give two of --epsilon, --noise-multiplier and --epochs.

    An option given several times makes a table over all combinations.
    """
    check_promised_delta("--delta", delta)
    rates = _rates(records, batch_size, sample_rate)
    given: dict[str, list[Any] | None]
    given = {"epsilon": epsilon, "noise_multiplier": noise_multiplier, "epochs": epochs}
    missing = [name for name, values in given.items() if not values]
    two = "two of --epsilon, --noise-multiplier and --epochs, to compute the third"
    expect(len(missing) == 1, two, len(given) - len(missing))
    from dpspan.accounting.epsilon import check_accountant

    check_accountant(accountant)
    settings = itertools.product(rates, *(values or [None] for values in given.values()))
    shared: dict[str, Any] = {"delta": delta, "accountant": accountant}
    rows = [{**_row(*setting, **shared), "solved_for": missing[0]} for setting in settings]
    warn_of_weaknesses(max(row["epsilon"] for row in rows), delta, records)
    document = {"adjacency": "add or remove one record", "rows": rows}
    answer(document, _table(rows), as_json=as_json)


def _rates(
    records: int | None, batch_sizes: list[int] | None, sample_rates: list[float] | None
) -> list[float]:
    if sample_rates and not batch_sizes and records is None:
        for rate in sample_rates:
            expect(0 < rate <= 1, "--sample-rate above 0 and at most 1", rate)
        return sample_rates
    if sample_rates or not batch_sizes or records is None:
        raise ValueError("Expected --records and --batch-size, or --sample-rate alone.")
    check_count("--records", records)
    return [min(1.0, check_count("--batch-size", size) / records) for size in batch_sizes]


def _row(
    q: float, epsilon: Any, z: Any, epochs: Any, *, delta: float, accountant: str
) -> dict[str, Any]:
    """One setting; that of ε, noise multiplier and epochs which is None is computed."""
    from dpspan.accounting.epsilon import account
    from dpspan.accounting.events import step_event

    an_epoch = max(1, round(1 / q))
    if epochs is not None:
        check_count("--epochs", epochs)
    if z is None:
        z = dpspan.calibrate(epsilon, delta, q, epochs * an_epoch, accountant=accountant)
    step = step_event(z, q)
    if epochs is None:
        most = dpspan.Budget(epsilon=epsilon, delta=delta).epsilon
        epochs = _largest(
            lambda n: account([(step, n * an_epoch)], delta, accountant).epsilon <= most
        )
    spending = account([(step, epochs * an_epoch)] if epochs else [], delta, accountant)
    return {
        "sample_rate": q,
        "epochs": epochs,
        "steps": epochs * an_epoch,
        "noise_multiplier": z,
        "epsilon": spending.epsilon,
        "delta": delta,
        "accountant": spending.accountant,
    }


def _largest(fits: Callable[[int], bool]) -> int:
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if low > _MOST_EPOCHS:
            budget = "take a smaller ε or less noise, or give --epochs for another of the three"
            raise ValueError(f"That budget lasts for more than {_MOST_EPOCHS:,} epochs: {budget}.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _table(rows: list[dict[str, Any]]) -> Table:
    first = rows[0]
    settings = f"δ = {first['delta']:g}, {first['accountant']}"
    table = Table(title=f"{settings}, add or remove one record, Poisson batches")
    for name in ("sample_rate", "epochs", "steps", "noise_multiplier", "epsilon"):
        heading = {"sample_rate": "q", "epsilon": "ε"}.get(name, name.replace("_", " "))
        style = "bold" if name == first["solved_for"] else ""
        table.add_column(heading, justify="right", style=style)
    for row in rows:
        epsilon = "∞" if math.isinf(row["epsilon"]) else four_digits(row["epsilon"])
        cells = (f"{row['sample_rate']:.6g}", str(row["epochs"]), str(row["steps"]))
        table.add_row(*cells, f"{row['noise_multiplier']:.4f}", epsilon)
    return table
