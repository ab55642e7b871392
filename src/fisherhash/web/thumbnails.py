"""Re-encoded images, kept on disk within a bound: the least recently used ones go first."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import threading
import time
from pathlib import Path

from PIL import Image

from fisherhash.data.images import ImageLike, load_image
from fisherhash.errors import FisherhashError
from fisherhash.system.storage import write_file
from fisherhash.web.queries import Size

SIDES: dict[Size, int] = {"small": 128, "medium": 384, "large": 1600}
"""The longer side of an image in pixels, by the name of its size in a URL."""
_KEPT = 0.8
"""How full the cache is after the oldest files were deleted."""
_TOUCH_AFTER = 3600.0


class ThumbnailCache:
    """JPEG files by name, in a folder.

    Args:
        folder: where; it is created when the first file is written. Several processes may share it.
        limit: the most bytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._lock = threading.Lock()
        self._unknown = 0
        self._counted = False

    def thumbnail(self, path: str, side: int) -> bytes:
        """An image file, upright and in RGB, as a JPEG whose longer side has so many pixels.

        Raises:
            UnreadableImage: the file cannot be read.
            OSError: there is no such file.
        """
        state = os.stat(path)
        what = f"{path}\n{state.st_size}\n{state.st_mtime_ns}\n{state.st_ctime_ns}\n{side}"
        name = hashlib.sha256(what.encode(errors="surrogateescape")).hexdigest()[:40]
        data = self.read(name)
        if data is None:
            data = encode_jpeg(path, side)
            self.write(name, data)
        return data

    def read(self, name: str) -> bytes | None:
        """A stored file, or None."""
        path = self._path(name)
        try:
            data = path.read_bytes()
            if time.time() - path.stat().st_mtime > _TOUCH_AFTER:
                os.utime(path)
            return data
        except OSError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Store a file; a full or missing disk only means that it is made again next time."""
        with contextlib.suppress(FisherhashError, OSError):
            write_file(self._path(name), data)
        with self._lock:
            self._unknown += len(data)
            # The first time, because the folder may be full of what earlier processes wrote.
            if self._counted and self._unknown < self.limit // 16:
                return
            self._counted, self._unknown = True, 0
            self._evict()

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name}.jpg"

    def _evict(self) -> None:
        files = []
        for path in self.folder.rglob("*.jpg"):
            with contextlib.suppress(OSError):
                state = path.stat()
                files.append((state.st_mtime, state.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self.limit:
            return
        for _, size, path in sorted(files):
            if total <= _KEPT * self.limit:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size


def encode_jpeg(source: ImageLike, side: int) -> bytes:
    """An image whose longer side has at most so many pixels, as a JPEG without any metadata."""
    image = load_image(source, enough=side)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "jpeg", quality=84, optimize=True)
    return file.getvalue()
