"""How a search is done: estimates of work, in nanoseconds of one thread.

They only decide how fast a result comes, never what it is.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from dataclasses import dataclass

# numpy is used up to this much work while numba's kernels are not loaded yet
_SMALL = 25e6
# the same once they are loaded
_TINY = 5e3
# work of numpy in total, after which the kernels would have been the better choice
_PATIENCE = 500e6
# numpy's work per code: for a word of eight bytes, and for a byte of a weighted search
_NUMPY_WORD, _NUMPY_BYTE = 1.3, 1.2

# one compared code in a bucket
_COMPARED = 0.15
# one code of the scan: a fixed part, and one per byte
_SCANNED = 0.035
_SCANNED_BYTE = 0.01
# reading planes from memory, per byte, all threads together
_READ_BYTE = 0.025
# building buckets, per code
_BUILT = 60.0
_FEWEST_BUILT = 100_000
# buckets of longer codes would take many times the memory of the codes
_LONGEST_BUILT = 128
# buckets may spend this fraction of what a scan would
_SHARE = 0.7

# buckets that mostly failed are tried again once in so many searches
_RETRY = 16

# without numba, a hint is logged from so many codes on, and for so much work in one search
_LARGE_COLLECTION = 2_000_000
_LARGE_WORK = 2e9

_log = logging.getLogger(__name__)

loaded: set[str] = set()
"""Kinds of searches whose kernels this process has compiled or loaded from the cache."""

_numpy_done = 0.0


@functools.cache
def has_numba() -> bool:
    """Whether numba is installed; it is not imported yet."""
    return importlib.util.find_spec("numba") is not None


def use_numpy(queries: int, total: int, width: int, kind: str, *, weighted: bool) -> bool:
    """Whether numpy searches, instead of the kernels of this kind; see ``loaded``."""
    global _numpy_done
    each = width * _NUMPY_BYTE if weighted else -(-width // 8) * _NUMPY_WORD
    work = queries * total * each
    if not has_numba():
        if total > _LARGE_COLLECTION or work > _LARGE_WORK:
            _suggest_numba()
        return True
    if kind in loaded:
        return work < _TINY
    if work > _SMALL or _numpy_done > _PATIENCE:
        return False
    _numpy_done += work
    return True


@functools.cache
def _suggest_numba() -> None:
    _log.warning("searches of this size are many times faster with: pip install 'fisherhash[fast]'")


def scan_cost(total: int, width: int, queries: int, threads: int) -> float:
    """Nanoseconds that a thread needs to scan for one query, in a batch of this many."""
    cost = total * (_SCANNED + _SCANNED_BYTE * width)
    if queries < 4:
        # few queries have all threads to themselves, but wait for the memory
        cost = max(cost / threads, total * width * _READ_BYTE)
    return cost


@dataclass
class _Past:
    """Searches for about the same k."""

    tried: int = 0
    failed: int = 0
    waited: int = 0
    guess: int | None = None


class Planner:
    """Remembers how earlier searches of one engine went.

    Args:
        total: how many codes there are.
        width: bytes of a code.
        threads: the most threads to use.
    """

    def __init__(self, total: int, width: int, threads: int) -> None:
        self._size = total, width
        self._threads = threads
        self._scanned = 0
        self._past: dict[int, _Past] = {}

    def buckets_pay(self, bits: int, queries: int) -> bool:
        """Whether the scans up to this one would have paid for building buckets."""
        self._scanned += queries
        total = self._size[0]
        if total < _FEWEST_BUILT or bits > _LONGEST_BUILT:
            return False
        return self._scanned * scan_cost(*self._size, queries, 1) > _BUILT * total

    def budget(self, queries: int, k: int = 0) -> int:
        """Work that the buckets may do per query; 0 when they failed too often for this k."""
        past = self._past.get(k.bit_length(), _Past())
        if past.tried >= 8 and 2 * past.failed > past.tried:
            past.waited += 1
            if past.waited % _RETRY:
                return 0
        return int(_SHARE * scan_cost(*self._size, queries, self._threads) / _COMPARED)

    def guess(self, k: int) -> int | None:
        """A distance within which the k nearest are likely to be found."""
        return self._past.get(k.bit_length(), _Past()).guess

    def learn(self, k: int, tried: int, failed: int, guess: int) -> None:
        """Remember for how many queries the buckets failed, and how far the results were."""
        past = self._past.setdefault(k.bit_length(), _Past())
        past.tried += tried
        past.failed += failed
        past.guess = guess
        if past.tried > 1024:
            past.tried, past.failed = past.tried // 2, past.failed // 2
