"""The local index: a folder with a catalogue and code files, see folder.py.

A commit first brings the new codes to the disk, then commits the catalogue, then writes its number
into ``head``. A process that ends in between leaves bytes that nobody reads.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import SaveModel, Uri, Verb
from fisherhash.index.checks import (
    CheckedEntry,
    Notes,
    NoteTexts,
    as_ids,
    check_entries,
    check_notes,
    code_pairs,
)
from fisherhash.index.items import Ids, Item
from fisherhash.index.local.catalogue_writer import CatalogueWriter
from fisherhash.index.local.change import Change
from fisherhash.index.local.code_files import delete_files
from fisherhash.index.local.compacting import Group, next_group, plan_group, rewrite_group
from fisherhash.index.local.folder import create_folder
from fisherhash.index.local.format_1 import delete_old_notes
from fisherhash.index.local.guards import CommitMark
from fisherhash.index.local.reader import LocalReader
from fisherhash.index.local.records import Records
from fisherhash.index.local.rows import ItemRow
from fisherhash.index.local.schema import PUT_FACT, fact_columns
from fisherhash.index.local.table_files import delete_tables

logger = logging.getLogger(__name__)


class LocalIndex(LocalReader):
    """An index in a folder. One process may write while any number of others read."""

    @classmethod
    def create_at(cls, uri: Uri, facts: dict[str, Any], save_model: SaveModel | None) -> Self:
        """See :meth:`Index.create`."""
        create_folder(Path(uri), facts, save_model)
        return cls.open_at(uri, write=True)

    def _put(
        self, verb: Verb, entries: list[CheckedEntry], notes: NoteTexts, fingerprint: str | None
    ) -> Ids:
        with self._guard, self._commit(fingerprint) as change:
            known = self._catalogue.rows_of_keys([entry.key for entry in entries])
            self._check_entries(verb, entries, known)
            ids = itertools.count(change.state.next_id)
            rows = [
                ItemRow.from_stored(known[e.key]).updated(e)
                if e.key in known
                else ItemRow.from_entry(next(ids), e)
                for e in entries
            ]
            change.delete_rows(known.values())
            change.insert_rows(rows)
            new = {
                row.id: e.code + (e.fine or b"")
                for row, e in zip(rows, entries, strict=True)
                if e.code
            }
            moved = {row[0]: new.pop(row[0]) for row in known.values() if row[0] in new}
            change.move(as_ids(moved), self._form.joined(moved.values()))
            change.append(self._form.joined(new.values()))
            change.write_notes(notes)
        return as_ids(row.id for row in rows)

    def add_codes(
        self,
        codes: ArrayLike | Iterable[ArrayLike],
        *,
        fine: ArrayLike | Iterable[ArrayLike] | None = None,
        fingerprint: str | None = None,
    ) -> range:
        """See :meth:`Index.add_codes`."""
        with self._guard, self._commit(fingerprint) as change:
            first = change.state.next_id
            for pair in code_pairs(codes, fine, self.bits, self.fine_bits):
                change.append(np.hstack(pair) if self.fine_bits else pair[0])
            return range(first, change.state.next_id)

    def add_items(
        self, items: Iterable[Item], *, notes: Notes = None, next_id: int | None = None
    ) -> None:
        """See :meth:`Index.add_items`; one commit."""
        self._must_write()
        given = list(items)
        keyed = [item for item in given if item.key is not None]
        entries = check_entries((item.entry() for item in keyed), *self._form)
        rows = [
            ItemRow.from_entry(item.id, entry) for item, entry in zip(keyed, entries, strict=True)
        ]
        with self._guard:
            known = self._catalogue.rows_of_keys([entry.key for entry in entries])
            self._check_entries("add", entries, known)
            ids = as_ids(item.id for item in given)
            records = self._form.joined(i.code + (i.fine or b"") for i in given)
            self.load_items(ids, records, rows, check_notes(notes), next_id=next_id or 0)

    def load_items(
        self,
        ids: Ids,
        records: Records,
        rows: Sequence[ItemRow],
        notes: NoteTexts,
        *,
        next_id: int = 0,
    ) -> None:
        """Add items with ids of their own, in one commit; for repair and copies.

        Args:
            ids: ascending, and none below the next id.
            records: their codes, each with its second code behind it.
            rows: the rows of those that have a key.
            notes: written in the same commit.
            next_id: the least id that a new item gets afterwards.
        """
        with self._guard, self._commit(None) as change:
            if len(ids) and (ids[0] < change.state.next_id or (np.diff(ids) <= 0).any()):
                raise UsageError(f"{self.uri}: the ids to load must ascend, and be new")
            change.load(ids, records, rows, next_id)
            change.write_notes(notes)

    def _remove(self, keys: list[str], ids: Ids, notes: NoteTexts, *, missing_ok: bool) -> int:
        with self._guard, self._commit(None) as change:
            rows = self._catalogue.rows_of_keys(keys)
            if len(rows) < len(keys) and not missing_ok:
                missing = next(key for key in keys if key not in rows)
                raise self._missing(missing, "; nothing was removed")
            wanted = np.unique(np.concatenate([as_ids([row[0] for row in rows.values()]), ids]))
            exists = change.before.locate(wanted)[0] >= 0
            if not exists.all() and not missing_ok:
                raise self._missing(wanted[~exists][0], "; nothing was removed")
            wanted = wanted[exists]
            change.remove(wanted)
            change.write_notes(notes)
            return len(wanted)

    def compact(self, *, seconds: float | None = None) -> dict[str, int]:
        """See :meth:`Index.compact`."""
        with self._guard:
            self._heal()
            catalogue = self._writer()
            before = self._current()
            start, place, left = time.monotonic(), 0, 0
            while group := next_group(self._current(), place):
                if seconds is not None and time.monotonic() - start > seconds:
                    left += 1
                else:
                    self._compact_group(group)
                place = group.end
            if self._current().state != before.state:
                catalogue.vacuum()
            after = self._current()
            return {
                "dropped": before.removed() - after.removed(),
                "bytes_before": before.code_bytes(),
                "bytes_after": after.code_bytes(),
                "left": left,
            }

    def _compact_group(self, group: Group) -> None:
        snapshot = self._current()
        snapshot.check()
        runs = plan_group(snapshot, group, self._form.width)
        if runs is None:
            return
        with self._commit(None) as change:
            gone = rewrite_group(change, group, runs)
        self._snapshot = None
        delete_files(self.path, gone)
        delete_tables(self.path, gone)

    def _writer(self) -> CatalogueWriter:
        self._must_write()
        catalogue = self._catalogue
        if not isinstance(catalogue, CatalogueWriter) or catalogue.uncertain:
            raise FisherhashError(
                f"{self.uri}: the disk failed during the last change. Check the disk, then close "
                "the index and open it again"
            )
        if self._lock is None or not self._lock.is_ours():
            catalogue.abandoned = True
            raise FisherhashError(
                f"{self.path / 'lock'} was deleted or replaced while {self.uri} was open for "
                "writing, so another process may be writing. Nothing was changed; close the index "
                "and open it again"
            )
        return catalogue

    @contextlib.contextmanager
    def _commit(self, fingerprint: str | None) -> Iterator[Change]:
        """One commit: all that is done to the change happens, or nothing does."""
        self._heal()
        catalogue = self._writer()
        snapshot = self._current()
        self._check_model(fingerprint, unnamed_codes=snapshot.state.next_id > 0)
        change = Change(catalogue, snapshot, self.path)
        try:
            change.begin()
            # Again: another process that did the same cannot have begun meanwhile.
            self._writer()
            yield change
            if change.is_empty():
                catalogue.rollback()
                return
            if fingerprint is not None and self.fingerprint is None:
                facts = {**catalogue.facts, "fingerprint": fingerprint}
                catalogue.write(PUT_FACT, [fact_columns("index", facts)])
            change.finish()
        except BaseException:
            self._roll_back(catalogue, change)
            raise
        finally:
            change.close()
        # It is committed; what follows is for those who come later.
        if fingerprint is not None:
            self.fingerprint = fingerprint
        with contextlib.suppress(OSError):
            CommitMark(self.path).write(change.state.commit)
        if change.upgrades:
            delete_old_notes(self.path)
        catalogue.tidy()

    def _roll_back(self, catalogue: CatalogueWriter, change: Change) -> None:
        catalogue.rollback()
        try:
            # An interruption may come just after the commit; then the bytes count.
            unchanged = catalogue.state().commit == change.before.state.commit
            # Nor may bytes be cut off that another writer put there, if the lock was deleted.
            ours = self._lock is not None and self._lock.is_ours()
            if unchanged and ours and not catalogue.uncertain:
                change.undo()
        except FisherhashError as error:
            logger.warning("%s: %s", self.uri, error)
