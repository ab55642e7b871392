"""Progress: a bar on a terminal, an occasional log line elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fisherhash.errors import printable
from fisherhash.system.launched import launched_rank

logger = logging.getLogger(__name__)

Advance = Callable[[int], None]
FIRST_LINE, LINE_SECONDS = 5.0, 30.0
"""Where there is no terminal: when the first log line comes, and the time between two others."""
HEAD_START = 0.1
"""Items counted this soon were done before (cached rows, say) and do not count for the speed."""


Listener = Callable[[str, int, int], object]
"""Called with the title of a job, how many items are done, and how many there are."""
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def progress_to(listener: Listener) -> Iterator[None]:
    """In this thread, progress goes to a function instead of to the terminal."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


@contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Yield a function that advances the bar by a number of items.

    Of several processes that torchrun started, the first one has the bar.
    """
    # It often names a folder, which may be a stranger's.
    title = printable(title)
    if launched_rank()[0]:
        yield lambda _: None
        return
    listener = _listener.get()
    if listener is not None:
        yield _told(listener, title, total)
        return
    bar = _rich_bar() if sys.stderr.isatty() else None
    if bar is None:
        yield _lines(title, total)
        return
    with bar:
        task = bar.add_task(title.replace("[", "\\["), total=total)
        yield lambda step: bar.advance(task, step)


def _told(listener: Listener, title: str, total: int) -> Advance:
    done = 0

    def advance(step: int) -> None:
        nonlocal done
        done += step
        listener(title, done, total)

    advance(0)
    return advance


def _lines(title: str, total: int) -> Advance:
    began = time.monotonic()
    done, before, due = 0, 0, began + FIRST_LINE

    def advance(step: int) -> None:
        nonlocal done, before, due
        now = time.monotonic()
        done += step
        if now - began < HEAD_START:
            before = done
        if now >= due and done < total:
            due = now + LINE_SECONDS
            rate = (done - before) / (now - began)
            logger.info("%s: %s", title, describe_progress(done, total, rate))

    return advance


def describe_progress(done: int, total: int, rate: float) -> str:
    """How far a job is, its speed and the time left, in words.

    >>> describe_progress(1200, 5000, 131.4)
    '1,200 of 5,000, 131 per second, 29 s left'
    >>> describe_progress(3, 9000, 0.5)
    '3 of 9,000, 0.5 per second, 5 h left'
    """
    line = f"{done:,} of {total:,}"
    if rate <= 0:
        return line
    seconds = (total - done) / rate
    unit, length = "s", 1
    for name, size in (("min", 60), ("h", 3600)):
        if seconds >= 2 * size:
            unit, length = name, size
    speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.1g}"
    return f"{line}, {speed} per second, {seconds / length:.0f} {unit} left"


def _rich_bar():
    try:
        from rich import console, progress
    except ImportError:
        return None

    class Speed(progress.ProgressColumn):
        def render(self, task: Any) -> str:
            return f"{task.speed:,.1f}/s" if task.speed else ""

    columns = (
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        Speed(),
        progress.TimeRemainingColumn(),
    )
    screen = console.Console(stderr=True)
    return progress.Progress("{task.description}", *columns, console=screen, transient=True)
