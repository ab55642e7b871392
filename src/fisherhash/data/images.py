"""Decodes one image, however it is stored, to upright RGB."""

from __future__ import annotations

import errno
import io
import os
import stat
import threading
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fisherhash.errors import FisherhashError, UsageError

MAX_PIXELS = 89_478_485
"""Images with more pixels are refused: Pillow's own threshold, a quarter GiB of RGB."""

ImageLike = str | os.PathLike[str] | bytes | Image.Image | NDArray[np.generic]

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_HEIF_BRANDS = {b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"}
_warning_filters = threading.Lock()


class UnreadableImage(FisherhashError):  # noqa: N818
    """An image that cannot be decoded; the message is the reason.

    Attributes:
        passing: the file could not be opened at all, so another try may succeed.
    """

    def __init__(self, reason: str, *, passing: bool = False) -> None:
        super().__init__(reason)
        self.passing = passing


def load_image(source: ImageLike) -> Image.Image:
    """Decode an image to upright RGB from a path, bytes, a Pillow image or an array.

    The EXIF orientation is applied, transparency becomes white, 16-bit greys are scaled to 8 bits,
    and an animation yields its first frame. Arrays are ``uint8`` of shape (h, w), (h, w, 1),
    (h, w, 3) or (h, w, 4), or ``uint16`` of shape (h, w).

    Raises:
        UnreadableImage: the file or the bytes are missing, damaged, truncated, too large, or not
            an image.
        UsageError: an array of another shape or type, or an object that is none of these.

    >>> load_image(np.zeros((2, 3), dtype=np.uint8)).size
    (3, 2)
    """
    if isinstance(source, Image.Image):
        return _decoded(source)
    if isinstance(source, np.ndarray):
        return _decoded(_from_array(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return _from_bytes(bytes(source))
    if isinstance(source, str | os.PathLike):
        return _from_bytes(read_file(source))
    raise UsageError(
        f"cannot read an image from {type(source).__name__}; "
        "give a path, bytes, a Pillow image or a numpy array"
    )


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Read a file; every way in which that can fail becomes an :class:`UnreadableImage`."""
    try:
        # A pipe or a device is never opened: it could block forever.
        if not stat.S_ISREG(os.stat(path).st_mode):
            kind = "a folder" if os.path.isdir(path) else "a pipe, socket or device"
            raise UnreadableImage(f"{kind}, not a file")
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise UnreadableImage(read_failure(error), passing=True) from None


def read_failure(error: OSError | ValueError) -> str:
    """Why a file cannot be opened, in words."""
    if isinstance(error, FileNotFoundError):
        return "the file does not exist (moved or deleted?)"
    if isinstance(error, PermissionError):
        return "permission denied"
    code = getattr(error, "errno", None)
    reason = os.strerror(code) if code else str(error)
    hint = " (a loop of links)" if code == errno.ELOOP else ""
    return f"cannot be read: {reason.lower()}{hint}"


def _from_bytes(data: bytes) -> Image.Image:
    if not data:
        raise UnreadableImage("the file is empty (0 bytes)")
    try:
        # Only the header is read under the lock: warning filters are global to the process.
        with _warning_filters, warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise UnreadableImage(_unknown_format(data)) from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise UnreadableImage(_too_large()) from None
    except Exception as error:
        raise UnreadableImage(f"damaged: {_reason(error)}") from None
    return _decoded(image)


def _decoded(image: Image.Image) -> Image.Image:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise UnreadableImage(_too_large(width, height))
    if width == 0 or height == 0:
        raise UnreadableImage(f"the image has no pixels ({width} x {height})")
    try:
        image.load()
        rgb = _to_rgb(image)
        # After load(): plugins that rotate the image themselves have dropped the tag by now.
        turn = _UPRIGHT.get(_orientation(image))
        return rgb.transpose(turn) if turn is not None else rgb
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise UnreadableImage(_too_large()) from None
    except MemoryError:
        raise UnreadableImage(f"not enough memory for {width} x {height} pixels") from None
    except Exception as error:
        # On garbage, decoders raise almost anything: OSError, SyntaxError, struct.error, …
        reason = _reason(error)
        state = "truncated" if "truncated" in reason.lower() else "damaged"
        raise UnreadableImage(f"{state}: {reason}") from None


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        # Broken EXIF data is common and says nothing about the pixels.
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        return _deep_grey(image)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _deep_grey(image: Image.Image) -> Image.Image:
    """Scale greys of more than 8 bits: 16 bits by 1 / 257, others by the range they use."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    top = float(values.max())
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        scaled = values / 257
    elif values.min() < 0 or top > 65_535:
        low = float(values.min())
        scaled = (values - low) * (255 / max(top - low, 1e-12))
    elif image.mode == "F" and top <= 1:
        scaled = values * 255
    else:
        scaled = values / 257 if top > 255 else values
    return Image.fromarray(np.rint(scaled).astype(np.uint8)).convert("RGB")


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


def _unknown_format(data: bytes) -> str:
    if data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS:
        return "a HEIC image, which Pillow cannot read: convert it to JPEG"
    if data[:512].lstrip().lower().startswith((b"<svg", b"<?xml")):
        return "an SVG or XML file, not an image made of pixels"
    return "not an image in any format that Pillow knows"


def _too_large(width: int = 0, height: int = 0) -> str:
    size = f"{width} x {height}" if width else "too many"
    return f"{size} pixels, above the limit of {MAX_PIXELS:,} (a decompression bomb?)"


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]
