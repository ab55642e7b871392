"""Which files are images, and the only code that lets Pillow open one.

Pillow is given an explicit list of formats. Its other plugins stay out of reach: the one for EPS,
for example, starts Ghostscript on what the file says.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Iterator
from typing import BinaryIO

from PIL import Image, JpegImagePlugin, UnidentifiedImageError

from fisherhash.errors import FisherhashError

_FORMATS = """
    JPEG PNG GIF WEBP TIFF BMP DIB JPEG2000 PPM ICO ICNS TGA QOI PCX SGI DDS PSD
"""
FORMATS = tuple(_FORMATS.split())
"""Pillow's names of the formats that are read, beside HEIF and AVIF; no other is ever opened."""

_EXTENSIONS = """
    .jpg .jpeg .jpe .jfif .jp2 .j2k .jpf .jpx .png .apng .gif .webp .avif .avifs .bmp .dib .tif
    .tiff .mpo .pbm .pgm .ppm .pnm .pfm .ico .icns .tga .qoi .pcx .sgi .rgb .dds .psd .heic .heics
    .heif .heifs .hif
"""
IMAGE_EXTENSIONS = frozenset(_EXTENSIONS.split())
"""Files that are read as images, in upper or lower case."""

_RAW = """
    .3fr .arw .cr2 .cr3 .crw .dcr .dng .erf .fff .gpr .iiq .k25 .kdc .mef .mos .mrw .nef .nrw .orf
    .pef .raf .raw .rw2 .rwl .sr2 .srf .srw .x3f
"""
RAW_EXTENSIONS = frozenset(_RAW.split())
"""Raw files of cameras: skipped, with a reason that says what to do."""

RAW_REASON = (
    "a raw file of a camera, which is not read: export it as JPEG, TIFF or PNG with your raw "
    "converter"
)
_header = threading.Lock()


class UnreadableImage(FisherhashError):  # noqa: N818
    """An image that cannot be decoded; the message is the reason.

    Attributes:
        passing: the reason lies outside the file, so another try may succeed.
    """

    def __init__(self, reason: str, *, passing: bool = False) -> None:
        super().__init__(reason)
        self.passing = passing


def is_image_name(name: str) -> bool:
    """Whether a file has the extension of an image.

    >>> is_image_name("Übung 1.JPEG"), is_image_name("notes.txt")
    (True, False)
    """
    return os.path.splitext(name)[1].lower() in IMAGE_EXTENSIONS


def is_raw_name(name: str) -> bool:
    """Whether a file has the extension of a camera's raw file.

    >>> is_raw_name("IMG_1.CR2")
    True
    """
    return os.path.splitext(name)[1].lower() in RAW_EXTENSIONS


def open_image(file: BinaryIO, *, pixels: int) -> Image.Image:
    """Read the header of an image; only the formats in :data:`FORMATS` are tried.

    Args:
        file: bytes that can be seeked, at their beginning.
        pixels: the most pixels it may have. A JPEG may have four times as many, because it can be
            decoded at half its size; a progressive one twice as many, because its decoder holds
            all of it in memory even then.

    Raises:
        UnreadableImage: it is no image, it is damaged, or it has too many pixels.
    """
    head = file.read(12)
    file.seek(0)
    if not head:
        raise UnreadableImage("the file is empty (0 bytes)")
    formats = _heif_formats() if head[4:8] == b"ftyp" else FORMATS
    try:
        try:
            with _pillow_limit(pixels):
                image = Image.open(file, formats=formats)
        except (Image.DecompressionBombWarning, Image.DecompressionBombError):
            if not head.startswith(b"\xff\xd8"):
                raise too_many_pixels(0, 0, pixels) from None
            file.seek(0)
            image = JpegImagePlugin.JpegImageFile(file)
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise _unidentified(head[8:12] if head[4:8] == b"ftyp" else b"") from None
    except MemoryError:
        raise UnreadableImage("not enough memory to read its header", passing=True) from None
    except Exception as error:
        raise UnreadableImage(f"damaged: {first_line(error)}") from None
    width, height = image.size
    most = pixels
    if head.startswith(b"\xff\xd8"):
        most = 2 * pixels if image.info.get("progressive") else 4 * pixels
    if width * height > most:
        raise too_many_pixels(width, height, most)
    return image


@contextlib.contextmanager
def _pillow_limit(pixels: int) -> Iterator[None]:
    """Let Pillow open images of so many pixels, and raise an error for more.

    Only a header is read inside: Pillow's limit and warning filters are global.
    """
    with _header, warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        theirs = Image.MAX_IMAGE_PIXELS
        if theirs is not None and theirs < pixels:
            Image.MAX_IMAGE_PIXELS = pixels
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = theirs


@functools.cache
def register_heif() -> bool:
    """Let Pillow read HEIC and HEIF; False if the extra ``heif`` is not installed."""
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def _heif_formats() -> tuple[str, ...]:
    """Of the formats that share the container of HEIF, those that can be decoded here."""
    Image.init()
    heif = ("HEIF",) if register_heif() else ()
    return (*heif, "AVIF") if "AVIF" in Image.OPEN else heif


def _unidentified(brand: bytes) -> UnreadableImage:
    """The error for what no decoder takes; ``brand`` is what a HEIF container says it holds."""
    # Such files are tried again at the next sync, because the decoder may be there by then.
    if (brand[:2] == b"he" or brand in (b"mif1", b"msf1")) and not register_heif():
        reason = "a HEIC image; to read it, install: pip install 'fisherhash[heif]'"
        return UnreadableImage(reason, passing=True)
    if brand in (b"avif", b"avis") and "AVIF" not in Image.OPEN:
        reason = "an AVIF image; to read it: pip install --upgrade 'pillow>=11.3'"
        return UnreadableImage(reason, passing=True)
    return UnreadableImage("not an image in any format that is read")


def too_many_pixels(width: int, height: int, limit: int) -> UnreadableImage:
    """The error for an image above the limit."""
    size = f"{width} x {height}" if width else "too many"
    return UnreadableImage(
        f"{size} pixels, above the limit of {limit:,} (a decompression bomb?); if you trust the "
        "file, raise the limit: --max-pixels",
        passing=True,
    )


def first_line(error: Exception) -> str:
    """What an error says, in one line of bounded length."""
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]
