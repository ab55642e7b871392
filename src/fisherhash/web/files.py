"""Images as files: those of items by their ids, re-encoded or as they are, and uploaded ones."""

from __future__ import annotations

import io
from typing import Annotated

from fastapi import APIRouter, HTTPException, Path, Request, Response
from starlette.datastructures import UploadFile

from fisherhash.data.formats import open_image
from fisherhash.data.images import current_limits
from fisherhash.system.files import read_bounded
from fisherhash.web.gallery import MissingError, showing
from fisherhash.web.queries import LARGEST_ID, Size, UploadName
from fisherhash.web.rendering import LONG_CACHE, Shown

BROWSER_TYPES = {
    "JPEG": "image/jpeg",
    "MPO": "image/jpeg",
    "PNG": "image/png",
    "GIF": "image/gif",
    "WEBP": "image/webp",
}
"""The formats that every browser shows; any other one is re-encoded."""
ItemId = Annotated[int, Path(alias="id", ge=0, le=LARGEST_ID, description="The id of the item.")]
router = APIRouter(include_in_schema=False)

_PLACEHOLDER = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 96 96"><path fill="none" '
    b'stroke="#8a90a0" stroke-width="3" d="M14 14h68v68h-68zM34 34l28 28M34 62l28-28"/></svg>'
)


@router.get("/images/{id}/original")
def original(request: Request, gallery: Shown, number: ItemId) -> Response:
    """The file of an item as it is, or re-encoded if a browser cannot show its format."""
    hit, limits = gallery.item(number), current_limits()
    path = gallery.file_of(hit)
    with showing():
        data = read_bounded(path, limits.bytes)
        kind = open_image(io.BytesIO(data), pixels=limits.pixels).format or ""
    if kind not in BROWSER_TYPES:
        data, kind = gallery.jpeg(hit, "large"), "JPEG"
    return _image(data, BROWSER_TYPES[kind], keep="v" in request.query_params)


@router.get("/images/{id}/{size}")
def resized(request: Request, gallery: Shown, number: ItemId, size: Size) -> Response:
    """The image of an item as a JPEG: small, medium or large."""
    hit = gallery.item(number)
    try:
        data = gallery.jpeg(hit, size)
    except MissingError:
        if "image/" not in request.headers.get("accept", ""):
            raise
        # The page that shows it says the name; a drawing is better than a broken image.
        return Response(_PLACEHOLDER, 404, media_type="image/svg+xml")
    return _image(data, "image/jpeg", keep="v" in request.query_params)


@router.get("/uploads/{name}")
def uploaded(gallery: Shown, name: UploadName) -> Response:
    """The preview of an image that was uploaded as a query."""
    data = gallery.thumbnails.read(name)
    if data is None:
        raise MissingError("the preview of this upload is not kept any more")
    return _image(data, "image/jpeg", keep=True)


def _image(data: bytes, kind: str, *, keep: bool) -> Response:
    headers = {
        "cache-control": LONG_CACHE if keep else "private, max-age=60",
        # Whatever a file holds, it is shown as an image and runs nothing.
        "content-security-policy": "default-src 'none'; sandbox",
    }
    return Response(data, media_type=kind, headers=headers)


async def read_upload(request: Request) -> bytes:
    """The image that a request carries: as a file of a form, or as its whole body.

    Raises:
        HTTPException: there is none.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    async with request.app.state.uploads:
        if kind != "multipart/form-data":
            data = await request.body()
        else:
            async with request.form(max_files=1, max_fields=20) as form:
                file = form.get("image")
                if not isinstance(file, UploadFile):
                    raise HTTPException(400, "The form has no file named image")
                data = await file.read()
    if not data:
        raise HTTPException(400, "There is no image in the request: choose a file first")
    # curl calls every body a form, an image too; a form that is one is text.
    if kind == "application/x-www-form-urlencoded" and data.isascii():
        raise HTTPException(415, "Send the image as the body, or as a file of a multipart form")
    return data
