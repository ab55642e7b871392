"""Tie groups, the cut at rank K, and the sums behind average precision."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TieGroups:
    """The tie groups of some queries, nearest first; groups may be empty.

    Attributes:
        items: (queries, groups) items in each group.
        relevant: (queries, groups) items of the group that share a label with the query.
        weight: (queries, groups) sum of the shared labels over the group.
        gain: (queries, groups) sum of ``2 ** shared - 1`` over the group.
        grades: (queries, most) items of the whole ranking sharing 1, 2, … labels.
    """

    items: Counts
    relevant: Counts
    weight: Counts
    gain: Floats
    grades: Counts

    @classmethod
    def from_counts(cls, items: Counts, grades: Counts) -> TieGroups:
        """Build from items (queries, groups) and grades (queries, groups, most)."""
        most = grades.shape[2]
        if most == 1:
            relevant = grades[:, :, 0]
            return cls(items, relevant, relevant, relevant.astype(np.float64), grades.sum(axis=1))
        shared = np.arange(1, most + 1)
        return cls(
            items=items,
            relevant=grades.sum(axis=2),
            weight=grades @ shared,
            gain=grades @ (2.0**shared - 1),
            grades=grades.sum(axis=1),
        )

    def of(self, rows: NDArray[np.bool_]) -> TieGroups:
        """Return the groups of the queries marked in ``rows`` (queries,)."""
        return TieGroups(*(getattr(self, field.name)[rows] for field in fields(self)))


def harmonic(n: int) -> Floats:
    """Return the harmonic numbers H(0) to at least H(n).

    >>> harmonic(3)[:4].round(4).tolist()
    [0.0, 1.0, 1.5, 1.8333]
    """
    return _harmonic(max(10, int(n).bit_length()))


@functools.lru_cache(maxsize=2)
def _harmonic(log_size: int) -> Floats:
    # extended precision, because differences of neighbours are multiplied by large counts
    terms = 1 / np.arange(1, (1 << log_size) + 1, dtype=np.longdouble)
    return np.concatenate([[0.0], np.cumsum(terms)]).astype(np.float64)


def _reciprocals(after: Counts, many: Counts, table: Floats) -> Floats:
    """Return the sum of 1 / rank over the ``many`` ranks that follow rank ``after``."""
    return np.where(many == 1, 1.0 / (after + 1), table[after + many] - table[after])


def expected_sum(
    items: Counts,
    relevant: Counts,
    weight: Floats | Counts,
    before: Counts,
    weight_before: Counts,
    inside: Counts,
    table: Floats,
) -> Floats:
    """Return the expected sum of (weight up to the rank) / rank over a group's relevant ranks.

    Only the first ``inside`` ranks of the group count. With weight = relevant this is the sum of
    precisions that average precision averages.
    """
    pair = weight * (relevant - 1) / np.maximum(items - 1, 1)
    constant = relevant * weight_before + weight - pair * (before + 1)
    total = inside * pair + constant * _reciprocals(before, inside, table)
    return total / np.maximum(items, 1)


def first_sum(relevant: Counts, before: Counts, rel_before: Counts, table: Floats) -> Floats:
    """Return the sum of precisions when a group's relevant items come first."""
    return relevant + (rel_before - before) * _reciprocals(before, relevant, table)


def last_sum(
    items: Counts, relevant: Counts, before: Counts, rel_before: Counts, table: Floats
) -> Floats:
    """Return the sum of precisions when a group's relevant items come last."""
    return first_sum(relevant, before + items - relevant, rel_before, table)


class Cut:
    """Tie groups split at rank ``top``: whole groups above the cut, at most one group across it.

    Attributes:
        groups: The tie groups.
        before: (queries, groups) items before each group.
        rel_before: (queries, groups) relevant items before each group.
        inside: (queries, groups) items of each group above the cut.
        rows: (n,) queries that have a group across the cut.
        table: Harmonic numbers.
    """

    def __init__(self, groups: TieGroups, top: Counts) -> None:
        items = groups.items
        self.groups = groups
        self.before = before_each(items)
        self.rel_before = before_each(groups.relevant)
        self.inside = np.clip(top[:, None] - self.before, 0, items)
        partial = (self.inside > 0) & (self.inside < items)
        self.rows = np.flatnonzero(partial.any(axis=1))
        self._at = partial.argmax(axis=1)
        self.table = harmonic(int(items.sum(axis=1).max(initial=1)))

    def above(self, values: Floats | Counts) -> Floats:
        """Sum values (queries, groups) over the groups wholly above the cut, (queries,)."""
        return np.where(self.inside == self.groups.items, values, 0.0).sum(axis=1)

    def across(self, values: Counts, rows: NDArray[np.intp]) -> Counts:
        """Return the values (queries, groups) of the group across the cut, for the given rows."""
        return values[rows, self._at[rows]]

    def crossing(self, rows: NDArray[np.intp]) -> tuple[Counts, Counts, Counts, Counts, Counts]:
        """Return the counts of the group across the cut, for the given rows.

        They are its items, its relevant items, and its items above the cut, then the fewest and the
        most relevant items among those.
        """
        groups = self.groups
        n, r, m = (self.across(x, rows) for x in (groups.items, groups.relevant, self.inside))
        return n, r, m, np.maximum(0, m - (n - r)), np.minimum(m, r)

    def expected_sums(self, weight: Counts) -> Floats:
        """Return :func:`expected_sum` of every group up to the cut, (queries, groups)."""
        return expected_sum(
            self.groups.items,
            self.groups.relevant,
            weight,
            self.before,
            before_each(weight),
            self.inside,
            self.table,
        )


def before_each(counts: Counts) -> Counts:
    """Return the sum of the counts (queries, groups) before each group."""
    return np.cumsum(counts, axis=1) - counts


def over(numerator: Floats | Counts, denominator: Counts | Floats) -> Floats:
    """Divide; 0 where the denominator is 0."""
    return np.divide(
        numerator, denominator, out=np.zeros(np.shape(numerator)), where=denominator > 0
    )
