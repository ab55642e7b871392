"""Runs the server: one process, or several that share a socket and an index."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import tempfile
import webbrowser
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import quote

import uvicorn
from starlette.types import ASGIApp
from uvicorn.supervisors import Multiprocess

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.web.app import create_app, open_served
from fisherhash.web.guard import COUNTERS_VARIABLE, GuardedProtocol
from fisherhash.web.options import ServeOptions

MOST_CONNECTIONS = 1024


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
    with _listen(options) as listener:
        # Before anything is served: a wrong path is reported at once, in one sentence.
        with open_served(options) as images:
            count = len(images.index)
        options = replace(options, port=listener.getsockname()[1])
        address, *others = list_addresses(options)
        say(f"{count:,} images of {options.index} are at {address}")
        for other in others:
            say(f"from other machines: {other}")
        if options.writable:
            say(f"changes need the token: {options.token}")
        say("Ctrl-C ends the server")
        if browse:
            webbrowser.open(address)
        config = uvicorn.Config(
            functools.partial(served_app, options),
            factory=True,
            workers=workers,
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
            timeout_worker_healthcheck=60,
            h11_max_incomplete_event_size=64 << 10,
        )
        if workers == 1:
            with contextlib.suppress(KeyboardInterrupt):
                uvicorn.Server(config).run(sockets=[listener])
            return
        with tempfile.TemporaryDirectory(prefix="fisherhash-") as counters:
            os.environ[COUNTERS_VARIABLE] = counters
            Multiprocess(config, sockets=[listener]).run()


def served_app(options: ServeOptions) -> ASGIApp:
    """The application of one process, over an index of its own."""
    return create_app(open_served(options), options)


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
