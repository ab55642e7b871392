"""Worker processes for reading images: spawned, never forked, and ended with their parent.

A worker is a fresh interpreter that receives a reader and a job on its standard input and answers
on its standard output, image by image. It does not import the caller's main module, so a
script needs no ``if __name__ == "__main__"`` guard, and it ends when the pipe closes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import IO, cast

from fisherhash.data.collection import Reader
from fisherhash.data.images import UnreadableImage
from fisherhash.data.processes import (
    WORTH_STARTING,
    Step,
    check_workers,
    most_workers,
    waiting,
    worker_process,
)
from fisherhash.errors import FisherhashError, UsageError

MOST_CHUNK = 32
CHUNK_SECONDS = 0.1
"""Work that a worker is given at a time: more would leave the others idle at the end."""

TIMEOUT = 120.0
"""Seconds without an answer after which a worker counts as hung."""

ALONE_SECONDS = 30.0
"""Time limit for an image that is read alone after it took a worker process down."""

LOST_IN_A_ROW = 8
"""Images in a row that may take their worker down before the images are no longer to blame."""

PROBE_IMAGES = 16
PROBE_SECONDS = 0.25
FEWEST_PROBED, CLEARLY_WORTH = 3, 4.0
"""Images after which to stop timing if, as each of them says, so many seconds of work are left."""


Answer = bytes | UnreadableImage
Job = Callable[[Reader, int], bytes]
"""What a worker does with one image; picklable; raises ``UnreadableImage`` for a bad one."""


class LostWorkerError(FisherhashError):
    """A worker process crashed or hung; ``index`` is the image it was reading."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


def run_jobs(
    reader: Reader,
    job: Job,
    indices: Sequence[int],
    *,
    names: Sequence[str],
    workers: int | None = None,
    timeout: float = TIMEOUT,
) -> Generator[tuple[int, Answer]]:
    """Run a job for every index; yield pairs of an index and its answer, in order.

    Args:
        reader: opens the images.
        job: what to do with each.
        indices: numbers of images.
        names: names of all images, for error messages.
        workers: number of processes; 0 means this one. None takes those that were started early;
            if there are none, it decides after timing the first few images: except on Windows,
            processes start if the rest would take more than a second.
        timeout: seconds without an answer after which a worker counts as hung.

    An image whose decoder crashes or hangs is read again, alone. If that fails too, its answer is
    an ``UnreadableImage``.

    Raises:
        UsageError: an impossible number of workers, or a reader that cannot be sent to them.
        FisherhashError: worker processes cannot be started, or fail image after image.
    """
    if workers is not None:
        check_workers(workers)
    early = waiting() if workers is None and len(indices) > 1 else 0
    hello = _hello(reader, job) if workers or early else None
    if hello is not None:
        workers = workers or early
    if workers and hello is None:
        raise UsageError(
            f"a {type(reader).__name__} cannot be sent to worker processes; define it in a "
            "module that can be imported, or use workers=0"
        )
    done = 0
    times: list[float] = []
    while done < len(indices) and hello is None:
        if workers is None and _probed(times, len(indices) - done):
            workers = choose_workers(times, len(indices) - done)
            hello = _hello(reader, job) if workers else None
            continue
        start = time.perf_counter()
        try:
            answer: Answer = job(reader, indices[done])
        except UnreadableImage as error:
            answer = error
        if workers is None:
            times.append(time.perf_counter() - start)
        yield indices[done], answer
        done += 1
    rest = list(indices[done:])
    if hello is None or not workers or not rest:
        return
    # The first image may have paid for loading what the job needs.
    seconds = statistics.median(times) if times else 0.01
    chunk = max(1, min(MOST_CHUNK, int(CHUNK_SECONDS / max(seconds, 1e-6))))
    chunk = min(chunk, -(-len(rest) // workers))
    yield from _survive(
        functools.partial(_in_processes, hello, names, chunk), rest, workers, timeout
    )


def _probed(times: Sequence[float], left: int) -> bool:
    """Whether the seconds of the first few images say enough about the rest."""
    if len(times) == PROBE_IMAGES or sum(times) >= PROBE_SECONDS:
        return True
    return len(times) >= FEWEST_PROBED and min(times) * left >= CLEARLY_WORTH


def choose_workers(times: Sequence[float], left: int) -> int:
    """Decide how many processes to start for ``left`` images, given the seconds of a few."""
    if not times or not left:
        return 0
    seconds = statistics.median(times) * left
    return min(most_workers(), int(seconds / WORTH_STARTING) + 1) if seconds > WORTH_STARTING else 0


def _hello(reader: Reader, job: Job) -> bytes | None:
    """Return the first message to a worker; None if the reader cannot be sent."""
    if not sys.executable or type(reader).__module__ == "__main__":
        return None
    try:
        return pickle.dumps((reader, job))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def _survive(
    run: Callable[[Sequence[int], int, float], Iterator[tuple[int, Answer]]],
    wanted: Sequence[int],
    workers: int,
    timeout: float,
) -> Generator[tuple[int, Answer]]:
    """The answers of worker processes; a decoder that crashes or hangs costs one image only."""
    lost = 0
    while wanted:
        done = 0
        try:
            for pair in run(wanted, workers, timeout):
                yield pair
                done += 1
            return
        except LostWorkerError as error:
            at = wanted.index(error.index, done)
        yield from _survive(run, wanted[done:at], workers, timeout)
        lost = lost + 1 if at == 0 else 1
        try:
            yield from run([wanted[at]], 1, min(timeout, ALONE_SECONDS))
            lost = 0
        except LostWorkerError as error:
            if lost > LOST_IN_A_ROW:
                raise
            yield wanted[at], UnreadableImage(str(error), passing=True)
        wanted = wanted[at + 1 :]


def _in_processes(
    hello: bytes,
    names: Sequence[str],
    size: int,
    indices: Sequence[int],
    most: int,
    timeout: float,
) -> Iterator[tuple[int, Answer]]:
    """Yield answers in order, some chunks per worker ahead; a thread drives each worker."""
    count = min(most, len(indices))
    # Enough that all go on while the caller writes what it has.
    ahead = count * max(2, 2 * MOST_CHUNK // size)
    workers: list[_Worker] = []
    threads = ThreadPoolExecutor(count, thread_name_prefix="fisherhash-worker")
    sent: deque[tuple[Sequence[int], Future[list[Answer]]]] = deque()

    def run(chunk: Sequence[int]) -> list[Answer]:
        worker = free.popleft()
        try:
            return worker.run(chunk)
        finally:
            free.append(worker)

    def oldest() -> Iterator[tuple[int, Answer]]:
        chunk, future = sent.popleft()
        while wait([future], timeout=0.5).not_done:
            for worker in workers:
                worker.check_hung(timeout)
        answers = future.result()
        if not sent and start == len(indices):
            # They end while the caller writes what they did last.
            for worker in workers:
                worker.kill()
        yield from zip(chunk, answers, strict=True)

    start = 0
    try:
        for _ in range(count):
            workers.append(_Worker(hello, names))
        free = deque(workers)
        while start < len(indices):
            # Ever less at the end, so that all end at the same time.
            some = max(1, min(size, (len(indices) - start) // (2 * count)))
            chunk, start = indices[start : start + some], start + some
            sent.append((chunk, threads.submit(run, chunk)))
            if len(sent) >= ahead:
                yield from oldest()
        while sent:
            yield from oldest()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()
        # Without its process, every thread returns from its pipe; then the pipes can be closed.
        threads.shutdown(wait=True)
        for worker in workers:
            worker.close()


class _Worker:
    """One process and our ends of its pipes."""

    def __init__(self, hello: bytes, names: Sequence[str]) -> None:
        self._names = names
        self._current = -1
        self._waiting_since: float | None = None
        self._hello = hello
        try:
            self._process = worker_process()
        except OSError as error:
            raise FisherhashError(
                f"a worker process could not be started ({error.strerror}); use workers=0"
            ) from None
        self._send = cast("IO[bytes]", self._process.stdin)
        self._receive = cast("IO[bytes]", self._process.stdout)
        _widen(self._receive)

    def run(self, chunk: Sequence[int]) -> list[Answer]:
        """Send a chunk and collect its answers; one thread calls this at a time."""
        answers: list[Answer] = []
        self._current, self._waiting_since = chunk[0], time.monotonic()
        try:
            self._send.write(self._hello + pickle.dumps(chunk))
            self._send.flush()
            self._hello = b""
            for index in chunk:
                self._current, self._waiting_since = index, time.monotonic()
                answer: Answer | str = pickle.load(self._receive)
                if isinstance(answer, str):
                    raise FisherhashError(f"reading '{self._names[index]}' failed: {answer}")
                answers.append(answer)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            raise LostWorkerError(
                f"a worker process ended ({self._fate()}) while it read "
                f"'{self._names[self._current]}'. Use fewer workers, or workers=0",
                self._current,
            ) from None
        finally:
            self._waiting_since = None
        return answers

    def check_hung(self, timeout: float) -> None:
        """Raise an error if an answer has been due for too long."""
        since = self._waiting_since
        if since is not None and time.monotonic() - since > timeout:
            raise LostWorkerError(
                f"a worker process gave no answer for {timeout:g} s while it read "
                f"'{self._names[self._current]}'; is the disk or the network share hanging? Remove "
                "the file or copy the images to a local disk",
                self._current,
            )

    def kill(self) -> None:
        """End the process; it holds nothing that could be lost."""
        self._process.kill()

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.wait()

    def close(self) -> None:
        """Close the pipes; what could not be sent is no longer needed."""
        for pipe in (self._send, self._receive):
            with contextlib.suppress(OSError):
                pipe.close()

    def _fate(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        if code == -9:
            return "killed by signal 9: out of memory?"
        return f"signal {-code}" if code < 0 else f"exit code {code}, see its message above"


def _widen(pipe: IO[bytes]) -> None:
    """Let a pipe hold several images, if the system can, so that a worker seldom waits."""
    if sys.platform.startswith("linux"):
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, 1 << 20)


def serve(early: Sequence[Step]) -> None:
    """The worker's side: read chunks of indices until the pipe closes.

    Args:
        early: what to call while there is nothing else to do; what fails fails again when needed.
    """
    requests = sys.stdin.buffer
    pipe = os.fdopen(os.dup(1), "wb")
    # What a decoder prints must not end up between the answers.
    os.dup2(2, 1)
    for module, name, arguments in early:
        with contextlib.suppress(Exception):
            getattr(importlib.import_module(module), name)(*arguments)
    gc.freeze()
    gc.enable()
    try:
        reader, job = pickle.load(requests)
        while True:
            for index in pickle.load(requests):
                try:
                    answer: Answer | str = job(reader, index)
                except UnreadableImage as error:
                    answer = error
                except Exception as error:
                    answer = f"{type(error).__name__}: {error}"
                pickle.dump(answer, pipe)
                pipe.flush()
    except EOFError:
        return
    except (BrokenPipeError, KeyboardInterrupt, pickle.UnpicklingError):
        # The parent is gone, or going.
        os._exit(0)
