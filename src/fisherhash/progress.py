"""One helper for every progress bar: shown on a terminal, silent elsewhere and without rich."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


@contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Yield a function that moves the bar forward by a number of items."""
    bar = _rich_bar() if sys.stderr.isatty() else None
    if bar is None:
        yield lambda _: None
        return
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda step: bar.advance(task, step)


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
