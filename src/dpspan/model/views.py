"""In which order the rows of several views of each record stand."""

from __future__ import annotations

from torch import Tensor

_ENOUGH, _SURE = 32, 0.9  # rows that are not equal to their record: so many, and this share


def order_of_views(given: Tensor, rows: Tensor, views: int) -> str | None:
    """'record' (all rows of one record, then the next), 'view', or None if it cannot be seen.

    `given` is what the loader gave, n records or n × views rows of them; `rows` is what was made of
    it. Augmented rows are not equal to their record, but nearer to it than to another.
    """
    if rows.shape[:1] != (len(given) * views,) or given.dtype != rows.dtype:
        return None
    given = given.detach().to(rows.device)
    if given.shape[1:] == rows.shape[1:]:
        given = given.unsqueeze(1).expand(-1, views, *given.shape[1:])
    elif given.shape[1:] != (views, *rows.shape[1:]):
        return None
    by_record, by_view = (
        (rows.detach().double() - order.flatten(0, 1).double()).view(len(rows), -1).norm(dim=1)
        for order in (given, given.transpose(0, 1))
    )
    for name, near, far in ("record", by_record, by_view), ("view", by_view, by_record):
        nearer, decisive = int((near < far).sum()), int((near != far).sum())
        equal = not bool((near > 0).any())
        if nearer and (equal or (decisive >= _ENOUGH and nearer >= _SURE * decisive)):
            return name
    return None
