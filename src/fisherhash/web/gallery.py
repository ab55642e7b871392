"""The collection behind the page: searches, items and their files, and what is derived of all."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import hamming, unpack
from fisherhash.data.formats import UnreadableImage, open_image
from fisherhash.data.images import current_limits, read_failure
from fisherhash.errors import UsageError
from fisherhash.index.base import Index
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.known import is_inside, known_folders
from fisherhash.index.images.labels import where_labels
from fisherhash.index.images.nearest import Near, check_weight_of, nearest
from fisherhash.index.images.results import image_path, joined_codes, synced_folder
from fisherhash.index.items import Item
from fisherhash.system.cache import cache_dir
from fisherhash.system.cores import available_cores
from fisherhash.system.files import open_regular
from fisherhash.web.buckets import Bucket, largest_buckets
from fisherhash.web.changes import IndexChanges
from fisherhash.web.columns import Columns, read_columns
from fisherhash.web.derived import Derived, Version
from fisherhash.web.duplicates import DuplicateFinder
from fisherhash.web.layout import MapLayout, lay_out, load_layout, save_layout
from fisherhash.web.options import ServeOptions
from fisherhash.web.queries import KNOWN_RANKINGS, SearchQuery
from fisherhash.web.thumbnails import SIDES, ThumbnailCache, encode_jpeg

_BLOCK = 1 << 18
_FOLDERS_SECONDS = 2.0


class MissingError(UsageError):
    """There is no such item, or its image may not be shown."""


@dataclass(frozen=True)
class Found:
    """One item that a search found.

    Attributes:
        item: the item.
        distance: of its first code; None where nothing was searched for.
        fine: the distance of its second code, where that was compared.
        combined: the distance of both codes, where that orders the results.
    """

    item: Item
    distance: float | None = None
    fine: int | None = None
    combined: float | None = None


@dataclass(frozen=True)
class PageAnswer:
    """What a search found.

    Attributes:
        query: the search.
        subject: the item that was searched with, if it was one.
        code: the code that was searched with.
        found: the items, the nearest first.
        compared: how many codes the query was compared with: those that match the filters.
        seconds: how long it took.
        fine_weight: the weight of the second codes in the order; None where they order inside ties
            only, or where there are none.
    """

    query: SearchQuery
    subject: Item | None
    code: bytes | None
    found: list[Found]
    compared: int
    seconds: float
    fine_weight: float | None = None


class Gallery:
    """An index of images as the page and the API show it; threads may share it.

    Args:
        images: the open index; closed by whoever opened it.
        options: how it is served.
    """

    def __init__(self, images: ImageIndex, options: ServeOptions) -> None:
        self.images, self.options = images, options
        name = os.fspath(images.index.uri)
        place = name if "://" in name else os.path.realpath(name)
        digest = hashlib.sha256(place.encode(errors="surrogateescape")).hexdigest()[:24]
        self.cache = cache_dir() / "web" / digest
        self.thumbnails = ThumbnailCache(cache_dir() / "web" / "images", options.cache_bytes)
        self.columns: Derived[Columns] = Derived(self.version, self._columns)
        self.map: Derived[MapLayout] = Derived(self.version, self._lay_out)
        self.buckets: Derived[list[Bucket]] = Derived(
            self.version, lambda: largest_buckets(self.index)
        )
        self.duplicates = DuplicateFinder(images, self.version, self.cache)
        self.changes = IndexChanges(images, options)
        self._encoding = threading.BoundedSemaphore(available_cores())
        self._folders: tuple[float, list[str]] = (-_FOLDERS_SECONDS, [])

    @property
    def index(self) -> Index:
        """The index of codes."""
        return self.images.index

    @property
    def name(self) -> str:
        """The name of the index."""
        return os.path.basename(os.path.abspath(self.index.uri)) or self.index.uri

    def version(self) -> Version:
        """Changes whenever the index does."""
        info = self.index.info()
        return info["count"], info.get("commit"), info.get("next_id")

    # Searches

    def find(self, query: SearchQuery) -> PageAnswer:
        """Search, or select items where nothing is searched for.

        Raises:
            UsageError: a filter is not as it must be, or its field does not exist.
            MissingError: the item that was searched with does not exist.
        """
        began = time.perf_counter()
        index = self.index
        with index.reading():
            where = where_labels(index, query.where) if query.where else None
            subject = None if query.item is None else self.item(query.item)
            code = query.code if subject is None else subject.code
            compared = index.count(where) if where else len(index)
            finer: dict[str, Any] = {}
            if code is None:
                near = [Near(id_, 0) for id_ in self._chosen(query, where).tolist()]
            else:
                finer = self._finer(query, subject)
                (row,) = nearest(
                    *(index, joined_codes([code]), query.k + (subject is not None)),
                    # A radius is a number of bits.
                    radius=query.radius if query.ranking == "hamming" else None,
                    where=where,
                    **finer,
                )
                own = None if subject is None else subject.id
                near = [one for one in row if one.id != own][: query.k]
            items = index.get_items(np.array([one.id for one in near], dtype=np.int64))
        rows = [
            Found(item) if code is None else Found(item, one.distance, one.fine, one.combined)
            for item, one in zip(items, near, strict=True)
            # None: another writer removed the item meanwhile.
            if item is not None
        ]
        seconds = time.perf_counter() - began
        weight = finer["fine_weight"] if "fine" in finer else None
        return PageAnswer(query, subject, code, rows, compared, seconds, weight)

    def _chosen(self, query: SearchQuery, where: Any) -> NDArray[np.int64]:
        """Random items that match the filters; the same ones for the same seed."""
        ids = self.index.ids(where)
        if len(ids) > query.k:
            rng = np.random.default_rng(query.seed)
            ids = ids[rng.choice(len(ids), query.k, replace=False)]
        return ids

    def histogram(self, query: SearchQuery) -> list[int]:
        """How many items are at each distance from 0 to the number of bits.

        Raises:
            UsageError: there is nothing to search for.
        """
        if not query.searches:
            raise UsageError("nothing to compare with: give an item (like) or a code")
        with self.index.reading():
            subject = None if query.item is None else self.item(query.item)
            code = joined_codes([subject.code if subject else query.code or b""])
            counts = np.zeros(self.index.bits + 1, dtype=np.int64)
            for block in self._codes(query.where):
                counts += np.bincount(hamming(code, block)[0], minlength=len(counts))
        if subject is not None and counts[0]:
            counts[0] -= not query.where or self._matches(subject, query.where)
        return counts.tolist()

    def _matches(self, item: Item, where: Sequence[str]) -> bool:
        return where_labels(self.index, where).matches(item)

    def _codes(self, where: Sequence[str]) -> Iterator[NDArray[np.uint8]]:
        if not where:
            yield from (codes for _, codes in self.index.scan(_BLOCK))
            return
        ids = self.index.ids(where_labels(self.index, where))
        for start in range(0, len(ids), _BLOCK):
            yield self.index.codes(ids[start : start + _BLOCK])

    def way(self) -> str:
        """How searches without filters find their results, in words."""
        engines = [file.get("engine") or {} for file in self.index.info().get("files", ())]
        if any(engine.get("tables") and engine.get("bucket_tables") for engine in engines):
            return "found through tables of codes"
        return "every code was compared"

    def rankings(self) -> tuple[str, ...]:
        """The orders of results that the index offers to uploaded images, the usual one first."""
        return KNOWN_RANKINGS

    def _finer(self, query: SearchQuery, subject: Item | None) -> dict[str, Any]:
        """What orders results beyond the bits that differ, where the index has it."""
        finer: dict[str, Any] = {"fine_weight": check_weight_of(self.index, query.fine_weight)}
        fine = query.fine if subject is None else subject.fine
        if self.index.fine_bits and fine:
            finer["fine"] = joined_codes([fine])
        if query.ranking == "real":
            if query.code is None or query.weights is None:
                raise UsageError(
                    "the ranking 'real' is for uploaded images, of which it needs more"
                )
            signs = unpack(joined_codes([query.code]), self.index.bits).astype(np.float32) * 2 - 1
            # Never 0, which would be a sign of its own.
            sizes = np.maximum(np.frombuffer(query.weights, np.uint8).astype(np.float32), 0.25)
            finer["logits"] = signs * sizes
        return finer

    # Uploaded images

    def encode(
        self, data: bytes, query: SearchQuery, *, preview: bool = False, ranking: str | None = None
    ) -> SearchQuery:
        """The query with the code of an uploaded image.

        Args:
            data: the bytes of its file.
            query: the other parts of the query.
            preview: keep a preview of it.
            ranking: how to order results; by default as the model's card says is better, where
                nothing else was asked for.

        Raises:
            UnreadableImage: it is no image, damaged, or too large.
            FisherhashError: the index has no hasher for images.
        """
        open_image(io.BytesIO(data), pixels=self.options.max_pixels)
        name = hashlib.sha256(b"query\n" + data).hexdigest()[:40]
        hasher = self.images.hasher
        with self._encoding:
            block = next(hasher.encode_blocks([data], queries=True))
            for skip in block.skipped:
                raise UnreadableImage(skip.reason)
            if preview and self.thumbnails.read(name) is None:
                self.thumbnails.write(name, encode_jpeg(data, SIDES["medium"]))
        weights = None
        if block.queries is not None and block.queries.shape[1:] == (self.index.bits,):
            sizes = np.abs(block.queries[0])
            weights = np.rint(sizes * (255 / max(float(sizes.max()), 1e-9))).astype(np.uint8)
        if ranking is None:
            ranking = hasher.ranking if query.radius is None else "hamming"
        return replace(
            query,
            item=None,
            code=block.codes[0].tobytes(),
            image=name if preview else None,
            weights=None if weights is None else weights.tobytes(),
            fine=None if block.fine is None else block.fine[0].tobytes(),
            ranking=ranking if weights is not None else "hamming",
            seed=0,
        )

    # Items and their files

    def item(self, number: int) -> Item:
        """The item of an id.

        Raises:
            MissingError: there is none.
        """
        if not 0 <= number < 2**62:
            raise MissingError(f"there is no item with the id {number}")
        found = self.index.get_items(np.array([number], dtype=np.int64))[0]
        if found is None:
            raise MissingError(f"there is no item with the id {number}")
        return found

    def folders(self) -> list[str]:
        """The folders whose images may be shown."""
        read, folders = self._folders
        if time.monotonic() - read > _FOLDERS_SECONDS:
            folders = [*known_folders(self.index.uri), *self.options.show_from]
            self._folders = time.monotonic(), folders
        return folders

    def file_of(self, item: Item) -> str:
        """Where the image of an item is, all links resolved.

        Raises:
            MissingError: it has no file, or the file is outside the folders of the index.
        """
        path = image_path(item, synced_folder(self.index))
        if path is None:
            raise MissingError("this item has no image file")
        real = os.path.realpath(path)
        if not is_inside(real, self.folders()):
            raise MissingError(
                "this image is outside the folders that the index was filled from on this machine; "
                "show them with --show-from FOLDER"
            )
        return real

    def jpeg(self, item: Item, size: str) -> bytes:
        """The image of an item as a JPEG of a size.

        Raises:
            MissingError: its file is gone, cannot be read, or may not be shown.
        """
        try:
            with self._encoding:
                return self.thumbnails.thumbnail(self.file_of(item), size)
        except UnreadableImage as error:
            raise MissingError(f"the image cannot be shown: {error}") from None
        except OSError as error:
            raise MissingError(f"the image cannot be shown: {read_failure(error)}") from None

    def pixels(self, item: Item) -> tuple[int, int] | None:
        """Width and height of the image of an item; None if it cannot be read."""
        try:
            with open_regular(self.file_of(item)) as file:
                image = open_image(file, pixels=current_limits().pixels)
                turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
                width, height = image.size
                return (height, width) if turned else (width, height)
        except Exception:
            # On broken files and broken EXIF data, decoders raise almost anything.
            return None

    def label(self, item: Item) -> str:
        """The name of an item for people: relative to its folder, and always UTF-8."""
        name = item.name
        if item.key is not None and os.path.isabs(name):
            inside = [folder for folder in self.folders() if is_inside(name, [folder])]
            name = os.path.relpath(name, inside[0]) if inside else os.path.basename(name)
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    # What is derived of the whole collection

    def _columns(self) -> Columns:
        # Only items with a key match a filter; there may be millions of codes without one.
        keyed = self.index.info()["keyed"]
        return read_columns(self.index.items("id>=0") if keyed else ())

    def _lay_out(self) -> MapLayout:
        version = "-".join(map(str, self.version()))
        path = self.cache / f"map-{version}.npz"
        layout = load_layout(path)
        if layout is None:
            layout = lay_out(self.index.scan(_BLOCK), self.index.bits)
            save_layout(path, layout)
        return layout
