"""The image files of an index: which of them may be shown, and small copies of them on disk."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import threading
import time
from collections.abc import Iterator

from PIL import Image

from fisherhash.data.formats import UnreadableImage, open_image
from fisherhash.data.images import ImageLike, current_limits, load_image, read_failure
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.images.folders import is_inside, known_folders
from fisherhash.index.images.results import Hit
from fisherhash.system.cache import cache_dir
from fisherhash.system.cores import available_cores
from fisherhash.system.files import open_regular, read_bounded
from fisherhash.system.storage import write_file
from fisherhash.web.options import ServeOptions
from fisherhash.web.queries import Size

SIDES: dict[Size, int] = {"small": 128, "medium": 384, "large": 1600}
"""The longer side of an image in pixels, by the name of its size in a URL."""
BROWSER_TYPES = {
    "JPEG": "image/jpeg",
    "MPO": "image/jpeg",
    "PNG": "image/png",
    "GIF": "image/gif",
    "WEBP": "image/webp",
}
"""The formats that every browser shows; any other one is re-encoded."""
_FOLDERS_SECONDS = 2.0
_KEPT = 0.8
"""How full the cache is after the oldest files were deleted."""
_TOUCH_AFTER = 3600.0


class MissingError(UsageError):
    """There is no such item, or its image may not be shown."""


class ImageFiles:
    """Reads the images of items; threads may share it, and processes its cache of small copies.

    Args:
        uri: the index.
        options: how it is served.
    """

    def __init__(self, uri: str, options: ServeOptions) -> None:
        self._uri, self._options = uri, options
        self._folders: tuple[float, list[str]] = (-_FOLDERS_SECONDS, [])
        self._cache, self._lock = cache_dir() / "web" / "images", threading.Lock()
        # Bytes since the cache was measured; the first time, earlier processes may have filled it.
        self._written = options.cache_bytes
        self.decoding = threading.BoundedSemaphore(available_cores())

    def folders(self) -> list[str]:
        """The folders whose images may be shown."""
        read, folders = self._folders
        if time.monotonic() - read > _FOLDERS_SECONDS:
            folders = [*known_folders(self._uri), *self._options.show_from]
            self._folders = time.monotonic(), folders
        return folders

    def path_of(self, hit: Hit) -> str:
        """Where the image of an item is, all links resolved.

        Raises:
            MissingError: it has no file, or the file is outside the folders of the index.
        """
        if hit.path is None:
            raise MissingError("this item has no image file")
        real = os.path.realpath(hit.path)
        if not is_inside(real, self.folders()):
            raise MissingError(
                "this image is outside the folders that the index was filled from on this machine; "
                "show them with --show-from FOLDER"
            )
        return real

    def original(self, hit: Hit) -> tuple[bytes, str]:
        """The file of an item as it is, or re-encoded if a browser cannot show it; and its type.

        Raises:
            MissingError: its file is gone, cannot be read, or may not be shown.
        """
        path, limits = self.path_of(hit), current_limits()
        with _showing():
            data = read_bounded(path, limits.bytes)
            kind = open_image(io.BytesIO(data), pixels=limits.pixels).format or ""
        if kind in BROWSER_TYPES:
            return data, BROWSER_TYPES[kind]
        return self.jpeg(hit, "large"), "image/jpeg"

    def jpeg(self, hit: Hit, size: Size) -> bytes:
        """The image of an item as a JPEG of a size.

        Raises:
            MissingError: its file is gone, cannot be read, or may not be shown.
        """
        path = self.path_of(hit)
        with _showing(), self.decoding:
            state = os.stat(path)
            what = f"{path}\n{state.st_size}\n{state.st_mtime_ns}\n{state.st_ctime_ns}\n{size}"
            name = hashlib.sha256(what.encode(errors="surrogateescape")).hexdigest()[:40]
            data = self.stored(name)
            return self._store(name, encode_jpeg(path, SIDES[size])) if data is None else data

    def preview(self, data: bytes) -> str:
        """Store a small copy of an uploaded image; returns its name."""
        name = hashlib.sha256(b"query\n" + data).hexdigest()[:40]
        with self.decoding:
            if self.stored(name) is None:
                self._store(name, encode_jpeg(data, SIDES["medium"]))
        return name

    def pixels(self, hit: Hit) -> tuple[int, int] | None:
        """Width and height of the image of an item; None if it cannot be read."""
        try:
            with open_regular(self.path_of(hit)) as file:
                image = open_image(file, pixels=current_limits().pixels)
                turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
                width, height = image.size
                return (height, width) if turned else (width, height)
        except Exception:
            # On broken files and broken EXIF data, decoders raise almost anything.
            return None

    def stored(self, name: str) -> bytes | None:
        """A small copy by its name, or None."""
        path = self._cache / name[:2] / f"{name}.jpg"
        try:
            data = path.read_bytes()
            if time.time() - path.stat().st_mtime > _TOUCH_AFTER:
                os.utime(path)
            return data
        except OSError:
            return None

    def _store(self, name: str, data: bytes) -> bytes:
        # A full or missing disk only means that it is made again next time.
        with contextlib.suppress(FisherhashError, OSError):
            write_file(self._cache / name[:2] / f"{name}.jpg", data)
        with self._lock:
            self._written += len(data)
            if self._written > self._options.cache_bytes // 16:
                self._written = 0
                self._evict()
        return data

    def _evict(self) -> None:
        """Delete the least recently used copies if there are too many."""
        files = []
        for path in self._cache.rglob("*.jpg"):
            with contextlib.suppress(OSError):
                state = path.stat()
                files.append((state.st_mtime, state.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self._options.cache_bytes:
            return
        for _, size, path in sorted(files):
            if total <= _KEPT * self._options.cache_bytes:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size


@contextlib.contextmanager
def _showing() -> Iterator[None]:
    """Raise MissingError for an image that cannot be read."""
    try:
        yield
    except UnreadableImage as error:
        raise MissingError(f"the image cannot be shown: {error}") from None
    except OSError as error:
        raise MissingError(f"the image cannot be shown: {read_failure(error)}") from None


def encode_jpeg(source: ImageLike, side: int) -> bytes:
    """An image whose longer side has at most so many pixels, as a JPEG without any metadata."""
    image = load_image(source, enough=side)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "jpeg", quality=84, optimize=True)
    return file.getvalue()
