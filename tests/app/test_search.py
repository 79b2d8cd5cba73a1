"""The search for a learning rate, on scores that are made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest

from dpspan.app.comparison.search import FIRST_SEED, Known, Search, Try

BEGIN = (0.1, 0.3, 0.9)


def concave(optimum: float) -> Callable[[Try], float]:
    """A parabola in the logarithm of the rate."""
    return lambda each: 0.9 - 0.05 * math.log(each.rate / optimum) ** 2


class Made:
    """Scores of what has been trained, by a scorer; what was trained is kept in order."""

    def __init__(self, scorer: Callable[[Try], float]) -> None:
        self.scorer, self.scores = scorer, dict[Try, float]()

    def known(self, each: Try) -> float | None:
        return self.scores.get(each)

    def make(self, tries: Iterable[Try]) -> None:
        for each in tries:
            assert each not in self.scores  # nothing is made twice
            self.scores[each] = self.scorer(each)

    @property
    def short(self) -> list[float]:
        return sorted(each.rate for each in self.scores if each.share < 1)


def ended(search: Search, made: Made, begin: Iterable[float] = BEGIN) -> float:
    """The rate that is found when nothing more is wanted."""
    while wanted := search.wanted(tuple(begin), made.known):
        made.make(wanted)
    return search.best(tuple(begin), made.known)


@pytest.mark.parametrize("optimum", [0.004, 0.02, 0.1, 0.3, 0.55, 0.9, 7.0, 40.0])
def test_the_optimum_is_found_and_is_inside(optimum: float) -> None:
    made = Made(concave(optimum))
    found = ended(Search(tries=7), made)
    assert min(made.short) < found < max(made.short)
    assert abs(math.log(found / optimum)) <= math.log(3) / 2 + 0.01  # nearer than a grid's step
    assert max(made.scores.values()) == made.scorer(Try(found, 1.0, 0))


@pytest.mark.parametrize(("optimum", "further"), [(30.0, 2.7), (0.001, 0.0333)])
def test_the_grid_grows_by_its_own_factor_at_the_end_where_the_best_is(
    optimum: float, further: float
) -> None:
    made = Made(concave(optimum))
    made.make(Search().wanted(BEGIN, made.known))
    assert made.short == list(BEGIN)
    assert Search().wanted(BEGIN, made.known) == [Try(further, 0.25, FIRST_SEED)]


def test_a_finalist_at_an_end_is_not_the_last_word_there_either() -> None:
    """The best of three is in the middle, so the second best never has a neighbour outside."""
    made = Made(concave(0.4))
    made.make(Search().wanted(BEGIN, made.known))
    assert [each.rate for each in Search().wanted(BEGIN, made.known)] == [2.7]
    assert [each.rate for each in Search(finalists=1).wanted(BEGIN, made.known)] == [0.52]


@pytest.mark.parametrize("tries", [3, 5, 7])
def test_every_method_has_as_many_tries(tries: int) -> None:
    search, counts = Search(tries=tries), set()
    diverging: list[Callable[[Try], float]] = [
        lambda each: math.nan,
        lambda each: 0.1,
        lambda each: math.nan if each.rate > 0.05 else 0.5,
    ]
    for scorer in [*map(concave, (1e-3, 0.1, 0.3, 0.4, 100.0)), *diverging]:
        made = Made(scorer)
        ended(search, made)
        counts.add((len(made.short), len(made.scores)))
    assert counts == {(tries, tries + 6)}


def test_the_best_two_are_decided_between_in_full_and_by_all_seeds() -> None:
    """Short trainings prefer 0.9, full ones 0.3, but for the first seed."""

    def reached(each: Try) -> float:
        if each.share < 1:
            return {0.3: 0.7, 0.9: 0.8}.get(each.rate, 0.1)
        return 0.6 + 0.2 * (each.rate == 0.3) - 0.3 * (each == Try(0.3, 1.0, FIRST_SEED))

    made = Made(reached)
    assert ended(Search(tries=5), made) == 0.3
    full = [each for each in made.scores if each.share == 1]
    seeds = range(FIRST_SEED, FIRST_SEED + 3)
    assert {(each.rate, each.seed) for each in full} == {(r, s) for r in (0.3, 0.9) for s in seeds}
    assert {each.seed for each in made.scores if each.share < 1} == {FIRST_SEED}


def test_without_finalists_the_short_trainings_decide() -> None:
    made = Made(concave(0.3))
    assert ended(Search(tries=3, finalists=1), made) == 0.3
    assert len(made.scores) == 3


def test_a_try_that_is_as_long_as_a_final_one_is_not_made_again() -> None:
    made = Made(concave(0.3))
    ended(Search(tries=4, share=1.0), made)
    assert len(made.scores) == 4 + 2 * 2


def test_at_the_cap_the_best_may_be_at_an_end() -> None:
    made = Made(concave(1e6))
    assert ended(Search(tries=5), made) == max(made.short) == 8.1


class TestWhatDiverged:
    def test_is_worse_than_anything(self) -> None:
        made = Made(lambda each: math.nan if each.rate > 0.1 else 0.0)
        assert ended(Search(tries=5), made) <= 0.1

    def test_sends_the_search_to_smaller_rates(self) -> None:
        made = Made(lambda each: math.nan if each.rate > 0.01 else 0.5 + each.rate)
        found = ended(Search(tries=7), made)
        assert min(made.short) < found < 0.01

    def test_ends_the_search_like_any_other_if_all_do(self) -> None:
        made = Made(lambda each: math.nan)
        assert ended(Search(tries=5), made) == min(made.short)

    def test_with_one_of_the_seeds_loses_the_final(self) -> None:
        def reached(each: Try) -> float:
            lost = each == Try(0.3, 1.0, FIRST_SEED + 2)
            return math.nan if lost else concave(0.3)(each)

        made = Made(reached)
        assert ended(Search(tries=4), made) != 0.3

    def test_beside_the_best_is_not_where_the_grid_grows(self) -> None:
        """Beyond 0.9 everything diverges too."""
        made = Made(lambda each: {0.1: math.nan, 0.3: 0.5}.get(each.rate, math.nan))
        made.make(Search().wanted(BEGIN, made.known))
        (further,) = Search().wanted(BEGIN, made.known)
        assert 0.1 < further.rate < 0.9


def test_ties_go_to_the_smaller_rate() -> None:
    made = Made(lambda each: 0.5)
    made.make(Search().wanted(BEGIN, made.known))
    assert Search().best(BEGIN, made.known) == 0.1
    assert [each.rate for each in Search().wanted(BEGIN, made.known)] == [0.0333]


def test_what_is_left_is_spent_around_the_best_in_the_wider_gap() -> None:
    made = Made(concave(0.35))
    found = ended(Search(tries=7), made)
    assert [each.rate for each in made.scores][3:7] == [2.7, 0.52, 0.173, 0.395]
    assert found == 0.395


def test_rates_that_cannot_be_told_apart_end_the_search() -> None:
    made = Made(concave(1.0))
    ended(Search(tries=50, finalists=1), made, (0.999, 1.0, 1.001))
    assert len(made.short) < 50


@pytest.mark.parametrize("interrupted_after", range(13))
def test_a_search_goes_on_where_it_was(interrupted_after: int) -> None:
    """One that is killed after any of its trainings asks for the others, and finds the same."""
    search, whole = Search(tries=7), Made(concave(5.0))
    expected = ended(search, whole)
    assert len(whole.scores) == 13
    made = Made(concave(5.0))
    made.scores = dict(list(whole.scores.items())[:interrupted_after])
    assert ended(search, made) == expected
    assert made.scores == whole.scores


def test_what_was_tried_elsewhere_does_not_lead_the_search() -> None:
    """Scores of rates that this search did not come to are stored, and are not its own."""
    made = Made(concave(0.3))
    made.scores[Try(50.0, 0.25, FIRST_SEED)] = 1.0
    assert ended(Search(tries=5), made) == 0.3


def test_finals_that_are_there_decide_though_more_tries_are_wanted() -> None:
    search = Search(tries=4)
    made = Made(lambda each: concave(0.3)(each) if each.share < 1 else -each.rate)
    ended(search, made)
    more = Search(tries=9)
    assert more.wanted(BEGIN, made.known)
    assert more.best(BEGIN, made.known) == search.best(BEGIN, made.known) != 0.3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tries": 0}, "tries"),
        ({"share": 0.0}, "Expected 0 < share <= 1, got 0.0"),
        ({"share": math.nan}, "Expected share to be a number, got nan"),
        ({"finalists": 0}, "finalists"),
        ({"seeds": 1.5}, "seeds"),
    ],
)
def test_what_cannot_be_searched_is_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Search(**wrong)  # type: ignore[arg-type]


def test_the_search_asks_only_for_scores() -> None:
    """Whoever has scores can search: a dictionary's `get` is enough."""
    scores = {Try(rate, 0.25, FIRST_SEED): 0.5 for rate in BEGIN}
    known: Known = scores.get
    assert len(Search(tries=4).wanted(BEGIN, known)) == 1
