"""Plain threads for work that releases the GIL."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_LARGEST = 64
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def run(job: Callable[..., Any], calls: Iterable[Iterable[Any]], threads: int) -> list[Any]:
    """Call a job once per tuple of arguments, and return the results in the same order.

    After an error or Ctrl-C no further call begins.

    >>> run(max, [(1, 2), (4, 3)], threads=2)
    [2, 4]

    Args:
        job: releases the GIL for most of its time.
        calls: the arguments of each call.
        threads: the most threads to use, including this one.
    """
    calls = list(calls)
    results: list[Any] = [None] * len(calls)
    waiting = iter(range(len(calls)))
    stopped = False

    def work() -> None:
        nonlocal stopped
        try:
            while not stopped:
                with _lock:
                    number = next(waiting, None)
                if number is None:
                    return
                results[number] = job(*calls[number])
        except BaseException:
            stopped = True
            raise

    others: list[Future[None]] = []
    try:
        for _ in range(min(threads, len(calls), _LARGEST) - 1):
            others.append(_threads().submit(work))
        work()
    except BaseException:
        stopped = True
        raise
    finally:
        # even after an error here: no thread may still be writing when the caller goes on
        failures = [other.exception() for other in others]
    for failure in failures:
        if failure is not None:
            raise failure
    return results


def split(total: int, pieces: int) -> list[tuple[int, int]]:
    """Cut range(total) into at most ``pieces`` pieces of about equal size, none of them empty.

    >>> split(5, 2)
    [(0, 2), (2, 5)]
    """
    bounds = [total * i // pieces for i in range(pieces + 1)] if pieces else []
    return [(a, b) for a, b in itertools.pairwise(bounds) if a < b]


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_LARGEST, thread_name_prefix="fisherhash-search")
        return _pool


def _forget() -> None:
    """A forked child has none of its parent's threads, one of which may have held the lock."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
