"""What all pages and the API share: threads with a time limit, errors as sentences, templates."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

import anyio
import anyio.to_thread
import jinja2
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from fisherhash.data.formats import UnreadableImage
from fisherhash.errors import FisherhashError, UsageError, counted
from fisherhash.index.base import CannotWriteError
from fisherhash.index.images.results import shown_weight
from fisherhash.pages.html import shorten_middle
from fisherhash.web.changes import BusyError
from fisherhash.web.gallery import Gallery, MissingError

logger = logging.getLogger(__name__)

THREADS = 32
UPLOADS = 16
"""Uploads that are received at once; others wait."""
LONG_CACHE = "private, max-age=31536000, immutable"

Endpoint = Callable[[Request], Awaitable[Response]]


class JsonAnswer(Response):
    """JSON in ASCII, so that file names that are not UTF-8 survive as escapes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The value as JSON."""
        return json.dumps(content, ensure_ascii=True, allow_nan=False).encode("ascii")


def threaded(work: Callable[[Any, Request], Response]) -> Callable[[Any, Request], Any]:
    """An endpoint whose work runs in a thread and may take only so long.

    Python cannot stop a thread: what takes too long ends on its own, and its result is dropped.
    """

    @functools.wraps(work)
    async def run(self: Any, request: Request) -> Response:
        return await in_thread(request, lambda: work(self, request))

    return run


async def in_thread(request: Request, work: Callable[[], Any]) -> Any:
    """Run work in a thread; after the time limit of the server, answer without it."""
    seconds = request.app.state.options.seconds
    try:
        async with asyncio.timeout(seconds):
            return await anyio.to_thread.run_sync(
                work, abandon_on_cancel=True, limiter=request.app.state.limiter
            )
    except TimeoutError:
        raise HTTPException(503, f"This took longer than {seconds:g} seconds.") from None


def status_of(error: FisherhashError) -> int:
    """The status of the answer to a request that raised an error of ours."""
    if isinstance(error, MissingError):
        return 404
    if isinstance(error, UnreadableImage):
        return 422
    if isinstance(error, BusyError):
        return 409
    if isinstance(error, CannotWriteError):
        return 507
    return 400 if isinstance(error, UsageError) else 503


def sentence(text: str) -> str:
    """A message as a sentence of its own.

    >>> sentence("nothing to search for")
    'Nothing to search for.'
    """
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").strip()
    first = text.partition(" ")[0]
    # A parameter of one letter is a name.
    start = text[:1] if len(first) == 1 else text[:1].upper()
    return start + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def wants_html(scope: Scope) -> bool:
    """Whether whoever sent a request would rather read a page than JSON."""
    accept = b",".join(value for name, value in scope["headers"] if name == b"accept")
    return b"text/html" in accept and not scope["path"].startswith("/api/")


def error_answer(scope: Scope, status: int, text: str) -> Response:
    """A page or JSON that says in a sentence what went wrong."""
    if not wants_html(scope):
        return JsonAnswer({"error": sentence(text)}, status)
    page = TEMPLATES.get_template("error.html").render(
        status=status, text=sentence(text), static=STATIC, page=None, gallery=None
    )
    return html_answer(page, status)


def refusal(scope: Scope, status: int, text: str) -> ASGIApp:
    """The answer to a request that never reaches a page."""
    return error_answer(scope, status, text)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer a request that Starlette refused, or one of us through it."""
    if not isinstance(error, HTTPException):
        raise error
    usual = {404: "There is no such page.", 405: f"{request.method} is not possible here."}
    text = error.detail
    if text in ("Not Found", "Method Not Allowed"):
        text = usual[error.status_code]
    answer = error_answer(request.scope, error.status_code, text)
    answer.headers.update(error.headers or {})
    return answer


async def on_own_error(request: Request, error: Exception) -> Response:
    """Answer a request with the sentence of an error of ours."""
    if not isinstance(error, FisherhashError):
        raise error
    status = status_of(error)
    if status >= 500:
        logger.warning("%s: %s", request.url.path, error)
    # Where the index is on this machine is nobody's business.
    text = str(error).replace(request.app.state.options.index, "the index")
    return error_answer(request.scope, status, text)


async def on_bug(request: Request, error: Exception) -> Response:
    """Answer a request that hit an error nobody expected; the details stay in the log."""
    logger.error("%s failed", request.url.path, exc_info=error)
    return error_answer(request.scope, 500, "Something went wrong here; the server's log says what")


def html_answer(text: str, status: int = 200) -> Response:
    """A page; names that are not UTF-8 cannot break it."""
    return Response(text.encode("utf-8", "replace"), status, media_type="text/html; charset=utf-8")


# Files of the package

_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class StaticFiles:
    """The style sheets and scripts, held in memory; only these names exist."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[bytes, str]] = {}
        places = (resources.files("fisherhash.web") / "static", resources.files("fisherhash.pages"))
        for place in places:
            for file in place.iterdir():
                kind = _TYPES.get(file.name.rpartition(".")[2])
                if kind is not None:
                    self.files[file.name] = (file.read_bytes(), kind)
        self._versions = {
            name: hashlib.sha256(data).hexdigest()[:12] for name, (data, _) in self.files.items()
        }

    def __call__(self, name: str) -> str:
        """The address of a file, which changes with its content."""
        return f"/static/{name}?v={self._versions[name]}"

    def answer(self, name: str) -> Response:
        """A file.

        Raises:
            MissingError: there is none of this name.
        """
        if name not in self.files:
            raise MissingError("there is no such file")
        data, kind = self.files[name]
        return Response(data, media_type=kind, headers={"cache-control": LONG_CACHE})


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("fisherhash.web", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "middle": shorten_middle,
        "counted": counted,
        "weight": shown_weight,
        "number": lambda value: f"{value:,}",
        "bytes": readable_bytes,
    }
    return made


def readable_bytes(size: int | None) -> str:
    """A number of bytes for people.

    >>> readable_bytes(1536), readable_bytes(12), readable_bytes(3_400_000)
    ('1.5 kB', '12 B', '3.4 MB')
    """
    if size is None:
        return ""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


TEMPLATES = _environment()
STATIC = StaticFiles()


def render_page(template: str, gallery: Gallery, page: str, **values: Any) -> Response:
    """A page of the collection, from a template."""
    text = TEMPLATES.get_template(template).render(
        gallery=gallery, page=page, static=STATIC, **values
    )
    return html_answer(text)
