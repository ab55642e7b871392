"""Progress: a bar on a terminal, an occasional log line elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fisherhash.errors import printable

logger = logging.getLogger(__name__)

Advance = Callable[[int], None]
LINE_SECONDS = 30.0
"""Time between two log lines where there is no terminal; a short job logs none."""


@contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Yield a function that advances the bar by a number of items."""
    # It often names a folder, which may be a stranger's.
    title = printable(title)
    bar = _rich_bar() if sys.stderr.isatty() else None
    if bar is None:
        yield _lines(title, total)
        return
    with bar:
        task = bar.add_task(title.replace("[", "\\["), total=total)
        yield lambda step: bar.advance(task, step)


def _lines(title: str, total: int) -> Advance:
    done, last = 0, time.monotonic()

    def advance(step: int) -> None:
        nonlocal done, last
        done += step
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            logger.info("%s: %d of %d", title, done, total)

    return advance


def _rich_bar():
    try:
        from rich import console, progress
    except ImportError:
        return None
    columns = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn())
    screen = console.Console(stderr=True)
    return progress.Progress("{task.description}", *columns, console=screen, transient=True)
