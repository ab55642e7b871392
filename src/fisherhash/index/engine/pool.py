"""Plain threads for kernels that release the GIL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_LARGEST = 64
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def run(jobs: Sequence[Callable[[], Any]], threads: int) -> list[Any]:
    """Call all jobs on at most ``threads`` threads, including this one, and return the results.

    >>> run([lambda: 1, lambda: 2], threads=2)
    [1, 2]
    """
    results: list[Any] = [None] * len(jobs)
    waiting = iter(range(len(jobs)))

    def work() -> None:
        while True:
            with _lock:
                number = next(waiting, None)
            if number is None:
                return
            results[number] = jobs[number]()

    helpers = min(threads, len(jobs), _LARGEST) - 1
    others = [_threads().submit(work) for _ in range(helpers)]
    try:
        work()
    finally:
        # even after an error here: no thread may still be writing when the caller goes on
        failures = [job.exception() for job in others]
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
