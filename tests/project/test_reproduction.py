"""The table of what reproduces: its verdicts follow from figures, and its rows exist."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments import anchors, reproduction, spectra
from experiments.catalogue import load
from experiments.claims import CLAIMS
from experiments.reproduction import (
    NOT,
    NOT_RUN,
    REPRODUCED,
    SHORTER,
    SMALLER,
    UNSURE,
    Beats,
    Cell,
    Claim,
    Costs,
    Evidence,
    FewerSteps,
    Flat,
    Orders,
    Reaches,
    Rises,
    Said,
    Stored,
    TablesAhead,
)

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
HIGH, LOW = Cell("gep-cifar10", ("GEP",), 2.0), Cell("gep-cifar10", ("DP-SGD",), 2.0)


class Made(Stored):
    """Figures that are made up, by row."""

    def __init__(self, epochs: int = 30, **shares: list[float]) -> None:
        super().__init__(RESULTS)
        self.made, self.took = {k.replace("_", "-"): v for k, v in shares.items()}, epochs

    def shares(self, cell: Cell) -> list[float]:
        return self.made.get(cell.rows[0], [])

    def runs(self, cell: Cell) -> tuple[str, list[dict[str, Any]]]:
        return cell.rows[0], [{"rate": 0.1} for _ in self.shares(cell)]

    def epochs(self, cell: Cell) -> int:
        return self.took


def around(mean: float, spread: float = 0.002) -> list[float]:
    return [mean - spread, mean, mean + spread]


def cells_of(evidence: Evidence) -> list[Cell]:
    found: list[Cell] = []
    for field in dataclasses.fields(evidence):  # type: ignore[arg-type]
        value = getattr(evidence, field.name)
        found += [value] if isinstance(value, Cell) else []
        found += [cell for _, cell in value] if isinstance(evidence, Rises) else []
    return found


class TestVerdicts:
    @pytest.mark.parametrize(
        ("reached", "epochs", "verdict"),
        [
            (0.70, 30, REPRODUCED),
            (0.692, 30, REPRODUCED),  # less than a point below
            (0.75, 30, REPRODUCED),
            (0.688, 30, SHORTER),
            (0.688, 200, NOT),
        ],
    )
    def test_of_a_figure(self, reached: float, epochs: int, verdict: str) -> None:
        found = Reaches(HIGH, 70.0, 200).measured(Made(epochs, GEP=around(reached)))
        assert found.verdict == verdict
        assert found.paper == "70"
        assert float(found.difference) == pytest.approx(100 * reached - 70, abs=0.06)

    @pytest.mark.parametrize(
        ("first", "gain", "epochs", "verdict"),
        [
            (around(0.66), 16.0, 200, REPRODUCED),
            (around(0.66), None, 10, REPRODUCED),
            (around(0.55), 16.0, 200, SMALLER),
            (around(0.55), 16.0, 30, f"{SMALLER}; {SHORTER}"),
            (around(0.52, 0.1), None, 200, UNSURE),
            (around(0.52, 0.1), None, 30, f"{UNSURE}; {SHORTER}"),
            ([0.66], 16.0, 200, UNSURE),  # one seed tells nothing
            (around(0.40), None, 200, NOT),
            (around(0.40), 16.0, 30, SHORTER),
        ],
    )
    def test_of_a_gain(
        self, first: list[float], gain: float | None, epochs: int, verdict: str
    ) -> None:
        stored = Made(epochs, GEP=first, DP_SGD=around(0.5))
        assert Beats(HIGH, LOW, gain, 200).measured(stored).verdict == verdict

    @pytest.mark.parametrize(
        ("loss", "epochs", "verdict"),
        [(0.02, 5, REPRODUCED), (0.04, 5, SHORTER), (0.04, 50, NOT), (-0.01, 5, REPRODUCED)],
    )
    def test_of_a_loss_which_is_to_be_small(self, loss: float, epochs: int, verdict: str) -> None:
        stored = Made(epochs, GEP=around(0.9 - loss), DP_SGD=around(0.9))
        assert Costs(HIGH, LOW, 1.9, 50).measured(stored).verdict == verdict

    def test_of_an_order(self) -> None:
        cells = (("a", LOW), ("b", HIGH))
        assert Rises(cells).measured(Made(GEP=[0.6], DP_SGD=[0.5])).verdict == REPRODUCED
        assert Rises(cells).measured(Made(GEP=[0.4], DP_SGD=[0.5])).verdict == NOT

    @pytest.mark.parametrize(
        "evidence", [Reaches(HIGH, 70.0), Beats(HIGH, LOW), Costs(HIGH, LOW, 1.0, 5)]
    )
    def test_of_nothing(self, evidence: Evidence) -> None:
        assert evidence.measured(Made()).verdict == NOT_RUN

    def test_of_correlations(self) -> None:
        down = [5.0, 4.0, 3.0, 2.0, 1.0]
        assert reproduction._spearman(down, [1, 2, 3, 4, 5]) == (-1.0, 1 / 120)
        rho, chance = reproduction._spearman(down, [1, 2, 3, 5, 4])
        assert rho == pytest.approx(-0.9)
        assert chance == pytest.approx(5 / 120)  # the best order, and four neighbours exchanged


def test_rows_of_equal_length_are_compared() -> None:
    """GEP at the paper's epochs is no evidence against DP-SGD at thirty."""
    long = Cell("gep-cifar10", ("GEP, the paper's recipe", "GEP"), 2.0)
    other = Cell("gep-cifar10", ("DP-SGD, the paper's epochs", "DP-SGD"), 2.0)

    class Without(Stored):
        def __init__(self, *missing: str) -> None:
            super().__init__(RESULTS)
            self.missing = missing

        def runs(self, cell: Cell) -> tuple[str, list[dict[str, Any]]]:
            there = [row for row in cell.rows if row not in self.missing]
            return (there or cell.rows)[0], [{}] if there else []

    assert Without("DP-SGD, the paper's epochs").both(long, other)[0].rows == ("GEP",)
    assert Without("GEP, the paper's recipe").both(long, other)[1].rows == ("DP-SGD",)
    assert Without().both(long, other)[0].rows == ("GEP, the paper's recipe",)


class TestClaims:
    def test_every_paper_has_some(self) -> None:
        assert {claim.paper for claim in CLAIMS} == {
            "PDP-SGD",
            "GEP",
            "RGP",
            "noisy AdaGrad",
            "GSD",
        }

    @pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.paper}: {claim.says}")
    def test_what_they_look_up_exists(self, claim: Claim) -> None:
        assert claim.evidence
        for evidence in claim.evidence:
            for cell in cells_of(evidence):
                experiment: Any = load(cell.experiment)
                assert set(cell.rows) <= set(experiment.rows)
                assert cell.target in experiment.targets.values
            if isinstance(evidence, Flat):
                assert {evidence.method, evidence.against} <= set(load("dimension").rates)  # type: ignore[union-attr]
            if isinstance(evidence, FewerSteps):
                assert {evidence.method, evidence.against} <= set(spectra.METHODS)
            if isinstance(evidence, TablesAhead):
                assert {evidence.method, evidence.other} <= set(load("tables").rates)  # type: ignore[union-attr]
            if isinstance(evidence, Orders):
                assert load(evidence.experiment).kind == "choosing"

    def test_figures_are_the_ones_in_the_tables(self) -> None:
        """Where the experiment knows the paper's figure, the claim has the same."""
        compared = 0
        for claim in CLAIMS:
            for evidence in claim.evidence:
                if isinstance(evidence, Reaches):
                    experiment: Any = load(evidence.cell.experiment)
                    for row in evidence.cell.rows:
                        known = experiment.rows[row].paper.get(evidence.cell.target)
                        compared += known is not None
                        assert known in (None, evidence.figure), (claim.says, row)
        assert compared > 10

    def test_without_results_nothing_is_said(self, tmp_path: Path) -> None:
        stored = Stored(tmp_path)
        for claim in CLAIMS:
            assert claim.line(stored).endswith("|  |")  # and no reason is given
            for evidence in claim.evidence:
                if not isinstance(evidence, Said):
                    assert evidence.measured(stored).verdict == NOT_RUN

    def test_parts_that_differ_are_named(self) -> None:
        evidence = (Said("ε = 2", "1", "1", REPRODUCED), Said("ε = 8", "2", "1", NOT))
        claim = Claim(paper="p", says="says", where="Table 1", evidence=evidence, setting="other")
        assert claim.line(Stored(RESULTS)) == (
            "| p | says (ε = 2, ε = 8) | Table 1 | 1 / 2 | 1 / 1; other |  | "
            "**reproduced** (ε = 2); **not reproduced** (ε = 8) |  |"
        )


@pytest.mark.parametrize(("verdict", "given"), [(NOT, True), (REPRODUCED, False), (NOT_RUN, False)])
def test_a_reason_is_given_where_it_is_asked_for(verdict: str, given: bool) -> None:
    evidence = (Said("", "1", "1", verdict),)
    about: Any = {"paper": "p", "says": "says", "where": "", "evidence": evidence}
    line = Claim(**about, reason=lambda stored: "because").line(Stored(RESULTS))
    assert ("because" in line) is given


def test_what_others_report() -> None:
    text = anchors.table([anchors.Anchor(who="A", figures="1 at ε = 2", more="more data")])
    assert "| A | 1 at ε = 2 | more data |" in text
