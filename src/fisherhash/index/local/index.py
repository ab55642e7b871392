"""The local index: a reader that changes the file, each change in one transaction."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Files, Index, Uri, Verb
from fisherhash.index.checks import CheckedEntry, NoteTexts, as_ids, check_entries
from fisherhash.index.items import Codes, Ids, Item
from fisherhash.index.local.blocks import MOST_IDS
from fisherhash.index.local.change import Change
from fisherhash.index.local.create import create_tables, new_file
from fisherhash.index.local.file import IndexFile
from fisherhash.index.local.reader import LocalReader
from fisherhash.index.local.rows import ItemRow

T = TypeVar("T")
_VACUUM_BYTES = 1 << 20
"""Free space in a file that is worth a vacuum, if it is also a third of the file."""


class LocalIndex(LocalReader):
    """An index in one SQLite file.

    Any number of processes may read it, and several may have it open for writing: each change waits
    for its turn. A call sees the last commit. Do not carry an object over a ``fork``.
    """

    _removed = False

    @classmethod
    def create_at(cls, uri: Uri, facts: dict[str, Any], files: Files) -> Self:
        """Create the file of an empty index."""
        with new_file(Path(uri)) as draft:
            create_tables(draft, facts, files)
        return cls(uri, write=True)

    def _commit(self, fingerprint: str | None, work: Callable[[IndexFile, Change], T]) -> T:
        """One commit: all that is done happens, or nothing does."""
        with self._guard:
            self._must_write()
            file = self._ready()
            with file.explained():
                file.begin(write=True)
                try:
                    snapshot = self._refresh(file)
                    Index._check_model(self, fingerprint, unnamed_codes=snapshot.state.next_id > 0)
                    change = Change(file, snapshot)
                    done = work(file, change)
                    named = fingerprint is not None and self.fingerprint is None
                    facts = {"bits": self.bits, "fingerprint": fingerprint, "model": self.model}
                    new = change.finish(facts if named else None)
                    # An interruption may come just after the commit: look at the file then.
                    seen, self._seen = self._seen, None
                    file.commit()
                finally:
                    file.rollback()
                # Commits of this connection do not change what it has seen of others.
                self._snapshot, self._seen = new, seen
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
        # Copies, as it may use the same array for every block.
        given = [np.array(codes) for codes in blocks]

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
            if max(next_id, *ids[-1:].tolist(), 0) >= MOST_IDS:
                raise UsageError(f"{self.uri}: an id to load is too large")
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
