"""Labels, dates and fields of all items as columns: counts under any filter in milliseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.items import Ids, Item

DATE_FIELD = "taken"
MOST_FIELDS = 24
MOST_VALUES = 200
"""A field with more distinct values is no choice among a few, and is not offered as a filter."""
_NO_DATE = -1

Value = str | int | float | bool


@dataclass(frozen=True)
class ValueColumn:
    """One property of every item, as the number of its value; -1 where an item has none."""

    values: list[Any]
    numbers: NDArray[np.int32]

    def count(self, rows: NDArray[np.int64] | None) -> list[tuple[Any, int]]:
        """How many items have each value, the most frequent first.

        Args:
            rows: only these items; None for all.
        """
        numbers = self.numbers if rows is None else self.numbers[rows]
        counts = np.bincount(numbers[numbers >= 0], minlength=len(self.values)).tolist()
        # Not a mapping: 1 and True are equal, but two values.
        pairs = [pair for pair in zip(self.values, counts, strict=True) if pair[1]]
        return sorted(pairs, key=lambda pair: -pair[1])


@dataclass(frozen=True)
class Columns:
    """The properties of all items with a key.

    Attributes:
        ids: their ids, ascending.
        labels: the first label of each; an item with several counts for each in ``more``.
        more: (item, label) pairs of items with several labels, as rows and numbers of labels.
        months: year × 12 + month (0 to 11) of the date of each; -1 without one.
        fields: columns of the metadata, by name, those with few values.
    """

    ids: Ids
    labels: ValueColumn
    more: tuple[NDArray[np.int64], NDArray[np.int32]]
    months: NDArray[np.int32]
    fields: dict[str, ValueColumn]

    def rows(self, ids: Ids) -> NDArray[np.int64]:
        """Where some items are in the columns; those that are not there are left out."""
        if not len(self.ids):
            return np.zeros(0, dtype=np.int64)
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return places[self.ids[places] == ids]

    def count_labels_of(self, rows: NDArray[np.int64] | None) -> Counter[str]:
        """How many items have each label; the empty text counts those without one."""
        counts = Counter(dict(self.labels.count(rows)))
        items, numbers = self.more
        if rows is not None:
            chosen = np.isin(items, rows)
            numbers = numbers[chosen]
        for number, count in enumerate(np.bincount(numbers, minlength=1).tolist()):
            if count:
                counts[self.labels.values[number]] += count
        return counts

    def count_months(self, rows: NDArray[np.int64] | None) -> dict[str, int]:
        """How many items are of each month, as ``2021-06``, in the order of time."""
        months = self.months if rows is None else self.months[rows]
        found, counts = np.unique(months[months >= 0], return_counts=True)
        return {month_text(m): c for m, c in zip(found.tolist(), counts.tolist(), strict=True)}


def month_text(month: int) -> str:
    """The number of a month as a text.

    >>> month_text(2021 * 12 + 5)
    '2021-06'
    """
    return f"{month // 12:04d}-{month % 12 + 1:02d}"


def read_columns(items: Iterable[Item]) -> Columns:
    """Read the columns of items with ascending ids; those without a key are left out."""
    ids: list[int] = []
    labels = _Growing()
    more_items: list[int] = []
    more_labels: list[int] = []
    months: list[int] = []
    fields: dict[str, _Growing] = {}
    for item in items:
        if item.key is None:
            continue
        row = len(ids)
        ids.append(item.id)
        names = item.labels or ("",)
        labels.add(row, names[0])
        for name in names[1:]:
            more_items.append(row)
            more_labels.append(labels.number(name))
        months.append(_month(item))
        for name, value in item.metadata.items():
            if name == DATE_FIELD or not isinstance(value, str | int | float | bool):
                continue
            if name not in fields and len(fields) < MOST_FIELDS:
                fields[name] = _Growing(MOST_VALUES)
            if name in fields:
                fields[name].add(row, value)
    count = len(ids)
    return Columns(
        np.array(ids, dtype=np.int64),
        labels.column(count),
        (np.array(more_items, dtype=np.int64), np.array(more_labels, dtype=np.int32)),
        np.array(months, dtype=np.int32),
        {name: one.column(count) for name, one in sorted(fields.items()) if one.useful},
    )


class _Growing:
    """A column while it is read; with a bound on the number of values."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._numbers: dict[tuple[type, Value], int] = {}
        self._rows: list[int] = []
        self._values: list[int] = []
        self.useful = True

    def number(self, value: Value) -> int:
        # With its type: 1 and True are equal, but other values.
        return self._numbers.setdefault((type(value), value), len(self._numbers))

    def add(self, row: int, value: Value) -> None:
        if not self.useful:
            return
        self._rows.append(row)
        self._values.append(self.number(value))
        if self._most is not None and len(self._numbers) > self._most:
            self.useful = False
            self._rows, self._values = [], []

    def column(self, count: int) -> ValueColumn:
        numbers = np.full(count, -1, dtype=np.int32)
        numbers[self._rows] = self._values
        return ValueColumn([value for _, value in self._numbers], numbers)


def _month(item: Item) -> int:
    text = item.metadata.get(DATE_FIELD)
    if isinstance(text, str) and len(text) >= 7 and text[4] == "-":
        year, month = text[:4], text[5:7]
        if year.isdecimal() and month.isdecimal() and 1 <= int(month) <= 12:
            return int(year) * 12 + int(month) - 1
    return _NO_DATE


def item_date(item: Item) -> str | None:
    """When an image was taken or, if that is not known, when its file was changed."""
    text = item.metadata.get(DATE_FIELD)
    if isinstance(text, str):
        return text.replace("T", " ")
    if item.mtime_ns is None:
        return None
    try:
        return f"{datetime.fromtimestamp(item.mtime_ns / 1e9, UTC):%Y-%m-%d %H:%M} (file)"
    except (ValueError, OverflowError, OSError):
        return None
