"""Writing the catalogue: the place where a commit happens."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError
from fisherhash.index.base import UnknownOutcomeError
from fisherhash.index.checks import NoteTexts
from fisherhash.index.local.catalogue import Catalogue
from fisherhash.index.local.connect import (
    CACHE_KIB,
    WAIT_MS,
    check_schema,
    connection,
    error_name,
)
from fisherhash.index.local.files import replace_inside, unlink_inside
from fisherhash.index.local.guards import Sums, crc_blocks
from fisherhash.index.local.rows import encode_text, note_columns
from fisherhash.index.local.schema import (
    APPLICATION,
    CATALOGUE,
    NOTES_SCHEMA,
    PLAIN_FORMAT,
    PUT_FACT,
    SCHEMA,
    SUMS,
    State,
    fact_columns,
    format_of,
)
from fisherhash.index.local.spare import Spare, save_spare
from fisherhash.system.storage import fsync_file, fsync_folder

_MOST_BEHIND = 1 << 28
"""Bytes that may lie behind the database in its file."""

logger = logging.getLogger(__name__)

WAL_BYTES = 8 << 20
"""A longer log is moved into the catalogue after a commit."""


def create_catalogue(folder: Path, facts: dict[str, Any]) -> None:
    """Create the catalogue of an empty index in a folder that nobody else uses yet."""
    path = folder / CATALOGUE
    db = sqlite3.connect(path, isolation_level=None)
    try:
        # One flush at the end is enough: the folder gets its name after that.
        db.execute("PRAGMA synchronous = OFF")
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {format_of(facts)}")
        db.executescript(SCHEMA)
        for name, value in (("index", facts), ("state", State()._asdict())):
            db.execute(PUT_FACT, fact_columns(name, value))
    finally:
        db.close()
    fsync_file(path)
    data = path.read_bytes()
    sums = Sums(State().commit, len(data), tuple(crc_blocks(memoryview(data))))
    replace_inside(folder, SUMS, sums.dump())


class CatalogueWriter(Catalogue):
    """A catalogue that may be changed; the caller holds the lock and has checked the content.

    Attributes:
        uncertain: a commit failed in such a way that a power cut could still make it true.
        committed: number of the commit before the one that was begun last.
        abandoned: another process may be writing, so nothing may be changed, not even at the end.
    """

    def __init__(self, folder: Path) -> None:
        self.uncertain = self.abandoned = False
        self.committed = 0
        self._checkpoint_at = WAL_BYTES
        super().__init__(folder, locked=True)

    def _connect(self) -> sqlite3.Connection:
        for place in (self.path.parent, self.path):
            if not os.access(place, os.W_OK):
                raise FisherhashError(
                    f"{place} may not be written. Reading the index works; to change it, get "
                    "write permission or copy the folder"
                )
        db, self._meter = connection(self.path, "rw")
        try:
            check_schema(self.path, db)
        except sqlite3.Error as error:
            db.close()
            raise self._error(error) from None
        except BaseException:
            db.close()
            raise
        return db

    def _start(self) -> None:
        self._trusted = True
        self.facts = self.read_facts()
        self._check_length()
        self._drop_sums()
        try:
            (mode,) = self._db.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise FisherhashError(
                    f"{self.path} cannot be written here: its file system has no shared memory. "
                    "Store an index that is written on a local disk"
                )
            self._db.execute("PRAGMA wal_autocheckpoint = 0")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            # After an integrity_check SQLite refuses a checkpoint until something was read.
            self.state()
            self._checkpoint(2000)
        except sqlite3.Error as error:
            raise self._error(error) from None
        self._write_sums()

    def _check_length(self) -> None:
        """Refuse a file with much behind the database in it, which would be read for its sums."""
        try:
            (pages,) = self._db.execute("PRAGMA page_count").fetchone()
            (size,) = self._db.execute("PRAGMA page_size").fetchone()
        except sqlite3.Error as error:
            raise self._error(error) from None
        if self._file.size() > pages * size + _MOST_BEHIND:
            raise self.damaged("the file is much longer than the database in it")

    def begin(self) -> State:
        """Start a commit; returns the state before it, which no other process can change now."""
        try:
            self._meter.refill()
            self._transaction = None
            self._db.execute("BEGIN IMMEDIATE")
            state = self._state(self._db)
        except sqlite3.Error as error:
            raise self._error(error) from error
        self.committed = state.commit
        return state

    def write(self, query: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run a statement of schema.py for every row."""
        with self._reading() as db:
            self._meter.suspend()
            db.executemany(query, rows)
            self._meter.refill()

    def upgrade(self, *, notes: bool) -> None:
        """Make this commit the first one of today's format; ``notes``: it had none."""
        with self._reading() as db:
            if notes:
                db.execute(NOTES_SCHEMA)
            db.execute(f"PRAGMA user_version = {PLAIN_FORMAT}")

    def put_notes(self, notes: NoteTexts) -> tuple[int, int] | None:
        """Write notes; returns by how much their number and the sum of their checksums grow.

        None: all notes are stored already.
        """
        count = total = changed = 0
        with self._reading() as db:
            self._meter.suspend()
            for (kind, name), text in notes.items():
                place = (encode_text(kind), encode_text(name))
                query = "SELECT value, crc FROM notes WHERE kind = ? AND name = ?"
                old = db.execute(query, place).fetchone()
                if text == (old[0] if old else None):
                    continue
                changed += 1
                if old:
                    db.execute("DELETE FROM notes WHERE kind = ? AND name = ?", place)
                    count, total = count - 1, total - old[1]
                if text is not None:
                    row = note_columns(kind, name, text)
                    db.execute("INSERT INTO notes VALUES (?, ?, ?, ?)", row)
                    count, total = count + 1, total + row[-1]
        return (count, total) if changed else None

    def commit(self) -> None:
        """Commit all changes since :meth:`begin`.

        Raises:
            CannotWriteError: nothing was changed.
            UnknownOutcomeError: that is not certain.
        """
        before = self.committed
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self.rollback()
            failed = self._error(error)
            name = error_name(error)
            # When the log cannot be written, the end of the commit is not in it. In any other case
            # all of it may be there, and count after a power cut.
            if name.startswith("SQLITE_IOERR") and name != "SQLITE_IOERR_WRITE":
                self.uncertain = not self._empties_log(before)
            if self.uncertain:
                failed = UnknownOutcomeError(
                    f"{self.path.parent} cannot be written: {error}",
                    "check the disk, open the index again to see what it holds",
                    "It is not known whether the last change was stored",
                )
            raise failed from error

    def _empties_log(self, before: int) -> bool:
        """Discard a commit that failed from SQLite's log; whether that worked, for certain."""
        try:
            if not self._checkpoint(2000) or self.state().commit != before:
                return False
            # The log is empty now. Durably, or a power cut could bring back what was in it.
            fsync_file(self.path.with_name(CATALOGUE + "-wal"))
            return True
        except (OSError, sqlite3.Error, FisherhashError):
            return False

    def rollback(self) -> None:
        """Discard all changes since :meth:`begin`."""
        if self._db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    # Checkpoints and the end

    def tidy(self) -> None:
        """Move a long log into the catalogue."""
        try:
            size = self.path.with_name(CATALOGUE + "-wal").stat().st_size
        except OSError:
            return
        if size < self._checkpoint_at:
            return
        done = False
        try:
            self._drop_sums()
            self._meter.refill()
            done = self._checkpoint(0)
        except (OSError, sqlite3.Error) as error:
            # The log still holds everything; a later attempt may find room.
            logger.warning("%s: the log could not be moved: %s", self.path, error)
        threshold = max(WAL_BYTES, self._size() // 4)
        self._checkpoint_at = threshold if done else size + threshold
        self._write_sums()
        self._write_spare()

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def _checkpoint(self, wait_ms: int) -> bool:
        """Move the log into the catalogue as far as readers allow; True if it is empty now."""
        self._db.execute(f"PRAGMA busy_timeout = {wait_ms}")
        busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self._db.execute(f"PRAGMA busy_timeout = {WAIT_MS}")
        return not busy

    def _drop_sums(self) -> None:
        """Before the bytes change; durably, or a power cut could bring the old file back."""
        unlink_inside(self.path.parent, SUMS)
        fsync_folder(self.path.parent)

    def _write_sums(self, commit: int | None = None) -> None:
        """Write the sums of the catalogue's bytes; without them readers check the rows."""
        try:
            size, sums = self._file.sums()
            if commit is None:
                commit = self.state().commit
            replace_inside(self.path.parent, SUMS, Sums(commit, size, tuple(sums)).dump())
        except (OSError, FisherhashError) as error:
            with contextlib.suppress(OSError):
                unlink_inside(self.path.parent, SUMS)
            logger.warning("%s could not be written: %s", self._sums_path, error)

    def _write_spare(self) -> None:
        """Write the small tables a second time, for repair."""
        with contextlib.suppress(FisherhashError):
            save_spare(self.path.parent, Spare(self.read_facts(), *self.load()))

    def vacuum(self) -> None:
        """Free the space of many deleted rows."""
        try:
            (free,) = self._db.execute("PRAGMA freelist_count").fetchone()
            (pages,) = self._db.execute("PRAGMA page_count").fetchone()
            if free > 64 and 4 * free > pages:
                self._meter.suspend()
                self._db.execute("VACUUM")
        except sqlite3.Error as error:
            logger.warning("%s: the space of deleted rows was not freed: %s", self.path, error)
        self.tidy()

    def _finish(self) -> None:
        """Leave one plain file; if that fails, everything committed is safe in the log."""
        commit = None
        try:
            self.rollback()
            if not self.abandoned:
                self._meter.refill()
                commit = self.state().commit
                self._write_spare()
                self._drop_sums()
                self._checkpoint(2000)
                # Not while there are readers: then it stays as it is, which is as good.
                self._db.execute("PRAGMA busy_timeout = 0")
                self._db.execute("PRAGMA journal_mode = DELETE").fetchone()
        except (OSError, sqlite3.Error, FisherhashError) as error:
            logger.info("%s: its log stays beside it: %s", self.path, error)
        finally:
            super()._finish()
            if commit is not None:
                # Only now, because SQLite moves the rest of its log when it closes.
                self._write_sums(commit)
