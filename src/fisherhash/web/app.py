"""The application: its routes, in one list."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from fisherhash.errors import FisherhashError
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.web import serving
from fisherhash.web.api import Api
from fisherhash.web.exploring import ExploringPages
from fisherhash.web.gallery import Gallery
from fisherhash.web.guard import Guard
from fisherhash.web.image_routes import ImageRoutes
from fisherhash.web.metrics import RequestMetrics
from fisherhash.web.options import ServeOptions
from fisherhash.web.queries import SearchQuery
from fisherhash.web.reviewing import DuplicatePages
from fisherhash.web.searching import SearchPages

FEWEST_BUILT = 200_000
"""Codes from which on the search tables are built before the first search."""


def create_app(images: ImageIndex, options: ServeOptions) -> ASGIApp:
    """The application that serves an open index.

    Args:
        images: the index; closed when the application ends.
        options: how it is served.
    """
    gallery = Gallery(images, options)
    routes = list_routes(gallery)
    metrics = RequestMetrics([*(route.path for route in routes), "other"], options.metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.limiter = anyio.CapacityLimiter(serving.THREADS)
        # Each may hold as many bytes as an upload may have.
        app.state.uploads = asyncio.Semaphore(serving.UPLOADS)
        # The first search would wait for tables, kernels and the model.
        threading.Thread(target=_warm, args=(gallery,), daemon=True).start()
        try:
            yield
        finally:
            images.close()

    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            HTTPException: serving.on_http_error,
            FisherhashError: serving.on_own_error,
            Exception: serving.on_bug,
        },
        middleware=[Middleware(GZipMiddleware, minimum_size=1024, compresslevel=4)],
    )
    app.state.options, app.state.metrics = options, metrics
    return Guard(app, options=options, metrics=metrics, refuse=serving.refusal)


def open_served(options: ServeOptions) -> ImageIndex:
    """Open the index that is to be served."""
    return ImageIndex.open(options.index, device=options.device, skip_damaged=options.skip_damaged)


def list_routes(gallery: Gallery) -> list[Route]:
    """Every route of the application."""
    search, api = SearchPages(gallery), Api(gallery)
    files, explore, review = ImageRoutes(gallery), ExploringPages(gallery), DuplicatePages(gallery)
    return [
        Route("/", search.page, name="search"),
        Route("/results", search.results),
        Route("/histogram", search.histogram),
        Route("/search", search.upload, methods=["POST"]),
        Route("/uploads/{name}", files.upload),
        Route("/images/{number}/original", files.original),
        Route("/images/{number}/{size}", files.resized),
        Route("/map", explore.map),
        Route("/map/points", explore.points),
        Route("/buckets", explore.buckets),
        Route("/timeline", explore.timeline),
        Route("/model", explore.model),
        Route("/model/bits", explore.bits),
        Route("/duplicates", review.page),
        Route("/duplicates/groups", review.groups),
        Route("/duplicates/compute", review.compute, methods=["POST"]),
        Route("/duplicates/export", review.export, methods=["POST"]),
        Route("/api/info", api.info),
        Route("/api/search", api.search, methods=["GET", "POST"]),
        Route("/api/items", api.items, methods=["GET", "POST"]),
        Route("/api/items/{number}", api.item, methods=["GET", "DELETE"]),
        Route("/api/facets", api.facets),
        Route("/api/duplicates", api.duplicates),
        Route("/api/skipped", api.skipped),
        Route("/openapi.json", api.openapi),
        Route("/healthz", api.health),
        Route("/metrics", api.metrics),
        Route("/static/{name}", _static),
    ]


async def _static(request: Request) -> Response:
    return serving.STATIC.answer(request.path_params["name"])


def _warm(gallery: Gallery) -> None:
    index = gallery.index
    with contextlib.suppress(FisherhashError):
        # A small index needs no tables, and compiling what builds them takes longer than a search.
        if len(index) >= FEWEST_BUILT:
            index.build()
        # In a large index, each ranking has kernels of its own, compiled once per machine.
        code, fine = (bytes(-(-bits // 8)) for bits in (index.bits, index.fine_bits))
        query = SearchQuery(code=code, fine=fine or None, weights=bytes(index.bits))
        for ranking in gallery.rankings():
            gallery.find(replace(query, ranking=ranking))
    with contextlib.suppress(FisherhashError):
        gallery.columns.get()
        gallery.images.hasher  # noqa: B018 (loads it)
