"""Worker processes: fresh interpreters that wait for what to do on their standard input.

Starting one takes a tenth of a second, for imports. A command that is sure to need some starts them
before it imports its own modules. Those that nobody needs end with their parent, because their
standard input closes. Nothing here imports anything heavy.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, cast

from fisherhash.errors import UsageError
from fisherhash.system.cores import available_cores

MOST_WORKERS = 64
MOST_PER_CORE = 16

WORTH_STARTING = 1.5
"""Seconds of work below which starting processes takes longer than it saves."""

MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
"""Environment of a worker: glibc keeps up to 128 MB for the next image. By default it returns the
memory of every large image to the system, and getting it back takes a third of the time."""

MOST_COUNTED = 2000
"""Images of a folder that are counted before processes start."""

_MOST_ENTRIES = 20_000
_USUAL = (".jpg", ".jpeg", ".png", ".webp", ".heic")
_LEAST_SECONDS, _MOST_BYTES = 0.001, 200e6
"""No image takes less time than this, and no second is enough for more bytes."""

_BOOT = (
    "import gc, os, pickle, sys\n"
    "gc.disable()\n"
    "try: sys.path[:], early = pickle.load(sys.stdin.buffer)\n"
    "except (EOFError, pickle.UnpicklingError): os._exit(0)\n"
    "from fisherhash.data.workers import serve\n"
    "serve(early)"
)
Step = tuple[str, str, Sequence[str | int]]
"""A module, a function in it, and its arguments."""
_waiting: list[subprocess.Popen[bytes]] = []


def most_workers() -> int:
    """The number of processes for much work; 0 where one process is as fast."""
    cores = available_cores()
    return 0 if cores < 2 or sys.platform == "win32" else min(cores, MOST_WORKERS)


def check_workers(workers: int) -> None:
    """Refuse a number of processes that would only fill the memory."""
    most = MOST_PER_CORE * available_cores()
    if not 0 <= workers <= most:
        raise UsageError(
            f"workers must be 0 or more, and at most {most} ({MOST_PER_CORE} per core of this "
            f"machine), got {workers}"
        )


def start_early(
    folder: str | os.PathLike[str],
    count: int | None,
    early: Callable[[int], Sequence[Step]] | None = None,
) -> None:
    """Start processes that wait, if the images of a folder are surely worth it.

    Args:
        folder: the images.
        count: number of processes; None for one per core. At most one per core starts early.
        early: what the processes call while they wait, given the number of images, of which at
            most ``MOST_COUNTED`` are counted.
    """
    seconds, images = 0.0, 0
    for images, size in enumerate(_sizes(folder), 1):
        seconds += _LEAST_SECONDS + size / _MOST_BYTES
        if images == MOST_COUNTED:
            break
    if seconds <= WORTH_STARTING:
        return
    most = most_workers()
    wanted = most if count is None else min(count, max(1, most))
    steps = early(images) if early else ()
    # A process that cannot be started is missed, and reported, when there is work for it.
    with contextlib.suppress(OSError):
        for _ in range(min(wanted, images)):
            _waiting.append(_start(steps))


def _sizes(folder: str | os.PathLike[str]) -> Iterator[int]:
    """The bytes of the usual images in and below a folder, as far as it is soon looked through."""
    places, seen = [os.fspath(folder)], 0
    while places and seen < _MOST_ENTRIES:
        try:
            with os.scandir(places.pop()) as entries:
                for entry in entries:
                    seen += 1
                    if entry.name.startswith("."):
                        continue
                    if entry.name.lower().endswith(_USUAL):
                        yield entry.stat().st_size
                    elif entry.is_dir(follow_symlinks=False):
                        places.append(entry.path)
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
