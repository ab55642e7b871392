"""Labels, dates and fields of all items as columns: counts under any filter in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.items import Ids, Item

DATE_FIELD = "taken"
MOST_FIELDS = 24
MOST_VALUES = 200
"""A field with more distinct values is no choice among a few, and is not offered as a filter."""
Rows = NDArray[np.int32]
Chosen = NDArray[np.bool_] | None
"""For each item whether it counts; None for all."""


@dataclass(frozen=True)
class Column:
    """One property: pairs of an item and a value that it has.

    Attributes:
        values: the distinct values.
        rows: (pairs,) the number of the item of each pair, ascending.
        numbers: (pairs,) the number of its value.
    """

    values: list[Any]
    rows: Rows
    numbers: Rows

    def count(self, chosen: Chosen = None) -> list[tuple[Any, int]]:
        """How many items have each value, the most frequent first."""
        numbers = self.numbers if chosen is None else self.numbers[chosen[self.rows]]
        counts = np.bincount(numbers, minlength=len(self.values)).tolist()
        # Not a mapping: 1 and True are equal, but two values.
        pairs = [pair for pair in zip(self.values, counts, strict=True) if pair[1]]
        return sorted(pairs, key=lambda pair: -pair[1])

    def rows_of(self, value: Any) -> Rows:
        """The numbers of the items that have a value."""
        return self.rows[self.numbers == self.values.index(value)]


@dataclass(frozen=True)
class Columns:
    """The properties of all items with a key.

    Attributes:
        ids: their ids, ascending.
        labels: their labels; the empty text for an item without one.
        months: when they were taken, as ``2021-06``; items without a date are left out.
        fields: columns of the metadata, by name, those with few values.
    """

    ids: Ids
    labels: Column
    months: Column
    fields: dict[str, Column]

    def chosen(self, ids: Ids) -> NDArray[np.bool_]:
        """For each item whether it is among some ids."""
        return np.isin(self.ids, ids)

    def count_months(self, chosen: Chosen = None) -> list[tuple[str, int]]:
        """How many items are of each month, in the order of time."""
        return sorted(self.months.count(chosen))


def read_columns(items: Iterable[Item]) -> Columns:
    """Read the columns of items with ascending ids; those without a key are left out."""
    ids: list[int] = []
    labels, months, fields = _Growing(), _Growing(), dict[str, _Growing]()
    for item in items:
        if item.key is None:
            continue
        row = len(ids)
        ids.append(item.id)
        for label in dict.fromkeys(item.labels or ("",)):
            labels.add(row, label)
        for name, value in item.metadata.items():
            if name == DATE_FIELD:
                months.add(row, _month(value))
            elif isinstance(value, str | int | float | bool):
                if name not in fields and len(fields) < MOST_FIELDS:
                    fields[name] = _Growing(MOST_VALUES)
                if name in fields:
                    fields[name].add(row, value)
    few = {name: one.column() for name, one in sorted(fields.items()) if not one.full}
    return Columns(np.array(ids, dtype=np.int64), labels.column(), months.column(), few)


class _Growing:
    """A column while it is read; with more than ``most`` values it is full, and holds nothing."""

    def __init__(self, most: int | None = None) -> None:
        self._most, self.full = most, False
        self._known: dict[tuple[type, Any], int] = {}
        self._rows: list[int] = []
        self._numbers: list[int] = []

    def add(self, row: int, value: Any) -> None:
        if value is None or self.full:
            return
        self._rows.append(row)
        # With its type: 1 and True are equal, but other values.
        self._numbers.append(self._known.setdefault((type(value), value), len(self._known)))
        if self._most is not None and len(self._known) > self._most:
            self.full, self._rows, self._numbers = True, [], []

    def column(self) -> Column:
        rows, numbers = (np.array(part, dtype=np.int32) for part in (self._rows, self._numbers))
        return Column([value for _, value in self._known], rows, numbers)


def _month(value: object) -> str | None:
    """The month of a date; None if it is no date.

    >>> _month("2021-06-15T14:03:22"), _month("2021-13"), _month(7)
    ('2021-06', None, None)
    """
    if not (isinstance(value, str) and len(value) >= 7 and value[4] == "-"):
        return None
    year, month = value[:4], value[5:7]
    known = year.isdecimal() and month.isdecimal() and 1 <= int(month) <= 12
    return f"{year}-{month}" if known else None
