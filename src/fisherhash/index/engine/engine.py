"""Exact search over an array of codes, by position.

Four ways return the same results in the same order: plain numpy (small collections), a scan of all
codes, a scan of the distinct codes, and buckets (see tables.py). The planner chooses. ``search``
and ``within`` go by Hamming distance, ``rank`` also by weights and by a second code.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.codes import check_bits, check_codes, code_bytes
from fisherhash.errors import UsageError
from fisherhash.index.checks import whole_number
from fisherhash.index.engine import planner, small, sums
from fisherhash.index.engine import ranking as by_kernels
from fisherhash.index.engine import tables as search_tables
from fisherhash.index.engine.sums import SumLayout
from fisherhash.index.engine.tables import Tables
from fisherhash.index.ranking import (
    COST_BITS,
    Ranked,
    WeightedQueries,
    check_weights,
    ranked_by_numpy,
)
from fisherhash.system.cores import available_cores
from fisherhash.system.memory import available_memory

PATHS = ("auto", "numpy", "scan", "unique", "buckets")
MOST_CODES = 2**31 - 1

UNLIMITED = 1 << 60
# the bit at which the query's number begins in a record
_QUERY = np.uint64(43)
# items ranked by the first code beyond twice the k wanted, before sums are scanned
_MORE_RANKED = 64
_NO_FINE = np.zeros((0, 1), dtype=np.uint64)
# bytes for entries of second codes, 8 per item and table; and at most an eighth of the memory
_MOST_ENTRIES = 1 << 30

_log = logging.getLogger(__name__)


class _Shown:
    """A read-only array's memory, presented as writable.

    The kernels do not write to these arrays, but numba would compile every kernel a second time
    for read-only ones.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.__array_interface__ = {
            **array.__array_interface__,
            "data": (array.__array_interface__["data"][0], False),
        }


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    array = np.require(np.asarray(array), requirements=["C", "A"])
    return array if array.flags.writeable or not array.size else np.asarray(_Shown(array))


class Engine:
    """Exact search over codes, ordered by (distance, position).

    >>> engine = Engine(np.array([[3], [1], [6]], dtype=np.uint8), bits=8)
    >>> positions, distances = engine.search(np.array([[1]], dtype=np.uint8), k=2)
    >>> positions.tolist(), distances.tolist()
    ([[1, 0]], [[0, 1]])

    Args:
        codes: (n, bytes) packed codes, possibly memory-mapped; they are not copied, and must not
            change while the engine is used.
        bits: length of a code.
        tables: the result of :meth:`tables` of an engine over the same codes.
        threads: the most threads to use; all cores if None.
        path: one of PATHS, to force one way; ``auto`` lets the planner choose.
        fine: (n, fine bytes) second codes, by which :meth:`rank` orders ties.

    Attributes:
        rejected: the given tables were not those of the codes, and were built again.
    """

    def __init__(
        self,
        codes: NDArray[np.uint8],
        bits: int,
        *,
        tables: Mapping[str, NDArray[Any]] | None = None,
        threads: int | None = None,
        path: str = "auto",
        fine: NDArray[np.uint8] | None = None,
    ) -> None:
        self.bits = check_bits(bits)
        if codes.ndim != 2 or codes.dtype != np.uint8 or codes.shape[1] != code_bytes(bits):
            raise UsageError(
                f"codes of {bits} bits must be uint8 of shape (n, {code_bytes(bits)}), "
                f"got {codes.dtype} of shape {codes.shape}"
            )
        if len(codes) > MOST_CODES:
            raise UsageError(f"an engine can hold at most {MOST_CODES} codes, got {len(codes)}")
        if path not in PATHS:
            raise UsageError(f"unknown path '{path}'. Known: {', '.join(PATHS)}")
        if fine is not None and (
            fine.ndim != 2 or fine.dtype != np.uint8 or len(fine) != len(codes)
        ):
            raise UsageError(
                f"the second codes of {len(codes)} codes must be uint8 of shape ({len(codes)}, "
                f"bytes), got {fine.dtype} of shape {fine.shape}"
            )
        self.codes = _plain(codes)
        self.fine = fine
        self._fine_words: tuple[Tables, NDArray[np.uint64]] | None = None
        self._layout: tuple[Tables, SumLayout] | None = None
        self._entries: tuple[Tables, NDArray[np.uint64] | None] | None = None
        self.threads = available_cores() if threads is None else max(1, threads)
        self.path = path
        self._lock = threading.Lock()
        self._planes: Tables | None = None
        self._tables: Tables | None = None
        self._plan = planner.Planner()
        self._rank_plan = planner.Planner()
        self._sum_plan = planner.Planner(sums=True)
        self._build_seconds: float | None = None
        self.rejected = False
        self._proven = tables is None
        if tables is not None:
            ready = {name: _plain(array) for name, array in tables.items()}
            self._tables = Tables.from_arrays(ready, len(codes), self.bits)

    def __len__(self) -> int:
        return len(self.codes)

    def search(self, queries: ArrayLike, k: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions and distances (n_queries, min(k, n)) of the nearest codes."""
        codes = check_codes(queries, self.bits)
        k = min(whole_number("k", k, 1), len(self))
        if not k or not len(codes) or self._is_small(len(codes), "search"):
            return small.nearest_by_numpy(codes, self.codes, self.bits, k)
        from fisherhash.index.engine import multi_index, scan

        codes = _plain(codes)
        tables = self._ready(len(codes))
        planner.loaded.add(self._kernels("search"))
        budget = self._budget(tables, len(codes), k, self._plan)
        if not budget:
            return scan.nearest_by_scan(tables, codes, k, self.threads)
        began = time.perf_counter()
        found, distances, done, guess = multi_index.nearest_by_buckets(
            tables, codes, k, self.threads, budget, self._plan.guess(k)
        )
        late = planner.is_late(time.perf_counter() - began, tables, len(codes), self.threads)
        left = np.flatnonzero(done == 0)
        self._plan.learn(k, len(codes), len(left), guess, late=late)
        found[left], distances[left] = scan.nearest_by_scan(tables, codes[left], k, self.threads)
        return found, distances

    def rank(self, queries: WeightedQueries, k: int) -> Ranked:
        """The best codes (n_queries, min(k, n)), in the order of the queries' ranking."""
        codes, k = check_codes(queries.codes, self.bits), min(whole_number("k", k, 1), len(self))
        fine, extra, weights = queries.fine, queries.fine_weight, queries.weights
        if fine is not None:
            fine = self._check_fine(fine, len(codes))
        if weights is not None:
            weights = check_weights(weights, len(codes), self.bits)
        if extra is None:
            return self._rank(WeightedQueries(_plain(codes), weights, fine), k)
        if fine is None or extra.shape != (len(codes),) or extra.dtype.kind not in "iu":
            raise UsageError("fine_weight needs second codes, and a whole number per query")
        if extra.size and (extra.min() < 0 or extra.max() >= 1 << (2 * COST_BITS - 10)):
            raise UsageError("fine_weight must not be negative, and not that large")
        return self._rank(WeightedQueries(_plain(codes), weights, fine, extra.astype(np.int64)), k)

    def _check_fine(self, fine: NDArray[np.uint8], queries: int) -> NDArray[np.uint8]:
        if self.fine is None:
            raise UsageError("there are no second codes to compare the queries' with")
        if fine.dtype != np.uint8 or fine.shape != (queries, self.fine.shape[1]):
            raise UsageError(
                f"second codes must be uint8 of shape ({queries}, {self.fine.shape[1]}), "
                f"got {fine.dtype} of shape {fine.shape}"
            )
        return fine

    def _rank(self, queries: WeightedQueries, k: int) -> Ranked:
        summed = queries.fine_weight is not None
        kind, plan = ("sum", self._sum_plan) if summed else ("rank", self._rank_plan)
        # numpy has no fast way to add weights
        effort = 1 if queries.plain else self.codes.shape[1]
        count = len(queries.codes)
        if not k or not count or self._is_small(effort * count, kind):
            return ranked_by_numpy(queries, self.codes, k, self.fine)
        tables = self._ready(count)
        planner.loaded.add(self._kernels(kind))
        budget = self._budget(tables, count, k, plan)
        by_scan = self._sum_by_scan if summed else self._rank_by_scan
        entries = self._bucket_entries(tables) if budget and summed else None
        if not budget or (summed and entries is None):
            return by_scan(tables, queries, k)
        stored = self._fine(tables) if queries.fine is not None and not summed else _NO_FINE
        began = time.perf_counter()
        if entries is not None:
            results, done = sums.summed_by_buckets(
                tables, queries, k, self._sum_layout(tables), entries, self.threads, budget
            )
        else:
            results, done = by_kernels.ranked_by_buckets(
                tables, queries, k, stored, self.threads, budget
            )
        late = planner.is_late(time.perf_counter() - began, tables, count, self.threads)
        left = np.flatnonzero(done == 0)
        plan.learn(k, count, len(left), 0, late=late)
        if len(left):
            rest = by_scan(tables, queries.part(left), k)
            for result, values in zip(results, rest, strict=True):
                result[left] = values
        return results

    def _rank_by_scan(self, tables: Tables, queries: WeightedQueries, k: int) -> Ranked:
        stored = self._fine(tables) if queries.fine is not None else _NO_FINE
        return by_kernels.ranked_by_scan(tables, queries, k, stored, self.threads)

    def _sum_by_scan(self, tables: Tables, queries: WeightedQueries, k: int) -> Ranked:
        count = min(len(self), 2 * k + _MORE_RANKED)
        codes, weights, second, _ = queries
        if queries.plain:
            positions, distances = self.search(codes, count)
            each = 1 if weights is None else weights
            near = Ranked(positions, distances * each, np.zeros_like(positions))
        else:
            near = self._rank(WeightedQueries(codes, weights), count)
        if second is not None and self.fine is not None:
            near = near._replace(fines=sums.fine_distances(near, second, self.fine))
        layout = self._sum_layout(tables)
        return sums.summed_by_scan(tables, queries, near, k, layout, self.threads)

    def _fine(self, tables: Tables) -> NDArray[np.uint64]:
        """The second codes in the order of the tables' lists: those of equal codes lie together."""
        with self._lock:
            if self._fine_words is None or self._fine_words[0] is not tables:
                fine = self.fine if self.fine is not None else np.zeros((0, 8), np.uint8)
                ordered = fine[tables.positions] if len(tables.starts) else fine
                self._fine_words = tables, _plain(by_kernels.fine_words(ordered))
            return self._fine_words[1]

    def _sum_layout(self, tables: Tables) -> SumLayout:
        """The second codes as sums read them."""
        with self._lock:
            if self._layout is None or self._layout[0] is not tables:
                fine = self.fine if self.fine is not None else np.zeros((0, 8), np.uint8)
                self._layout = tables, sums.sum_layout(tables, fine, self.threads)
            return self._layout[1]

    def _bucket_entries(self, tables: Tables) -> NDArray[np.uint64] | None:
        """Where the second codes of what is in the buckets are; None if that is too large."""
        layout = self._sum_layout(tables)
        with self._lock:
            if self._entries is None or self._entries[0] is not tables:
                free, size = available_memory(), 8 * tables.bucket_items.size
                fits = size <= _MOST_ENTRIES and (free is None or size <= free // 8)
                made = sums.bucket_entries(tables, layout.entries, self.threads) if fits else None
                self._entries = tables, made
            return self._entries[1]

    def within(
        self, queries: ArrayLike, radius: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Offsets (n_queries + 1,), positions and distances of everything up to the radius."""
        codes = check_codes(queries, self.bits)
        radius = min(whole_number("radius", radius, 0), self.bits)
        if not len(self) or not len(codes) or self._is_small(len(codes), "within"):
            return small.within_by_numpy(codes, self.codes, self.bits, radius)
        from fisherhash.index.engine import scan

        tables = self._ready(len(codes))
        planner.loaded.add(self._kernels("within"))
        step = scan.MOST_QUERIES
        blocks = [_plain(codes[first : first + step]) for first in range(0, len(codes), step)]
        parts = [self._within(tables, block, radius) for block in blocks]
        if len(parts) == 1:
            return parts[0]
        offsets, found, distances = zip(*parts, strict=True)
        counts = np.concatenate([[0], *map(np.diff, offsets)])
        return np.cumsum(counts), np.concatenate(found), np.concatenate(distances)

    def _within(
        self, tables: Tables, queries: NDArray[np.uint8], radius: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        from fisherhash.index.engine import kernels, multi_index, scan

        records = []
        left = np.arange(len(queries))
        budget = self._budget(tables, len(queries), 0, self._plan)
        if budget:
            near, done = multi_index.within_by_buckets(
                tables, queries, radius, self.threads, budget
            )
            records.append(near)
            left = np.flatnonzero(done == 0)
        if len(left):
            near = scan.within_by_scan(tables, queries[left], radius, self.threads)
            if len(left) < len(queries):
                numbers = near >> _QUERY
                near += (left.astype(np.uint64)[numbers] - numbers) << _QUERY
            records.append(near)
        offsets = np.zeros(len(queries) + 1, dtype=np.int64)
        for part in records:
            kernels.count_within(part, tables.starts, offsets[1:])
        np.cumsum(offsets, out=offsets)
        found = np.empty(offsets[-1], dtype=np.int64)
        distances = np.empty(offsets[-1], dtype=np.int64)
        for part in records:
            kernels.fill_within(part, tables.starts, tables.positions, offsets, found, distances)
        return offsets, found, distances

    def build(self) -> None:
        """Build the search tables now; otherwise the first search that profits from them does."""
        with self._lock:
            self._build()

    def tables(self) -> dict[str, NDArray[Any]]:
        """The search tables as plain arrays; builds them if necessary.

        They can be written to disk, mapped into memory and passed to another engine.
        """
        self.build()
        return {} if self._tables is None else self._tables.arrays()

    def describe(self) -> dict[str, Any]:
        """Which way a search goes, and how large the tables are."""
        tables = self._tables or self._planes
        about: dict[str, Any] = {
            "codes": len(self),
            "bits": self.bits,
            "path": self.path,
            "threads": self.threads,
            "tables": self._tables is not None,
        }
        if tables is not None:
            about |= {
                "distinct": tables.items if len(tables.starts) else None,
                "bucket_tables": len(tables.directory),
                "bucket_bits": tables.length,
                "table_bytes": tables.bytes,
            }
        summed = self._layout[1].bytes if self._layout is not None else 0
        if self._entries is not None and self._entries[1] is not None:
            summed += self._entries[1].nbytes
        if summed:
            about["sum_bytes"] = summed
        if self._build_seconds is not None:
            about["build_seconds"] = round(self._build_seconds, 3)
        kernels = sys.modules.get("fisherhash.index.engine.kernels")
        if kernels is not None:
            about["compile_seconds"] = round(kernels.compiling.seconds, 3)
        return about

    def _is_small(self, queries: int, kind: str) -> bool:
        if self.path != "auto":
            return self.path == "numpy"
        return planner.is_small(queries * len(self), self._kernels(kind))

    def _kernels(self, kind: str) -> str:
        """The name of the kernels for a kind of search; they differ in the type of distances."""
        return f"{kind} in {8 if self.bits < 255 else 16} bits"

    def _ready(self, queries: int) -> Tables:
        """The tables to search in; builds them if that pays."""
        usable = self.path in ("auto", "buckets", "unique")
        if self._tables is not None and self._proven and usable:
            return self._tables
        with self._lock:
            if usable and not self._proven:
                self._build()
            if self._tables is not None and usable:
                return self._tables
            if self.path in ("buckets", "unique") or (
                self.path == "auto" and self._plan.build_now(len(self), self.bits, queries)
            ):
                self._build()
                if self._tables is not None:
                    return self._tables
            if self._planes is None:
                self._planes = search_tables.build(
                    self.codes, self.bits, self.threads, lists=False, buckets=False
                )
            return self._planes

    def _budget(self, tables: Tables, queries: int, k: int, plan: planner.Planner) -> int:
        """Work that the buckets may do per query; 0 if they are not to be used."""
        if not tables.length or self.path == "unique":
            return 0
        if self.path == "buckets":
            return UNLIMITED
        return plan.budget(tables, queries, self.threads, k)

    def _prove(self) -> None:
        """Compare given tables with the codes, before the first kernel sees them."""
        if self._proven:
            return
        wrong = self._tables.disprove(self.codes, self.threads) if self._tables is not None else ""
        if wrong:
            _log.warning("stored search tables are not those of the codes (%s): built again", wrong)
            self._tables, self.rejected = None, True
        self._proven = True

    def _build(self) -> None:
        self._prove()
        if self._tables is not None or not len(self):
            return
        start = time.perf_counter()
        forced = {"buckets": True, "unique": False}.get(self.path)
        lists = None if self.path == "auto" else True
        self._tables = search_tables.build(
            self.codes, self.bits, self.threads, lists=lists, buckets=forced
        )
        self._planes = None
        self._build_seconds = time.perf_counter() - start
        _log.info("search tables of %d codes built in %.1f s", len(self), self._build_seconds)
