"""An index in a collection of Milvus; see collection.py for how a commit is made there."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self, TypeVar

import numpy as np

from fisherhash.codes import code_bytes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import SaveModel, Uri
from fisherhash.index.carried import pack_model
from fisherhash.index.checks import as_ids, code_rows
from fisherhash.index.filters import All, Where, parse_filter, select
from fisherhash.index.items import (
    Codes,
    FileState,
    Ids,
    Item,
    Matches,
    Problem,
    Within,
    matches_of,
    within_of,
)
from fisherhash.index.milvus.collection import (
    ALL_FIELDS,
    MAX_TEXT,
    MODEL,
    MilvusRow,
    MilvusState,
    RowStore,
    milvus_errors,
    read_milvus_place,
    visible,
)
from fisherhash.index.milvus.commit import Commit, recover
from fisherhash.index.milvus.nearest import Nearest
from fisherhash.index.server import ServerIndex

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class MilvusIndex(ServerIndex):
    """An index in a collection of Milvus; one process at a time may write."""

    def __init__(self, collection: RowStore, state: MilvusState, *, write: bool) -> None:
        self.uri, self.writable = collection.place.uri, write
        self.bits, self.fingerprint, self.model = state.bits, state.fingerprint, state.model
        self.approximate = collection.place.search == "ivf"
        self._collection = collection
        self._closed = False
        self._lock = threading.RLock()
        self._keyed: tuple[int, list[Item]] | None = None
        if write:
            recover(collection, state)

    # Opening

    @classmethod
    def open_at(cls, uri: Uri, *, write: bool) -> Self:
        """See :meth:`Index.open`."""
        collection = RowStore(read_milvus_place(uri))
        state = collection.state() if collection.exists() else None
        if state is None:
            name = collection.place.name
            raise UsageError(f"{collection.place.uri} does not exist: there is no index {name}")
        return cls(collection, state, write=write)

    @classmethod
    def create_at(cls, uri: Uri, facts: dict[str, Any], save_model: SaveModel | None) -> Self:
        """See :meth:`Index.create`."""
        collection = RowStore(read_milvus_place(uri))
        if collection.exists():
            raise UsageError(f"{collection.place.uri} exists already")
        model = pack_model(save_model)
        state = MilvusState(**facts, archive=model.digest if model else None)
        try:
            collection.create(state, code_bytes(facts["bits"]))
            if model is not None:
                with Commit(collection, state).making() as commit:
                    for part in model.parts(MAX_TEXT // 2):
                        commit.insert_row(MODEL, 0, b"", base64.b64encode(part).decode())
        except BaseException:
            with contextlib.suppress(Exception):
                collection.client.drop_collection(collection.place.name)
            raise
        return cls.open_at(uri, write=True)

    @classmethod
    def exists_at(cls, uri: Uri) -> bool:
        """See :meth:`Index.exists`."""
        return RowStore(read_milvus_place(uri)).exists()

    @classmethod
    def is_index_at(cls, uri: Uri) -> bool:
        """See :meth:`Index.is_index`."""
        collection = RowStore(read_milvus_place(uri))
        return collection.exists() and collection.state() is not None

    def close(self) -> None:
        """See :meth:`Index.close`."""
        self._closed = True

    def _state(self) -> MilvusState:
        if self._closed:
            raise UsageError(f"{self.uri} was closed")
        state = self._collection.state()
        if state is None:
            raise FisherhashError(f"{self.uri} was deleted while it was open")
        self.fingerprint = state.fingerprint
        return state

    def _read(self, work: Callable[[MilvusState], Result]) -> Result:
        """What is read of one commit; again if rows were removed for good meanwhile."""
        while True:
            with self._collection.guard:
                state = self._state()
                result = work(state)
            if self._collection.is_local or self._state().compacted == state.compacted:
                return result

    # Changes

    @contextlib.contextmanager
    def _changing(self, fingerprint: str | None = None) -> Iterator[Commit]:
        self._must_write()
        with self._lock, self._collection.guard:
            state = self._state()
            self._check_model(fingerprint, unnamed_codes=state.next_id > 0)
            if fingerprint is not None:
                state = replace(state, fingerprint=fingerprint)
            with Commit(self._collection, state).making() as commit:
                yield commit
            self.fingerprint = state.fingerprint

    def compact(self, *, seconds: float | None = None) -> dict[str, int]:
        """See :meth:`Index.compact`."""
        self._must_write()
        with self._lock, self._collection.guard:
            state = self._state()
            width, gone = code_bytes(self.bits), self._ended_rows(state)
            if gone:
                # Announced first: who is reading an older commit reads again.
                said = replace(state, dead=0, compacted=state.compacted + 1)
                with Commit(self._collection, said).making():
                    pass
                with milvus_errors(self.uri):
                    self._collection.delete(gone)
            after = self.count() * width
            return {
                "dropped": len(gone),
                "bytes_before": after + len(gone) * width,
                "bytes_after": after,
                "left": 0,
            }

    def _ended_rows(self, state: MilvusState) -> list[int]:
        pages = self._collection.pages(state.next_row, f"died <= {state.commit}", ["row"])
        return [row["row"] for page in pages for row in page]

    # Content

    def _items(self, state: MilvusState, expression: str) -> list[Item]:
        """Items of a commit, by ascending id."""
        test = f"id >= 0 and {visible(state.commit)} and {expression}"
        pages = self._collection.pages(state.next_row, test, ALL_FIELDS)
        items = [_item(row) for page in pages for row in page]
        return sorted(items, key=lambda item: item.id)

    def _found(self, keys: list[str], ids: list[int]) -> Mapping[str | int, Item]:
        def rows(state: MilvusState) -> Mapping[str | int, MilvusRow]:
            commit = Commit(self._collection, state)
            return {**commit.rows_of(keys), **commit.rows_of_ids(ids)}

        return {name: _item(row) for name, row in self._read(rows).items()}

    def items(self, where: Where | None = None) -> Iterator[Item]:
        """See :meth:`Index.items`; all of them are read at once, as Milvus keeps no snapshot."""
        found = parse_filter(where)
        if found:
            return iter(self._read(lambda state: self._matching(state, found)))
        return iter(self._read(lambda state: self._items(state, "row >= 0")))

    def _matching(self, state: MilvusState, where: All) -> list[Item]:
        """Items that match a filter; the items with a key are kept until the next commit."""
        kept = self._keyed
        if kept is None or kept[0] != state.commit:
            kept = (state.commit, self._items(state, "hash != 0"))
            self._keyed = kept
        return select(kept[1], where, self.uri)

    def _scan(self, block: int) -> Iterator[tuple[Ids, Codes]]:
        def read(state: MilvusState) -> tuple[Ids, Codes]:
            test = f"id >= 0 and {visible(state.commit)}"
            ids: list[int] = []
            codes: list[bytes] = []
            for page in self._collection.pages(state.next_row, test, ALL_FIELDS):
                ids += [row.id for row in page]
                codes += [row.code for row in page]
            order = np.argsort(as_ids(ids), kind="stable")
            return as_ids(ids)[order], self._joined(codes)[order]

        ids, codes = self._read(read)
        return ((ids[i : i + block], codes[i : i + block]) for i in range(0, len(ids), block))

    def ids(self, where: Where | None = None) -> Ids:
        """See :meth:`Index.ids`."""
        found = parse_filter(where)

        def read(state: MilvusState) -> Ids:
            if found:
                return as_ids(item.id for item in self._matching(state, found))
            test = f"id >= 0 and {visible(state.commit)}"
            pages = self._collection.pages(state.next_row, test, ["id"])
            return np.sort(as_ids(row["id"] for page in pages for row in page))

        return self._read(read)

    def count(self, where: Where | None = None) -> int:
        """See :meth:`Index.count`."""
        if parse_filter(where):
            return len(self.ids(where))

        def read(state: MilvusState) -> int:
            rows = self._collection.query(f"id >= 0 and {visible(state.commit)}", ["count(*)"])
            return int(rows[0]["count(*)"])

        return self._read(read)

    def files(self) -> dict[str, FileState]:
        """See :meth:`Index.files`."""
        items = self._read(lambda state: self._matching(state, All()))
        return {i.key: FileState(i.size, i.mtime_ns, i.id) for i in items if i.key is not None}

    def notes(self, kind: str) -> dict[str, Any]:
        """See :meth:`Index.notes`."""
        notes = self._read(lambda state: Commit(self._collection, state).notes())
        return {name: json.loads(text) for (own, name), (_, text) in notes.items() if own == kind}

    def info(self) -> dict[str, Any]:
        """See :meth:`Index.info`."""
        state = self._state()
        found = super().info()
        place = self._collection.place
        return found | {
            "commit": state.commit,
            "next_id": state.next_id,
            "removed": state.dead,
            "search": place.search,
        }

    # Search

    def _nearest(self, state: MilvusState, where: All) -> Nearest:
        wanted = as_ids(item.id for item in self._matching(state, where)) if where else None
        return Nearest(self._collection, state, self.bits, wanted)

    def _search(self, queries: Codes, k: int, where: All) -> Matches:
        codes = code_rows(queries)
        return matches_of(self._read(lambda state: self._nearest(state, where).search(codes, k)))

    def _within(self, queries: Codes, radius: int, where: All) -> Within:
        codes = code_rows(queries)
        return within_of(
            self._read(lambda state: self._nearest(state, where).within(codes, radius))
        )

    def _refresh(self) -> None:
        self._state()

    # Health

    def verify(self) -> list[Problem]:
        """See :meth:`Index.verify`."""
        problems, place = [], f"collection {self._collection.place.name}"
        todo = "copy the index again"
        state, items = self._read(lambda state: (state, self._items(state, "row >= 0")))
        keys = [item.key for item in items if item.key is not None]
        last = items[-1].id if items else -1
        if len({item.id for item in items}) < len(items) or last >= state.next_id:
            problems.append(Problem(place, "has ids twice, or ids that were never given", todo))
        if len(set(keys)) < len(keys):
            problems.append(Problem(place, "has keys twice", todo))
        return problems + self._model_problems(place)

    def _model_digest(self) -> str | None:
        return self._state().archive

    def _model_archive(self) -> bytes:
        rows = self._collection.query(
            f"id == {MODEL} and {visible(self._state().commit)}", ["row", "text"]
        )
        ordered = sorted(rows, key=lambda row: row["row"])
        return b"".join(base64.b64decode(row["text"]) for row in ordered)


def _item(row: Any) -> Item:
    if not row.text:
        return Item(row.id, row.code)
    known = json.loads(row.text)
    return Item(row.id, row.code, **(known | {"labels": tuple(known.get("labels", ()))}))
