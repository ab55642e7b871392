"""Changes of a served index: images that are added and removed through the API."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fisherhash.data.formats import IMAGE_EXTENSIONS, UnreadableImage, open_image
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import CannotReadError, DamagedError, Index
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.results import Hit, synced_folder
from fisherhash.web.options import ServeOptions

WRITER_SECONDS = 2.0
"""How long a change waits for another writer."""


class BusyError(FisherhashError):
    """Another process writes to the index."""


class IndexChanges:
    """Adds and removes images, one at a time.

    Args:
        images: the index that is served, open for reading.
        options: how it is served.
    """

    def __init__(self, images: ImageIndex, options: ServeOptions) -> None:
        self._images, self._options = images, options
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[ImageIndex]:
        """The index, open for writing for as short a time as possible.

        Raises:
            BusyError: it is being written already.
        """
        until = time.monotonic() + WRITER_SECONDS
        while True:
            try:
                index = Index.open(self._images.index.uri, write=True)
                break
            except (UsageError, DamagedError, CannotReadError):
                raise
            except FisherhashError as error:
                if time.monotonic() > until:
                    raise BusyError(str(error)) from None
            time.sleep(0.1)
        with index:
            yield ImageIndex(index, self._images.hasher)

    def upload_folder(self) -> Path:
        """Where images that are added go.

        Raises:
            UsageError: there is no folder for them.
        """
        folder = self._options.uploads or synced_folder(self._images.index)
        if folder is None or not os.path.isdir(folder):
            raise UsageError(
                "the index is not in sync with a folder that images could be added to; start the "
                "server with --uploads FOLDER"
            )
        return Path(folder)

    def add(self, data: bytes, name: str, labels: Sequence[str] | None) -> Hit:
        """Store an image in the folder for uploads, and add it to the index.

        Raises:
            UnreadableImage: it is no image.
            UsageError: its name is not that of an image.
        """
        open_image(io.BytesIO(data), pixels=self._options.max_pixels)
        path = _free_path(self.upload_folder(), name)
        with self._lock, self._writing() as images:
            with open(path, "xb") as file:
                file.write(data)
            try:
                report = images.add(path, labels=labels, workers=0)
                keys = [*report.added, *report.updated]
                if not keys:
                    reasons = [skip.reason for skip in report.skipped if skip.name in str(path)]
                    raise UnreadableImage(reasons[0] if reasons else "it cannot be read")
                return Hit.of(images.index.get(keys[0]), folder=synced_folder(images.index))
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    def remove(self, number: int) -> None:
        """Remove an item from the index; its file stays."""
        with self._lock, self._writing() as images:
            images.index.remove(ids=[number])


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
