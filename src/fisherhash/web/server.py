"""Runs the server: one process, or several that share a socket and an index."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import signal
import socket
import tempfile
import time
import webbrowser
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from urllib.parse import quote

import uvicorn

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.web.app import create_app, open_served
from fisherhash.web.guard import GuardedProtocol
from fisherhash.web.options import ServeOptions

MOST_CONNECTIONS = 1024
SOON = 10.0
"""A worker that ends within so many seconds of its start would end again."""


def run_server(
    options: ServeOptions,
    *,
    workers: int = 1,
    browse: bool = False,
    say: Callable[[str], object] = print,
) -> None:
    """Serve an index until the process is interrupted.

    Args:
        options: what is served, and how.
        workers: number of processes.
        browse: open the page in a browser.
        say: called with the lines for the user.

    Raises:
        UsageError: there is no such index.
        FisherhashError: the address is taken, or the index cannot be read.
    """
    if workers < 1:
        raise UsageError(f"--workers must be at least 1, got {workers}")
    # Before anything listens: a wrong path is reported at once, in one sentence.
    with open_served(options) as images, _listen(options) as listener:
        options = replace(options, port=listener.getsockname()[1])
        address, *others = list_addresses(options)
        say(f"{len(images.index):,} images of {options.index} are at {address}")
        for other in others:
            say(f"from other machines: {other}")
        if options.writable:
            say(f"changes need the token: {options.token}")
        say("Ctrl-C ends the server")
        if browse:
            webbrowser.open(address)
        if workers == 1:
            _serve(images, options, listener)
            return
        images.close()
        with tempfile.TemporaryDirectory(prefix="fisherhash-") as counters:
            _supervise(replace(options, metrics=counters), listener, workers)


def _serve(images: ImageIndex, options: ServeOptions, listener: socket.socket) -> None:
    config = uvicorn.Config(
        create_app(images, options),
        http=GuardedProtocol,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=3,
        h11_max_incomplete_event_size=64 << 10,
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def _work(options: ServeOptions, listener: socket.socket) -> None:
    """What a worker process does."""
    with open_served(options) as images:
        _serve(images, options, listener)


def _supervise(options: ServeOptions, listener: socket.socket, count: int) -> None:
    """Keep worker processes running until this one is told to end.

    Raises:
        FisherhashError: a worker ended as soon as it was started.
    """
    # Not forked: a forked child dies after a parallel numba kernel.
    context = multiprocessing.get_context("spawn")
    began: dict[SpawnProcess, float] = {}

    def start() -> None:
        worker = context.Process(target=_work, args=(options, listener))
        worker.start()
        began[worker] = time.monotonic()

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        for _ in range(count):
            start()
        while True:
            multiprocessing.connection.wait([worker.sentinel for worker in began])
            for worker in [worker for worker in began if not worker.is_alive()]:
                if time.monotonic() - began.pop(worker) < SOON:
                    raise FisherhashError("a worker of the server ended right after its start")
                start()
    except KeyboardInterrupt:
        pass
    finally:
        for worker in began:
            worker.terminate()
        for worker in began:
            worker.join(5)
            worker.kill()
        signal.signal(signal.SIGTERM, before)


def _listen(options: ServeOptions) -> socket.socket:
    host = options.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By name: asyncio sends small answers at once only over sockets that say they are TCP's. The
    # others wait until the client's system confirms the headers, which takes it 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, options.port))
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise FisherhashError(
            f"cannot listen on {options.host} port {options.port}: {reason}; choose another one "
            "with --port, or --port 0 for any that is free"
        ) from None
    listener.listen(2048)
    return listener


def list_addresses(options: ServeOptions) -> list[str]:
    """Where the page is, for this machine first; with the token where it is needed to see it.

    >>> list_addresses(ServeOptions("photos.index"))
    ['http://127.0.0.1:8765/']
    """
    host = options.host.strip("[]")
    hosts = [f"[{host}]" if ":" in host else host]
    if host in ("0.0.0.0", "::"):
        hosts = ["127.0.0.1" if host == "0.0.0.0" else "[::1]", socket.gethostname()]
    token = "" if options.local else f"?token={quote(options.token or '')}"
    return [f"http://{one}:{options.port}/{token}" for one in hosts]
