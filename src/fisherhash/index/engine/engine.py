"""Exact search over an array of codes, by position."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.codes import as_words, check_bits, check_codes, code_bytes
from fisherhash.errors import UsageError
from fisherhash.index.engine import by_numpy
from fisherhash.index.engine.weights import check_weights
from fisherhash.system.cores import available_cores

MOST_CODES = 2**31 - 1

Numbers = NDArray[np.int64]


class Engine:
    """Exact search over codes in memory, ordered by (distance, position).

    Several threads may use one engine.

    >>> engine = Engine(np.array([[3], [1], [6]], dtype=np.uint8), bits=8)
    >>> positions, distances = engine.search(np.array([[1]], dtype=np.uint8), k=2)
    >>> positions.tolist(), distances.tolist()
    ([[1, 0]], [[0, 1]])

    Args:
        codes: (n, bytes) packed codes, possibly memory-mapped; they are not copied, and must not
            change while the engine is used.
        bits: length of a code.
        threads: the most threads to use; all cores if None.
    """

    def __init__(self, codes: NDArray[np.uint8], bits: int, *, threads: int | None = None) -> None:
        self.bits = check_bits(bits)
        if codes.ndim != 2 or codes.dtype != np.uint8 or codes.shape[1] != code_bytes(bits):
            raise UsageError(
                f"codes of {bits} bits must be uint8 of shape (n, {code_bytes(bits)}), "
                f"got {codes.dtype} of shape {codes.shape}"
            )
        if len(codes) > MOST_CODES:
            raise UsageError(f"an engine can hold at most {MOST_CODES} codes, got {len(codes)}")
        self.codes = np.require(codes, requirements=["C", "A"])
        self.threads = available_cores() if threads is None else max(1, threads)

    def __len__(self) -> int:
        return len(self.codes)

    def search(
        self,
        queries: ArrayLike,
        k: int,
        *,
        weights: ArrayLike | None = None,
        among: ArrayLike | None = None,
    ) -> tuple[Numbers, Numbers]:
        """The nearest codes of each query.

        Args:
            queries: (n_queries, bytes) packed codes.
            k: how many; reduced to the number of codes that are searched.
            weights: (n_queries, bits) what each bit costs where a code differs from the query, as
                whole numbers with a sum below 2 ** 31; see :func:`real_weights`.
            among: only these positions are searched; they must ascend.

        Returns:
            Positions and distances (n_queries, k); with weights, distances are sums of costs.
        """
        own = check_codes(queries, self.bits)
        costs = None if weights is None else check_weights(weights, len(own), self.bits)
        k = _whole_number("k", k, 1)
        if among is not None:
            chosen = self._positions(among)
            positions, distances = self._chosen(chosen)._search(own, costs, k)
            return chosen[positions], distances
        return self._search(own, costs, k)

    def within(
        self, queries: ArrayLike, radius: int, *, among: ArrayLike | None = None
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Everything within a Hamming distance of each query.

        Args:
            queries: (n_queries, bytes) packed codes.
            radius: the largest distance.
            among: only these positions are searched; they must ascend.

        Returns:
            Offsets (n_queries + 1,), positions and distances: the results of query i are those from
            offset i to offset i + 1.
        """
        own = check_codes(queries, self.bits)
        radius = min(_whole_number("radius", radius, 0), self.bits)
        if among is not None:
            chosen = self._positions(among)
            offsets, positions, distances = self._chosen(chosen)._within(own, radius)
            return offsets, chosen[positions], distances
        return self._within(own, radius)

    def _positions(self, among: ArrayLike) -> Numbers:
        chosen = np.asarray(among)
        if chosen.size == 0:
            return np.zeros(0, dtype=np.int64)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise UsageError(
                f"among must be a list of positions, got {chosen.dtype} of shape {chosen.shape}"
            )
        chosen = chosen.astype(np.int64, copy=False)
        if chosen[0] < 0 or chosen[-1] >= len(self) or (chosen[1:] <= chosen[:-1]).any():
            raise UsageError(f"among must hold ascending positions from 0 to {len(self) - 1}")
        return chosen

    def _chosen(self, positions: Numbers) -> Engine:
        return Engine(self.codes[positions], self.bits, threads=self.threads)

    def _search(
        self, queries: NDArray[np.uint8], weights: Numbers | None, k: int
    ) -> tuple[Numbers, Numbers]:
        k = min(k, len(self))
        if weights is not None:
            return by_numpy.nearest_weighted(queries, weights, self.codes, k, self.threads)
        return by_numpy.nearest(queries, as_words(self.codes), self.bits, k, self.threads)

    def _within(self, queries: NDArray[np.uint8], radius: int) -> tuple[Numbers, Numbers, Numbers]:
        return by_numpy.within(queries, as_words(self.codes), self.bits, radius, self.threads)


def _whole_number(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number
