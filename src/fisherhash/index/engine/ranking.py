"""Rankings finer than the Hamming distance: bits of different weight, and a second code.

A query may have real outputs instead of bits. A stored bit that differs from the sign of an output
then costs the output's weight, and the distance of a code is the sum of its costs. Weights are
rounded to whole numbers once per query, to about a 2 ** 30th of their sum, so that every way
through the engine computes the same sums and agrees on ties. Items of equal distance may be ordered
by the Hamming distance of a second code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.codes import hamming, pack
from fisherhash.errors import UsageError
from fisherhash.index.engine.pool import run
from fisherhash.index.engine.tables import Tables, split

Numbers = NDArray[np.int64]
Bytes = NDArray[np.uint8]

COST_BITS = 31
"""Costs are below 2 ** COST_BITS."""
# steps in which the costs found so far are counted, see kernels._take
_LEVELS = 2048
# bucket numbers that are looked up in one table before the search scans instead
_MOST_LOOKUPS = 1 << 16
# queries per job of the scan, and the most entries of its scratch memory
_QUERIES = 64
_ENTRIES = 1 << 24
# pairs of a query and a code that numpy holds at once
_BLOCK_PAIRS = 1 << 21
# the bits of every byte
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.int64)


class Ranked(NamedTuple):
    """Results of a ranked search, ordered by (cost, fine distance, position).

    Attributes:
        positions: (n_queries, k) positions.
        costs: (n_queries, k) weighted distances, in the units of the weights.
        fines: (n_queries, k) Hamming distances of the second codes; zeros without them.
    """

    positions: Numbers
    costs: Numbers
    fines: Numbers


class RealQueries(NamedTuple):
    """Queries with real outputs, ready for a ranked search.

    Attributes:
        codes: (n, bytes) the nearest code of each.
        weights: (n, bits) what each differing bit costs, as whole numbers.
        scales: (n,) powers of two: a cost divided by the scale is a distance.
    """

    codes: Bytes
    weights: Numbers
    scales: NDArray[np.float64]


def real_queries(logits: ArrayLike) -> RealQueries:
    """Queries whose bits cost the absolute value of their logits (n, bits).

    Up to a constant and a factor of two, that is the inner product of the logits and the stored
    bits as -1 and 1. With logits of equal size it is the Hamming distance.

    >>> real_queries([[0.5, -2.0, 1.0]]).weights.tolist()
    [[67108864, 268435456, 134217728]]
    """
    array = np.asarray(logits, dtype=np.float64)
    codes = pack(array)
    if not np.isfinite(array).all():
        raise UsageError("logits must be finite numbers")
    return RealQueries(codes, *whole_weights(np.abs(array)))


def whole_weights(weights: NDArray[np.float64]) -> tuple[Numbers, NDArray[np.float64]]:
    """Weights (n, bits) as whole numbers, and the power of two that each row was multiplied by."""
    largest = np.frexp(weights.max(axis=1, initial=0.0))[1]
    # in two steps, since the sum of large numbers may be infinite
    sums = np.frexp(np.ldexp(weights, -largest[:, None]).sum(axis=1))[1]
    power = COST_BITS - 1 - sums
    whole = np.rint(np.ldexp(np.ldexp(weights, -largest[:, None]), power[:, None]))
    return whole.astype(np.int64), np.ldexp(1.0, np.clip(power - largest, -1000, 1000))


def check_weights(weights: ArrayLike, queries: int, bits: int) -> Numbers:
    """Weights (queries, bits) of a ranked search."""
    array = np.asarray(weights)
    if array.shape != (queries, bits) or array.dtype.kind not in "iu":
        raise UsageError(
            f"weights must be whole numbers of shape ({queries}, {bits}), "
            f"got {array.dtype} of shape {array.shape}"
        )
    array = np.ascontiguousarray(array, dtype=np.int64)
    if array.size and (array.min() < 0 or array.sum(axis=1).max() >= 1 << COST_BITS):
        raise UsageError(f"weights must not be negative, and their sum less than 2**{COST_BITS}")
    return array


def as_words(codes: Bytes) -> NDArray[np.uint64]:
    """Second codes (n, words) as the kernels compare them."""
    missing = -codes.shape[1] % 8
    padded = np.pad(codes, ((0, 0), (0, missing))) if missing else np.ascontiguousarray(codes)
    return padded.view(np.uint64)


def ranked_by_numpy(
    queries: Bytes,
    codes: Bytes,
    k: int,
    weights: Numbers | None,
    fine_queries: Bytes | None,
    fine: Bytes | None,
) -> Ranked:
    """The k best of each query with plain numpy; by Hamming distance without weights."""
    results = _empty(len(queries), min(k, len(codes)))
    if weights is None:
        step = max(1, _BLOCK_PAIRS // max(1, len(codes)))
        for start in range(0, len(queries), step):
            block = hamming(queries[start : start + step], codes).astype(np.int64)
            for i, row in enumerate(block, start):
                _best_of_row(row, i, fine_queries, fine, results)
        return results
    columns = np.ascontiguousarray(codes.T)
    for i in range(len(queries)):
        row = np.zeros(len(codes), dtype=np.int64)
        for byte, column in enumerate(columns):
            own = weights[i, 8 * byte : 8 * byte + 8]
            row += ((_BITS[:, : len(own)] ^ _BITS[queries[i, byte], : len(own)]) @ own)[column]
        _best_of_row(row, i, fine_queries, fine, results)
    return results


def _best_of_row(
    row: Numbers, query: int, fine_queries: Bytes | None, fine: Bytes | None, results: Ranked
) -> None:
    k = results.positions.shape[1]
    if not k:
        return
    places = np.flatnonzero(row <= np.partition(row, k - 1)[k - 1])
    fines = np.zeros(len(places), dtype=np.int64)
    if fine is not None and fine_queries is not None:
        fines[:] = hamming(fine_queries[query : query + 1], fine[places])[0]
    # stable: places ascend
    order = np.lexsort((fines, row[places]))[:k]
    for result, values in zip(results, (places, row[places], fines), strict=True):
        result[query] = values[order]


def ranked_by_scan(
    tables: Tables,
    queries: Bytes,
    k: int,
    weights: Numbers,
    fine_queries: NDArray[np.uint64],
    fine: NDArray[np.uint64],
    threads: int,
) -> Ranked:
    """The k best of each query by a scan of all items."""
    from fisherhash.index.engine import kernels, scan
    from fisherhash.index.engine.layout import PLANE_BLOCK

    results = _empty(len(queries), k)
    tile = max(1, scan.TILE // (PLANE_BLOCK * queries.shape[1]))

    def search(numbers: Numbers, room: int) -> Numbers:
        """Fill the results of some queries; returns those whose ties had no room."""
        most = max(1, min(_QUERIES, _ENTRIES // room))
        ranges, parts = scan.pieces(tables, len(numbers), threads, most)

        def job(first: int, last: int) -> Numbers:
            some = numbers[first:last]
            keys = np.empty((len(parts), len(some), room), dtype=np.uint64)
            counts = np.zeros(keys.shape[:2], dtype=np.int64)
            own, own_weights = queries[some], weights[some]

            def collect(part: tuple[int, int], *into: NDArray[Any]) -> None:
                kernels.scan_ranked(
                    *(own, own_weights, tables.planes, tables.items, tables.starts, *part, tile),
                    *(k, _LEVELS, len(fine) > 0, np.zeros(PLANE_BLOCK, dtype=np.uint8), *into),
                )

            run(collect, zip(parts, keys, counts, strict=True), len(parts))
            filled = _empty(len(some), k)
            kernels.finish_ranked(
                *(keys, counts, tables.starts, tables.positions),
                *(fine, fine_queries[some], *filled),
            )
            for result, values in zip(results, filled, strict=True):
                result[some] = values
            return some[(counts < 0).any(axis=0)]

        left = run(job, ranges, threads if len(parts) == 1 else 1)
        return np.concatenate([np.zeros(0, dtype=np.int64), *left])

    left, room = np.arange(len(queries)), 2 * k + 1024
    while len(left) and k:
        left, room = search(left, room), 8 * room
    return results


def ranked_by_buckets(
    tables: Tables,
    queries: Bytes,
    k: int,
    weights: Numbers,
    fine_queries: NDArray[np.uint64],
    fine: NDArray[np.uint64],
    threads: int,
    budget: int,
) -> tuple[Ranked, Bytes]:
    """The k best of each query by look-ups in rising cost; a flag says whether that was done."""
    from fisherhash.index.engine import kernels, multi_index

    results = _empty(len(queries), k)
    done = np.zeros(len(queries), dtype=np.uint8)
    tally = np.zeros(2, dtype=np.int64)
    words = multi_index.query_words(tables, queries)
    room = min(1 << tables.length, _MOST_LOOKUPS)

    def job(first: int, last: int) -> None:
        kernels.probe_ranked(
            *(words, weights, first, last, tables.directory, tables.words.reshape(-1)),
            *(tables.words.shape[2], tables.bucket_items, tables.starts, tables.positions),
            *(tables.length, _LEVELS, room, budget, multi_index.lookup_cost(tables)),
            *(fine, fine_queries, *results, done, tally),
        )

    run(job, split(len(queries), min(len(queries), 4 * threads)), threads)
    return results, done


def ranked_by_sum(
    rank: Callable[[Numbers, int], Ranked], queries: int, total: int, k: int, fine_weight: Numbers
) -> Ranked:
    """The k best of each query by (cost + weight * fine distance, position).

    More and more are ranked by cost, until those not yet seen cost more than the k-th sum.

    Args:
        rank: ranks some queries, by their numbers, by (cost, fine distance, position).
        queries: how many.
        total: how many positions there are.
        k: how many are wanted, at most ``total``.
        fine_weight: (queries,) weights in the units of the costs.
    """
    results = _empty(queries, k)
    left, fetch = np.arange(queries), min(total, 2 * k + 64)
    while len(left) and k:
        found = rank(left, fetch)
        sums = found.costs + fine_weight[left, None] * found.fines
        order = np.lexsort((found.positions, sums), axis=1)[:, :k]
        last = np.take_along_axis(sums, order[:, -1:], axis=1)[:, 0]
        enough = (last < found.costs[:, -1]) | (fetch == total)
        for result, values in zip(results, found, strict=True):
            result[left[enough]] = np.take_along_axis(values[enough], order[enough], axis=1)
        left, fetch = left[~enough], min(total, 4 * fetch)
    return results


def _empty(queries: int, k: int) -> Ranked:
    return Ranked(*(np.zeros((queries, k), dtype=np.int64) for _ in range(3)))
