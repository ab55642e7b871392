"""Metrics over tie groups in closed form.

A query's ranking is a row of tie groups, nearest first. Every order inside a group is equally
likely, so a metric has a distribution. This module computes its mean (``expected``) and its bounds
from the counts of :class:`TieGroups`; no function looks at a single item.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fisherhash.evaluation.groups import (
    Counts,
    Cut,
    Floats,
    TieGroups,
    before_each,
    expected_sum,
    first_sum,
    last_sum,
    over,
)
from fisherhash.evaluation.inputs import Denominator

_CHUNK = 1 << 21


def average_precision_bounds(
    groups: TieGroups, top: Counts, denominator: Denominator
) -> tuple[Floats, Floats]:
    """Return the least and greatest average precision over all orders inside ties, (queries,).

    Both are reached by some order, at every cut and with either denominator:

    * Moving a relevant item ahead of an irrelevant one never lowers the sum of precisions. With a
      denominator that does not depend on the order, the bounds are therefore "relevant last" and
      "relevant first".
    * With the number found as denominator, the order of the group across the cut also decides
      how many relevant items, ``x``, are found. For a fixed ``x`` the bounds are as above. As a
      function of ``x`` the best value first falls, then rises (each further item adds a precision
      no smaller than the one before), so its maximum is at an end of the range. The worst value
      also falls, then rises; bisection on the sign of the step finds its minimum.

    >>> groups = TieGroups.from_counts(np.array([[2]]), np.array([[[1]]]))
    >>> [float(b[0]) for b in average_precision_bounds(groups, np.array([2]), "found")]
    [0.5, 1.0]
    """
    cut = Cut(groups, top)
    r, table = groups.relevant, cut.table
    high = cut.above(first_sum(r, cut.before, cut.rel_before, table))
    low = cut.above(last_sum(groups.items, r, cut.before, cut.rel_before, table))
    divisor = cut.above(r) if denominator == "found" else np.minimum(top, r.sum(axis=1))
    lower, upper = over(low, divisor), over(high, divisor)
    rows = cut.rows
    _, _, m, fewest, most = cut.crossing(rows)
    before, rel_before = cut.across(cut.before, rows), cut.across(cut.rel_before, rows)
    low, high = low[rows], high[rows]
    if denominator != "found":
        lower[rows] = over(low + last_sum(m, fewest, before, rel_before, table), divisor[rows])
        upper[rows] = over(high + first_sum(most, before, rel_before, table), divisor[rows])
        return lower, upper
    best = [
        over(high + first_sum(x, before, rel_before, table), rel_before + x) for x in (fewest, most)
    ]
    upper[rows] = np.maximum(*best)
    x = _worst_found(fewest, most, rel_before, top[rows], low, table)
    lower[rows] = over(low + last_sum(m, x, before, rel_before, table), rel_before + x)
    return lower, upper


def _worst_found(
    fewest: Counts, most: Counts, rel_before: Counts, top: Counts, low: Floats, table: Floats
) -> Counts:
    """Return the number found in the group across the cut that minimises the worst value.

    One more item lowers the worst value exactly while ``step > 0``, and ``step`` only falls.
    """
    left, right = fewest.copy(), most.copy()
    while (left < right).any():
        x = (left + right) // 2
        found = np.maximum(rel_before + x, 1)
        recent = table[top] - table[top - x]
        step = 1 - (rel_before + 1) / np.maximum(top - x, 1)
        step = step - (top * recent + rel_before - low) / found
        # nothing found has the value 0, and no order can be below it
        falls = (step > 0) & (rel_before + x > 0)
        moving = left < right
        left = np.where(moving & falls, x + 1, left)
        right = np.where(moving & ~falls, x, right)
    return left


def expected_average_precision(
    groups: TieGroups, top: Counts, denominator: Denominator, weighted: bool = False
) -> Floats:
    """Return each query's average precision, averaged over all orders inside ties, (queries,).

    Args:
        groups: The rankings.
        top: (queries,) ranks that count, at most the number of items.
        denominator: ``"found"`` or ``"min(K, relevant)"``.
        weighted: Average the cumulative gain instead of the precision (weighted mAP).

    Two items of equal distance, one of them relevant: the average of 1 and 1/2.

    >>> groups = TieGroups.from_counts(np.array([[2]]), np.array([[[1]]]))
    >>> float(expected_average_precision(groups, np.array([2]), "found")[0])
    0.75
    """
    cut = Cut(groups, top)
    weight = groups.weight if weighted else groups.relevant
    terms = cut.expected_sums(weight)
    if denominator != "found":
        return over(terms.sum(axis=1), np.minimum(top, groups.relevant.sum(axis=1)))
    whole = cut.above(terms)
    result = over(whole, cut.above(groups.relevant))
    weight_before = before_each(weight)
    widest = int(10 * np.sqrt(cut.across(cut.inside, cut.rows).max(initial=1)) + 4)
    step = max(1, _CHUNK // widest)
    for i in range(0, len(cut.rows), step):
        rows = cut.rows[i : i + step]
        r, m = cut.across(groups.relevant, rows), cut.across(cut.inside, rows)[:, None]
        mean_weight = over(cut.across(weight, rows), r)[:, None]
        x, chance = _hypergeometric(cut, rows)
        sums = expected_sum(
            m,
            x,
            x * mean_weight,
            cut.across(cut.before, rows)[:, None],
            cut.across(weight_before, rows)[:, None],
            m,
            cut.table,
        )
        found = cut.across(cut.rel_before, rows)[:, None] + x
        result[rows] = (chance * over(whole[rows, None] + sums, found)).sum(axis=1)
    return result


def _hypergeometric(cut: Cut, rows: NDArray[np.intp]) -> tuple[Counts, Floats]:
    """Return the numbers found in the group across the cut and their probabilities.

    Both are (queries, width). Values further than 5 sqrt(m) from the mean are left out: by
    Hoeffding's inequality their total probability is below 4e-22.
    """
    n, r, m, fewest, most = cut.crossing(rows)
    reach = 5 * np.sqrt(m)
    mean = m * r / n
    fewest = np.maximum(fewest, np.floor(mean - reach).astype(np.int64))
    most = np.minimum(most, np.ceil(mean + reach).astype(np.int64))
    x = fewest[:, None] + np.arange(int((most - fewest).max()) + 1)
    valid = x <= most[:, None]
    x = np.where(valid, x, most[:, None])
    n, r, m = n[:, None], r[:, None], m[:, None]
    up = ((r - x) * (m - x)).astype(np.float64)
    down = ((x + 1) * (n - r - m + x + 1)).astype(np.float64)
    ratio = np.divide(up, down, out=np.ones_like(up), where=valid & (up > 0))
    logs = np.zeros_like(up)
    np.cumsum(np.log(ratio[:, :-1]), axis=1, out=logs[:, 1:])
    logs[~valid] = -np.inf
    chance = np.exp(logs - logs.max(axis=1, keepdims=True))
    return x, chance / chance.sum(axis=1, keepdims=True)


def expected_found(groups: TieGroups, ranks: Counts, total: int, weighted: bool = False) -> Floats:
    """Return the expected relevant items among the first ``ranks`` items, (queries, ranks).

    Inside a tie, a sum over the first ranks is linear in the rank.

    Args:
        groups: The rankings.
        ranks: (ranks,) numbers of items.
        total: Number of database items.
        weighted: Sum the shared labels of the items instead of counting the relevant ones.

    Three tied items, one of them relevant: 1/3 is expected at rank 1, 2/3 up to rank 2.

    >>> groups = TieGroups.from_counts(np.array([[3]]), np.array([[[1]]]))
    >>> expected_found(groups, np.array([1, 2, 3]), 3).round(3).tolist()
    [[0.333, 0.667, 1.0]]
    >>> groups = TieGroups.from_counts(np.array([[2]]), np.array([[[0, 1]]]))
    >>> expected_found(groups, np.array([1, 2]), 2, weighted=True).tolist()
    [[1.0, 2.0]]
    """
    queries = len(groups.items)
    edge = np.zeros((queries, 1), dtype=np.int64)
    reached = np.cumsum(groups.items, axis=1)
    summed = np.cumsum(groups.weight if weighted else groups.relevant, axis=1)
    # all queries on one long axis, each with an end point, need only one call
    x = np.hstack([edge, reached, edge + total]) + np.arange(queries)[:, None] * (total + 1)
    y = np.hstack([edge, summed, summed[:, -1:]])
    at = ranks + np.arange(queries)[:, None] * (total + 1)
    return np.interp(at.ravel(), x.ravel(), y.ravel()).reshape(queries, len(ranks))


def expected_ndcg(groups: TieGroups, rank: int) -> Floats:
    """Return the expected normalised discounted cumulative gain at ``rank``, (queries,).

    The gain of an item is ``2 ** shared - 1``, the discount ``1 / log2(1 + rank)``.

    >>> groups = TieGroups.from_counts(np.array([[1, 1]]), np.array([[[0], [1]]]))
    >>> round(float(expected_ndcg(groups, 2)[0]), 4)
    0.6309
    """
    table = _discounts(max(10, int(groups.items.sum(axis=1).max(initial=1)).bit_length()))

    def discounts(counts: Counts) -> Floats:
        ends = np.cumsum(counts, axis=1)
        return table[np.minimum(ends, rank)] - table[np.minimum(ends - counts, rank)]

    reached = (groups.gain * discounts(groups.items) / np.maximum(groups.items, 1)).sum(axis=1)
    best_first = groups.grades[:, ::-1]
    gains = 2.0 ** np.arange(best_first.shape[1], 0, -1) - 1
    return over(reached, (discounts(best_first) * gains).sum(axis=1))


@functools.lru_cache(maxsize=2)
def _discounts(log_size: int) -> Floats:
    terms = 1 / np.log2(np.arange(2, (1 << log_size) + 2))
    return np.concatenate([[0.0], np.cumsum(terms)])


@dataclass(frozen=True)
class WithinGroups:
    """Metrics of all items up to each group, (queries, groups) each.

    Attributes:
        precision: Relevant share of the items; 0 where there are none.
        recall: Share of all relevant items; 0 where there are none.
        average_precision: Expected average precision of those items; 0 where nothing is found.
        items: Number of items.
    """

    precision: Floats
    recall: Floats
    average_precision: Floats
    items: Counts


def within_groups(groups: TieGroups) -> WithinGroups:
    """Return precision, recall and expected average precision of the items up to each group.

    With groups for the Hamming distances 0, 1, … these are the metrics within a radius; no tie
    is cut, so precision and recall do not depend on the order.

    >>> groups = TieGroups.from_counts(np.array([[1, 2]]), np.array([[[1], [1]]]))
    >>> within_groups(groups).precision.round(3).tolist()
    [[1.0, 0.667]]
    """
    cut = Cut(groups, groups.items.sum(axis=1))
    found = cut.rel_before + groups.relevant
    items = cut.before + groups.items
    return WithinGroups(
        precision=over(found, items),
        recall=over(found, found[:, -1:]),
        average_precision=over(np.cumsum(cut.expected_sums(groups.relevant), axis=1), found),
        items=items,
    )
