"""Which way a search goes: estimates of work, in nanoseconds of one thread.

They only decide how fast a result comes, never what it is.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

from fisherhash.index.engine.tables import Tables

# comparisons up to which numpy is used while numba's kernels are not loaded yet
_SMALL = 4_000_000
# the same once they are loaded
_TINY = 5_000
# numpy's comparisons in total, after which the kernels would have been the better choice
_PATIENCE = 200_000_000

# one compared code in a bucket
_COMPARED = 0.15
# one code of the scan: a fixed part, and one per byte
_SCANNED = 0.035
_SCANNED_BYTE = 0.01
# a scan that adds up two distances, relative to one that does not
_SUMMED = 8
# reading planes from memory, per byte, all threads together
_READ_BYTE = 0.025
# building, per code
_BUILT = 60.0
_FEWEST_BUILT = 100_000
# buckets may spend this fraction of what a scan would
_SHARE = 0.7

# buckets that mostly failed, or were late, are tried again once in so many searches
_RETRY, _LATE_RETRY = 16, 256

# buckets are late when they take so many times as long as a scan would, and so many seconds
_LATE, _LATE_SECONDS = 8.0, 0.05
# so many times in a row, and their tables are taken not to be in memory
_OFTEN_LATE = 4

# kinds of searches whose kernels this process has compiled or loaded from the cache
loaded: set[str] = set()

_numpy_done = 0


@functools.cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def is_small(comparisons: int, kind: str) -> bool:
    """Whether numpy is fast enough for this many comparisons.

    ``kind`` names the kernels that would do it instead; see ``loaded``.
    """
    global _numpy_done
    if kind in loaded:
        return comparisons < _TINY
    if not _has_numba():
        return True
    if comparisons > _SMALL or _numpy_done > _PATIENCE:
        return False
    _numpy_done += comparisons
    return True


def scan_cost(items: int, width: int, queries: int, threads: int) -> float:
    """Nanoseconds that a thread needs to scan for one query, in a batch of this many."""
    cost = items * (_SCANNED + _SCANNED_BYTE * width)
    if queries < 4:
        # few queries have all threads to themselves, but wait for the memory
        cost = max(cost / threads, items * width * _READ_BYTE)
    return cost


def is_late(seconds: float, tables: Tables, queries: int, threads: int) -> bool:
    """Whether the buckets took far longer than a scan would.

    Look-ups are spread over all of the tables. Where these do not fit into memory, nearly every
    look-up waits for the disk, while a scan reads the codes alone, which may fit.
    """
    if seconds < _LATE_SECONDS:
        return False
    cost = scan_cost(tables.items, _width(tables), queries, threads)
    return seconds > 1e-9 * _LATE * cost * (queries if queries < 4 else queries / threads)


def _width(tables: Tables) -> int:
    return len(tables.planes) // max(1, tables.items)


def tables_pay(total: int, bits: int, queries: int) -> bool:
    """Whether this many queries save more time than building takes."""
    if total < _FEWEST_BUILT:
        return False
    return queries * scan_cost(total, -(-bits // 8), queries, 1) > _BUILT * total


@dataclass
class _Past:
    """Searches of one engine for about the same k."""

    tried: int = 0
    failed: int = 0
    late: int = 0
    waited: int = 0
    guess: int | None = None


class Planner:
    """Remembers how earlier searches of one engine went.

    Args:
        sums: they rank by the sum of two distances.
    """

    def __init__(self, *, sums: bool = False) -> None:
        self._share = _SHARE * (_SUMMED if sums else 1)
        self._scanned = 0
        self._past: dict[int, _Past] = {}

    def build_now(self, total: int, bits: int, queries: int) -> bool:
        """Whether the scans up to this one would have paid for the tables."""
        self._scanned += queries
        return tables_pay(total, bits, self._scanned)

    def budget(self, tables: Tables, queries: int, threads: int, k: int = 0) -> int:
        """Work that the buckets may do per query; 0 when they failed or were late too often."""
        past = self._past.get(k.bit_length(), _Past())
        fails = past.tried >= 8 and 2 * past.failed > past.tried
        if fails or past.late >= _OFTEN_LATE:
            past.waited += 1
            if past.waited % (_RETRY if fails else _LATE_RETRY):
                return 0
        cost = scan_cost(tables.items, _width(tables), queries, threads)
        return int(self._share * cost / _COMPARED)

    def guess(self, k: int) -> int | None:
        """A distance within which the k nearest are likely to be found."""
        return self._past.get(k.bit_length(), _Past()).guess

    def learn(self, k: int, tried: int, failed: int, guess: int, *, late: bool = False) -> None:
        """Remember for how many queries the buckets failed, and how far the results were.

        Whether they were late counts per search: kernels that are compiled make one of them late.
        """
        past = self._past.setdefault(k.bit_length(), _Past())
        past.late = past.late + 1 if late else 0
        past.tried += tried
        past.failed += failed
        past.guess = guess
        if past.tried > 1024:
            past.tried, past.failed = past.tried // 2, past.failed // 2
