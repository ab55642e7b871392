"""How many processor cores this process may use, and how many processes fit on them."""

from __future__ import annotations

import os

from fisherhash.errors import UsageError

MOST_PER_CORE = 16


def available_cores() -> int:
    """The number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_workers(workers: int) -> None:
    """Refuse a number of processes that would only fill the memory."""
    most = MOST_PER_CORE * available_cores()
    if not 0 <= workers <= most:
        raise UsageError(
            f"workers must be 0 or more, and at most {most} ({MOST_PER_CORE} per core of this "
            f"machine), got {workers}"
        )
