"""The application: pages and API of one open index, behind the guard."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.dependencies.utils import get_flat_params
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from fisherhash.data.formats import UnreadableImage
from fisherhash.errors import FisherhashError, UsageError, unknown_name
from fisherhash.index.base import CannotWriteError
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.system.version import __version__
from fisherhash.web import api, files, model_page, pages, rendering, review
from fisherhash.web.gallery import Gallery, MissingError
from fisherhash.web.guard import Guard, RequestMetrics
from fisherhash.web.options import ServeOptions
from fisherhash.web.queries import SearchQuery
from fisherhash.web.rendering import error_answer

UPLOADS = 16
"""Uploads that are received at once; others wait."""
STATUS = {MissingError: 404, UnreadableImage: 422, CannotWriteError: 507}
"""What a request that raised an error of ours gets; 400 for bad use, 503 for any other failure."""
logger = logging.getLogger(__name__)


class Refusal(TypedDict):
    """Why a request was refused, as a sentence."""

    error: str


def create_app(images: ImageIndex, options: ServeOptions) -> ASGIApp:
    """The application that serves an open index.

    Args:
        images: the index; closed when the application ends.
        options: how it is served.
    """
    gallery, metrics = Gallery(images, options), RequestMetrics()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Each may hold as many bytes as an upload may have.
        app.state.uploads = asyncio.Semaphore(UPLOADS)
        # The first search would wait for kernels and the model.
        threading.Thread(target=_warm, args=(gallery,), daemon=True).start()
        try:
            yield
        finally:
            images.close()

    app = FastAPI(
        title="fisherhash",
        version=__version__,
        description="Search a collection of images by their binary codes.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses={
            "4XX": {"model": Refusal, "description": "Refused, with a sentence that says why."},
            "5XX": {"model": Refusal, "description": "Failed, or not ready yet."},
        },
    )
    app.state.gallery, app.state.metrics = gallery, metrics
    for part in (pages, files, review, model_page, rendering, api):
        app.include_router(part.router)
    app.include_router(api.changes, include_in_schema=options.writable)
    app.include_router(api.health)
    handlers: dict[type[Exception], Any] = {
        RequestValidationError: _on_wrong_parameter,
        HTTPException: _on_http_error,
        FisherhashError: _on_own_error,
        Exception: _on_bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=4)
    return Guard(app, options, metrics)


def open_served(options: ServeOptions) -> ImageIndex:
    """Open the index that is to be served."""
    return ImageIndex.open(options.index, device=options.device, skip_damaged=options.skip_damaged)


def _warm(gallery: Gallery) -> None:
    with contextlib.suppress(FisherhashError):
        gallery.find(SearchQuery(code="00" * (-(-gallery.index.bits // 8))))
    with contextlib.suppress(FisherhashError):
        gallery.columns.get()
        gallery.images.hasher  # noqa: B018 (loads it)


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
    text = str(error).replace(request.app.state.gallery.options.index, "the index")
    return error_answer(request.scope, status, text)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answer a request that hit an error nobody expected; the details stay in the log."""
    logger.error("%s failed", request.url.path, exc_info=error)
    return error_answer(request.scope, 500, "Something went wrong here; the server's log says what")
