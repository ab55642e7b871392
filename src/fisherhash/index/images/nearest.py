"""The nearest items of queries by both codes of an index, also within a radius of the first."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import UsageError
from fisherhash.index.base import Codes, Index
from fisherhash.index.filters import Where
from fisherhash.index.items import Matches
from fisherhash.index.ranking import PLAIN_COST, check_fine_weight, rounded_weight

FINE_WEIGHT = 1 / 6
"""What a bit of the second code counts in a search for images, beside one of the first.

It is the largest of 1/6, 1/5, 1/4 and 1/3 by which a search takes at most 3 times as long as by the
first code alone (``results/ranking-benchmark.json``). With the default lengths of ``fisherhash
train``, 48 and 128 bits, P@10 by class is higher by this sum than with the second code inside ties
only, and than with the first code alone, on all three sets that were measured
(``results/second-code.json``, ``second-code-cifar10.json`` and ``second-code-coco21.json``). A
weight of 1/3 has up to 0.5 points more (``results/second-code-weights.json``).
"""
# items read beyond twice the k wanted, before more are
_MORE = 64


class Near(NamedTuple):
    """An item that a query found.

    Attributes:
        id: of the item.
        distance: of the first code.
        fine: the Hamming distance of the second code, if there is one.
        combined: the distance plus the weighted fine distance, where this sum orders the results.
    """

    id: int
    distance: float
    fine: int | None = None
    combined: float | None = None


def check_weight_of(index: Index, fine_weight: float | None) -> float | None:
    """The weight that orders an index's results: None where it has no second codes.

    Raises:
        UsageError: it is out of range, or the caller chose one where there is nothing to weigh.
    """
    if fine_weight is not None:
        check_fine_weight(fine_weight)
    if index.fine_bits:
        return fine_weight
    if fine_weight not in (None, FINE_WEIGHT):
        raise UsageError(f"{index.uri} has no second codes, so they cannot have a weight")
    return None


def nearest(
    index: Index,
    codes: Codes,
    k: int | None,
    *,
    radius: int | None = None,
    where: Where | None = None,
    fine: Codes | None = None,
    fine_weight: float | None = FINE_WEIGHT,
    logits: NDArray[Any] | None = None,
) -> list[list[Near]]:
    """The nearest items of each query, in order.

    Args:
        index: what is searched.
        codes: (n, bytes) the queries' codes.
        k: how many per query; None, with a radius, for all.
        radius: only items whose first codes differ in at most this many bits.
        where: only items that match this filter.
        fine: (n, fine bytes) the queries' second codes, where the index has those.
        fine_weight: order by the distance plus this weight times the fine distance; None orders by
            the distance, and by the fine distance only inside ties.
        logits: (n, bits) the queries' real outputs, to rank by those; not with a radius.
    """
    if fine is None:
        fine_weight = None
    if k is None:
        if radius is None:
            raise UsageError("a search without a radius needs the number of results")
        inside = index.within(codes, radius, where=where)
        if fine is None:
            return [[Near(hit.id, hit.distance) for hit in row] for row in inside]
        counts = np.diff(inside.offsets).tolist()
    elif radius is None or not fine_weight or fine is None:
        args: dict[str, Any] = {"fine": fine, "fine_weight": fine_weight}
        if logits is not None:
            args |= {"ranking": "real", "logits": logits}
        found = index.search(codes, k, where=where, **args)
        rows = [_rows(found, row, fine_weight) for row in range(len(found))]
        # By distance, what is within the radius comes first.
        return [[near for near in row if radius is None or near.distance <= radius] for row in rows]
    else:
        counts = [k] * len(codes)
    return [
        _within(index, codes[i : i + 1], count, radius, where, fine[i : i + 1], fine_weight)
        for i, count in enumerate(counts)
    ]


def _within(
    index: Index,
    code: Codes,
    k: int,
    radius: int,
    where: Where | None,
    fine: Codes,
    fine_weight: float | None,
) -> list[Near]:
    """The first k of one query within a radius.

    By distance, those within the radius come first, so more and more are read until one is beyond
    it, or until all others are too far for the k-th sum.
    """
    if not k:
        return []
    found = index.search(code, k, where=where, fine=fine, fine_weight=fine_weight)
    whole = found.ids.shape[1] < k
    if whole or not fine_weight or (found.distances <= radius).all():
        return [near for near in _rows(found, 0, fine_weight) if near.distance <= radius]
    fetch = 2 * k + _MORE
    while True:
        found = index.search(code, fetch, where=where, fine=fine)
        distances, fines = found.distances[0], _fines(found, 0)
        sums = PLAIN_COST * distances + rounded_weight(fine_weight) * fines
        inside = np.flatnonzero(distances <= radius)
        order = inside[np.lexsort((found.ids[0][inside], sums[inside]))][:k]
        whole = len(distances) < fetch or distances[-1] > radius
        if whole or (len(order) == k and sums[order[-1]] < PLAIN_COST * distances[-1]):
            rows = _rows(found, 0, fine_weight)
            return [rows[place] for place in order]
        fetch *= 4


def _rows(found: Matches, row: int, fine_weight: float | None) -> list[Near]:
    if found.fines is None:
        return [Near(hit.id, hit.distance) for hit in found[row]]
    fines = found.fines[row].tolist()
    return [
        Near(hit.id, hit.distance, fine, combined_distance(hit.distance, fine, fine_weight))
        for hit, fine in zip(found[row], fines, strict=True)
    ]


def _fines(found: Matches, row: int) -> NDArray[np.int64]:
    if found.fines is None:
        raise UsageError("the index returned no distances of second codes")
    return found.fines[row]


def combined_distance(distance: float, fine: int, fine_weight: float | None) -> float | None:
    """The distance plus the weighted fine distance; None where the second code has no weight.

    >>> combined_distance(2, 12, 0.25)
    5.0
    """
    return distance + fine_weight * fine if fine_weight else None
