"""One helper for every progress bar: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

Advance = Callable[[int], None]
SECONDS = 30.0
"""Between two lines where there is no terminal; a short job prints none."""


@contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Yield a function that moves the bar forward by a number of items."""
    bar = _rich_bar() if sys.stderr.isatty() else None
    if bar is None:
        yield _lines(title, total)
        return
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda step: bar.advance(task, step)


def _lines(title: str, total: int) -> Advance:
    done, said = 0, time.monotonic()

    def advance(step: int) -> None:
        nonlocal done, said
        done += step
        if time.monotonic() - said >= SECONDS:
            said = time.monotonic()
            logger.info("%s: %d of %d", title, done, total)

    return advance


def _rich_bar():
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
