"""Reading the rows of a catalogue; catalogue_file.py opens it, schema.py has its tables."""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import CannotReadError
from fisherhash.index.items import FileState
from fisherhash.index.local.catalogue_file import CatalogueFile
from fisherhash.index.local.connect import (
    CACHE_KIB,
    error_name,
)
from fisherhash.index.local.rows import decode_text, encode_text, parsed, row_crc, wrong_item
from fisherhash.index.local.schema import (
    APPLICATION,
    CATALOGUE_FORMAT,
    ITEM_COLUMNS,
    FileRow,
    RemovedRow,
    State,
    check_facts,
)

logger = logging.getLogger(__name__)

CHECK_AT_ONCE = 64 << 20
"""Up to this size the bytes are checked when the catalogue is opened, else before rows are read."""

_CHUNK = 900
_ROWS_AT_ONCE = 1 << 13

Columns = Sequence[Any]
"""A stored row; its last column is its checksum."""


class Catalogue(CatalogueFile):
    """An open catalogue; every method that reads sees complete commits only.

    Args:
        folder: the index.
        locked: the caller holds the writer's lock.

    Attributes:
        path: the SQLite file.
        facts: what the index is: bits, fingerprint, model, …
    """

    def __init__(self, folder: Path, *, locked: bool = False) -> None:
        # The state as it was read last: it is read before every search and changes rarely.
        self._last_state: tuple[Columns | None, State] = ((), State())
        super().__init__(folder, locked=locked)

    # Opening

    def _start(self) -> None:
        # First, because rows of a newer format cannot be checked.
        self.facts = self.read_facts()
        if self.path.stat().st_size <= CHECK_AT_ONCE:
            self.trust()

    def read_facts(self) -> dict[str, Any]:
        """What the index is, as it is stored now."""
        with self._reading() as db:
            (application,) = db.execute("PRAGMA application_id").fetchone()
            if application != APPLICATION:
                raise UsageError(
                    f"{self.path} is not the catalogue of an index, or its first page is damaged. "
                    "Check the folder's name, or restore it from a copy"
                )
            version = _version(db)
            if version > CATALOGUE_FORMAT:
                raise FisherhashError(
                    f"{self.path.parent} has format {version}, this version of fisherhash reads "
                    f"up to {CATALOGUE_FORMAT}. Update fisherhash: pip install --upgrade fisherhash"
                )
            if version < 1:
                raise self.damaged(f"its format is {version}")
            return self._fact(db, "index")

    def format(self) -> int:
        """The format of the last commit; the first write to an index of format 1 raises it."""
        with self._reading() as db:
            return _version(db)

    # Proof

    def trust(self) -> None:
        """Make sure once that rows are what was written: all bytes at once, or else row by row.

        Raises:
            FisherhashError: they are not.
        """
        if self._trusted:
            return
        if not self._bytes_hold():
            start = time.monotonic()
            problems = self.row_problems()
            if problems:
                raise self.damaged(problems[0])
            seconds = time.monotonic() - start
            if seconds > 1:
                logger.info("%s: rows checked in %.1f s", self.path, seconds)
        self._trusted = True

    def row_problems(self) -> list[str]:
        """What is wrong with the structure or the rows; reads everything.

        Raises:
            CannotReadError: the disk fails, so that nothing can be said.
        """
        try:
            with self._reading() as db:
                reported = [text for (text,) in db.execute("PRAGMA integrity_check(5)")]
                if reported != ["ok"]:
                    if error := self._unreadable():
                        raise error
                    return [f"SQLite: {text}" for text in reported]
                state = self._state(db)
                self._files(db, state)
                cursor, sums = db.execute(f"SELECT {ITEM_COLUMNS} FROM items"), []
                while rows := cursor.fetchmany(_ROWS_AT_ONCE):
                    sums += [row[-1] for row in self._checked_items(rows)]
                if (len(sums), sum(sums) % 2**64) != (state.rows, state.rows_sum):
                    return [f"rows of items are missing or old ({len(sums)} of {state.rows} found)"]
                sums = [crc for *_, crc in self._note_rows(db)] if _version(db) > 1 else []
                if (len(sums), sum(sums) % 2**64) != (state.notes, state.notes_sum):
                    return [f"rows of notes are missing or old ({len(sums)} of {state.notes})"]
                self._fact(db, "index")
        except CannotReadError:
            raise
        except FisherhashError as error:
            return [str(error)]
        return []

    # Reading

    @contextlib.contextmanager
    def view(self) -> Iterator[State]:
        """Calls inside see one commit, whatever is written meanwhile; yields its state."""
        self._renew_copy()
        with contextlib.ExitStack() as reading:
            db = reading.enter_context(self._reading())
            try:
                state = self._state(db)
            except sqlite3.OperationalError as error:
                # A writer was killed in the middle of a change, which a reader may not take back.
                if self._locked or not error_name(error).startswith("SQLITE_READONLY"):
                    raise
                reading.close()
                logger.info("%s: opened again (%s)", self.path, error)
                self._reconnect()
                state = self._state(reading.enter_context(self._reading()))
            yield state

    def _fact(self, db: sqlite3.Connection, name: str) -> dict[str, Any]:
        row = db.execute("SELECT value, crc FROM facts WHERE name = ?", (name,)).fetchone()
        if row is None or not isinstance(row[0], str) or zlib.crc32(row[0].encode()) != row[1]:
            raise self.damaged(f"its row '{name}' is not what was written")
        try:
            return check_facts(name, json.loads(row[0]))
        except (ValueError, RecursionError) as error:
            raise self.damaged(f"its row '{name}' is wrong ({error})") from None

    def _state(self, db: sqlite3.Connection) -> State:
        row = db.execute("SELECT value, crc FROM facts WHERE name = 'state'").fetchone()
        known, state = self._last_state
        if row != known:
            state = State(**self._fact(db, "state"))
            self._last_state = row, state
        return state

    def state(self) -> State:
        """The last commit's state; quick enough to be read before every search."""
        with self.view() as state:
            return state

    def recent(self) -> dict[str, Any] | None:
        """What the last commits touched, see subsets.py; None if no writer noted that."""
        with self._reading() as db:
            if db.execute("SELECT 1 FROM facts WHERE name = 'recent'").fetchone() is None:
                return None
            return self._fact(db, "recent")

    def load(self, since: int = 0) -> tuple[State, list[FileRow], list[RemovedRow]]:
        """State, files, and the removed bits that changed after commit ``since``."""
        with self._reading() as db:
            state = self._state(db)
            query = "SELECT file, block, changed, bits, crc FROM removed WHERE changed > ?"
            rows = db.execute(query, (since,))
            rows = self._checked(rows, lambda row: RemovedRow(*row).crc(), "removed positions")
            return state, self._files(db, state), [RemovedRow(*row[:-1]) for row in rows]

    def _files(self, db: sqlite3.Connection, state: State) -> list[FileRow]:
        rows = db.execute(f"SELECT {', '.join(FileRow._fields)}, crc FROM files ORDER BY number")
        rows = list(self._checked(rows, lambda row: FileRow(*row).crc(), "code files"))
        if (len(rows), sum(row[-1] for row in rows) % 2**64) != (state.files, state.files_sum):
            raise self.damaged("rows of code files are missing or old")
        files = [FileRow(*row[:-1]) for row in rows]
        for file in files:
            if wrong := file.problem():
                raise self.damaged(f"its row of code file {file.number} is wrong ({wrong})")
        return files

    def _checked(
        self, rows: Iterable[Columns], crc: Callable[[Columns], int], table: str
    ) -> Iterator[Columns]:
        """Stored rows, each compared with the checksum in its last column."""
        for row in rows:
            try:
                right = crc(row[:-1]) == row[-1]
            except (TypeError, ValueError, AttributeError, OverflowError):
                right = False
            if not right:
                raise self.damaged(f"a row of {table} is not what was written")
            yield row

    def _checked_items(self, rows: list[Columns]) -> list[Columns]:
        """Stored rows of items, each compared with its checksum."""
        wrong = wrong_item(rows)
        if wrong is not None:
            raise self.damaged(f"the row of item {wrong[0]} is not what was written")
        return rows

    def rows_of_ids(self, ids: Sequence[int]) -> dict[int, Columns]:
        """Stored columns of the rows of those ids that have one."""
        return {row[0]: row for row in self.rows("id", ids)}

    def rows_of_keys(self, keys: Sequence[str]) -> dict[str, Columns]:
        """Stored columns of the rows of those keys that exist."""
        rows = self.rows("key", [encode_text(key) for key in keys])
        return {decode_text(row[1]): row for row in rows}

    def rows(self, column: str, values: Sequence[Any]) -> list[Columns]:
        """The rows of items whose ``id`` or ``key`` is one of some values, as they are stored."""
        self.trust()
        rows: list[Columns] = []
        with self._reading() as db:
            for start in range(0, len(values), _CHUNK):
                part = values[start : start + _CHUNK]
                marks = ",".join("?" * len(part))
                query = f"SELECT {ITEM_COLUMNS} FROM items WHERE {column} IN ({marks})"
                rows += db.execute(query, part).fetchall()
        return self._checked_items(rows)

    def warm(self, first: int, end: int) -> None:
        """Bring the rows of some ids into SQLite's cache, if all rows fit; nothing is checked."""
        with self._reading() as db:
            if self.path.stat().st_size <= CACHE_KIB << 10:
                query = "SELECT max(crc) FROM items WHERE id >= ? AND id < ?"
                db.execute(query, (first, end)).fetchone()

    def rows_where(self, condition: str, values: Sequence[Any]) -> dict[int, Columns]:
        """Stored columns by id of the rows that match a condition, by ascending id."""
        self.trust()
        with self._reading() as db:
            self._meter.refill(_weight(values))
            order = f"ORDER BY id{self._limit(db)}"
            query = f"SELECT {ITEM_COLUMNS} FROM items WHERE {condition} {order}"
            rows = self._checked_items(db.execute(query, values).fetchall())
            self._must_fit(db, len(rows))
            return {row[0]: row for row in rows}

    def ids_where(self, condition: str, values: Sequence[Any]) -> list[int]:
        """Ids of the rows that match a condition, ascending."""
        self.trust()
        with self._reading() as db:
            self._meter.refill(_weight(values))
            query = f"SELECT id FROM items WHERE {condition} ORDER BY id{self._limit(db)}"
            ids = [id_ for (id_,) in db.execute(query, values)]
            self._must_fit(db, len(ids))
            return ids

    def _limit(self, db: sqlite3.Connection) -> str:
        """One row more than there are: the pages of a file from a stranger may repeat."""
        return f" LIMIT {self._state(db).rows + 1}"

    def _must_fit(self, db: sqlite3.Connection, rows: int) -> None:
        if rows > self._state(db).rows:
            raise self.damaged(f"it has more than its {self._state(db).rows} rows of items")

    def files(self) -> dict[str, FileState]:
        """What is known about the file of every item with a key, by ascending id."""
        self.trust()
        with self._reading() as db:
            query = f"SELECT key, size, mtime_ns, id FROM items ORDER BY id{self._limit(db)}"
            rows = db.execute(query).fetchall()
            self._must_fit(db, len(rows))
        return {decode_text(key): FileState(*columns) for key, *columns in rows}

    def notes(self, kind: str) -> dict[str, str] | None:
        """The notes of a kind as JSON by name; None if they are in the files of format 1."""
        self.trust()
        with self._reading() as db:
            if _version(db) == 1:
                return None
            rows = self._note_rows(db, "WHERE kind = ?", (encode_text(kind),))
            return {decode_text(name): value for _, name, value, _ in rows}

    def _note_rows(
        self, db: sqlite3.Connection, where: str = "", values: Sequence[Any] = ()
    ) -> Iterator[Columns]:
        query = f"SELECT kind, name, value, crc FROM notes {where} ORDER BY kind, name"
        return self._checked(db.execute(query, values), lambda row: row_crc((), row), "notes")

    def metadata_fields(self) -> set[str]:
        """Names of metadata fields, from the first thousand distinct metadata."""
        with self._reading() as db:
            query = "SELECT DISTINCT id, metadata FROM items GROUP BY metadata LIMIT 1000"
            rows = db.execute(query).fetchall()
        return {name for id_, text in rows for name in parsed(id_, text, dict)}

    def has_field(self, json_path: str) -> bool:
        """Whether any item's metadata has a field."""
        with self._reading() as db:
            query = "SELECT 1 FROM items WHERE json_type(metadata, ?) IS NOT NULL LIMIT 1"
            return db.execute(query, (json_path,)).fetchone() is not None


def _weight(values: Sequence[Any]) -> int:
    """How many values one row is compared with; a list in JSON counts as many."""
    return len(values) + sum(len(value) // 8 for value in values if isinstance(value, str))


def _version(db: sqlite3.Connection) -> int:
    return db.execute("PRAGMA user_version").fetchone()[0]
