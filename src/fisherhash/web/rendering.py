"""How pages and answers are written: templates, files of the package, errors as sentences."""

from __future__ import annotations

import functools
import json
import zlib
from datetime import UTC, datetime
from importlib import resources
from typing import Annotated, Any

import jinja2
import numpy as np
from fastapi import APIRouter, Depends, HTTPException, Request, Response
from markupsafe import Markup
from starlette.types import Scope

from fisherhash.errors import counted
from fisherhash.index.images.results import Hit
from fisherhash.pages.html import bits_svg, shorten_middle
from fisherhash.web.derived import DATE_FIELD
from fisherhash.web.served import ServedIndex

WAIT = 2.0
"""Seconds that a page waits for what is computed of the whole collection."""
LONG_CACHE = "private, max-age=31536000, immutable"
router = APIRouter(include_in_schema=False)


async def _served_of(request: Request) -> ServedIndex:
    return request.app.state.served


Served = Annotated[ServedIndex, Depends(_served_of)]
"""The index that is served, as a parameter of an endpoint."""


class JsonAnswer(Response):
    """JSON in ASCII, so that file names that are not UTF-8 survive as escapes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The value as JSON."""
        return json.dumps(content, ensure_ascii=True, allow_nan=False).encode("ascii")


def render_page(
    template: str, served: ServedIndex | None, page: str, *, status: int = 200, **values: Any
) -> Response:
    """A page from a template; names that are not UTF-8 cannot break it."""
    text = _environment().get_template(template).render(served=served, page=page, **values)
    return Response(text.encode("utf-8", "replace"), status, media_type="text/html; charset=utf-8")


def wants_html(scope: Scope) -> bool:
    """Whether whoever sent a request would rather read a page than JSON."""
    accept = b",".join(value for name, value in scope["headers"] if name == b"accept")
    return b"text/html" in accept and not scope["path"].startswith("/api/")


def error_answer(scope: Scope, status: int, text: str) -> Response:
    """A page or JSON that says in a sentence what went wrong."""
    if wants_html(scope):
        return render_page("error.html", None, "", status=status, code=status, text=sentence(text))
    return JsonAnswer({"error": sentence(text)}, status)


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


# What templates say of an item


def item_date(hit: Hit) -> str | None:
    """When an image was taken or, if that is not known, when its file was changed."""
    text = hit.metadata.get(DATE_FIELD)
    if isinstance(text, str):
        return text.replace("T", " ")
    if hit.mtime_ns is None:
        return None
    try:
        return f"{datetime.fromtimestamp(hit.mtime_ns / 1e9, UTC):%Y-%m-%d %H:%M} (file)"
    except (ValueError, OverflowError, OSError):
        return None


def image_url(hit: Hit, size: str = "medium") -> str:
    """The address of the image of an item, which changes when its file does."""
    state = f"{(hit.mtime_ns or 0) & 0xFFFFFFFFFF:x}-{hit.size or 0:x}"
    return f"/images/{hit.id}/{size}?v={state}"


def code_drawing(code: bytes, bits: int, against: bytes | None = None) -> Markup:
    """A code as squares; bits that differ from another code are circles."""
    other = None if against is None else np.frombuffer(against, np.uint8)
    return Markup(bits_svg(np.frombuffer(code, np.uint8), bits, against=other))


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("fisherhash.web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["static"] = _static_url
    made.filters.update(
        middle=shorten_middle,
        counted=counted,
        number=lambda value: f"{value:,}",
        date=item_date,
        image=image_url,
        drawing=code_drawing,
    )
    return made


# Style sheets and scripts


@functools.cache
def _static_files() -> dict[str, tuple[bytes, str]]:
    """Content and type of each file, held in memory; only these names exist."""
    types = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    folders = resources.files("fisherhash.web") / "static", resources.files("fisherhash.pages")
    files = [(file.name.rpartition(".")[2], file) for one in folders for file in one.iterdir()]
    return {file.name: (file.read_bytes(), types[end]) for end, file in files if end in types}


def _static_url(name: str) -> str:
    """The address of a file, which changes when the file does."""
    return f"/static/{name}?v={zlib.crc32(_static_files()[name][0]):x}"


@router.get("/static/{name}")
async def static_file(name: str) -> Response:
    """A style sheet, a script or an icon."""
    if name not in _static_files():
        raise HTTPException(404, "There is no such file")
    data, kind = _static_files()[name]
    return Response(data, media_type=kind, headers={"cache-control": LONG_CACHE})
