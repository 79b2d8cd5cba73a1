"""The unit of privacy: which records are one person's, where a person may have several.

An id is a number or a text. Errors show none: they are somebody's.
"""

import datetime
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from dpspan.support.checks import check_count, expect

RECORDS_PER_UNIT = 16
_KINDS = (str, bytes, int, float, datetime.date, uuid.UUID)
_APART = (str, bytes, datetime.datetime, datetime.date, uuid.UUID)  # numbers are of one kind
Ids = Sequence[Any] | Callable[[Any], Any]  # one a record, or a function of a record


@dataclass(frozen=True, eq=False, repr=False)
class Units:
    """The records of each unit, of which a step uses at most `most`, drawn anew every time."""

    members: tuple[np.ndarray[Any, Any], ...]  # positions in the dataset
    most: int

    @classmethod
    def of(cls, ids: Any, most: int, *, records: int, name: str = "unit") -> Self:
        if isinstance(ids, cls) and len(ids.owners) == records:
            return ids
        most = check_count(f"records_per_{name.removesuffix('s')}", most)
        sized = hasattr(ids, "__len__") and not isinstance(ids, str | bytes | dict)
        expect(sized, f"{name} to hold one id for each record, or to be a function of one", ids)
        each_one = f"one id in {name} for each of the {records} records"
        expect(len(ids) == records, each_one, len(ids))
        listed = ids.tolist() if hasattr(ids, "tolist") else ids
        plain = [_plain(each, place, name) for place, each in enumerate(listed)]
        if len(set(map(_kind, plain))) > 1:
            raise ValueError(
                f"Ids in {name} are of several kinds, texts and numbers say: with '7' and 7 one "
                "person would be two. Make all of them texts, or all numbers, or tuples alike."
            )
        numbers: dict[Any, int] = {}
        owner = np.array([numbers.setdefault(each, len(numbers)) for each in plain], dtype=np.int64)
        order = np.argsort(owner, kind="stable")
        return cls(tuple(np.split(order, np.bincount(owner).cumsum()[:-1])), most)

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def owners(self) -> np.ndarray[Any, Any]:
        """Of each record: the number of its unit."""
        owners = np.empty(sum(map(len, self.members)), dtype=np.int64)
        for number, own in enumerate(self.members):
            owners[own] = number
        return owners

    @cached_property
    def sizes(self) -> np.ndarray[Any, Any]:
        """How many records of each unit a step uses."""
        return np.minimum([len(own) for own in self.members], self.most)

    def drawn(self, unit: int, seed: Sequence[int]) -> list[int]:
        """The records of a unit that a step uses; other units have no influence on which."""
        own = self.members[unit]
        if len(own) > self.most:
            # One above: numpy takes no notice of zeros at the end of a short seed.
            generator = np.random.default_rng([*seed, unit + 1])
            own = np.sort(generator.choice(own, self.most, replace=False))
        found: list[int] = own.tolist()
        return found


def _plain(each: Any, place: int, name: str) -> Any:
    """An id that is equal to another exactly where they mean the same."""
    if hasattr(each, "tolist"):  # of numpy or torch
        each = each.tolist()
        each = each[0] if isinstance(each, list) and len(each) == 1 else each
    if isinstance(each, tuple):
        return tuple(_plain(part, place, name) for part in each)
    if each is None or (isinstance(each, _KINDS) and (each != each or each in ("", b""))):
        raise ValueError(
            f"Record {place} has no id in {name}: whose it is must be known, or it could be a part "
            "of several units. Give it an id, one of its own if nobody else's record it is."
        )
    if not isinstance(each, _KINDS):
        raise TypeError(
            f"Expected ids in {name} to be numbers or texts, or tuples of them, got a "
            f"{type(each).__name__} for record {place}: two that mean the same must be equal."
        )
    return each


def _kind(each: Any) -> Any:
    """What an id must have in common with the others, so that what looks alike is equal."""
    if isinstance(each, tuple):
        return tuple(map(_kind, each))
    return next((kind for kind in _APART if isinstance(each, kind)), int)
