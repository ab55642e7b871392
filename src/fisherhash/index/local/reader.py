"""Reading a local index: codes in memory as the last commit left them, rows in the file."""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import CannotReadError, Index, Uri
from fisherhash.index.checks import (
    as_ids,
    code_rows,
    whole_number,
)
from fisherhash.index.filters import All, Where, parse_filter
from fisherhash.index.items import Codes, FileState, Ids, Item, Matches, Problem, Within
from fisherhash.index.local.blocks import Snapshot, load_blocks
from fisherhash.index.local.create import read_files
from fisherhash.index.local.file import (
    FORMAT,
    REMEDY,
    IndexFile,
)
from fisherhash.index.local.rows import (
    SUMMED,
    ItemRow,
    check_rows,
    item_of,
    key_hash,
    other_rows,
    read_notes,
    read_rows,
    row_problem,
)
from fisherhash.index.local.salvage import salvage, structure_problems
from fisherhash.index.local.where import refuse_unknown, to_sql

T = TypeVar("T")
_STEP = 4096
_FILTERS = 8
"""Filters whose items are remembered until the next commit."""


class LocalReader(Index):
    """An index in one SQLite file, to be read; :class:`LocalIndex` adds the changes.

    A call sees the last commit. Do not carry an object over a ``fork``.

    Attributes:
        path: the file.
    """

    def __init__(self, uri: Uri, *, write: bool, skip_damaged: bool = False) -> None:
        self.uri, self.path, self.writable = os.fspath(uri), Path(uri), write
        self._guard = threading.RLock()
        self._process, self._skip_damaged = os.getpid(), skip_damaged
        self._snapshot: Snapshot | None = None
        self._seen: Any = None
        self._rows_checked = False
        self._file = IndexFile(self.path, write=write)
        try:
            with self._file.explained():
                self._load_facts(self._file.meta()[0])
        except BaseException:
            self._file.close()
            raise

    def _load_facts(self, facts: dict[str, Any]) -> None:
        self.bits, self.fingerprint = facts["bits"], facts["fingerprint"]
        self.model = facts["model"]

    @classmethod
    def open_at(cls, uri: Uri, *, write: bool, skip_damaged: bool = False) -> Self:
        """Open the file of an index."""
        return cls(uri, write=write, skip_damaged=skip_damaged)

    @classmethod
    def exists_at(cls, uri: Uri) -> bool:
        """Whether there is anything of that name, also a folder or a broken link."""
        return os.path.lexists(uri)

    @classmethod
    def examine_at(cls, uri: Uri) -> list[Problem]:
        """Check a file that may be too damaged to be opened."""
        try:
            return super().examine_at(uri)
        except FisherhashError as error:
            if not Path(uri).is_file():
                raise
            todo = "check the disk" if isinstance(error, CannotReadError) else REMEDY
            return [Problem(str(uri), f"cannot be opened: {error}", todo)]

    def close(self) -> None:
        """Release the file."""
        with self._guard:
            self._snapshot = None
            self._file.close()

    # The last commit

    def _ready(self) -> IndexFile:
        file = self._file
        if not file.is_open:
            raise UsageError(f"{self.uri} was closed")
        if self._process != os.getpid():
            raise UsageError(
                f"{self.uri} was opened before this process was forked; open it again here"
            )
        if not file.is_the_file():
            raise FisherhashError(
                f"{self.uri} was deleted, or another index took its name, while it was open; "
                "open it again"
            )
        if file.immutable and self._seen not in (None, file.version()):
            # Somebody who may write there has changed it.
            file.close()
            self._file = file = IndexFile(self.path, write=False)
        # What an interrupted call left.
        file.rollback()
        return file

    def _read(self, work: Callable[[IndexFile, Snapshot], T]) -> T:
        """Do something that reads the file and the codes of one commit."""
        with self._guard:
            file = self._ready()
            with file.explained():
                file.begin()
                try:
                    return work(file, self._refresh(file))
                finally:
                    file.rollback()

    def _now(self) -> Snapshot:
        """The codes of the last commit."""
        with self._guard:
            file = self._ready()
            with file.explained():
                if self._snapshot is not None and self._seen == file.version():
                    return self._snapshot
            return self._read(lambda _, snapshot: snapshot)

    def _refresh(self, file: IndexFile) -> Snapshot:
        """The codes as a transaction of a file sees them."""
        facts, state = file.meta()
        self._load_facts(facts)
        old, new = self._snapshot, None
        if old is not None and old.state == state:
            new = old
        elif self._skip_damaged:
            new = Snapshot(self.bits, state, salvage(file).blocks)
            new.unavailable = max(0, state.live - len(new.whole.ids))
        elif old is not None and old.state.commit < state.commit:
            new = old.after(state, load_blocks(file, self.bits, old.state.commit))
            new = new if new.is_complete() else None
        if new is None:
            new = Snapshot(self.bits, state, load_blocks(file, self.bits))
            if not new.is_complete():
                raise file.damaged(
                    f"of its {state.blocks:,} blocks of codes, {len(new.sums):,} are as its last "
                    "commit left them"
                )
        self._snapshot = new
        if file is self._file:
            self._seen = file.version()
        return new

    @property
    def unavailable(self) -> int | None:
        """How many items were left out because they are damaged; None where none may be."""
        return self._now().unavailable if self._skip_damaged else None

    def _check_model(self, fingerprint: str | None, *, unnamed_codes: bool = False) -> None:
        if fingerprint is not None and self.fingerprint is None:
            # Another process may have named the model meanwhile.
            self._now()
        super()._check_model(fingerprint, unnamed_codes=unnamed_codes)

    # Rows

    def _rows_of_keys(
        self, file: IndexFile, snapshot: Snapshot, keys: Sequence[str]
    ) -> dict[str, ItemRow]:
        """The rows of those keys that exist, in the order of the keys."""
        ids = snapshot.candidates([key_hash(key) for key in keys])
        found = {row.key: row for row in read_rows(file, ids, singly=self._skip_damaged).values()}
        return {key: found[key] for key in keys if key in found}

    def _items(self, file: IndexFile, snapshot: Snapshot, ids: Ids) -> list[Item]:
        """Items that exist, in the order of their ascending ids."""
        rows = read_rows(file, ids[snapshot.have_rows(ids)], singly=self._skip_damaged)
        codes = code_rows(snapshot.whole.codes[snapshot.positions(ids)[1]])
        found = []
        for id_, code in zip(ids.tolist(), codes, strict=True):
            row = rows.get(id_)
            try:
                found.append(Item(id_, code) if row is None else item_of(row, code))
            except ValueError as error:
                raise file.damaged(row_problem(id_, None, error)) from None
        return found

    # Content

    def get_items(self, names: Sequence[str] | Ids) -> list[Item | None]:
        """The items of some keys or ids, all from one commit; None where there is none."""

        def get(file: IndexFile, snapshot: Snapshot) -> list[Item | None]:
            if len(names) and isinstance(names[0], str):
                rows = self._rows_of_keys(file, snapshot, list(dict.fromkeys(names)))  # type: ignore[arg-type]
                by_name: dict[Any, int] = {key: row.id for key, row in rows.items()}
            else:
                known = np.unique(as_ids(names))  # type: ignore[arg-type]
                known = known[snapshot.positions(known)[0]]
                by_name = dict(zip(known.tolist(), known.tolist(), strict=True))
            ids = np.unique(as_ids(by_name.values()))
            items = {item.id: item for item in self._items(file, snapshot, ids)}
            return [items.get(by_name.get(name, -1)) for name in names]

        return self._read(get)

    def items(self, where: Where | None = None) -> Iterator[Item]:
        """All items that match a filter by ascending id, from one commit."""
        found = parse_filter(where)
        with self._guard:
            self._ready()
            # A connection of its own, which stays at this commit until the last item.
            own = IndexFile(self.path, write=False)
            try:
                with own.explained():
                    own.begin()
                    snapshot = self._refresh(own)
                    ids = self._matching(own, snapshot, found) if found else snapshot.whole.ids
            except BaseException:
                own.close()
                raise
        return self._iterate(own, snapshot, ids)

    def _iterate(self, own: IndexFile, snapshot: Snapshot, ids: Ids) -> Iterator[Item]:
        try:
            for start in range(0, len(ids), _STEP):
                with own.explained():
                    own.meter.refill(0)
                    items = self._items(own, snapshot, ids[start : start + _STEP])
                yield from items
        finally:
            own.close()

    def _matching(self, file: IndexFile, snapshot: Snapshot, where: All) -> Ids:
        """The ids of the items that match a filter; every row is checked on the way."""
        # As text: 1 and True are equal, but match different items.
        name = repr(where)
        if name in snapshot.filters:
            return snapshot.filters[name]
        named = snapshot.whole.named
        if self._skip_damaged:
            items = self._items(file, snapshot, named)
            ids = as_ids(item.id for item in items if where.matches(item))
        else:
            if not self._rows_checked:
                check_rows(file, named)
                self._rows_checked = True
            condition, values = to_sql(where)
            file.meter.refill(len(values))
            rows = file.db.execute(f"SELECT id FROM items WHERE {condition} ORDER BY id", values)
            ids = as_ids(id_ for (id_,) in rows)
        if len(named):
            refuse_unknown(file.db, where, self.uri)
        while len(snapshot.filters) >= _FILTERS:
            snapshot.filters.pop(next(iter(snapshot.filters)), None)
        snapshot.filters[name] = ids
        return ids

    def ids(self, where: Where | None = None) -> Ids:
        """Ids of all items that match a filter, ascending; of all items without one."""
        found = parse_filter(where)
        if not found:
            return self._now().whole.ids.copy()
        return self._read(lambda file, snapshot: self._matching(file, snapshot, found)).copy()

    def count(self, where: Where | None = None) -> int:
        """How many items match a filter; all items without one."""
        return len(self.ids(where)) if parse_filter(where) else len(self._now().whole.ids)

    def codes(self, ids: Iterable[int] | Ids) -> Codes:
        """(n, bytes) codes of items, in the order of the ids."""
        wanted, snapshot = as_ids(ids), self._now()
        exists, positions = snapshot.positions(wanted)
        if not exists.all():
            raise self._missing(wanted[~exists][0])
        return snapshot.whole.codes[positions]

    def scan(self, block: int = 1 << 16) -> Iterator[tuple[Ids, Codes]]:
        """Ids and codes of everything by ascending id, about ``block`` at a time, of one commit."""
        step, whole = whole_number("block", block, 1), self._now().whole
        starts = range(0, len(whole.ids), step)
        return ((whole.ids[i : i + step], whole.codes[i : i + step]) for i in starts)

    def files(self) -> dict[str, FileState]:
        """What is known about the file of every item that has a key, by ascending id."""

        def read(file: IndexFile, snapshot: Snapshot) -> dict[str, FileState]:
            named = snapshot.whole.named
            if self._skip_damaged:
                rows = read_rows(file, named, singly=True).values()
                return {row.key: FileState(row.size, row.mtime_ns, row.id) for row in rows}
            found: dict[str, FileState] = {}
            query = f"SELECT key, size, mtime_ns, id, crc, {SUMMED} FROM items ORDER BY id"
            for key, size, mtime, id_, crc, summed in file.db.execute(query):
                if summed is None or zlib.crc32(summed) != crc:
                    raise file.damaged(row_problem(id_, key, "does not match its checksum"))
                found[key.decode(errors="surrogateescape")] = FileState(size, mtime, id_)
            ids = [state.id for state in found.values()]
            if ids != named.tolist():
                raise file.damaged(other_rows(ids, named.tolist()))
            return found

        return self._read(read)

    def notes(self, kind: str) -> dict[str, Any]:
        """The documents of a kind by name."""

        def read(file: IndexFile, snapshot: Snapshot) -> dict[str, Any]:
            return read_notes(file, snapshot.state, kind)

        found = self._read(read)
        return {name: json.loads(text) for name, text in found.items()}

    def model_files(self) -> dict[str, bytes]:
        """The files of the model that the index carries; empty if it carries none."""
        return self._read(lambda file, snapshot: read_files(file, snapshot.state))

    def info(self) -> dict[str, Any]:
        """Facts that JSON can hold."""
        snapshot = self._now()
        sizes = [f"{self.path}{end}" for end in ("", "-wal")]
        return {
            "uri": self.uri,
            "path": str(self.path),
            "format": FORMAT,
            "bits": self.bits,
            "fingerprint": self.fingerprint,
            "model": self.model,
            "count": len(snapshot.whole.ids),
            "keyed": len(snapshot.whole.named),
            "next_id": snapshot.state.next_id,
            "commit": snapshot.state.commit,
            "bytes": sum(os.path.getsize(path) for path in sizes if os.path.exists(path)),
            "unavailable": snapshot.unavailable,
        }

    # Search

    def _search(
        self, queries: Codes, weights: NDArray[np.int64] | None, k: int, where: All
    ) -> Matches:
        snapshot, among = self._among(where)
        positions, distances = snapshot.engine().search(queries, k, weights=weights, among=among)
        return Matches(snapshot.whole.ids[positions], distances)

    def _within(self, queries: Codes, radius: int, where: All) -> Within:
        snapshot, among = self._among(where)
        offsets, positions, distances = snapshot.engine().within(queries, radius, among=among)
        return Within(offsets, snapshot.whole.ids[positions], distances)

    def _among(self, where: All) -> tuple[Snapshot, NDArray[np.int64] | None]:
        """All codes, and the positions of those to search among."""
        if not where:
            return self._now(), None

        def read(file: IndexFile, snapshot: Snapshot) -> tuple[Snapshot, NDArray[np.int64]]:
            return snapshot, snapshot.positions(self._matching(file, snapshot, where))[1]

        return self._read(read)

    # Health

    def verify(self) -> list[Problem]:
        """Read and check everything; an empty list means that nothing is wrong."""
        with self._guard:
            file = self._ready()
            with file.explained():
                file.begin()
                try:
                    problems = [*salvage(file).problems, *structure_problems(file)]
                    if problems and (error := file.read_error()):
                        return [Problem(str(self.path), str(error), "check the disk")]
                    return problems
                finally:
                    file.rollback()
