"""Worker processes for reading images: spawned, never forked, and ended with their parent.

A worker is a fresh interpreter that receives a reader and a job on its standard input and answers
on its standard output, one frame per image. It does not import the caller's main module, so a
script needs no ``if __name__ == "__main__"`` guard, and it ends when the pipe closes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import IO, Any, Protocol

from fisherhash.data.collection import Reader
from fisherhash.data.images import UnreadableImage
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.system.cores import available_cores

CHUNK = 32
"""Images that a worker is given at a time."""

TIMEOUT = 120.0
"""Seconds without an answer after which a worker counts as hung."""

WORTH_STARTING = 3.0
"""Seconds of work below which starting processes takes longer than it saves."""

PROBE_IMAGES = 16
PROBE_SECONDS = 0.25

_GOOD, _BAD, _FAILED, _PASSING = 0, 1, 2, 3
_COUNT = struct.Struct("<I")
_FRAME = struct.Struct("<BI")
_BOOT = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from fisherhash.data.workers import serve; serve()"
)


class Job(Protocol):
    """What a worker does with one image; must be picklable."""

    def __call__(self, reader: Reader, index: int) -> bytes:
        """Return the answer for image ``index``; raises :class:`UnreadableImage` for a bad one."""
        ...


Answer = bytes | UnreadableImage


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
        workers: number of processes; 0 means this one. None decides after timing the first few
            images: on Linux, processes start if the rest would take more than a few seconds.
        timeout: seconds without an answer after which a worker counts as hung.

    Raises:
        UsageError: a negative number of workers, or a reader that cannot be sent to them.
        FisherhashError: a worker could not be started, ended, or hung.
    """
    if workers is not None and workers < 0:
        raise UsageError(f"workers must be 0 or more, got {workers}")
    done, given = 0, workers
    if workers is None:
        times: list[float] = []
        while done < min(len(indices), PROBE_IMAGES) and sum(times) < PROBE_SECONDS:
            start = time.perf_counter()
            answer = _answer(reader, job, indices[done])
            times.append(time.perf_counter() - start)
            yield indices[done], answer
            done += 1
        workers = choose_workers(times, len(indices) - done)
    hello = _hello(reader, job) if workers else None
    if given and hello is None:
        raise UsageError(
            f"a {type(reader).__name__} cannot be sent to worker processes; define it in a "
            "module that can be imported, or use workers=0"
        )
    rest = indices[done:]
    if hello is None or len(rest) == 0:
        for index in rest:
            yield index, _answer(reader, job, index)
        return
    pool = _Pool(hello, names, min(workers, -(-len(rest) // CHUNK)), timeout)
    with contextlib.closing(pool):
        yield from pool.map(rest)


def choose_workers(times: Sequence[float], left: int) -> int:
    """Decide how many processes to start for ``left`` images, given the seconds of a few."""
    cpus = available_cores()
    if not times or not left or cpus < 2 or not sys.platform.startswith("linux"):
        return 0
    seconds = statistics.median(times) * left
    return min(cpus, 16, int(seconds / WORTH_STARTING) + 1) if seconds > WORTH_STARTING else 0


def _hello(reader: Reader, job: Job) -> bytes | None:
    """Return the first message to a worker; None if the reader cannot be sent."""
    if not sys.executable or type(reader).__module__ == "__main__":
        return None
    try:
        return pickle.dumps(sys.path) + pickle.dumps((reader, job))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def _answer(reader: Reader, job: Job, index: int) -> Answer:
    try:
        return job(reader, index)
    except UnreadableImage as error:
        return error


class _Pool:
    """A fixed number of workers, each driven by one thread; answers arrive in order."""

    def __init__(self, hello: bytes, names: Sequence[str], count: int, timeout: float) -> None:
        self._timeout = timeout
        self._free: deque[_Worker] = deque()
        self._workers: list[_Worker] = []
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="fisherhash-worker")
        try:
            for _ in range(count):
                self._workers.append(_Worker(hello, names))
        except OSError as error:
            self.close()
            raise FisherhashError(
                f"a worker process could not be started ({error.strerror}); use workers=0"
            ) from None
        self._free.extend(self._workers)

    def map(self, indices: Sequence[int]) -> Iterator[tuple[int, Answer]]:
        """Yield the answers for ``indices``, at most two chunks per worker ahead of the caller."""
        chunks = (indices[start : start + CHUNK] for start in range(0, len(indices), CHUNK))
        waiting: deque[tuple[Sequence[int], Future[list[Answer]]]] = deque()
        for chunk in chunks:
            waiting.append((chunk, self._threads.submit(self._run, chunk)))
            if len(waiting) >= 2 * len(self._workers):
                yield from self._oldest(waiting)
        while waiting:
            yield from self._oldest(waiting)

    def _oldest(
        self, waiting: deque[tuple[Sequence[int], Future[list[Answer]]]]
    ) -> Iterator[tuple[int, Answer]]:
        chunk, future = waiting.popleft()
        while True:
            try:
                answers = future.result(timeout=0.5)
                break
            except FutureTimeout:
                self._check_hung()
        yield from zip(chunk, answers, strict=True)

    def _run(self, chunk: Sequence[int]) -> list[Answer]:
        worker = self._free.popleft()
        try:
            return worker.run(chunk)
        finally:
            self._free.append(worker)

    def _check_hung(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            since = worker.waiting_since
            if since is not None and now - since > self._timeout:
                raise LostWorkerError(
                    f"a worker process gave no answer for {self._timeout:g} s while it read "
                    f"'{worker.name}'; is the disk or the network share hanging? Remove the "
                    "file or copy the images to a local disk",
                    worker.current,
                )

    def close(self) -> None:
        """End the workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        # Without its process, every thread returns from its pipe; then the pipes can be closed.
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.close()


class _Worker:
    """One process and our ends of its pipes."""

    def __init__(self, hello: bytes, names: Sequence[str]) -> None:
        self._names = names
        self.current = -1
        self.waiting_since: float | None = None
        self._hello: bytes | None = hello
        # Its own group, so that Ctrl-C reaches only the parent, which then ends its workers.
        flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
            creationflags=flags,
        )
        _widen(self._process.stdout)

    @property
    def name(self) -> str:
        """The name of the image that it reads."""
        index = self.current
        return self._names[index] if 0 <= index < len(self._names) else f"image {index}"

    def run(self, chunk: Sequence[int]) -> list[Answer]:
        """Send a chunk and collect its answers; one thread calls this at a time."""
        send, receive = self._process.stdin, self._process.stdout
        answers: list[Answer] = []
        self.current, self.waiting_since = int(chunk[0]), time.monotonic()
        try:
            if send is None or receive is None:
                raise EOFError
            if self._hello is not None:
                send.write(self._hello)
                self._hello = None
            send.write(_COUNT.pack(len(chunk)) + struct.pack(f"<{len(chunk)}q", *chunk))
            send.flush()
            for index in chunk:
                self.current, self.waiting_since = int(index), time.monotonic()
                answers.append(self._read_answer(receive))
        except (EOFError, OSError, ValueError):
            raise LostWorkerError(
                f"a worker process ended ({self._fate()}) while it read '{self.name}'. "
                "Use fewer workers, or workers=0",
                self.current,
            ) from None
        finally:
            self.waiting_since = None
        return answers

    def _read_answer(self, pipe: IO[bytes]) -> Answer:
        state, length = _FRAME.unpack(_read_exactly(pipe, _FRAME.size))
        data = _read_exactly(pipe, length)
        if state == _GOOD:
            return data
        text = data.decode("utf-8", "replace")
        if state == _FAILED:
            raise FisherhashError(f"reading '{self.name}' failed: {text}")
        return UnreadableImage(text, passing=state == _PASSING)

    def kill(self) -> None:
        """End the process; it holds nothing that could be lost."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pipes; what could not be sent is no longer needed."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
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


def _widen(pipe: IO[bytes] | None) -> None:
    """Let a pipe hold several images, if the system can, so that a worker seldom waits."""
    if pipe is None or not sys.platform.startswith("linux"):
        return
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, 1 << 20)


def _read_exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data


def serve() -> None:
    """The worker's side: read chunks of indices until the pipe closes."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    # What a decoder prints must not end up between the frames.
    os.dup2(2, 1)
    try:
        reader, job = pickle.load(requests)
        while True:
            header = requests.read(_COUNT.size)
            if len(header) < _COUNT.size:
                return
            (count,) = _COUNT.unpack(header)
            for index in struct.unpack(f"<{count}q", requests.read(8 * count)):
                _reply(answers, reader, job, index)
    except (BrokenPipeError, KeyboardInterrupt):
        # The parent is gone, or going.
        os._exit(0)


def _reply(pipe: IO[bytes], reader: Reader, job: Any, index: int) -> None:
    try:
        answer = _answer(reader, job, index)
    except Exception as error:
        state, data = _FAILED, f"{type(error).__name__}: {error}".encode()
    else:
        if isinstance(answer, UnreadableImage):
            state, data = (_PASSING if answer.passing else _BAD), str(answer).encode()
        else:
            state, data = _GOOD, answer
    pipe.write(_FRAME.pack(state, len(data)))
    pipe.write(data)
    pipe.flush()
