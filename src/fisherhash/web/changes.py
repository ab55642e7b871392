"""Changes of a served index: images that are added and removed through the API."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from fisherhash.data.formats import IMAGE_EXTENSIONS, UnreadableImage, open_image
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Index
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.results import Hit, synced_folder
from fisherhash.web.options import ServeOptions


class IndexChanges:
    """Adds and removes images, one at a time; the index is open for writing as long as that takes.

    Args:
        images: the index that is served, open for reading.
        options: how it is served.
    """

    def __init__(self, images: ImageIndex, options: ServeOptions) -> None:
        self._images, self._options = images, options
        self._lock = threading.Lock()

    def add(self, data: bytes, name: str, labels: Sequence[str] | None) -> Hit:
        """Store an image in the folder for uploads, and add it to the index.

        Raises:
            UnreadableImage: it is no image.
            UsageError: its name is not that of an image, or there is no folder for uploads.
        """
        open_image(io.BytesIO(data), pixels=self._options.max_pixels)
        folder = self._options.uploads or synced_folder(self._images.index)
        if folder is None or not os.path.isdir(folder):
            raise UsageError(
                "the index is not in sync with a folder that images could be added to; start the "
                "server with --uploads FOLDER"
            )
        path = _free_path(Path(folder), name)
        with self._lock, Index.open(self._images.index.uri, write=True) as index:
            with open(path, "xb") as file:
                file.write(data)
            try:
                images = ImageIndex(index, self._images.hasher)
                report = images.add(path, labels=labels, workers=0)
                keys = [*report.added, *report.updated]
                if not keys:
                    reasons = [skip.reason for skip in report.skipped if skip.name in str(path)]
                    raise UnreadableImage(reasons[0] if reasons else "it cannot be read")
                return Hit.of(index.get(keys[0]), folder=synced_folder(index))
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    def remove(self, number: int) -> None:
        """Remove an item from the index; its file stays."""
        with self._lock, Index.open(self._images.index.uri, write=True) as index:
            index.remove(ids=[number])


def _free_path(folder: Path, name: str) -> Path:
    """A file name in a folder that is not taken yet, from what a client called its file."""
    plain = name.replace("\\", "/").rpartition("/")[2].strip().lstrip(".")
    stem, suffix = os.path.splitext(plain)
    bad = any(not c.isprintable() for c in plain) or len(plain.encode(errors="replace")) > 200
    if bad or not stem or suffix.lower() not in IMAGE_EXTENSIONS:
        raise UsageError(f"{name!r} is not the name of an image file; send one such as photo.jpg")
    for number in range(10_000):
        path = folder / (f"{stem}-{number}{suffix}" if number else plain)
        if not os.path.lexists(path):
            return path
    raise FisherhashError(f"there are too many files named {plain} in the folder for uploads")
