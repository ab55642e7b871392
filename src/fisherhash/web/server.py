"""The server: pages and API of one index behind the guard, in one process or in several."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import tempfile
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.dependencies.utils import get_flat_params
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp
from typing_extensions import TypedDict
from uvicorn.supervisors import Multiprocess

from fisherhash.data.formats import UnreadableImage
from fisherhash.errors import FisherhashError, UsageError, unknown_name
from fisherhash.index.base import CannotWriteError
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.system.version import __version__
from fisherhash.web import api, duplicates, pages, rendering
from fisherhash.web.files import MissingError
from fisherhash.web.guard import COUNTERS_VARIABLE, Guard, GuardedProtocol
from fisherhash.web.options import ServeOptions
from fisherhash.web.queries import SearchQuery
from fisherhash.web.rendering import error_answer
from fisherhash.web.served import ServedIndex

UPLOADS = 16
"""Uploads that are received at once; others wait."""
MOST_CONNECTIONS = 1024
STATUS = {MissingError: 404, UnreadableImage: 422, CannotWriteError: 507}
"""What a request that raised an error of ours gets; 400 for bad use, 503 for any other failure."""
logger = logging.getLogger(__name__)


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
        with _opened(options) as images:
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
    return create_app(_opened(options), options)


def _opened(options: ServeOptions) -> ImageIndex:
    return ImageIndex.open(options.index, device=options.device, skip_damaged=options.skip_damaged)


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


# The application


class Refusal(TypedDict):
    """Why a request was refused, as a sentence."""

    error: str


def create_app(images: ImageIndex, options: ServeOptions) -> ASGIApp:
    """The application that serves an open index.

    Args:
        images: the index; closed when the application ends.
        options: how it is served.
    """
    served = ServedIndex(images, options)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Each may hold as many bytes as an upload may have.
        app.state.uploads = asyncio.Semaphore(UPLOADS)
        # The first search would wait for kernels and the model.
        threading.Thread(target=_warm, args=(served,), daemon=True).start()
        try:
            yield
        finally:
            images.close()

    handlers: dict[Any, Any] = {
        RequestValidationError: _on_wrong_parameter,
        HTTPException: _on_http_error,
        FisherhashError: _on_own_error,
        Exception: _on_bug,
    }
    app = FastAPI(
        title="fisherhash",
        version=__version__,
        description="Search a collection of images by their binary codes.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers=handlers,
        responses={
            "4XX": {"model": Refusal, "description": "Refused, with a sentence that says why."},
            "5XX": {"model": Refusal, "description": "Failed, or not ready yet."},
        },
    )
    app.state.served = served
    for part in (pages, duplicates, rendering, api):
        app.include_router(part.router)
    app.include_router(api.changes, include_in_schema=options.writable)
    app.include_router(api.health)
    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=4)
    return Guard(app, options)


def _warm(served: ServedIndex) -> None:
    with contextlib.suppress(FisherhashError):
        served.find(SearchQuery(code="00" * (-(-served.index.bits // 8))))
    with contextlib.suppress(FisherhashError):
        served.columns.get()
        served.images.hasher  # noqa: B018 (loads it)


async def _on_wrong_parameter(request: Request, error: RequestValidationError) -> Response:
    """Say in a sentence which parameter is wrong."""
    fault = error.errors()[0]
    name, text = str(fault["loc"][-1]), fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        known = [one.alias for one in get_flat_params(request.scope["route"].dependant)]
        text = str(unknown_name("parameter", name, known))
    elif text.startswith("Input "):
        text = f"{name} {text.removeprefix('Input ')}, got {fault['input']!r}"
    elif fault["type"] != "value_error":
        text = f"{name}: {text}"
    return error_answer(request.scope, 404 if fault["loc"][0] == "path" else 400, text)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    """Answer a request that the framework refused, or one of us through it."""
    usual = {"Not Found": "There is no such page"}
    usual["Method Not Allowed"] = f"{request.method} is not possible here"
    text = usual.get(error.detail, error.detail)
    answer = error_answer(request.scope, error.status_code, text)
    answer.headers.update(error.headers or {})
    return answer


async def _on_own_error(request: Request, error: FisherhashError) -> Response:
    """Answer a request with the sentence of an error of ours."""
    usual = 400 if isinstance(error, UsageError) else 503
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), usual)
    if status >= 500:
        logger.warning("%s: %s", request.url.path, error)
    # Where the index is on this machine is nobody's business.
    text = str(error).replace(request.app.state.served.options.index, "the index")
    return error_answer(request.scope, status, text)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answer a request that hit an error nobody expected; the details stay in the log."""
    logger.error("%s failed", request.url.path, exc_info=error)
    return error_answer(request.scope, 500, "Something went wrong here; the server's log says what")
