"""An index in a collection of Milvus; see rows.py for how a commit is made there.

Milvus returns ties in any order and a page of results at most. A search therefore takes more than k
results, and if they do not tell which of the ties have the smallest ids, the codes are searched in
memory. So are searches by a radius, with logits, or with a filter. Codes and the items that have a
key are read once per commit.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import code_bytes
from fisherhash.errors import UsageError
from fisherhash.index.base import CannotWriteError, Files, Uri
from fisherhash.index.checks import CheckedEntry, NoteTexts, code_rows
from fisherhash.index.filters import All, Where, parse_filter, select
from fisherhash.index.items import (
    Codes,
    FileState,
    Ids,
    Item,
    Matches,
    Problem,
    matches_of,
)
from fisherhash.index.milvus.rows import (
    FOREVER,
    MAX_TEXT,
    MODEL,
    NOTE,
    PAGE,
    MilvusException,
    MilvusRow,
    MilvusRows,
    item_of_milvus,
    milvus_reason,
    text_hash,
    visible,
)
from fisherhash.index.server import Facts, ServerIndex, digest_of

_QUERIES = 64
_MORE = 256
"""Results that a search takes beyond the k nearest, to see all ties."""
_BUFFER = 1 << 14
Result = TypeVar("Result")
Hits = list[tuple[int, int]]


class MilvusIndex(ServerIndex):
    """An index in a collection of Milvus; one process at a time may write."""

    def __init__(self, uri: Uri, *, write: bool) -> None:
        self._rows = MilvusRows(uri)
        self.uri, self.writable = self._rows.uri, write
        self.approximate = self._rows.options["search"] == "ivf"
        self._closed = False
        self._lock = threading.RLock()
        self._keyed: tuple[int, list[Item]] | None = None
        with self._rows.guard:
            stored = self._rows.facts() if self._rows.exists() else None
            facts = self._read_facts(stored, opening=True)
            if write:
                self._rows.recover(facts)

    # Opening

    @classmethod
    def open_at(cls, uri: Uri, *, write: bool, skip_damaged: bool = False) -> Self:
        """Open the index; damaged items are not left out."""
        return cls(uri, write=write)

    @classmethod
    def create_at(cls, uri: Uri, facts: dict[str, Any], files: Files) -> Self:
        """Create an empty index, complete or not at all."""
        rows = MilvusRows(uri)
        if rows.exists():
            name = rows.options["index"]
            raise UsageError(f"{rows.uri} exists already: there is a collection {name}")
        rows.create(Facts(**facts, digest=digest_of(files)), files)
        return cls(uri, write=True)

    @classmethod
    def exists_at(cls, uri: Uri) -> bool:
        """Whether the name of the index is taken on the server."""
        return MilvusRows(uri).exists()

    def close(self) -> None:
        """Release the index."""
        self._closed = True

    def _facts(self) -> Facts:
        if self._closed:
            raise UsageError(f"{self.uri} was closed")
        return self._read_facts(self._rows.facts())

    def _read(self, work: Callable[[Facts], Result]) -> Result:
        """What is read of one commit; again if rows were removed for good meanwhile."""
        while True:
            with self._rows.guard:
                facts = self._facts()
                result = work(facts)
                if self._rows.is_local or self._facts().cleaned == facts.cleaned:
                    return result

    # Changes

    @contextlib.contextmanager
    def _changing(self, fingerprint: str | None = None) -> Iterator[_Change]:
        self._must_write()
        with self._lock, self._rows.guard:
            facts = self._facts()
            self._check_model(fingerprint, unnamed_codes=facts.next_id > 0)
            named = replace(facts, fingerprint=fingerprint or facts.fingerprint)
            try:
                change = _Change(self._rows, named)
                yield change
                change.commit()
            except BaseException as error:
                done = "The change may or may not have been stored"
                with contextlib.suppress(Exception):
                    last = self._facts()
                    self._rows.recover(last)
                    if last.commit == facts.commit:
                        done = "Nothing was added or changed"
                if isinstance(error, MilvusException):
                    what = f"{self.uri}: {milvus_reason(error)}"
                    raise CannotWriteError(what, "see that the server runs", done) from error
                raise
            self.fingerprint = named.fingerprint

    # Content

    def _items(self, facts: Facts, expression: str) -> list[Item]:
        """Items of a commit, by ascending id."""
        rows = self._rows.all(facts, f"id >= 0 and {expression}")
        return sorted(map(item_of_milvus, rows), key=lambda item: item.id)

    def _existing(self, keys: list[str], ids: list[int]) -> list[Item]:
        def read(facts: Facts) -> list[MilvusRow]:
            by_key = self._rows.by_key(facts, keys).values()
            return [*by_key, *self._rows.by_id(facts, ids)]

        return [item_of_milvus(row) for row in self._read(read)]

    def items(self, where: Where | None = None) -> Iterator[Item]:
        """All items that match a filter, read at once, as Milvus has no snapshots."""
        found = parse_filter(where)
        if found:
            return iter(select(self._read(self._with_keys), found, self.uri))
        return iter(self._read(lambda facts: self._items(facts, "row >= 0")))

    def _with_keys(self, facts: Facts) -> list[Item]:
        """All items that have a key; they stay in memory until the next commit."""
        known = self._keyed
        if known is None or known[0] != facts.commit:
            self._keyed = known = (facts.commit, self._items(facts, "hash != 0"))
        return known[1]

    def count(self, where: Where | None = None) -> int:
        """How many items match a filter; all items without one."""
        if parse_filter(where):
            return super().count(where)
        return self._read(lambda facts: self._rows.count(f"id >= 0 and {visible(facts.commit)}"))

    def files(self) -> dict[str, FileState]:
        """What is known about the file of every item that has a key, by ascending id."""
        items = self._read(self._with_keys)
        return {i.key: FileState(i.size, i.mtime_ns, i.id) for i in items if i.key is not None}

    def notes(self, kind: str) -> dict[str, Any]:
        """The documents of a kind by name."""
        known = self._read(lambda facts: self._rows.notes(facts, kind))
        return {name: json.loads(text) for name, (_, text) in known.items()}

    def info(self) -> dict[str, Any]:
        """Facts that JSON can hold, with those of the server."""
        facts, search = self._facts(), self._rows.options["search"]
        more = {"commit": facts.commit, "next_id": facts.next_id, "search": search}
        return super().info() | more

    def _stored_files(self) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        rows = self._read(lambda facts: list(self._rows.all(facts, f"id == {MODEL}")))
        for row in sorted(rows, key=lambda row: row.row):
            name, part = json.loads(row.text)
            files[name] = files.get(name, b"") + base64.b64decode(part)
        return files

    # Search

    def _search(
        self, queries: Codes, weights: NDArray[np.int64] | None, k: int, where: All
    ) -> Matches:
        found = None
        if not where and weights is None and k + _MORE < PAGE:
            codes = code_rows(queries)
            found = self._read(lambda facts: self._nearest(facts, codes, k))
        if found is None:
            return super()._search(queries, weights, k, where)
        return matches_of(found)

    def _nearest(self, facts: Facts, queries: Sequence[bytes], k: int) -> list[Hits] | None:
        """The k nearest of each query; None if there are more ties than Milvus returns."""
        test = f"id >= 0 and {visible(facts.commit)}"
        found: list[Hits] = []
        for start in range(0, len(queries), _QUERIES):
            found += self._rows.search(queries[start : start + _QUERIES], k + _MORE, test)
        for i, hits in enumerate(found):
            if _has_ties_beyond(hits, k, k + _MORE) and not self.approximate:
                (hits,) = self._rows.search([queries[i]], PAGE, test)
                if _has_ties_beyond(hits, k, PAGE):
                    return None
            found[i] = sorted(hits, key=_by_distance)[:k]
        return found

    # Health

    def verify(self) -> list[Problem]:
        """Read and check everything; an empty list means that nothing is wrong."""
        problems = self._model_problems()
        where, todo = f"collection {self._rows.options['index']}", "copy the index again"
        facts, items = self._read(lambda facts: (facts, self._items(facts, "row >= 0")))
        keys = [item.key for item in items if item.key is not None]
        last = items[-1].id if items else -1
        if len({item.id for item in items}) < len(items) or last >= facts.next_id:
            problems.append(Problem(where, "has ids twice, or ids that were never given", todo))
        if len(set(keys)) < len(keys):
            problems.append(Problem(where, "has keys twice", todo))
        return problems


class _Change:
    """One commit in the making."""

    def __init__(self, rows: MilvusRows, facts: Facts) -> None:
        self._rows, self._facts = rows, facts
        self._width = code_bytes(facts.bits)
        self._new: list[MilvusRow] = []
        self._ended: list[MilvusRow] = []
        self._known: dict[int, MilvusRow] = {}
        self._next_row = facts.next_row
        self.next_id = facts.next_id

    def commit(self) -> None:
        """Make all of it visible at once."""
        number = self._facts.commit + 1
        self._rows.insert(self._new)
        self._rows.replace(replace(row, died=number) for row in self._ended)
        new = replace(self._facts, commit=number, next_row=self._next_row, next_id=self.next_id)
        self._rows.commit(new)
        with contextlib.suppress(MilvusException):
            self._rows.delete([-1 - self._facts.commit])

    def _insert(self, id_: int, hash_: int, code: bytes | None, text: str) -> None:
        if len(text) > MAX_TEXT:
            raise UsageError(
                f"{self._rows.uri}: an item or a note can have {MAX_TEXT:,} bytes at "
                f"most on Milvus, one has {len(text):,}. Nothing was added"
            )
        born = self._facts.commit + 1
        code = code or bytes(self._width)
        self._new.append(MilvusRow(self._next_row, id_, hash_, born, FOREVER, code, text))
        self._next_row += 1
        if len(self._new) >= _BUFFER:
            self._rows.insert(self._new)
            self._new = []

    def ids_of(self, keys: list[str]) -> dict[str, int]:
        """Return the ids of those keys that exist."""
        found = self._rows.by_key(self._facts, keys)
        self._known = {row.id: row for row in found.values()}
        return {key: row.id for key, row in found.items()}

    def insert(self, ids: Sequence[int], entries: list[CheckedEntry]) -> None:
        """Add items with keys."""
        for id_, entry in zip(ids, entries, strict=True):
            self._insert(id_, text_hash(entry.key), entry.code, _text(entry, {}))

    def insert_codes(self, ids: Ids, codes: Codes) -> None:
        """Add codes without keys."""
        for id_, code in zip(ids.tolist(), code_rows(codes), strict=True):
            self._insert(id_, 0, code, "")

    def update(self, entries: dict[int, CheckedEntry]) -> None:
        """Change the fields that are given, of items that :meth:`ids_of` found."""
        for id_, entry in entries.items():
            old = self._known[id_]
            self._ended.append(old)
            self._insert(id_, old.hash, entry.code or old.code, _text(entry, json.loads(old.text)))

    def delete(self, keys: list[str], ids: Ids) -> dict[int, str | None]:
        """Remove items; returns the keys of those that were there, by id."""
        by_key = self._rows.by_key(self._facts, keys).values()
        rows = [*by_key, *self._rows.by_id(self._facts, ids.tolist())]
        gone = {row.id: row for row in rows}
        self._ended += gone.values()
        return {id_: item_of_milvus(row).key for id_, row in gone.items()}

    def write_notes(self, notes: NoteTexts) -> None:
        """Write and remove notes."""
        known = {kind: self._rows.notes(self._facts, kind) for kind, _ in notes}
        for (kind, name), text in notes.items():
            if name in known[kind]:
                self._ended.append(known[kind][name][0])
            if text is not None:
                self._insert(NOTE, text_hash(kind), None, json.dumps([kind, name, text]))


def _text(entry: CheckedEntry, old: dict[str, Any]) -> str:
    """The fields of an item that has a key, after an entry."""
    given = {name: v for name, v in entry._asdict().items() if v is not None and name != "code"}
    for name in ("labels", "metadata") & given.keys():
        given[name] = json.loads(given[name])
    return json.dumps(old | given)


def _by_distance(hit: tuple[int, int]) -> tuple[int, int]:
    return hit[1], hit[0]


def _has_ties_beyond(hits: Hits, k: int, limit: int) -> bool:
    """Whether results that were not returned may be as near as the k-th."""
    distances = sorted(distance for _, distance in hits)
    return len(hits) >= limit and distances[k - 1] == distances[-1]
