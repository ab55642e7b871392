"""Reads images in worker processes: a pool of the standard library, made safe for this work.

The processes are spawned, never forked, because libraries such as gRPC do not survive a fork. They
do not import the caller's main module, so a script needs no ``if __name__ == "__main__"`` guard;
they leave Ctrl-C to their parent, and end with it. Among the pools that could do this, loky takes
twice as long to start, and pebble imports the main module as well.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import statistics
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from fisherhash.data.collection import Reader
from fisherhash.data.formats import UnreadableImage
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.system.cores import available_cores, check_workers

MOST_WORKERS = 60
"""More do not help, and Windows cannot wait for more."""

WORTH_STARTING = 1.5
"""Seconds of work below which starting processes takes longer than it saves."""

MOST_CHUNK = 32
CHUNK_SECONDS = 0.1
"""Work that a worker is given at a time: more would leave the others idle at the end."""

TIMEOUT = 120.0
"""Seconds without an answer after which a worker counts as hung."""

ALONE_SECONDS = 30.0
"""Time limit for an image that is read alone after a worker process was lost."""

LOST_IN_A_ROW = 8
"""Images in a row that may take their worker down before the images are no longer to blame."""

PROBE_IMAGES = 16
PROBE_SECONDS = 0.25
"""Images, or seconds of work, after which the time of the others is clear."""

FIRST_SECONDS = 0.02
"""What loading a decoder may take, at most."""

MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
"""Environment of a worker: glibc keeps up to 128 MB for the next image. By default it returns the
memory of every large image to the system, and getting it back takes a third of the time."""

_ENVIRONMENT = MEMORY | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

Answer = bytes | UnreadableImage
Job = Callable[[Reader, int], bytes]
"""What a worker does with one image; picklable; raises ``UnreadableImage`` for a bad one."""

_Chunk = Sequence[int]
_Answers = list[Answer | str]
"""One answer per image of a chunk; a text says which error a reader or a job raised."""


class LostWorkerError(FisherhashError):
    """A worker process crashed or hung."""


def run_jobs(
    reader: Reader,
    job: Job,
    indices: Sequence[int],
    *,
    names: Sequence[str],
    workers: int | None = None,
) -> Generator[tuple[int, Answer]]:
    """Run a job for every index; yield pairs of an index and its answer, in order.

    Args:
        reader: opens the images.
        job: what to do with each.
        indices: numbers of images.
        names: names of all images, for error messages.
        workers: number of processes; 0 means this one. None decides after timing the first few
            images: except on Windows, processes start if the rest would take more than a second.

    An image whose decoder crashes or hangs is read again, alone. If that fails too, its answer is
    an ``UnreadableImage``.

    Raises:
        UsageError: an impossible number of workers, or a reader that cannot be sent to them.
        FisherhashError: worker processes cannot be started, or fail image after image.
    """
    packed = functools.cache(lambda: _packed(reader, job))
    if workers is not None:
        check_workers(workers)
    if multiprocessing.current_process().daemon:
        workers = 0  # Such a process, for example one of a loader of torch, must not start others.
    if workers and packed() is None:
        raise UsageError(
            f"a {type(reader).__name__} cannot be sent to worker processes; define it in a "
            "module that can be imported, or use workers=0"
        )
    times: list[float] = []
    if workers is None and len(indices) > PROBE_IMAGES:
        # Where reading alone is enough work, this process need not load what the job needs.
        times = [_seconds_to_open(reader, indices[0])]
        workers = (choose_workers(times, len(indices)) if packed() else 0) or None
    done = 0
    while done < len(indices) and not workers:
        if workers is None and (len(times) > PROBE_IMAGES or sum(times) >= PROBE_SECONDS):
            workers = choose_workers(times, len(indices) - done) if packed() else 0
            continue
        start = time.perf_counter()
        try:
            answer: Answer = job(reader, indices[done])
        except UnreadableImage as error:
            answer = error
        times.append(time.perf_counter() - start)
        yield indices[done], answer
        done += 1
    rest, work = indices[done:], packed() if workers else None
    if not rest or not workers or work is None:
        return
    # The first image may have paid for loading what the job needs.
    seconds = statistics.median(times) if times else 0.01
    chunk = max(1, min(MOST_CHUNK, int(CHUNK_SECONDS / max(seconds, 1e-6))))
    workers = min(workers, len(rest), MOST_WORKERS if sys.platform == "win32" else workers)
    yield from _Run(work, names).all(rest, workers, min(chunk, -(-len(rest) // workers)))


def choose_workers(times: Sequence[float], left: int) -> int:
    """Decide how many processes to start for ``left`` images, given the seconds of a few."""
    cores = available_cores()
    if not times or not left or cores < 2 or sys.platform == "win32":
        return 0
    seconds = statistics.median(times) * left
    most = min(cores, MOST_WORKERS)
    return min(most, int(seconds / WORTH_STARTING) + 1) if seconds > WORTH_STARTING else 0


def _seconds_to_open(reader: Reader, index: int) -> float:
    """The time to read an image, less what the first one may take for loading a decoder."""
    start = time.perf_counter()
    with contextlib.suppress(UnreadableImage):
        reader.open(index)
    return max(time.perf_counter() - start - FIRST_SECONDS, 0.0)


def _packed(reader: Reader, job: Job) -> bytes | None:
    """What every worker needs; None if it cannot be sent."""
    if not sys.executable or type(reader).__module__ == "__main__":
        return None
    try:
        return pickle.dumps((reader, job))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


@dataclass
class _Run:
    """Runs a job in worker processes, and goes on where one of them is lost."""

    work: bytes
    names: Sequence[str]
    lost_in_a_row: int = 0

    def all(self, wanted: _Chunk, workers: int, size: int) -> Iterator[tuple[int, Answer]]:
        """Yield an answer per image, in order; chunks of ``size`` images are sent ahead."""
        # Enough that all go on while the caller writes what it has.
        ahead = workers * max(2, 2 * MOST_CHUNK // size)
        start = 0
        while start < len(wanted):
            sent: deque[tuple[_Chunk, Future[_Answers]]] = deque()
            with _Pool(self.work, workers) as pool, contextlib.suppress(LostWorkerError):
                while sent or start < len(wanted):
                    while start < len(wanted) and len(sent) < ahead:
                        # Ever fewer at the end, so that all workers end at the same time.
                        some = max(1, min(size, (len(wanted) - start) // (2 * workers)))
                        chunk = wanted[start : start + some]
                        sent.append((chunk, pool.submit(chunk)))
                        start += some
                    yield from self._named(sent[0][0], pool.result(sent[0][1], TIMEOUT))
                    sent.popleft()
            # One of these images is to blame. It takes only itself down when it is read alone.
            for chunk, future in sent:
                if future.done() and not future.cancelled() and future.exception() is None:
                    yield from self._named(chunk, future.result())
                else:
                    yield from self._one_by_one(chunk)

    def _one_by_one(self, chunk: _Chunk) -> Iterator[tuple[int, Answer]]:
        left, reason = deque(chunk), ""
        while left:
            with _Pool(self.work, 1) as pool:
                # An image is not to blame for the time that a process takes to start.
                pool.result(pool.submit(()), max(TIMEOUT, 60.0))
                try:
                    while left:
                        future, seconds = pool.submit((left[0],)), min(TIMEOUT, ALONE_SECONDS)
                        answers = pool.result(future, seconds, self.names[left[0]])
                        yield from self._named((left.popleft(),), answers)
                        self.lost_in_a_row = 0
                except LostWorkerError as error:
                    self.lost_in_a_row += 1
                    if self.lost_in_a_row > LOST_IN_A_ROW:
                        raise
                    reason = str(error)
            if left:
                yield left.popleft(), UnreadableImage(reason, passing=True)

    def _named(self, chunk: _Chunk, answers: _Answers) -> Iterator[tuple[int, Answer]]:
        for index, answer in zip(chunk, answers, strict=True):
            if isinstance(answer, str):
                raise FisherhashError(f"reading '{self.names[index]}' failed: {answer}")
            yield index, answer


class _Pool:
    """Worker processes that are killed at the end; they hold nothing that could be lost."""

    def __init__(self, work: bytes, workers: int) -> None:
        self._context = _Context()
        try:
            self._executor = ProcessPoolExecutor(
                workers, mp_context=self._context, initializer=_start, initargs=(work,)
            )
        except (OSError, ImportError, NotImplementedError) as error:
            raise FisherhashError(f"worker processes cannot be used here ({error})") from None

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._context.started:
            with contextlib.suppress(ValueError):
                process.kill()
        self._executor.shutdown(cancel_futures=True)

    def submit(self, chunk: _Chunk) -> Future[_Answers]:
        """Send a chunk to the next worker that is free."""
        try:
            return self._executor.submit(_answers, chunk)
        except BrokenProcessPool:
            raise LostWorkerError("a worker process ended") from None
        except OSError as error:
            raise FisherhashError(
                f"a worker process could not be started ({error.strerror}); use workers=0"
            ) from None

    def result(self, future: Future[_Answers], seconds: float, name: str = "") -> _Answers:
        """Wait so many seconds for the answers of a chunk; ``name`` is that of its only image.

        Raises:
            LostWorkerError: a process crashed, or there was no answer.
        """
        try:
            return future.result(seconds)
        except BrokenProcessPool:
            self._executor.shutdown()  # Then the exit codes are known.
            raise LostWorkerError(
                f"a worker process ended ({self._context.fate()}) while it read '{name}'. Use "
                "fewer workers, or workers=0"
            ) from None
        except TimeoutError:
            raise LostWorkerError(
                f"a worker process gave no answer for {seconds:g} s while it read '{name}'; is the "
                "disk or the network share hanging? Remove the file or copy the images to a local "
                "disk"
            ) from None


_starting = threading.Lock()


class _Process(SpawnProcess):
    """A spawned process that knows nothing of the main module, nor of Ctrl-C."""

    def start(self) -> None:
        with _starting:
            self._start()

    def _start(self) -> None:
        main, missing = sys.modules["__main__"], _ENVIRONMENT.keys() - os.environ.keys()
        blocks = hasattr(signal, "pthread_sigmask")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if blocks else None
        try:
            # As in an interactive session, whose main module no process can import.
            sys.modules["__main__"] = types.ModuleType("__main__")
            os.environ.update({name: _ENVIRONMENT[name] for name in missing})
            super().start()
        finally:
            sys.modules["__main__"] = main
            for name in missing:
                os.environ.pop(name, None)
            if before is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Context(SpawnContext):
    """Starts such processes for a pool, and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[_Process] = []

    def Process(self, *args: Any, **kwargs: Any) -> _Process:  # type: ignore[override]  # noqa: N802
        """A process that a pool will start."""
        process = _Process(*args, **kwargs)
        self.started.append(process)
        return process

    def fate(self) -> str:
        """How the first process that was lost has ended."""
        codes = [process.exitcode for process in self.started]
        # The pool itself terminates the others.
        code = next((code for code in codes if code not in (None, 0, -signal.SIGTERM)), None)
        if code is None:
            return "for no known reason"
        if code == -9:
            return "killed by signal 9: out of memory?"
        return f"signal {-code}" if code < 0 else f"exit code {code}, see its message above"


_work: Any = None
"""In a worker: the packed reader and job, unpacked by the first chunk."""


def _start(work: bytes) -> None:
    """Prepare a worker process."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setsid"):
        # A busy Linux shares its time among sessions: in that of the caller, all workers together
        # would get the time of one.
        os.setsid()
    # What a decoder prints is no output of the command.
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def _answers(chunk: _Chunk) -> _Answers:
    """In a worker: the answers for the images of a chunk."""
    global _work
    if isinstance(_work, bytes):
        try:
            _work = pickle.loads(_work)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"] * len(chunk)
    reader, job = _work
    found: _Answers = []
    for index in chunk:
        try:
            found.append(job(reader, index))
        except UnreadableImage as error:
            found.append(error)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
