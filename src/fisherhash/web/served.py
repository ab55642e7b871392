"""The index behind the pages and the API: searches, items, what is derived of all of them."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import from_hex, hamming, pack
from fisherhash.data.formats import open_image
from fisherhash.errors import UsageError
from fisherhash.index.images.folders import is_inside
from fisherhash.index.images.grouping import all_codes
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.results import Hit, joined_codes, synced_folder
from fisherhash.index.images.searching import where_labels
from fisherhash.index.items import Ids
from fisherhash.web.derived import Columns, Derived, DuplicateFinder, lay_out, read_columns
from fisherhash.web.files import ImageFiles, MissingError
from fisherhash.web.options import ServeOptions
from fisherhash.web.queries import ImageQuery, SearchQuery

_BLOCK = 1 << 18


@dataclass(frozen=True)
class Answer:
    """What a search found.

    Attributes:
        subject: the item that was searched with, if it was one.
        code: the code that was searched with.
        hits: the items, the nearest first.
        compared: how many codes the query was compared with: those that match the filters.
        seconds: how long it took.
        ranking: how bits that differ count: ``hamming`` or ``real``.
    """

    subject: Hit | None
    code: bytes | None
    hits: list[Hit]
    compared: int
    seconds: float
    ranking: str = "hamming"


class ServedIndex:
    """An index of images as the pages and the API show it; threads may share it.

    Args:
        images: the open index; closed by whoever opened it.
        options: how it is served.

    Attributes:
        index: the index of codes.
        name: its name for people.
        files: the images of its items.
        columns: labels, dates and fields of all items.
        map: ids of all items, and where each is on the map.
        duplicates: groups of likely copies.
    """

    def __init__(self, images: ImageIndex, options: ServeOptions) -> None:
        self.images, self.index, self.options = images, images.index, options
        self.name = os.path.basename(os.path.abspath(self.index.uri)) or self.index.uri
        self.files = ImageFiles(self.index.uri, options)
        self.columns: Derived[Columns] = Derived(self.version, self._columns)
        self.map: Derived[tuple[Ids, NDArray[np.uint16]]] = Derived(self.version, self._map)
        self.duplicates = DuplicateFinder(images, self.version)

    def version(self) -> Hashable:
        """Changes whenever the index does."""
        info = self.index.info()
        return info["count"], info.get("commit"), info.get("next_id")

    def _columns(self) -> Columns:
        # Only items with a key match a filter; there may be millions of codes without one.
        keyed = self.index.info()["keyed"]
        return read_columns(self.index.items("id>=0") if keyed else ())

    def _map(self) -> tuple[Ids, NDArray[np.uint16]]:
        ids, codes = all_codes(self.index)
        return ids, lay_out(codes, self.index.bits)

    # Searches

    def find(
        self, query: SearchQuery, *, logits: NDArray[np.float32] | None = None, seed: int = 0
    ) -> Answer:
        """Search, or select random items where nothing is searched for.

        Args:
            query: the search.
            logits: (1, bits) real outputs that the code is the signs of; they rank the items.
            seed: which random items; the same ones for the same seed.

        Raises:
            UsageError: a parameter does not fit this index, or the field of a filter does not
                exist.
            MissingError: the item that was searched with does not exist.
        """
        began, bits = time.perf_counter(), self.index.bits
        if query.radius is not None and query.radius > bits:
            raise UsageError(f"radius must be between 0 and {bits} bits, got {query.radius}")
        where = where_labels(self.index, query.where)
        subject, code = self._query_of(query)
        compared = self.index.count(where)
        if code is None:
            ids, distances = self.index.ids(where), None
            if len(ids) > query.k:
                ids = ids[np.random.default_rng(seed).choice(len(ids), query.k, replace=False)]
        else:
            # One more than wanted: an item finds itself.
            found = self.index.search(joined_codes([code]), query.k + 1, where=where, logits=logits)
            ids, distances = found.ids[0], found.distances[0]
            kept = ids != (-1 if subject is None else subject.id)
            if query.radius is not None:
                kept &= distances <= query.radius
            ids, distances = ids[kept][: query.k], distances[kept][: query.k]
        hits, ranking = self.hits(ids, distances), "hamming" if logits is None else "real"
        return Answer(subject, code, hits, compared, time.perf_counter() - began, ranking)

    def find_image(self, data: bytes, query: ImageQuery) -> Answer:
        """Search with an image, given as the bytes of its file.

        Raises:
            UsageError: a parameter does not fit this index, or the ranking is real within a radius.
            UnreadableImage: it is no image, damaged, or too large.
            FisherhashError: the index has no hasher for images.
        """
        if query.ranking == "real" and query.radius is not None:
            raise UsageError("a radius is a number of bits: it needs the ranking hamming")
        logits = self.logits(data)
        code = pack(logits)[0].tobytes().hex()
        search = SearchQuery(where=query.where, k=query.k, radius=query.radius, code=code)
        return self.find(search, logits=logits if query.ranking == "real" else None)

    def logits(self, data: bytes) -> NDArray[np.float32]:
        """The real outputs (1, bits) of the model for an image, given as the bytes of its file.

        Raises:
            UnreadableImage: it is no image, damaged, or too large.
            FisherhashError: the index has no hasher for images.
        """
        open_image(io.BytesIO(data), pixels=self.options.max_pixels)
        with self.files.decoding:
            return self.images.hasher.logits(data)

    def matching(self, filters: tuple[str, ...]) -> Ids | None:
        """Ids of the items that match some filters; None without any."""
        return self.index.ids(where_labels(self.index, filters)) if filters else None

    def _query_of(self, query: SearchQuery) -> tuple[Hit | None, bytes | None]:
        """The item and the code that are searched with."""
        if query.code is not None:
            return None, from_hex([query.code], self.index.bits)[0].tobytes()
        name = query.like if query.key is None else query.key
        subject = None if name is None else self.item(name)
        return subject, subject and subject.code

    def histogram(self, query: SearchQuery) -> list[int]:
        """How many items are at each distance from 0 to the number of bits.

        Raises:
            UsageError: there is nothing to search for.
        """
        subject, code = self._query_of(query)
        if code is None:
            raise UsageError("nothing to compare with: give an item (like) or a code")
        matching = self.matching(query.where)
        counts = np.zeros(self.index.bits + 1, dtype=np.int64)
        for ids, codes in self.index.scan(_BLOCK):
            kept = ids != (-1 if subject is None else subject.id)
            if matching is not None:
                kept &= np.isin(ids, matching)
            distances = hamming(joined_codes([code]), codes)[0]
            counts += np.bincount(distances[kept], minlength=len(counts))
        return counts.tolist()

    # Items

    def item(self, name: int | str) -> Hit:
        """The item of an id or a key.

        Raises:
            MissingError: there is none.
        """
        found = self.index.get_items([name])[0]  # type: ignore[list-item]
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

    def label(self, hit: Hit) -> str:
        """The name of an item for people: relative to its folder, and always UTF-8."""
        name = hit.name
        if hit.key is not None and os.path.isabs(name):
            inside = [folder for folder in self.files.folders() if is_inside(name, [folder])]
            name = os.path.relpath(name, inside[0]) if inside else os.path.basename(name)
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
