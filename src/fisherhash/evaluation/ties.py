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
    cut = Cut.of(groups, top)
    n, r, table = groups.items, groups.relevant, cut.table
    high = np.where(cut.whole, first_sum(r, cut.before, cut.rel_before, table), 0.0).sum(axis=1)
    low = np.where(cut.whole, last_sum(n, r, cut.before, cut.rel_before, table), 0.0).sum(axis=1)
    if denominator == "found":
        lower, upper = over(low, cut.found), over(high, cut.found)
    else:
        relevant = r.sum(axis=1)
        lower, upper = (over(s, np.minimum(top, relevant)) for s in (low, high))
    rows = np.flatnonzero(cut.crossing)
    if not len(rows):
        return lower, upper
    fewest, most = cut.relevant_range(rows)
    m, before = cut.across(cut.inside, rows), cut.across(cut.before, rows)
    rel_before = cut.across(cut.rel_before, rows)
    low, high = low[rows], high[rows]
    if denominator != "found":
        divisor = np.minimum(top, r.sum(axis=1))[rows]
        lower[rows] = over(low + last_sum(m, fewest, before, rel_before, table), divisor)
        upper[rows] = over(high + first_sum(most, before, rel_before, table), divisor)
        return lower, upper
    upper[rows] = np.maximum(
        *(
            over(high + first_sum(x, before, rel_before, table), rel_before + x)
            for x in (fewest, most)
        )
    )
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
    cut = Cut.of(groups, top)
    weight = groups.weight if weighted else groups.relevant
    weight_before = cut.weight_before if weighted else cut.rel_before
    terms = expected_sum(
        groups.items, groups.relevant, weight, cut.before, weight_before, cut.inside, cut.table
    )
    if denominator != "found":
        return over(terms.sum(axis=1), np.minimum(top, groups.relevant.sum(axis=1)))
    whole = np.where(cut.whole, terms, 0.0).sum(axis=1)
    result = over(whole, cut.found)
    rows = np.flatnonzero(cut.crossing)
    if not len(rows):
        return result
    r = cut.across(groups.relevant, rows)
    mean_weight = over(cut.across(weight, rows).astype(np.float64), r)
    widest = int(10 * np.sqrt(cut.across(cut.inside, rows).max()) + 4)
    step = max(1, _CHUNK // widest)
    for i in range(0, len(rows), step):
        part = slice(i, i + step)
        chosen = rows[part]
        m = cut.across(cut.inside, chosen)[:, None]
        x, chance = _hypergeometric(cut, chosen)
        sums = expected_sum(
            m,
            x,
            x * mean_weight[part, None],
            cut.across(cut.before, chosen)[:, None],
            cut.across(weight_before, chosen)[:, None],
            m,
            cut.table,
        )
        found = cut.across(cut.rel_before, chosen)[:, None] + x
        result[chosen] = (chance * over(whole[chosen, None] + sums, found)).sum(axis=1)
    return result


def _hypergeometric(cut: Cut, rows: NDArray[np.intp]) -> tuple[Counts, Floats]:
    """Return the numbers found in the group across the cut and their probabilities.

    Both are (queries, width). Values further than 5 sqrt(m) from the mean are left out: by
    Hoeffding's inequality their total probability is below 4e-22.
    """
    n = cut.across(cut.groups.items, rows)
    r = cut.across(cut.groups.relevant, rows)
    m = cut.across(cut.inside, rows)
    fewest, most = cut.relevant_range(rows)
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


def expected_found(groups: TieGroups, ranks: Counts, total: int) -> Floats:
    """Return the expected relevant items among the first ``ranks`` items, (queries, ranks).

    Three tied items, one of them relevant: 1/3 is expected at rank 1, 2/3 up to rank 2.

    >>> groups = TieGroups.from_counts(np.array([[3]]), np.array([[[1]]]))
    >>> expected_found(groups, np.array([1, 2, 3]), 3).round(3).tolist()
    [[0.333, 0.667, 1.0]]
    """
    return _interpolate(groups.items, groups.relevant, ranks, total)


def expected_weight(groups: TieGroups, ranks: Counts, total: int) -> Floats:
    """Return the expected sum of shared labels among the first ``ranks`` items.

    The result is (queries, ranks).

    >>> groups = TieGroups.from_counts(np.array([[2]]), np.array([[[0, 1]]]))
    >>> expected_weight(groups, np.array([1, 2]), 2).tolist()
    [[1.0, 2.0]]
    """
    return _interpolate(groups.items, groups.weight, ranks, total)


def _interpolate(items: Counts, values: Counts, ranks: Counts, total: int) -> Floats:
    """Interpolate: inside a tie, a sum over the first ranks is linear in the rank."""
    queries = len(items)
    edge = np.zeros((queries, 1), dtype=np.int64)
    reached = np.cumsum(items, axis=1)
    summed = np.cumsum(values, axis=1)
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
    ends = np.cumsum(groups.items, axis=1)
    starts = ends - groups.items
    discounts = table[np.minimum(ends, rank)] - table[np.minimum(starts, rank)]
    reached = (groups.gain * discounts / np.maximum(groups.items, 1)).sum(axis=1)
    best_first = groups.grades[:, ::-1]
    ends = np.minimum(np.cumsum(best_first, axis=1), rank)
    starts = np.minimum(np.cumsum(best_first, axis=1) - best_first, rank)
    gains = 2.0 ** np.arange(best_first.shape[1], 0, -1) - 1
    return over(reached, ((table[ends] - table[starts]) * gains).sum(axis=1))


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
    everything = groups.items.sum(axis=1)
    cut = Cut.of(groups, everything)
    terms = expected_sum(
        groups.items,
        groups.relevant,
        groups.relevant,
        cut.before,
        cut.rel_before,
        groups.items,
        cut.table,
    )
    found = cut.rel_before + groups.relevant
    items = cut.before + groups.items
    return WithinGroups(
        precision=over(found.astype(np.float64), items),
        recall=over(found.astype(np.float64), np.broadcast_to(found[:, -1:], found.shape)),
        average_precision=over(np.cumsum(terms, axis=1), found),
        items=items,
    )
