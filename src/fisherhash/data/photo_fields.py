"""What a camera wrote into an image file: when, with what and where a photo was taken."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from PIL import ExifTags, Image

from fisherhash.data.formats import open_image
from fisherhash.data.images import current_limits
from fisherhash.system.files import open_regular

PHOTO_FIELDS = ("taken", "camera", "latitude", "longitude")
"""The fields that :func:`photo_fields` may return."""

_MAX_TEXT = 100


def photo_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the date, the camera and the position of a photo from its EXIF data.

    Returns:
        Those of these fields that the file has: ``taken`` (``2021-06-15T14:03:22``, local time, so
        that texts sort by time), ``camera`` (maker and model), ``latitude`` and ``longitude`` in
        degrees, north and east positive. Broken data is left out.
    """
    try:
        with open_regular(path) as file:
            image = open_image(file, pixels=current_limits().pixels)
            if image.format == "TIFF":
                exif = image.getexif()
            else:
                # Not getexif(): it decodes a PNG that has none.
                exif = Image.Exif()
                exif.load(image.info.get("exif") or b"")
            if not exif:
                return {}
            details = exif.get_ifd(ExifTags.IFD.Exif)
            found = {
                "taken": _taken(details),
                "camera": _camera(exif),
                **_position(exif.get_ifd(ExifTags.IFD.GPSInfo)),
            }
            return {name: value for name, value in found.items() if value is not None}
    except Exception:
        # Pillow raises almost anything on broken EXIF data, which says nothing about the image.
        return {}


def _taken(details: Mapping[int, Any]) -> str | None:
    for tag in (ExifTags.Base.DateTimeOriginal, ExifTags.Base.DateTimeDigitized):
        # Some programs write dashes; fractions of a second and time zones have tags of their own.
        text = (_text(details.get(tag)) or "")[:19].replace("-", ":").replace("T", " ")
        with contextlib.suppress(ValueError):
            return datetime.strptime(text, "%Y:%m:%d %H:%M:%S").isoformat()
    return None


def _camera(exif: Mapping[int, Any]) -> str | None:
    maker, model = (_text(exif.get(tag)) for tag in (ExifTags.Base.Make, ExifTags.Base.Model))
    if not model:
        return maker
    # "NIKON CORPORATION" and "NIKON D70": the model names its maker.
    named = maker and model.lower().startswith(maker.lower().split()[0])
    return model if named or not maker else f"{maker} {model}"


def _position(gps: Mapping[int, Any]) -> dict[str, float]:
    found = {}
    for name, tag, side, most in (
        ("latitude", ExifTags.GPS.GPSLatitude, "S", 90),
        ("longitude", ExifTags.GPS.GPSLongitude, "W", 180),
    ):
        try:
            degrees, minutes, seconds = (float(part) for part in gps[tag])
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return {}
        value = degrees + minutes / 60 + seconds / 3600
        if not (math.isfinite(value) and 0 <= value <= most):
            return {}
        # The reference, N or S, E or W, comes before its value.
        reference = _text(gps.get(tag - 1)) or ""
        found[name] = round(-value if reference.upper().startswith(side) else value, 6)
    # Cameras without a fix write zeros.
    return found if any(found.values()) else {}


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str):
        return None
    text = " ".join(value.replace("\0", " ").split())[:_MAX_TEXT]
    return text or None
