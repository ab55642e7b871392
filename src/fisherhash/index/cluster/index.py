"""An index whose searches run on a Ray cluster.

The index itself is a folder of the default back-end: what is written, and every read but a search,
goes there. Its items are cut into shards by ascending id. Each shard is held by actors that load
it from the storage. A search goes to all shards, and their results are merged by (distance, id);
all of them must be of the same commit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import ray
from numpy.typing import ArrayLike, NDArray

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Index, SaveModel, Uri, Verb
from fisherhash.index.checks import CheckedEntry, Notes, NoteTexts
from fisherhash.index.cluster.actors import ShardCalls
from fisherhash.index.cluster.storage import (
    ClusterPlace,
    downloaded,
    read_cluster_place,
    stored_version,
)
from fisherhash.index.filters import All, Where
from fisherhash.index.items import Codes, FileState, Ids, Item, Matches, Problem, Within
from fisherhash.system.remote import file_system

_PAUSE = 0.05


class ClusterIndex(Index):
    """An index whose searches run on a Ray cluster."""

    def __init__(self, place: ClusterPlace, stored: Index, version: str) -> None:
        self._place, self._stored = place, stored
        self.uri = stored.uri = place.uri
        self.bits, self.fingerprint, self.model = stored.bits, stored.fingerprint, stored.model
        self.writable = stored.writable
        self._lock = threading.Lock()
        self._version = version
        self._made: ShardCalls | None = None

    # Opening

    @classmethod
    def open_at(cls, uri: Uri, *, write: bool) -> Self:
        """See :meth:`Index.open`."""
        place = read_cluster_place(uri)
        version = ""
        if place.is_remote:
            if write:
                raise UsageError(
                    f"{place.uri} can only be read: change the index where it was made, then "
                    f"upload it to {place.storage} again"
                )
            version = stored_version(place.storage)
        folder = downloaded(place.storage, version) if version else place.storage
        return cls(place, Index.open(folder, write=write), version)

    @classmethod
    def create_at(cls, uri: Uri, facts: dict[str, Any], save_model: SaveModel | None) -> Self:
        """See :meth:`Index.create`."""
        place = read_cluster_place(uri)
        if place.is_remote:
            raise UsageError(f"{place.uri}: create the index in a folder, then upload that")
        stored = Index.create(place.storage, **facts, save_model=save_model)
        return cls(place, stored, "")

    @classmethod
    def exists_at(cls, uri: Uri) -> bool:
        """See :meth:`Index.exists`."""
        place = read_cluster_place(uri)
        if place.is_remote:
            fs, root = file_system(place.storage)
            return bool(fs.exists(root))
        return Index.exists(place.storage)

    @classmethod
    def is_index_at(cls, uri: Uri) -> bool:
        """See :meth:`Index.is_index`."""
        place = read_cluster_place(uri)
        return cls.exists_at(uri) if place.is_remote else Index.is_index(place.storage)

    def close(self) -> None:
        """See :meth:`Index.close`."""
        with self._lock:
            if self._made is not None:
                self._made.close()
            self._made = None
        self._stored.close()

    # Search

    def _calls(self) -> ShardCalls:
        with self._lock:
            if self._made is None:
                self._made = ShardCalls(self._place, self._version)
            return self._made

    def _search(self, queries: Codes, k: int, where: All) -> Matches:
        parts = self._answers("search", queries, k, where)
        ids = np.concatenate([part[0] for part in parts], axis=1)
        distances = np.concatenate([part[1] for part in parts], axis=1)
        order = np.lexsort((ids, distances), axis=1)[:, :k]
        return Matches(
            np.take_along_axis(ids, order, axis=1), np.take_along_axis(distances, order, axis=1)
        )

    def _within(self, queries: Codes, radius: int, where: All) -> Within:
        parts = self._answers("within", queries, radius, where)
        rows = [np.repeat(np.arange(len(queries)), np.diff(part[0])) for part in parts]
        query, ids, distances = (
            np.concatenate(some)
            for some in (rows, [part[1] for part in parts], [part[2] for part in parts])
        )
        order = np.lexsort((ids, distances, query))
        counts = np.bincount(query, minlength=len(queries))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Within(offsets, ids[order], distances[order])

    def _answers(
        self, method: str, queries: Codes, limit: int, where: All
    ) -> list[tuple[NDArray[Any], ...]]:
        """Results of all shards, all of the commit that was the last one."""
        deadline = time.monotonic() + self._place.timeout
        while True:
            commit = self._commit()
            calls = self._calls()
            wanted = None
            if where:
                wanted = ray.put(self._stored.ids(where))
                if self._commit() != commit:
                    continue
            answers = calls.call(method, commit, queries, limit, wanted)
            found = [answer.found for answer in answers if answer.found is not None]
            if len(found) == len(answers):
                return found
            if time.monotonic() > deadline:
                raise FisherhashError(
                    f"{self.uri}: the nodes see another commit of the index than this process; "
                    f"is {self._place.storage} the same folder on all of them?"
                )
            time.sleep(_PAUSE)

    def _commit(self) -> int:
        return int(self._stored.info()["commit"])

    def build(self) -> None:
        """Load all shards now."""
        empty = np.zeros((0, -(-self.bits // 8)), dtype=np.uint8)
        for _ in range(self._place.replicas):
            self._answers("search", empty, 1, All())

    # All else is done by the stored index.

    def _put(
        self, verb: Verb, entries: list[CheckedEntry], notes: NoteTexts, fingerprint: str | None
    ) -> Ids:
        ids = self._stored._put(verb, entries, notes, fingerprint)
        self.fingerprint = self._stored.fingerprint
        return ids

    def add_codes(
        self, codes: ArrayLike | Iterable[ArrayLike], *, fingerprint: str | None = None
    ) -> range:
        """See :meth:`Index.add_codes`."""
        ids = self._stored.add_codes(codes, fingerprint=fingerprint)
        self.fingerprint = self._stored.fingerprint
        return ids

    def add_items(
        self, items: Iterable[Item], *, notes: Notes = None, next_id: int | None = None
    ) -> None:
        """See :meth:`Index.add_items`."""
        self._stored.add_items(items, notes=notes, next_id=next_id)

    def _remove(self, keys: list[str], ids: Ids, notes: NoteTexts, *, missing_ok: bool) -> int:
        return self._stored._remove(keys, ids, notes, missing_ok=missing_ok)

    def compact(self, *, seconds: float | None = None) -> dict[str, int]:
        """See :meth:`Index.compact`."""
        return self._stored.compact(seconds=seconds)

    def get_items(self, names: Sequence[str] | Ids) -> list[Item | None]:
        """See :meth:`Index.get_items`."""
        return self._stored.get_items(names)

    def items(self, where: Where | None = None) -> Iterator[Item]:
        """See :meth:`Index.items`."""
        return self._stored.items(where)

    def ids(self, where: Where | None = None) -> Ids:
        """See :meth:`Index.ids`."""
        return self._stored.ids(where)

    def count(self, where: Where | None = None) -> int:
        """See :meth:`Index.count`."""
        return self._stored.count(where)

    def codes(self, ids: Iterable[int] | Ids) -> Codes:
        """See :meth:`Index.codes`."""
        return self._stored.codes(ids)

    def _scan(self, block: int) -> Iterator[tuple[Ids, Codes]]:
        return self._stored.scan(block)

    def files(self) -> dict[str, FileState]:
        """See :meth:`Index.files`."""
        return self._stored.files()

    def notes(self, kind: str) -> dict[str, Any]:
        """See :meth:`Index.notes`."""
        return self._stored.notes(kind)

    def info(self) -> dict[str, Any]:
        """See :meth:`Index.info`."""
        place = self._place
        cluster = {"shards": place.shards, "replicas": place.replicas, "storage": place.storage}
        return self._stored.info() | {"cluster": cluster}

    def _check_model(self, fingerprint: str | None, *, unnamed_codes: bool = False) -> None:
        self._stored._check_model(fingerprint, unnamed_codes=unnamed_codes)

    def verify(self) -> list[Problem]:
        """See :meth:`Index.verify`."""
        return self._stored.verify()

    def model_folder(self) -> Path | None:
        """See :meth:`Index.model_folder`."""
        return self._stored.model_folder()
