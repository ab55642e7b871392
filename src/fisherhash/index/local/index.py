"""The local index: codes in memory as the last commit left them, everything else in the file."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import code_bytes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import CannotReadError, Files, Index, Uri, Verb
from fisherhash.index.checks import (
    CheckedEntry,
    NoteTexts,
    as_ids,
    check_entries,
    code_rows,
    whole_number,
)
from fisherhash.index.filters import All, Where, parse_filter, unknown_field
from fisherhash.index.items import Codes, FileState, Ids, Item, Matches, Problem, Within
from fisherhash.index.local.blocks import SELECT_BLOCKS, Block, Snapshot, block_name, read_block
from fisherhash.index.local.change import Change
from fisherhash.index.local.file import (
    FORMAT,
    REMEDY,
    IndexFile,
    create_tables,
    new_file,
    read_files,
)
from fisherhash.index.local.rows import (
    COLUMNS,
    SUMMED,
    ItemRow,
    item_of,
    key_hash,
    read_notes,
    read_row,
    row_problem,
)
from fisherhash.index.local.salvage import salvage, structure_problems
from fisherhash.index.local.where import has_field, metadata_fields, to_sql

T = TypeVar("T")
_STEP = 4096
_FILTERS = 8
"""Filters whose items are remembered until the next commit."""
_VACUUM_BYTES = 1 << 20
"""Free space in a file that is worth a vacuum, if it is also a third of the file."""


class LocalIndex(Index):
    """An index in one SQLite file.

    Any number of processes may read it, and several may have it open for writing: each change waits
    for its turn. A call sees the last commit. Do not carry an object over a ``fork``.

    Attributes:
        path: the file.
    """

    def __init__(self, uri: Uri, *, write: bool, skip_damaged: bool = False) -> None:
        self.uri, self.path, self.writable = os.fspath(uri), Path(uri), write
        self._guard = threading.RLock()
        self._process, self._skip_damaged = os.getpid(), skip_damaged
        self._snapshot: Snapshot | None = None
        self._seen: Any = None
        self._removed = self._rows_checked = False
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
    def create_at(cls, uri: Uri, facts: dict[str, Any], files: Files) -> Self:
        """Create the file of an empty index."""
        with new_file(Path(uri)) as draft:
            create_tables(draft, facts, files)
        return cls(uri, write=True)

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
        """Release the file; what removed items left free is given back where that pays."""
        with self._guard:
            if self._removed and self._file.is_open and self._process == os.getpid():
                with contextlib.suppress(FisherhashError), self._file.explained():
                    self._vacuum()
            self._removed, self._snapshot = False, None
            self._file.close()

    def _vacuum(self) -> None:
        db = self._file.db
        free, pages, size = (
            db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("freelist_count", "page_count", "page_size")
        )
        if free * size > _VACUUM_BYTES and 3 * free > pages:
            self._file.meter.suspend()
            db.execute("VACUUM")

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
                return self._inside(file, work)

    def _inside(self, file: IndexFile, work: Callable[[IndexFile, Snapshot], T]) -> T:
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
                return self._inside(file, lambda _, snapshot: snapshot)

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
            new = old.after(state, self._blocks(file, old.state.commit))
            new = new if new.is_complete() else None
        if new is None:
            new = Snapshot(self.bits, state, self._blocks(file, None))
            if not new.is_complete():
                raise file.damaged(
                    f"of its {state.blocks:,} blocks of codes, {len(new.sums):,} are as its last "
                    "commit left them"
                )
        self._snapshot = new
        if file is self._file:
            self._seen = file.version()
        return new

    def _blocks(self, file: IndexFile, since: int | None) -> dict[int, tuple[int, Block]]:
        which = "ORDER BY block" if since is None else f"WHERE changed > {since}"
        width, found = code_bytes(self.bits), {}
        for row in file.db.execute(f"{SELECT_BLOCKS} {which}"):
            try:
                found[row[0]] = (row[2], read_block(row, width))
            except ValueError as error:
                raise file.damaged(f"{block_name(row[0])} {error}") from None
        return found

    @property
    def unavailable(self) -> int | None:
        """How many items were left out because they are damaged; None where none may be."""
        return self._now().unavailable if self._skip_damaged else None

    # Changes

    def _commit(self, fingerprint: str | None, work: Callable[[IndexFile, Change], T]) -> T:
        """One commit: all that is done happens, or nothing does."""
        with self._guard:
            self._must_write()
            file = self._ready()
            with file.explained():
                file.begin(write=True)
                try:
                    snapshot = self._refresh(file)
                    super()._check_model(fingerprint, unnamed_codes=snapshot.state.next_id > 0)
                    change = Change(file, snapshot)
                    done = work(file, change)
                    named = fingerprint is not None and self.fingerprint is None
                    facts = {"bits": self.bits, "fingerprint": fingerprint, "model": self.model}
                    new = change.finish(facts if named else None)
                    # An interruption may come just after the commit: look at the file then.
                    self._seen = None
                    file.commit()
                finally:
                    file.rollback()
                self._snapshot, self._seen = new, file.version()
                if named:
                    self.fingerprint = fingerprint
            return done

    def _put(
        self, verb: Verb, entries: list[CheckedEntry], notes: NoteTexts, fingerprint: str | None
    ) -> Ids:
        def put(file: IndexFile, change: Change) -> Ids:
            known = self._rows_of_keys(file, change.before, [entry.key for entry in entries])
            self._check_entries(verb, entries, known)
            numbers = itertools.count(change.state.next_id)
            new = [(next(numbers), entry) for entry in entries if entry.key not in known]
            ids = {entry.key: id_ for id_, entry in new} | {k: row.id for k, row in known.items()}
            old = sorted((ids[e.key], e) for e in entries if e.key in known)
            change.put_rows([known[entry.key].updated(entry) for _, entry in old])
            coded = [(id_, entry.code) for id_, entry in old if entry.code is not None]
            change.recode(as_ids(id_ for id_, _ in coded), self._joined(code for _, code in coded))
            rows = [ItemRow.from_entry(id_, entry) for id_, entry in new]
            codes = self._joined(entry.code or b"" for _, entry in new)
            change.append(as_ids(id_ for id_, _ in new), codes, rows)
            change.put_notes(notes)
            return as_ids(ids[entry.key] for entry in entries)

        return self._commit(fingerprint, put)

    def _put_codes(self, blocks: Iterator[Codes], fingerprint: str | None) -> range:
        # Before the commit begins: what makes the codes may take its time, or search this index.
        given = list(blocks)

        def put(_: IndexFile, change: Change) -> range:
            first = change.state.next_id
            for codes in given:
                start = change.state.next_id
                change.append(np.arange(start, start + len(codes)), codes)
            return range(first, change.state.next_id)

        return self._commit(fingerprint, put)

    def _load(self, items: list[Item], notes: NoteTexts, next_id: int) -> None:
        entries = check_entries((i.entry() for i in items if i.key is not None), self.bits)
        named = (item.id for item in items if item.key is not None)
        rows = [ItemRow.from_entry(id_, entry) for id_, entry in zip(named, entries, strict=True)]
        codes = self._joined(item.code for item in items)
        self.load_rows(as_ids(item.id for item in items), codes, rows, notes, next_id)

    def load_rows(
        self, ids: Ids, codes: Codes, rows: Sequence[ItemRow], notes: NoteTexts, next_id: int
    ) -> None:
        """Add items under their own ids, in one commit; ``rows`` are those of items with a key."""

        def load(file: IndexFile, change: Change) -> None:
            if len(ids) and ids[0] < change.state.next_id:
                raise UsageError(
                    f"{self.uri}: the ids to load must ascend, and be new: the next one is "
                    f"{change.state.next_id}, got {int(ids[0])}"
                )
            known = self._rows_of_keys(file, change.before, [row.key for row in rows])
            if known:
                key = next(iter(known))
                raise UsageError(f"{self.uri} already has an item with the key {key!r}")
            change.append(ids, codes, rows)
            change.reserve(next_id)
            change.put_notes(notes)

        self._commit(None, load)

    def _remove(self, keys: list[str], ids: Ids, notes: NoteTexts, *, missing_ok: bool) -> int:
        def remove(file: IndexFile, change: Change) -> int:
            known = self._rows_of_keys(file, change.before, keys)
            if len(known) < len(keys) and not missing_ok:
                missing = next(key for key in keys if key not in known)
                raise self._missing(missing, "; nothing was removed")
            wanted = np.sort(np.concatenate([as_ids(row.id for row in known.values()), ids]))
            wanted = wanted[np.append(True, wanted[1:] != wanted[:-1])[: len(wanted)]]
            exists, _ = change.before.positions(wanted)
            if not exists.all() and not missing_ok:
                raise self._missing(wanted[~exists][0], "; nothing was removed")
            change.remove(wanted[exists])
            change.put_notes(notes)
            return int(exists.sum())

        removed = self._commit(None, remove)
        self._removed |= removed > 0
        return removed

    def _check_model(self, fingerprint: str | None, *, unnamed_codes: bool = False) -> None:
        if fingerprint is not None and self.fingerprint is None:
            # Another process may have named the model meanwhile.
            self._now()
        super()._check_model(fingerprint, unnamed_codes=unnamed_codes)

    # Rows

    def _rows(self, file: IndexFile, ids: Ids) -> dict[int, ItemRow]:
        """The rows of items that have one, by id.

        Raises:
            DamagedError: a row is missing, or it is not what was written.
        """
        found: dict[int, ItemRow] = {}
        for start in range(0, len(ids), _STEP):
            some = ids[start : start + _STEP].tolist()
            # A row that SQLite finds by its id is found though its neighbours are damaged.
            if some[-1] - some[0] < 2 * len(some) and not self._skip_damaged:
                which, values = "BETWEEN ? AND ?", [some[0], some[-1]]
            else:
                which, values = f"IN ({','.join('?' * len(some))})", some
            wanted = set(some)
            for row in file.db.execute(f"SELECT {COLUMNS} FROM items WHERE id {which}", values):
                if row[0] in wanted:
                    try:
                        found[row[0]] = read_row(row)
                    except ValueError as error:
                        raise file.damaged(row_problem(row[0], row[1], error)) from None
            if missing := wanted - found.keys():
                raise file.damaged(row_problem(min(missing), None, "is missing"))
        return found

    def _rows_of_keys(
        self, file: IndexFile, snapshot: Snapshot, keys: Sequence[str]
    ) -> dict[str, ItemRow]:
        """The rows of those keys that exist, in the order of the keys."""
        ids = snapshot.candidates([key_hash(key) for key in keys])
        found = {row.key: row for row in self._rows(file, ids).values()}
        return {key: found[key] for key in keys if key in found}

    def _items(self, file: IndexFile, snapshot: Snapshot, ids: Ids) -> list[Item]:
        """Items that exist, in the order of their ascending ids."""
        rows = self._rows(file, ids[snapshot.have_rows(ids)])
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
                self._check_rows(file, named)
            condition, values = to_sql(where)
            file.meter.refill(len(values))
            rows = file.db.execute(f"SELECT id FROM items WHERE {condition} ORDER BY id", values)
            ids = as_ids(id_ for (id_,) in rows)
        if len(named):
            self._refuse_unknown(file, where)
        while len(snapshot.filters) >= _FILTERS:
            snapshot.filters.pop(next(iter(snapshot.filters)), None)
        snapshot.filters[name] = ids
        return ids

    def _check_rows(self, file: IndexFile, named: Ids) -> None:
        """Check all rows before a filter uses them for the first time."""
        place = 0
        rows = file.db.execute(f"SELECT id, crc, {SUMMED} FROM items ORDER BY id")
        for part in iter(lambda: rows.fetchmany(_STEP), []):
            ids, sums, summed = zip(*part, strict=True)
            for id_, _, text in part if None in summed else ():
                if text is None:
                    raise file.damaged(row_problem(id_, None, "lacks a field"))
            found = tuple(map(zlib.crc32, summed))
            if found != sums:
                wrong = next(i for i, a, b in zip(ids, found, sums, strict=True) if a != b)
                raise file.damaged(row_problem(wrong, None, "does not match its checksum"))
            expected = named[place : place + len(ids)].tolist()
            if list(ids) != expected:
                raise file.damaged(_other_rows(ids, expected))
            place += len(ids)
        if place < len(named):
            raise file.damaged(row_problem(int(named[place]), None, "is missing"))
        self._rows_checked = True

    def _refuse_unknown(self, file: IndexFile, where: All) -> None:
        """A mistyped field would match no item, and with != every one."""
        for condition in where.conditions:
            if condition.paths and not any(has_field(file.db, path) for path in condition.paths):
                raise unknown_field(self.uri, condition.field, metadata_fields(file.db))

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
                rows = self._rows(file, named).values()
                return {row.key: FileState(row.size, row.mtime_ns, row.id) for row in rows}
            found: dict[str, FileState] = {}
            query = f"SELECT key, size, mtime_ns, id, crc, {SUMMED} FROM items ORDER BY id"
            for key, size, mtime, id_, crc, summed in file.db.execute(query):
                if summed is None or zlib.crc32(summed) != crc:
                    raise file.damaged(row_problem(id_, key, "does not match its checksum"))
                found[key.decode(errors="surrogateescape")] = FileState(size, mtime, id_)
            ids = [state.id for state in found.values()]
            if ids != named.tolist():
                raise file.damaged(_other_rows(ids, named.tolist()))
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


def _other_rows(found: Iterable[int], expected: Iterable[int]) -> str:
    """What is wrong with rows that are not those of the items."""
    rows, items = set(found), set(expected)
    if missing := items - rows:
        return row_problem(min(missing), None, "is missing")
    if more := rows - items:
        return row_problem(min(more), None, "belongs to no item")
    return "its rows of items are not in order"
