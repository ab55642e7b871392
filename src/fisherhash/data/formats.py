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
HEAD = 64
"""Bytes at the beginning of a file that tell its format."""

_SIGNATURES = (
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"GIF87a",
    b"GIF89a",
    b"II*\0",
    b"MM\0*",
    b"8BPS\0\x01",
    b"\0\0\0\x0cjP  \r\n",
    b"\xff\x4f\xff\x51",
    b"qoif",
    b"DDS ",
    b"icns",
)
_HEIF_BRANDS = {b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"hevm", b"hevs"}
_AVIF_BRANDS = {b"avif", b"avis"}
_RAW_SIGNATURES = (b"FUJIFILMCCD-RAW", b"IIRO", b"IIRS", b"MMOR", b"IIU\0", b"FOVb", b"\0MRM")
_DNG_VERSION = 50706
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


def looks_like_image(head: bytes) -> bool:
    """Whether a file begins like an image; for files without an extension.

    >>> looks_like_image(b"GIF89a..."), looks_like_image(b"#!/bin/sh")
    (True, False)
    """
    if head.startswith(_SIGNATURES) or brand_of(head) is not None:
        return True
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return True
    return head[:2] == b"BM" and head[14:18] in (b"\x28\0\0\0", b"\x6c\0\0\0", b"\x7c\0\0\0")


def brand_of(head: bytes) -> str | None:
    """``HEIC`` or ``AVIF`` for a file that begins like one of them."""
    if head[4:8] != b"ftyp":
        return None
    length = min(int.from_bytes(head[:4], "big"), len(head))
    brands = {head[8:12], *(head[i : i + 4] for i in range(16, length - 3, 4))}
    if brands & _AVIF_BRANDS:
        return "AVIF"
    # mif1 and msf1 say only that it is some image in this kind of container.
    return "HEIC" if brands & _HEIF_BRANDS or head[8:12] in (b"mif1", b"msf1") else None


def check_head(head: bytes) -> None:
    """Refuse, from its first bytes, a file that this installation cannot decode.

    Raises:
        UnreadableImage: a raw file, or a format whose decoder is not installed.
    """
    brand = brand_of(head)
    if brand == "HEIC" and not register_heif():
        # Tried again at the next sync, because the extra may be there by then.
        raise UnreadableImage(
            "a HEIC image; to read it, install: pip install 'fisherhash[heif]'", passing=True
        )
    if brand == "AVIF" and not _reads_avif():
        raise UnreadableImage(
            "an AVIF image; to read it, install Pillow 11.3 or newer: pip install --upgrade pillow",
            passing=True,
        )
    cr2 = head[:4] in (b"II*\0", b"MM\0*") and head[8:10] == b"CR"
    if cr2 or head.startswith(_RAW_SIGNATURES) or head[4:12] == b"ftypcrx ":
        raise UnreadableImage(RAW_REASON)


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
    head = file.read(512)
    file.seek(0)
    if not head:
        raise UnreadableImage("the file is empty (0 bytes)")
    check_head(head[:HEAD])
    try:
        formats = {"HEIC": ("HEIF",), "AVIF": ("AVIF",)}.get(brand_of(head[:HEAD]) or "", FORMATS)
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
        raise UnreadableImage(_unknown_format(head)) from None
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
    if image.format == "TIFF" and _DNG_VERSION in getattr(image, "tag_v2", ()):
        raise UnreadableImage(RAW_REASON)
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


@functools.cache
def _reads_avif() -> bool:
    from PIL import features

    Image.init()
    return "AVIF" in Image.OPEN and bool(features.check("avif"))


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


def _unknown_format(head: bytes) -> str:
    if brand := brand_of(head[:HEAD]):
        return f"damaged: a file that begins like a {brand} image and is none"
    if head.lstrip().lower().startswith((b"<svg", b"<?xml")):
        return "an SVG or XML file, not an image made of pixels"
    if head.lstrip().startswith((b"%!PS", b"\xc5\xd0\xd3\xc6", b"%PDF")):
        return "a PostScript or PDF file, not an image made of pixels"
    return "not an image in any format that is read"
