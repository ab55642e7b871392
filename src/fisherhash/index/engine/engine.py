"""Exact search over an array of codes, by position.

Three paths return the same results in the same order: numpy (small collections, or where numba is
not installed), a scan of all codes, and buckets. The planner chooses between them.
"""

from __future__ import annotations

import operator
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.codes import as_words, check_bits, check_codes, code_bytes
from fisherhash.errors import UsageError, unknown_name
from fisherhash.index.engine import by_numpy, planner
from fisherhash.index.engine.weights import check_weights
from fisherhash.system.cores import available_cores
from fisherhash.system.memory import available_memory

if TYPE_CHECKING:
    from fisherhash.index.engine.buckets import Buckets
    from fisherhash.index.engine.scan import Planes

PATHS = ("auto", "numpy", "scan", "buckets")
MOST_CODES = 2**31 - 1

_UNLIMITED = 1 << 60
# so many searches by numpy take as long as copying the codes for a scan
_FEW_QUERIES = 8
# queries that a radius search answers at once; its records have 21 bits for their numbers
_RECORDED_QUERIES = 1 << 16

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
        path: one of PATHS, to force one; ``auto`` takes what is likely to be fastest. All of them
            return the same results. Without numba, only numpy is used.
    """

    def __init__(
        self,
        codes: NDArray[np.uint8],
        bits: int,
        *,
        threads: int | None = None,
        path: str = "auto",
    ) -> None:
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
        if path not in PATHS:
            raise unknown_name("path", path, PATHS)
        self.path = path
        self._size = len(codes), codes.shape[1]
        self._planner = planner.Planner(*self._size, self.threads)
        self._few = 0
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._words: NDArray[np.unsignedinteger] | None = None
        self._planes: Planes | None = None
        self._buckets: Buckets | None = None

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
        own = self._checked(queries)
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
        own = self._checked(queries)
        radius = min(_whole_number("radius", radius, 0), self.bits)
        if among is not None:
            chosen = self._positions(among)
            offsets, positions, distances = self._chosen(chosen)._within(own, radius)
            return offsets, chosen[positions], distances
        return self._within(own, radius)

    def _checked(self, queries: ArrayLike) -> NDArray[np.uint8]:
        # numba would compile its kernels once more for read-only arrays
        return np.require(check_codes(queries, self.bits), requirements="W")

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
        codes = np.take(self.codes, positions, axis=0)
        return Engine(codes, self.bits, threads=self.threads, path=self.path)

    def _search(
        self, queries: NDArray[np.uint8], weights: Numbers | None, k: int
    ) -> tuple[Numbers, Numbers]:
        k = min(k, len(self))
        if weights is not None:
            if self._use_numpy("weighted", len(queries)):
                return by_numpy.nearest_weighted(queries, weights, self.codes, k, self.threads)
            return self._ready_planes().nearest_weighted(queries, weights, k)
        if self._use_numpy("search", len(queries)):
            return by_numpy.nearest(queries, self._ready_words(), self.bits, k, self.threads)
        buckets, budget = self._ready_buckets(len(queries), k)
        if buckets is None:
            return self._ready_planes().nearest(queries, k)
        found, distances, done, guess = buckets.nearest(queries, k, budget, self._planner.guess(k))
        left = np.flatnonzero(~done)
        self._planner.learn(k, len(queries), len(left), guess)
        if len(left):
            found[left], distances[left] = self._ready_planes().nearest(queries[left], k)
        return found, distances

    def _within(self, queries: NDArray[np.uint8], radius: int) -> tuple[Numbers, Numbers, Numbers]:
        if self._use_numpy("within", len(queries)):
            words = self._ready_words()
            return by_numpy.within(queries, words, self.bits, radius, self.threads)
        starts = range(0, len(queries), _RECORDED_QUERIES)
        blocks = [queries[start : start + _RECORDED_QUERIES] for start in starts]
        parts = [self._within_by_kernels(block, radius) for block in blocks]
        counts, positions, distances = zip(*parts, strict=True)
        offsets = np.cumsum(np.concatenate([[0], *counts]))
        return offsets, np.concatenate(positions), np.concatenate(distances)

    def _within_by_kernels(
        self, queries: NDArray[np.uint8], radius: int
    ) -> tuple[Numbers, Numbers, Numbers]:
        """How many results each query has, positions and distances."""
        from fisherhash.index.engine.kernels import QUERY_SHIFT

        buckets, budget = self._ready_buckets(len(queries))
        records, left = np.zeros(0, dtype=np.uint64), np.arange(len(queries))
        if buckets is not None:
            records, done = buckets.within(queries, radius, budget)
            left = np.flatnonzero(~done)
        if len(left):
            found = self._ready_planes().within(queries[left], radius)
            numbers = (found >> np.uint64(QUERY_SHIFT)).astype(np.int64)
            found += (left[numbers] - numbers).astype(np.uint64) << np.uint64(QUERY_SHIFT)
            records = np.concatenate([records, found])
        records.sort()
        numbers = (records >> np.uint64(QUERY_SHIFT)).astype(np.int64)
        counts = np.bincount(numbers, minlength=len(queries))
        distances = (records >> np.uint64(32)) & np.uint64((1 << QUERY_SHIFT - 32) - 1)
        positions = records & np.uint64(0xFFFFFFFF)
        return counts, positions.astype(np.int64), distances.astype(np.int64)

    def _use_numpy(self, search: str, queries: int) -> bool:
        """Whether numpy does a kind of search; notes that the kernels are loaded otherwise."""
        if not len(self) or not queries:
            return True
        # kernels are compiled for each type of distances
        kind = f"{search} in {8 if self.bits < 255 else 16} bits"
        if self.path == "auto" or not planner.has_numba():
            weighted = search == "weighted"
            numpy = planner.use_numpy(queries, *self._size, kind, weighted=weighted)
            if self._planes is None and not weighted:
                self._few += queries
                numpy = numpy or self._few < _FEW_QUERIES
        else:
            numpy = self.path == "numpy"
        if not numpy:
            planner.loaded.add(kind)
        return numpy

    def _ready_words(self) -> NDArray[np.unsignedinteger]:
        if self._words is None:
            self._words = as_words(self.codes)
        return self._words

    def _ready_planes(self) -> Planes:
        from fisherhash.index.engine.scan import Planes

        with self._lock:
            if self._planes is None:
                self._planes = Planes(self.codes, self.bits, self.threads)
            return self._planes

    def _ready_buckets(self, queries: int, k: int = 0) -> tuple[Buckets | None, int]:
        """The buckets if this search is to use them, built if that pays, and its budget."""
        if self.path == "buckets":
            return self._built_buckets(), _UNLIMITED
        if self.path == "scan":
            return None, 0
        buckets = self._buckets
        if buckets is None and self._planner.buckets_pay(self.bits, queries):
            buckets = self._built_buckets()
        budget = self._planner.budget(queries, k) if buckets is not None else 0
        return (buckets, budget) if budget else (None, 0)

    def _built_buckets(self) -> Buckets | None:
        """The buckets; None while another thread builds them, or if they do not fit into memory."""
        from fisherhash.index.engine import buckets

        forced = self.path == "buckets"
        # unless the caller insists, it scans instead of waiting
        if not self._building.acquire(blocking=forced):
            return None
        try:
            free, needed = available_memory(), buckets.bytes_needed(self.bits, len(self))
            fits = free is None or needed < free // 2
            if self._buckets is None and (forced or fits):
                self._buckets = buckets.Buckets(self.codes, self.bits, self.threads)
        finally:
            self._building.release()
        return self._buckets


def _whole_number(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number
