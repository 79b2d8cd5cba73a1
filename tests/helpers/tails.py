"""Does noise have the tails of a normal law? Counts of rare numbers, within binomial bounds."""

from __future__ import annotations

from scipy import stats

TAILS = (5.0, 5.5, 5.8, 6.0)


def tails(draw, total: int, piece: int) -> dict[float, int]:
    counts = dict.fromkeys(TAILS, 0)
    for _ in range(total // piece):
        size = draw(piece).abs()
        large = size[size > TAILS[0]]
        for at in TAILS:
            counts[at] += int((large > at).sum())
    return counts


def check_tails(counts: dict[float, int], total: int) -> None:
    """Two-sided counts within binomial bounds that fail once in 10⁵ each; the draws are seeded."""
    for at, count in counts.items():
        law = stats.binom(total, 2 * stats.norm.sf(at))
        assert law.ppf(5e-6) <= count <= law.isf(5e-6), (at, count, law.mean())
