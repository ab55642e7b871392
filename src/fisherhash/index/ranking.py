"""Rankings finer than the Hamming distance: bits of different weight, and a second code.

A query may have real outputs instead of bits. A stored bit that differs from the sign of an output
then costs the output's weight, and the distance of a code is the sum of its costs. Weights are
rounded to whole numbers once per query, to about a 2 ** 30th of their sum, so that every back-end
and every way through the engine computes the same sums and agrees on ties. Items of equal distance
may be ordered by the Hamming distance of a second, finer code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.codes import check_codes, hamming, pack
from fisherhash.errors import UsageError

Numbers = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Ranking = Literal["hamming", "real"]
"""By what the nearest items are found: bits that differ, or what these bits cost."""
RANKINGS: tuple[Ranking, ...] = ("hamming", "real")

COST_BITS = 31
"""Costs are below 2 ** COST_BITS."""
PLAIN_COST = 1 << 20
"""The cost of a bit where the second code is weighed against the Hamming distance."""
_MOST_WEIGHT = 1024
# pairs of a query and a code that numpy holds at once
_BLOCK_PAIRS = 1 << 21
# the bits of every byte
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.int64)


class Ranked(NamedTuple):
    """Results of a ranked search, ordered by (cost, fine distance, position).

    Attributes:
        positions: (n_queries, k) positions, or ids.
        costs: (n_queries, k) weighted distances, in the units of the weights.
        fines: (n_queries, k) Hamming distances of the second codes; zeros without them.
    """

    positions: Numbers
    costs: Numbers
    fines: Numbers


class WeightedQueries(NamedTuple):
    """Queries of a ranked search; what is None does not count.

    Attributes:
        codes: (n, bytes) the code that costs nothing.
        weights: (n, bits) what a differing bit costs, whole numbers with a sum below 2 ** 31, or
            (n, 1) if every bit costs the same; 1 without them.
        fine: (n, fine bytes) second codes, which order items of equal cost.
        fine_weight: (n,) whole numbers: the order is by the sum of the cost and this weight times
            the fine distance instead, then by id.
    """

    codes: Bytes
    weights: Numbers | None = None
    fine: Bytes | None = None
    fine_weight: Numbers | None = None

    def part(self, rows: slice | Numbers) -> WeightedQueries:
        """Some of the queries."""
        return WeightedQueries(*(None if value is None else value[rows] for value in self))  # type: ignore[arg-type]

    @property
    def plain(self) -> bool:
        """Whether every bit costs the same."""
        return self.weights is None or self.weights.shape[1] == 1

    def distances(self, costs: Numbers) -> NDArray[np.int64] | NDArray[np.float64]:
        """Costs (n, k) as distances: the Hamming distance if all bits weigh the same."""
        if self.weights is None:
            return costs
        if self.plain:
            return costs // np.maximum(self.weights, 1)
        bits = self.weights.shape[1]
        found = costs * (bits / np.maximum(self.weights.sum(axis=1, keepdims=True), 1))
        equal = (self.weights == self.weights[:, :1]).all()
        return np.rint(found).astype(np.int64) if equal else found


def real_weights(logits: ArrayLike) -> Numbers:
    """What each bit costs: the absolute value of its logit (n, bits), as a whole number.

    The sum over the bits that differ is, up to a constant and a factor, the inner product of the
    logits and the stored bits as -1 and 1.

    >>> real_weights([[0.5, -2.0, 1.0]]).tolist()
    [[134217728, 536870912, 268435456]]
    """
    array = np.abs(np.asarray(logits, dtype=np.float64))
    if not np.isfinite(array).all():
        raise UsageError("logits must be finite numbers")
    # in two steps, since the sum of large numbers may be infinite
    scaled = np.ldexp(array, -np.frexp(array.max(axis=1, initial=0.0))[1][:, None])
    power = COST_BITS - 1 - np.frexp(scaled.sum(axis=1))[1]
    return np.rint(np.ldexp(scaled, power[:, None])).astype(np.int64)


def ranked_queries(
    codes: ArrayLike | None,
    bits: int,
    *,
    ranking: str = "hamming",
    logits: ArrayLike | None = None,
    fine: ArrayLike | None = None,
    fine_bits: int = 0,
    fine_weight: float | None = None,
) -> WeightedQueries:
    """Checked queries of an index whose codes have ``bits`` and ``fine_bits`` bits.

    Args:
        codes: (n, bytes) packed codes; with ``logits`` they may be left out.
        bits: length of a code.
        ranking: one of RANKINGS; ``real`` needs logits.
        logits: (n, bits) real outputs.
        fine: (n, fine bytes) second codes.
        fine_bits: length of a second code; 0 where the index has none.
        fine_weight: what a differing bit of the second code costs, relative to the mean cost of a
            bit of the first one. Equal sums are ordered by the distance of the first code.
    """
    if ranking not in RANKINGS:
        raise UsageError(f"unknown ranking {ranking!r}. Known: {', '.join(RANKINGS)}")
    weights = None
    if ranking == "real":
        if logits is None:
            raise UsageError("the ranking 'real' needs the queries' logits, not only their codes")
        given = np.asarray(logits)
        own = check_codes(pack(given), bits)
        if given.shape[1] != bits:
            raise UsageError(f"logits must have {bits} columns, got {given.shape[1]}")
        if codes is not None and not np.array_equal(check_codes(codes, bits), own):
            raise UsageError("the queries' codes are not the signs of their logits")
        weights = real_weights(given)
    elif codes is None:
        raise UsageError("a search needs the queries' codes")
    else:
        own = check_codes(codes, bits)
    if fine is None:
        if fine_weight is not None:
            raise UsageError("fine_weight needs the queries' second codes")
        return WeightedQueries(own, weights)
    if not fine_bits:
        raise UsageError("the index holds no second codes, so the queries' cannot be compared")
    second = check_codes(fine, fine_bits)
    if len(second) != len(own):
        raise UsageError(f"{len(own)} queries have {len(second)} second codes")
    if fine_weight is None:
        return WeightedQueries(own, weights, second)
    check_fine_weight(fine_weight)
    if weights is None:
        each = np.full((len(own), 1), PLAIN_COST)
        return WeightedQueries(own, each, second, np.full(len(own), rounded_weight(fine_weight)))
    extra = [_below(fine_weight * mean) for mean in (weights.sum(axis=1) / bits).tolist()]
    return WeightedQueries(own, weights, second, np.array(extra, dtype=np.int64))


def check_fine_weight(fine_weight: float) -> None:
    """Refuse a weight of the second code that is out of range."""
    if not 0 <= fine_weight <= _MOST_WEIGHT:
        raise UsageError(f"fine_weight must be from 0 to {_MOST_WEIGHT}, got {fine_weight}")


def rounded_weight(fine_weight: float) -> int:
    """What a bit of the second code costs where one of the first costs PLAIN_COST.

    A little less than it should: so items of equal sums are ordered by the cost of the first code.

    >>> rounded_weight(0.25) == PLAIN_COST // 4 - 1
    True
    """
    return _below(fine_weight * PLAIN_COST)


def _below(cost: float) -> int:
    return max(0, math.ceil(cost) - 1)


def check_weights(weights: ArrayLike, queries: int, bits: int) -> Numbers:
    """Weights (queries, bits) or (queries, 1) of a ranked search."""
    array = np.asarray(weights)
    if array.shape not in ((queries, bits), (queries, 1)) or array.dtype.kind not in "iu":
        raise UsageError(
            f"weights must be whole numbers of shape ({queries}, {bits}) or ({queries}, 1), "
            f"got {array.dtype} of shape {array.shape}"
        )
    array = np.ascontiguousarray(array, dtype=np.int64)
    most = (1 << COST_BITS) // (bits // array.shape[1])
    if array.size and (array.min() < 0 or array.sum(axis=1).max() >= most):
        raise UsageError(f"weights must not be negative, and their sum less than 2**{COST_BITS}")
    return array


def ranked_by_numpy(
    queries: WeightedQueries, codes: Bytes, k: int, fine: Bytes | None = None
) -> Ranked:
    """The k best of each query with plain numpy, whatever its ranking is.

    Args:
        queries: the queries.
        codes: (n, bytes) codes that are searched.
        k: how many; reduced to n.
        fine: (n, fine bytes) their second codes.
    """
    results = empty_ranked(len(queries.codes), min(k, len(codes)))
    if not results.positions.size:
        return results
    step = max(1, _BLOCK_PAIRS // len(codes))
    for start in range(0, len(queries.codes), step):
        some = queries.part(slice(start, start + step))
        for i, row in enumerate(_costs(some, codes)):
            found = _best(row, results.positions.shape[1], some.part(slice(i, i + 1)), fine)
            for result, values in zip(results, found, strict=True):
                result[start + i] = values
    return results


def _costs(queries: WeightedQueries, codes: Bytes) -> Numbers:
    """Costs (n_queries, n) of all codes."""
    if queries.weights is None or queries.plain:
        each = 1 if queries.weights is None else queries.weights
        return np.multiply(hamming(queries.codes, codes), each, dtype=np.int64)
    costs = np.zeros((len(queries.codes), len(codes)), dtype=np.int64)
    for byte, column in enumerate(np.ascontiguousarray(codes.T)):
        for row, code, weights in zip(costs, queries.codes, queries.weights, strict=True):
            own = weights[8 * byte : 8 * byte + 8]
            row += ((_BITS[:, : len(own)] ^ _BITS[code[byte], : len(own)]) @ own)[column]
    return costs


def _best(
    row: Numbers, k: int, query: WeightedQueries, fine: Bytes | None
) -> tuple[Numbers, Numbers, Numbers]:
    """Positions, costs and fine distances of the k best of all costs of one query."""
    summed = query.fine_weight is not None
    places = np.arange(len(row)) if summed else _up_to_kth(row, k)
    fines = np.zeros(len(places), dtype=np.int64)
    if query.fine is not None and fine is not None:
        fines[:] = hamming(query.fine, fine[places])[0]
    if query.fine_weight is not None:
        sums = row + query.fine_weight[0] * fines
        order = places = _up_to_kth(sums, k)
        order = order[np.argsort(sums[places], kind="stable")][:k]
        return order, row[order], fines[order]
    # stable: places ascend
    order = np.lexsort((fines, row[places]))[:k]
    return places[order], row[places][order], fines[order]


def _up_to_kth(values: Numbers, k: int) -> Numbers:
    return np.flatnonzero(values <= np.partition(values, k - 1)[k - 1])


def merge_ranked(parts: Iterable[Ranked], queries: WeightedQueries, k: int) -> Ranked:
    """The k best of several lists of ids, in the order of the queries' ranking."""
    lists = list(parts)
    if len(lists) == 1:
        return Ranked(*(values[:, :k] for values in lists[0]))
    none = empty_ranked(len(queries.codes), 0)
    joined = Ranked(*(np.concatenate(some, axis=1) for some in zip(none, *lists, strict=True)))
    if queries.fine_weight is None:
        order = np.lexsort((joined.positions, joined.fines, joined.costs), axis=1)
    else:
        sums = joined.costs + queries.fine_weight[:, None] * joined.fines
        order = np.lexsort((joined.positions, sums), axis=1)
    return Ranked(*(np.take_along_axis(values, order[:, :k], axis=1) for values in joined))


def empty_ranked(queries: int, k: int) -> Ranked:
    """Room for the results of a ranked search."""
    return Ranked(*(np.zeros((queries, k), dtype=np.int64) for _ in range(3)))
