"""What others report for the same data: their figures, and what they had that our rows have not."""

from __future__ import annotations

from collections.abc import Sequence

from dpspan.app.section import Section


class Anchor(Section):
    """One result of the field; `more` is what it had."""

    who: str
    figures: str
    more: str


def table(anchors: Sequence[Anchor]) -> str:
    """Below the table that they belong to."""
    lines = [
        "| what others report (not run here) | | with what our rows have not |",
        "|---|---|---|",
    ]
    lines += [f"| {each.who} | {each.figures} | {each.more} |" for each in anchors]
    return "\n".join(["", *lines, ""])
