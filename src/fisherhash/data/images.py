"""Decodes one image, however it is stored, to upright RGB in the colours of sRGB.

Transparency is laid on white. Colours with a profile (Display P3, Adobe RGB, CMYK) are converted
to sRGB; a broken profile is ignored, and so is one that says sRGB in other words.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fisherhash.data.formats import (
    RAW_REASON,
    UnreadableImage,
    first_line,
    is_raw_name,
    open_image,
    too_many_pixels,
)
from fisherhash.errors import UsageError
from fisherhash.system.files import (
    NotRegularError,
    TooLongError,
    check_size,
    open_regular,
    read_bounded,
)

MAX_PIXELS = 89_478_485
"""Images with more pixels are refused: Pillow's own threshold, a quarter GiB of RGB."""
MAX_BYTES = 256 << 20
"""Files with more bytes are refused."""
PIXELS_VARIABLE, BYTES_VARIABLE = "FISHERHASH_MAX_PIXELS", "FISHERHASH_MAX_BYTES"
"""Environment variables that set other limits, here and in worker processes."""

ImageLike = str | os.PathLike[str] | bytes | BinaryIO | Image.Image | NDArray[np.generic]

_SAME = 3
"""Levels of 255 by which a profile may move a colour and still count as sRGB."""


@dataclass(frozen=True)
class Limits:
    """What may be read of one image.

    Attributes:
        pixels: the most pixels; a JPEG may have four times as many, which halves its sides.
        bytes: the most bytes of a file.
    """

    pixels: int = MAX_PIXELS
    bytes: int = MAX_BYTES


def current_limits() -> Limits:
    """The limits that the environment sets.

    Raises:
        UsageError: an environment variable holds no whole number above zero.
    """
    found = []
    for name, default in ((PIXELS_VARIABLE, MAX_PIXELS), (BYTES_VARIABLE, MAX_BYTES)):
        text = os.environ.get(name, "")
        if text and not (text.isdecimal() and int(text) > 0):
            raise UsageError(f"{name} must be a whole number above 0, got '{text}'")
        found.append(int(text) if text else default)
    return Limits(*found)


def set_limits(*, pixels: int | None = None, bytes: int | None = None) -> None:
    """Set other limits for this process and for the worker processes that it starts.

    Args:
        pixels: the most pixels of an image.
        bytes: the most bytes of a file.
    """
    for name, value in ((PIXELS_VARIABLE, pixels), (BYTES_VARIABLE, bytes)):
        if value is not None:
            if value < 1:
                raise UsageError(f"a limit must be at least 1, got {value}")
            os.environ[name] = str(value)


def load_image(source: ImageLike, *, enough: int | None = None) -> Image.Image:
    """Decode an image to upright RGB from a path, bytes, a file, a Pillow image or an array.

    The EXIF orientation is applied, colours with a profile are converted to sRGB, transparency
    becomes white, 16 bits are scaled to 8, and an animation yields its first frame. Arrays are
    ``uint8`` of shape (h, w), (h, w, 1), (h, w, 3) or (h, w, 4), or ``uint16`` of shape (h, w).
    A file object is read from its beginning if it can be seeked.

    Args:
        source: the image.
        enough: a shorter side that is large enough. A JPEG may then be decoded at 1/2, 1/4 or 1/8
            of its size, which is faster; pixels differ a little from those of a reduced image. A
            Pillow image is the caller's and stays as it is.

    Raises:
        UnreadableImage: the file or the bytes are missing, damaged, truncated, too large, or not
            an image.
        UsageError: an array of another shape or type, or an object that is none of these.

    >>> load_image(np.zeros((2, 3), dtype=np.uint8)).size
    (3, 2)
    """
    limits = current_limits()
    if isinstance(source, Image.Image):
        return _decoded(source, limits.pixels, theirs=True)
    if isinstance(source, np.ndarray):
        return _decoded(_from_array(source), limits.pixels)
    if isinstance(source, str | os.PathLike):
        with _reading(source):
            data = read_bounded(source, limits.bytes)
    elif isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
    elif hasattr(source, "read"):
        data = _read_object(source, limits.bytes)
    else:
        raise UsageError(
            f"cannot read an image from {type(source).__name__}; give a path, bytes, a file, a "
            "Pillow image or a numpy array"
        )
    return _decoded(open_image(io.BytesIO(data), pixels=limits.pixels), limits.pixels, enough)


def is_one_image(images: object) -> bool:
    """Whether a caller passed one image rather than several; arrays and tensors say it by shape.

    >>> is_one_image(b"GIF89a"), is_one_image(["a.jpg"])
    (True, False)
    """
    if isinstance(images, str | bytes | bytearray | memoryview) or hasattr(images, "read"):
        return True
    return not isinstance(images, Iterable)


def check_file(path: str | os.PathLike[str]) -> None:
    """Refuse, from its size and its header, a file that :func:`load_image` would refuse.

    Raises:
        UnreadableImage: it cannot be read; a file whose pixels are damaged passes.
    """
    limits = current_limits()
    with _reading(path), open_regular(path) as file:
        check_size(file, limits.bytes)
        open_image(file, pixels=limits.pixels)


@contextlib.contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Every way in which reading a file can fail becomes an :class:`UnreadableImage`."""
    try:
        if is_raw_name(os.fspath(path)) and os.path.isfile(path):
            raise UnreadableImage(RAW_REASON)
        yield
    except NotRegularError as error:
        raise UnreadableImage(str(error)) from None
    except TooLongError as error:
        reason = f"{error}; if you trust the file, raise the limit: --max-bytes"
        raise UnreadableImage(reason, passing=True) from None
    except MemoryError:
        raise UnreadableImage("not enough memory to read the file", passing=True) from None
    except (OSError, ValueError) as error:
        raise UnreadableImage(read_failure(error), passing=True) from None


def read_failure(error: OSError | ValueError) -> str:
    """Why a file cannot be opened, in words."""
    if isinstance(error, FileNotFoundError):
        return "the file does not exist (moved or deleted?)"
    if isinstance(error, PermissionError):
        return "permission denied"
    if isinstance(error, NotRegularError):
        return str(error)
    code = getattr(error, "errno", None)
    reason = os.strerror(code) if code else str(error)
    hint = " (a loop of links)" if code == errno.ELOOP else ""
    return f"cannot be read: {reason.lower()}{hint}"


def _read_object(file: Any, limit: int) -> bytes:
    try:
        if getattr(file, "seekable", bool)():
            file.seek(0)
        data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise UnreadableImage(read_failure(error), passing=True) from None
    if not isinstance(data, bytes):
        raise UsageError("an image file must be opened in binary mode: open(path, 'rb')")
    if len(data) > limit:
        raise UnreadableImage(f"more than {limit:,} bytes, the limit; raise it: --max-bytes")
    return data


def _decoded(
    image: Image.Image, limit: int, enough: int | None = None, *, theirs: bool = False
) -> Image.Image:
    width, height = image.size
    if width == 0 or height == 0:
        raise UnreadableImage(f"the image has no pixels ({width} x {height})")
    try:
        if image.format in ("JPEG", "MPO"):
            side = min(width, height) if enough is None else enough
            if width * height > limit:
                # Its decoder halves the sides: never more pixels in memory than the limit.
                side = min(side, width // 2, height // 2)
            if side < min(width, height):
                image.draft(None, (side, side))
        if image.size[0] * image.size[1] > limit:
            raise too_many_pixels(width, height, limit)
        image.load()
        image = image.copy() if theirs else image
        # Broken EXIF data is common and says nothing about the pixels.
        with contextlib.suppress(Exception):
            ImageOps.exif_transpose(image, in_place=True)
        return _to_rgb(image)
    except UnreadableImage:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise too_many_pixels(0, 0, limit) from None
    except MemoryError:
        reason = f"not enough memory for {width} x {height} pixels"
        raise UnreadableImage(reason, passing=True) from None
    except Exception as error:
        # On garbage, decoders raise almost anything: OSError, SyntaxError, struct.error, …
        reason = first_line(error)
        state = "truncated" if "truncated" in reason.lower() else "damaged"
        raise UnreadableImage(f"{state}: {reason}") from None


def _from_array(array: NDArray[np.generic]) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    colour = array.ndim == 3 and array.shape[2] in (3, 4)
    if array.dtype == np.uint8 and (array.ndim == 2 or colour):
        return Image.fromarray(np.ascontiguousarray(array))
    if array.dtype == np.uint16 and array.ndim == 2:
        return Image.fromarray(np.ascontiguousarray(array))
    raise UsageError(
        f"an image array must be uint8 of shape (h, w), (h, w, 3) or (h, w, 4), "
        f"got {array.dtype} of shape {array.shape}"
    )


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert a loaded image to 8-bit RGB."""
    profile = image.info.get("icc_profile")
    if image.mode == "RGB" and "transparency" not in image.info:
        return _in_srgb(image, profile)
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        return _deep_grey(image)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        if profile:
            colours = _in_srgb(rgba.convert("RGB"), profile)
            colours.putalpha(rgba.getchannel("A"))
            rgba = colours
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    if image.mode == "CMYK":
        transform = _transform(profile, "CMYK") if profile else None
        return image.convert("RGB") if transform is None else _apply(image, transform)
    if image.mode in ("1", "L"):
        return image.convert("RGB")
    return _in_srgb(image.convert("RGB"), profile)


def _in_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    transform = _transform(profile, "RGB") if profile else None
    return image if transform is None else _apply(image, transform)


def _apply(image: Image.Image, transform: object) -> Image.Image:
    from PIL import ImageCms

    try:
        changed = ImageCms.applyTransform(image, transform)  # type: ignore[arg-type]
    except (ImageCms.PyCMSError, ValueError, OSError):
        changed = None
    return image.convert("RGB") if changed is None else changed


@functools.lru_cache(maxsize=32)
def _transform(profile: bytes, mode: str) -> object | None:
    """The conversion of a profile to sRGB; None if it is broken or changes next to nothing."""
    try:
        from PIL import ImageCms

        given = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space: str = given.profile.xcolor_space  # type: ignore[union-attr]
        if space.strip() != mode:
            return None
        transform = ImageCms.buildTransform(
            given,
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
        if mode == "RGB":
            # The many profiles that all mean sRGB differ in a level here and there. Images with
            # one of them keep the pixels that they have.
            steps = np.linspace(0, 255, 9).round().astype(np.uint8)
            cube = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(27, 27, 3)
            changed = np.asarray(ImageCms.applyTransform(Image.fromarray(cube), transform))
            if np.abs(changed.astype(int) - cube).max() <= _SAME:
                return None
        return transform
    except Exception:
        # Whatever is wrong with a profile, the pixels can be shown without it.
        return None


def _deep_grey(image: Image.Image) -> Image.Image:
    """Scale greys of more than 8 bits; floats and large integers by the range that they use."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        values = values / 257
    elif low < 0 or high > 255 or high <= 1:
        values = (values - low) * (255 / max(high - low, 1e-12))
    return Image.fromarray(np.rint(values).clip(0, 255).astype(np.uint8)).convert("RGB")
