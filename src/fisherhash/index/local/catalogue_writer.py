"""The catalogue as its one writer has it: the place where a commit happens."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError
from fisherhash.index.local.catalogue import WAIT_MS, Catalogue, connection
from fisherhash.index.local.guards import Sums, replace_file, sync_folder
from fisherhash.index.local.rows import Row
from fisherhash.index.local.schema import (
    APPLICATION,
    FORMAT,
    ITEM_COLUMNS,
    NAME,
    SCHEMA,
    FileRow,
    RemovedRow,
    State,
)

logger = logging.getLogger(__name__)

WAL_BYTES = 8 << 20
"""A longer log is moved into the catalogue after a commit."""


def create_catalogue(folder: Path, facts: dict[str, Any]) -> None:
    """Make a new catalogue under its name with one step, after all else is there."""
    draft = folder / (NAME + ".new")
    for leftover in folder.glob(draft.name + "*"):
        leftover.unlink()
    db = sqlite3.connect(draft, isolation_level=None)
    try:
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {FORMAT}")
        db.executescript("BEGIN;" + SCHEMA + "COMMIT;")
        db.execute("BEGIN")
        _put_fact(db, "index", facts)
        _put_fact(db, "state", asdict(State()))
        db.execute("COMMIT")
    finally:
        db.close()
    draft.replace(folder / NAME)
    sync_folder(folder)


class CatalogueWriter(Catalogue):
    """A catalogue that may be changed; the lock must be held, and what it holds be proven.

    Attributes:
        uncertain: a commit failed in a way that a power cut could still make it true.
    """

    def __init__(self, folder: Path) -> None:
        self.uncertain = False
        self._checkpoint_at = WAL_BYTES
        super().__init__(folder)

    def _connect(self) -> sqlite3.Connection:
        for place in (self.path.parent, self.path):
            if not os.access(place, os.W_OK):
                raise FisherhashError(
                    f"{place} may not be written. Reading the index works; to change it, ask for "
                    "the rights or copy the folder"
                )
        return connection(self.path, "rw")

    def _start(self) -> None:
        self._trusted = True
        self.facts = self._read_facts()
        self._drop_sums()
        try:
            (mode,) = self._db.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise FisherhashError(
                    f"{self.path} cannot be written here: its file system has no shared memory. "
                    "Keep an index that is written on a local disk"
                )
            self._db.execute("PRAGMA wal_autocheckpoint = 0")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA cache_size = -65536")
            # After an integrity_check SQLite refuses a checkpoint until something was read.
            self.state()
            self._checkpoint(2000)
        except sqlite3.Error as error:
            raise self._error(error) from None
        self._write_sums()

    def begin(self) -> None:
        """Start a commit."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise self._error(error) from error

    def insert_rows(self, rows: Iterable[Row]) -> int:
        """Add rows; the sum of their checksums."""
        columns = [row.stored_columns() for row in rows]
        self._many(f"INSERT INTO items ({ITEM_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", columns)
        return sum(row[-1] for row in columns)

    def replace_rows(self, rows: Iterable[Row]) -> int:
        """Write rows in the place of those with the same ids; the sum of their checksums."""
        columns = [row.stored_columns() for row in rows]
        query = (
            "UPDATE items SET path=?, size=?, mtime_ns=?, labels=?, metadata=?, crc=? WHERE id=?"
        )
        self._many(query, [(*row[2:], row[0]) for row in columns])
        return sum(row[-1] for row in columns)

    def delete_rows(self, ids: Iterable[int]) -> None:
        """Delete rows by id."""
        self._many("DELETE FROM items WHERE id = ?", [(id_,) for id_ in ids])

    def put_files(self, rows: Iterable[FileRow], *, replace_all: bool = False) -> None:
        """Write file rows; ``replace_all`` forgets all others with their removed bits."""
        if replace_all:
            self._many("DELETE FROM files", [()])
            self._many("DELETE FROM removed", [()])
        names = [field.name for field in fields(FileRow)]
        values = [(*(getattr(row, name) for name in names), row.crc()) for row in rows]
        marks = ", ".join("?" * (len(names) + 1))
        self._many(
            f"INSERT OR REPLACE INTO files ({', '.join(names)}, crc) VALUES ({marks})", values
        )

    def put_removed(self, rows: Iterable[RemovedRow]) -> None:
        """Write removed bits."""
        self._many(
            "INSERT OR REPLACE INTO removed (file, block, changed, bits, crc) "
            "VALUES (?, ?, ?, ?, ?)",
            [(row.file, row.block, row.changed, row.bits, row.crc()) for row in rows],
        )

    def put_state(self, state: State) -> None:
        """Write the state that the commit will have."""
        with self._reading() as db:
            _put_fact(db, "state", asdict(state))

    def put_facts(self, facts: dict[str, Any]) -> None:
        """Write what the index is."""
        with self._reading() as db:
            _put_fact(db, "index", facts)

    def _many(self, query: str, values: Sequence[Sequence[Any]]) -> None:
        try:
            self._db.executemany(query, values)
        except sqlite3.Error as error:
            raise self._error(error) from error

    def commit(self) -> None:
        """Make all changes since :meth:`begin` true at once."""
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", None) or ""
            self.uncertain = name.startswith("SQLITE_IOERR_FSYNC")
            self.rollback()
            raise self._error(error) from error

    def rollback(self) -> None:
        """Forget all changes since :meth:`begin`."""
        if self._db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    # Checkpoints and the end

    def tidy(self) -> None:
        """Move a long log into the catalogue."""
        try:
            size = self.path.with_name(NAME + "-wal").stat().st_size
        except OSError:
            return
        if size < self._checkpoint_at:
            return
        done = False
        try:
            self._drop_sums()
            done = self._checkpoint(0)
        except (OSError, sqlite3.Error) as error:
            # The log still holds everything; a later one may find room.
            logger.warning("%s: the log could not be moved: %s", self.path, error)
        threshold = max(WAL_BYTES, self.path.stat().st_size // 4)
        self._checkpoint_at = threshold if done else size + threshold
        self._write_sums()

    def _checkpoint(self, wait_ms: int) -> bool:
        """Move the log into the catalogue as far as readers allow; whether it is empty now."""
        self._db.execute(f"PRAGMA busy_timeout = {wait_ms}")
        busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self._db.execute(f"PRAGMA busy_timeout = {WAIT_MS}")
        return not busy

    def _drop_sums(self) -> None:
        """Before the bytes change; for good, or a power cut could bring the old note back."""
        self._sums_path.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def _write_sums(self, commit: int | None = None) -> None:
        """Note the bytes of the catalogue; who finds no note checks the rows instead."""
        try:
            size, sums = self._file.sums()
            if commit is None:
                commit = self.state().commit
            replace_file(self._sums_path, Sums(commit, size, tuple(sums)).dump())
        except (OSError, FisherhashError) as error:
            with contextlib.suppress(OSError):
                self._sums_path.unlink(missing_ok=True)
            logger.warning("%s could not be written: %s", self._sums_path, error)

    def vacuum(self) -> None:
        """Give back the room of many deleted rows."""
        try:
            (free,) = self._db.execute("PRAGMA freelist_count").fetchone()
            (pages,) = self._db.execute("PRAGMA page_count").fetchone()
            if free > 64 and 4 * free > pages:
                self._db.execute("VACUUM")
        except sqlite3.Error as error:
            logger.warning("%s: the room of deleted rows stays taken: %s", self.path, error)
        self.tidy()

    def _finish(self) -> None:
        """Leave one plain file behind."""
        commit = None
        try:
            self.rollback()
            commit = self.state().commit
            self._drop_sums()
            with contextlib.suppress(sqlite3.Error):
                self._checkpoint(2000)
                # Not while readers are there: then it stays as it is, which is as good.
                self._db.execute("PRAGMA busy_timeout = 0")
                self._db.execute("PRAGMA journal_mode = DELETE").fetchone()
        finally:
            self._db.close()
            if commit is not None:
                # SQLite moves what is left of its log when it closes; so only now.
                self._write_sums(commit)


def _put_fact(db: sqlite3.Connection, name: str, value: dict[str, Any]) -> None:
    text = json.dumps(value)
    db.execute(
        "INSERT OR REPLACE INTO facts (name, value, crc) VALUES (?, ?, ?)",
        (name, text, zlib.crc32(text.encode())),
    )
