"""The files of images, by the ids of their items: re-encoded ones, and the originals."""

from __future__ import annotations

import io
import re

from starlette.requests import Request
from starlette.responses import Response

from fisherhash.data.formats import UnreadableImage, open_image
from fisherhash.data.images import current_limits, read_failure
from fisherhash.system.files import read_bounded
from fisherhash.web.gallery import Gallery, MissingError
from fisherhash.web.serving import LONG_CACHE, threaded
from fisherhash.web.thumbnails import SIDES

BROWSER_TYPES = {
    "JPEG": "image/jpeg",
    "MPO": "image/jpeg",
    "PNG": "image/png",
    "GIF": "image/gif",
    "WEBP": "image/webp",
}
"""The formats that every browser shows; any other one is re-encoded."""

_PLACEHOLDER = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 96 96"><path fill="none" '
    b'stroke="#8a90a0" stroke-width="3" d="M14 14h68v68h-68zM34 34l28 28M34 62l28-28"/></svg>'
)
_NAME = re.compile(r"[0-9a-f]{40}")


class ImageRoutes:
    """The endpoints for images."""

    def __init__(self, gallery: Gallery) -> None:
        self.gallery = gallery

    @threaded
    def resized(self, request: Request) -> Response:
        """The image of an item as a JPEG: small, medium or large."""
        size = request.path_params["size"]
        if size not in SIDES:
            raise MissingError(f"there is no size {size!r}; the sizes are {', '.join(SIDES)}")
        item = self.gallery.item(item_number(request))
        try:
            data = self.gallery.jpeg(item, size)
        except MissingError:
            if b"image/" not in request.headers.get("accept", "").encode():
                raise
            # The page that shows it says the name; a drawing is better than a broken image.
            return Response(_PLACEHOLDER, 404, media_type="image/svg+xml")
        return self._image(request, data, "image/jpeg")

    @threaded
    def original(self, request: Request) -> Response:
        """The file of an item as it is, or re-encoded if a browser cannot show its format."""
        item = self.gallery.item(item_number(request))
        path = self.gallery.file_of(item)
        limits = current_limits()
        try:
            data = read_bounded(path, limits.bytes)
            kind = open_image(io.BytesIO(data), pixels=limits.pixels).format or ""
        except UnreadableImage as error:
            raise MissingError(f"the image cannot be shown: {error}") from None
        except (OSError, ValueError) as error:
            raise MissingError(f"the image cannot be shown: {read_failure(error)}") from None
        if kind not in BROWSER_TYPES:
            return self._image(request, self.gallery.jpeg(item, "large"), "image/jpeg")
        return self._image(request, data, BROWSER_TYPES[kind])

    @threaded
    def upload(self, request: Request) -> Response:
        """The preview of an image that was uploaded as a query."""
        name = request.path_params["name"]
        data = self.gallery.thumbnails.read(name) if _NAME.fullmatch(name) else None
        if data is None:
            raise MissingError("the preview of this upload is not kept any more")
        return self._image(request, data, "image/jpeg", keep=True)

    def _image(self, request: Request, data: bytes, kind: str, *, keep: bool = False) -> Response:
        kept = keep or "v" in request.query_params
        headers = {
            "cache-control": LONG_CACHE if kept else "private, max-age=60",
            # Whatever a file holds, it is shown as an image and runs nothing.
            "content-security-policy": "default-src 'none'; sandbox",
        }
        return Response(data, media_type=kind, headers=headers)


def item_number(request: Request) -> int:
    """The id in the path of an address.

    Raises:
        MissingError: it is no number.
    """
    text = str(request.path_params["number"])
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise MissingError("there is no such item: an id is a whole number")
    return int(text)
