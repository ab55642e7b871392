"""The collection behind the pages: searches, items and their files, and what is derived of all."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import from_hex, hamming, pack, unpack
from fisherhash.data.formats import UnreadableImage, open_image
from fisherhash.data.images import current_limits, read_failure
from fisherhash.errors import UsageError
from fisherhash.index.filters import All
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.known import is_inside, known_folders
from fisherhash.index.images.labels import where_labels
from fisherhash.index.images.results import Hit, joined_codes, synced_folder
from fisherhash.index.items import Codes, Ids
from fisherhash.system.cache import cache_dir
from fisherhash.system.cores import available_cores
from fisherhash.system.files import open_regular
from fisherhash.web.changes import IndexChanges
from fisherhash.web.columns import Columns, read_columns
from fisherhash.web.derived import Derived
from fisherhash.web.duplicates import DuplicateFinder
from fisherhash.web.options import ServeOptions
from fisherhash.web.queries import LARGEST_ID, ImageQuery, PageQuery, SearchQuery, Size
from fisherhash.web.thumbnails import SIDES, ThumbnailCache, encode_jpeg

_BLOCK = 1 << 18
_FOLDERS_SECONDS = 2.0
T = TypeVar("T")


class MissingError(UsageError):
    """There is no such item, or its image may not be shown."""


@dataclass(frozen=True)
class Answer:
    """What a search found.

    Attributes:
        query: the search.
        subject: the item that was searched with, if it was one.
        code: the code that was searched with.
        hits: the items, the nearest first.
        compared: how many codes the query was compared with: those that match the filters.
        seconds: how long it took.
    """

    query: SearchQuery
    subject: Hit | None
    code: bytes | None
    hits: list[Hit]
    compared: int
    seconds: float


@contextlib.contextmanager
def showing() -> Iterator[None]:
    """Raise MissingError for an image that cannot be read."""
    try:
        yield
    except UnreadableImage as error:
        raise MissingError(f"the image cannot be shown: {error}") from None
    except OSError as error:
        raise MissingError(f"the image cannot be shown: {read_failure(error)}") from None


class Gallery:
    """An index of images as the pages and the API show it; threads may share it.

    Args:
        images: the open index; closed by whoever opened it.
        options: how it is served.

    Attributes:
        index: the index of codes.
        name: its name for people.
        thumbnails: re-encoded images on disk.
        columns: labels, dates and fields of all items.
        duplicates: groups of likely copies.
        changes: what the API adds and removes.
    """

    def __init__(self, images: ImageIndex, options: ServeOptions) -> None:
        self.images, self.index, self.options = images, images.index, options
        self.name = os.path.basename(os.path.abspath(self.index.uri)) or self.index.uri
        self.thumbnails = ThumbnailCache(cache_dir() / "web" / "images", options.cache_bytes)
        self.columns: Derived[Columns] = Derived(self.version, self._columns)
        self._derived: dict[Any, Derived[Any]] = {}
        self.duplicates = DuplicateFinder(images, self.version)
        self.changes = IndexChanges(images, options)
        self._encoding = threading.BoundedSemaphore(available_cores())
        self._folders: tuple[float, list[str]] = (-_FOLDERS_SECONDS, [])

    def version(self) -> Hashable:
        """Changes whenever the index does."""
        info = self.index.info()
        return info["count"], info.get("commit"), info.get("next_id")

    def derived(self, compute: Callable[[Gallery], T], *, once: bool = False) -> Derived[T]:
        """What a function computes of the whole collection, in the background.

        Args:
            compute: the function.
            once: whether it does not depend on the items, or hardly; else per commit.
        """
        version = (lambda: "once") if once else self.version
        return self._derived.setdefault(compute, Derived(version, lambda: compute(self)))

    # Searches

    def find(self, query: SearchQuery) -> Answer:
        """Search, or select items where nothing is searched for.

        Raises:
            UsageError: a parameter does not fit this index, or the field of a filter does not
                exist.
            MissingError: the item that was searched with does not exist.
        """
        began = time.perf_counter()
        where = self.where(query.where)
        subject, code = self._query_of(query)
        compared = self.index.count(where)
        if code is None:
            ids, distances = self._random(query, where), None
        else:
            ids, distances = self._nearest(query, code, where, subject)
        hits = self.hits(ids, distances)
        return Answer(query, subject, code, hits, compared, time.perf_counter() - began)

    def where(self, filters: Iterable[str]) -> All | None:
        """The filters as one, None without any; labels are spelled as in the index."""
        texts = tuple(filters)
        return where_labels(self.index, texts) if texts else None

    def _query_of(self, query: SearchQuery) -> tuple[Hit | None, bytes | None]:
        """The item and the code that are searched with."""
        bits = self.index.bits
        if query.radius is not None and query.radius > bits:
            raise UsageError(f"radius must be between 0 and {bits} bits, got {query.radius}")
        if query.code is not None:
            return None, from_hex([query.code], bits)[0].tobytes()
        if not query.searches:
            return None, None
        subject = self.item(query.like if query.key is None else query.key)
        return subject, subject.code

    def _nearest(
        self, query: SearchQuery, code: bytes, where: All | None, subject: Hit | None
    ) -> tuple[Ids, NDArray[Any]]:
        """Ids and distances of the nearest items, without the subject."""
        codes, logits, radius = joined_codes([code]), None, query.radius
        if query.ranking == "real":
            logits = self._logits(query, codes)
            if radius is not None and radius < self.index.bits:
                raise UsageError("a radius is a number of bits: it needs the ranking hamming")
        k = query.k + (subject is not None)
        found = self.index.search(codes, k, where=where, logits=logits)
        ids, distances = found.ids[0], found.distances[0]
        kept = ids != (-1 if subject is None else subject.id)
        if radius is not None and logits is None:
            kept &= distances <= radius
        return ids[kept][: query.k], distances[kept][: query.k]

    def _logits(self, query: SearchQuery, codes: Codes) -> NDArray[np.float32]:
        """The real outputs of an uploaded image, from its code and how sure each bit is."""
        bits = self.index.bits
        weights = np.frombuffer(bytes.fromhex(query.weights or ""), np.uint8).astype(np.float32)
        if query.code is None or len(weights) != bits:
            raise UsageError(
                f"the ranking real is for uploaded images: it needs a code and {bits} weights"
            )
        # Never 0, which would be a sign of its own.
        return (unpack(codes, bits).astype(np.float32) * 2 - 1) * np.maximum(weights, 0.25)

    def _random(self, query: SearchQuery, where: All | None) -> Ids:
        """Random items that match the filters; the same ones for the same seed."""
        ids = self.index.ids(where)
        if len(ids) > query.k:
            seed = query.seed if isinstance(query, PageQuery) else 0
            ids = ids[np.random.default_rng(seed).choice(len(ids), query.k, replace=False)]
        return ids

    def histogram(self, query: SearchQuery) -> list[int]:
        """How many items are at each distance from 0 to the number of bits.

        Raises:
            UsageError: there is nothing to search for.
        """
        subject, code = self._query_of(query)
        if code is None:
            raise UsageError("nothing to compare with: give an item (like) or a code")
        counts = np.zeros(self.index.bits + 1, dtype=np.int64)
        for ids, codes in self._codes(self.where(query.where)):
            distances = hamming(joined_codes([code]), codes)[0]
            if subject is not None:
                distances = distances[ids != subject.id]
            counts += np.bincount(distances, minlength=len(counts))
        return counts.tolist()

    def _codes(self, where: All | None) -> Iterator[tuple[Ids, Codes]]:
        if where is None:
            yield from self.index.scan(_BLOCK)
            return
        ids = self.index.ids(where)
        for start in range(0, len(ids), _BLOCK):
            part = ids[start : start + _BLOCK]
            yield part, self.index.codes(part)

    def encode(self, data: bytes, query: ImageQuery, *, preview: bool = False) -> PageQuery:
        """The query with the code of an uploaded image.

        Args:
            data: the bytes of its file.
            query: the other parts of the query.
            preview: keep a preview of it.

        Raises:
            UnreadableImage: it is no image, damaged, or too large.
            FisherhashError: the index has no hasher for images.
        """
        open_image(io.BytesIO(data), pixels=self.options.max_pixels)
        hasher = self.images.hasher
        image = hashlib.sha256(b"query\n" + data).hexdigest()[:40] if preview else None
        with self._encoding:
            logits = hasher.logits(data)
            if image is not None and self.thumbnails.read(image) is None:
                self.thumbnails.write(image, encode_jpeg(data, SIDES["medium"]))
        sizes = np.abs(logits[0])
        weights = np.rint(sizes * (255 / max(float(sizes.max()), 1e-9))).astype(np.uint8)
        ranking = query.ranking
        if ranking == "auto":
            ranking = hasher.ranking if query.radius is None else "hamming"
        others = query.model_dump(include=set(ImageQuery.model_fields), exclude={"ranking"})
        code = pack(logits)[0].tobytes().hex()
        return PageQuery(
            **others, code=code, image=image, weights=weights.tobytes().hex(), ranking=ranking
        )

    # Items and their files

    def item(self, name: int | str | None) -> Hit:
        """The item of an id or a key.

        Raises:
            MissingError: there is none.
        """
        known = "\0" not in name if isinstance(name, str) else 0 <= (name or 0) < LARGEST_ID
        found = self.index.get_items([name])[0] if known else None  # type: ignore[list-item]
        if found is None:
            what = "key" if isinstance(name, str) else "id"
            raise MissingError(f"there is no item with the {what} {name!r}")
        return Hit.of(found, folder=synced_folder(self.index))

    def hits(self, ids: Iterable[int] | Ids, distances: NDArray[Any] | None = None) -> list[Hit]:
        """Some items, without those that another writer has removed meanwhile."""
        numbers = np.fromiter(ids, dtype=np.int64)
        apart = [None] * len(numbers) if distances is None else distances.tolist()
        items, folder = self.index.get_items(numbers), synced_folder(self.index)
        pairs = zip(items, apart, strict=True)
        return [Hit.of(item, d, folder=folder) for item, d in pairs if item is not None]

    def hits_by_id(self, parts: Iterable[Ids]) -> dict[int, Hit]:
        """Items of several lists of ids."""
        ids = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
        return {hit.id: hit for hit in self.hits(ids)}

    def folders(self) -> list[str]:
        """The folders whose images may be shown."""
        read, folders = self._folders
        if time.monotonic() - read > _FOLDERS_SECONDS:
            folders = [*known_folders(self.index.uri), *self.options.show_from]
            self._folders = time.monotonic(), folders
        return folders

    def file_of(self, hit: Hit) -> str:
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

    def jpeg(self, hit: Hit, size: Size) -> bytes:
        """The image of an item as a JPEG of a size.

        Raises:
            MissingError: its file is gone, cannot be read, or may not be shown.
        """
        with showing(), self._encoding:
            return self.thumbnails.thumbnail(self.file_of(hit), SIDES[size])

    def pixels(self, hit: Hit) -> tuple[int, int] | None:
        """Width and height of the image of an item; None if it cannot be read."""
        try:
            with open_regular(self.file_of(hit)) as file:
                image = open_image(file, pixels=current_limits().pixels)
                turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
                width, height = image.size
                return (height, width) if turned else (width, height)
        except Exception:
            # On broken files and broken EXIF data, decoders raise almost anything.
            return None

    def label(self, hit: Hit) -> str:
        """The name of an item for people: relative to its folder, and always UTF-8."""
        name = hit.name
        if hit.key is not None and os.path.isabs(name):
            inside = [folder for folder in self.folders() if is_inside(name, [folder])]
            name = os.path.relpath(name, inside[0]) if inside else os.path.basename(name)
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def _columns(self) -> Columns:
        # Only items with a key match a filter; there may be millions of codes without one.
        keyed = self.index.info()["keyed"]
        return read_columns(self.index.items("id>=0") if keyed else ())
