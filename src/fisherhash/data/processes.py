"""Worker processes: fresh interpreters that wait for what to do on their standard input.

Starting one takes a tenth of a second, for imports. A command that is sure to need some starts them
before it imports its own modules. Those that nobody needs end with their parent, because their
standard input closes. Nothing here imports anything heavy.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import IO, cast

from fisherhash.system.cores import available_cores

MOST_WORKERS = 64

WORTH_STARTING = 1.5
"""Seconds of work below which starting processes takes longer than it saves."""

MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
"""Environment of a worker: glibc keeps up to 128 MB for the next image. By default it returns the
memory of every large image to the system, and getting it back takes a third of the time."""

_USUAL = (".jpg", ".jpeg", ".png", ".webp", ".heic")
_LEAST_SECONDS, _MOST_BYTES = 0.001, 200e6
"""No image takes less time than this, and no second is enough for more bytes."""

_BOOT = (
    "import gc, pickle, sys; gc.disable(); sys.path[:], early = pickle.load(sys.stdin.buffer); "
    "from fisherhash.data.workers import serve; serve(early)"
)
Step = tuple[str, str, str]
"""A module, a function in it, and its argument."""
_waiting: list[subprocess.Popen[bytes]] = []


def most_workers() -> int:
    """The number of processes for much work; 0 where one process is as fast."""
    cores = available_cores()
    return 0 if cores < 2 or sys.platform == "win32" else min(cores, MOST_WORKERS)


def start_early(
    folder: str | os.PathLike[str], count: int | None, early: Sequence[Step] = ()
) -> None:
    """Start processes that wait, if the images of a folder are surely worth it.

    Args:
        folder: the images.
        count: number of processes; None for one per core.
        early: what they call while they wait.
    """
    seconds = 0.0
    for size in _sizes(folder):
        seconds += _LEAST_SECONDS + size / _MOST_BYTES
        if seconds > WORTH_STARTING:
            break
    else:
        return
    try:
        for _ in range(most_workers() if count is None else count):
            _waiting.append(_start(early))
    except OSError:
        # Whoever needs it will tell.
        return


def _sizes(folder: str | os.PathLike[str]) -> Iterator[int]:
    """The bytes of the usual images in and below a folder."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            if entry.name.lower().endswith(_USUAL):
                yield entry.stat().st_size
            elif entry.is_dir(follow_symlinks=False):
                yield from _sizes(entry.path)
        except OSError:
            continue


def waiting() -> int:
    """The number of processes that were started early and that nobody uses yet."""
    return len(_waiting)


def worker_process() -> subprocess.Popen[bytes]:
    """A process that waits, or a new one.

    Raises:
        OSError: it could not be started.
    """
    return _waiting.pop() if _waiting else _start()


def end_waiting() -> None:
    """End the processes that nobody needed."""
    while _waiting:
        process = _waiting.pop()
        process.kill()
        process.communicate()


def _start(early: Sequence[Step] = ()) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=MEMORY | os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        # Its own group, so that Ctrl-C reaches only the parent, which ends its workers.
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )
    send = cast("IO[bytes]", process.stdin)
    send.write(pickle.dumps((sys.path, tuple(early))))
    send.flush()
    return process
