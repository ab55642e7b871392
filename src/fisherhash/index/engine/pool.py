"""Plain threads for kernels that release the GIL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_LARGEST = 64
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def run(job: Callable[..., Any], calls: Iterable[Iterable[Any]], threads: int) -> list[Any]:
    """Call a job once per tuple of arguments, and return the results in the same order.

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

    def work() -> None:
        while True:
            with _lock:
                number = next(waiting, None)
            if number is None:
                return
            results[number] = job(*calls[number])

    helpers = min(threads, len(calls), _LARGEST) - 1
    others = [_threads().submit(work) for _ in range(helpers)]
    try:
        work()
    finally:
        # even after an error here: no thread may still be writing when the caller goes on
        failures = [other.exception() for other in others]
    for failure in failures:
        if failure is not None:
            raise failure
    return results


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
