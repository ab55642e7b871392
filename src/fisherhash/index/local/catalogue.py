"""Reading the catalogue of a local index: a SQLite file, see schema.py for its tables.

While a writer has the catalogue open, it is in SQLite's WAL mode, and readers are not blocked. At
rest it is one plain file, which can be read from a read-only medium.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sqlite3
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.items import FileState
from fisherhash.index.local.format_1 import read_old_notes
from fisherhash.index.local.guards import SharedFile, Sums, cannot_write
from fisherhash.index.local.lock import is_held, is_unsettled
from fisherhash.index.local.rows import ItemRow, decode_text, encode_text, item_crc, row_crc
from fisherhash.index.local.schema import (
    APPLICATION,
    CATALOGUE,
    CATALOGUE_FORMAT,
    ITEM_COLUMNS,
    SUMS,
    FileRow,
    RemovedRow,
    State,
)
from fisherhash.index.local.sql import has_label

logger = logging.getLogger(__name__)

CHECK_AT_ONCE = 64 << 20
"""Up to this size the bytes are checked when the catalogue is opened, else before rows are read."""

_CHUNK = 900
WAIT_MS = 30_000

Columns = Sequence[Any]
"""A stored row; its last column is its checksum."""


class Catalogue:
    """An open catalogue; every method that reads sees complete commits only.

    Args:
        folder: the index.
        locked: the caller holds the writer's lock.

    Attributes:
        path: the SQLite file.
        facts: what the index is: bits, fingerprint, model, …
    """

    def __init__(self, folder: Path, *, locked: bool = False) -> None:
        self.path = folder / CATALOGUE
        self._locked = locked
        self._sums_path = folder / SUMS
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._copied: tuple[object, ...] = ()
        self._trusted = False
        self._closed = False
        # The state as it was read last: it is read before every search and changes rarely.
        self._state_row: tuple[Any, ...] | None = ()
        self._last_state = State()
        with contextlib.ExitStack() as failed:
            self._file = SharedFile(self.path)
            failed.callback(self._file.release)
            self._db = self._connect()
            failed.callback(lambda: self._db.close())
            self._start()
            failed.pop_all()

    # Opening

    def _connect(self) -> sqlite3.Connection:
        db = connection(self.path, "ro")
        try:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return db
        except (sqlite3.Error, UnicodeDecodeError) as error:
            db.close()
            if not isinstance(error, sqlite3.OperationalError) or is_busy(error):
                raise self._error(error) from None
            # A writer that ended left a log, in a folder where SQLite may not write. A private
            # copy can be recovered, and then has the last commit.
            logger.info("%s: reading a copy of the catalogue (%s)", self.path, error)
        return self._connect_copy()

    def _connect_copy(self) -> sqlite3.Connection:
        self._copied = self._signature()
        self._copy = tempfile.TemporaryDirectory(prefix="fisherhash-")
        target = Path(self._copy.name) / CATALOGUE
        try:
            with target.open("wb") as file:
                for block in self._file.blocks():
                    file.write(block)
            for end in ("-wal", "-journal"):
                beside = self.path.with_name(CATALOGUE + end)
                if beside.exists():
                    shutil.copyfile(beside, target.with_name(CATALOGUE + end))
        except OSError as error:
            raise FisherhashError(f"{self.path} cannot be copied to be read: {error}") from None
        return connection(target, "rw")

    def _signature(self) -> tuple[object, ...]:
        found = []
        for end in ("", "-wal", "-journal"):
            try:
                status = self.path.with_name(CATALOGUE + end).stat()
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
            except OSError:
                found.append(None)
        return tuple(found)

    def _start(self) -> None:
        # First, because rows of a newer format cannot be checked.
        self.facts = self._read_facts()
        if self.path.stat().st_size <= CHECK_AT_ONCE:
            self.trust()

    def _read_facts(self) -> dict[str, Any]:
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

    def _bytes_hold(self) -> bool:
        """Whether the bytes match the stored sums. A writer may be changing them."""
        for _ in range(20):
            sums, _wrong = Sums.read(self._sums_path)
            if sums is not None and (sums.size, list(sums.blocks)) == self._file.sums():
                return True
            again, _wrong = Sums.read(self._sums_path)
            if again == sums and not (sums is None and self._writer_is_busy()):
                return False
            time.sleep(0.05)
        return False

    def _writer_is_busy(self) -> bool:
        return not self._locked and is_held(self.path.with_name("lock"))

    def byte_problem(self) -> tuple[str, str] | None:
        """The file (catalogue or its sums) whose bytes are not what was written, and the reason."""
        sums, wrong = Sums.read(self._sums_path)
        if sums is None and wrong is None and not self._is_unsettled():
            # Again: a writer may have come and gone.
            sums, wrong = Sums.read(self._sums_path)
            wrong = "is missing" if sums is None and wrong is None else wrong
        if wrong:
            return self._sums_path.name, wrong
        if sums is None or self._bytes_hold() or Sums.read(self._sums_path)[0] is None:
            return None
        return CATALOGUE, "does not have the bytes that were written"

    def _is_unsettled(self) -> bool:
        """Whether a writer is active, or ended before it could write the sums."""
        beside = (self.path.with_name(CATALOGUE + end) for end in ("-wal", "-journal"))
        return any(path.exists() for path in beside) or is_unsettled(self.path.with_name("lock"))

    def noted_commit(self) -> int | None:
        """The commit that the bytes of the catalogue are proven to hold."""
        sums, _wrong = Sums.read(self._sums_path)
        return sums.commit if sums is not None and self._bytes_hold() else None

    def row_problems(self) -> list[str]:
        """What is wrong with the structure or the rows; reads everything."""
        try:
            with self._reading() as db:
                reported = [text for (text,) in db.execute("PRAGMA integrity_check(5)")]
                if reported != ["ok"]:
                    return [f"SQLite: {text}" for text in reported]
                state = self._state(db)
                self._files(db, state)
                sums = [row[-1] for row in self._item_rows(db, "")]
                if (len(sums), sum(sums) % 2**64) != (state.rows, state.rows_sum):
                    return [f"rows of items are missing or old ({len(sums)} of {state.rows} found)"]
                sums = [crc for *_, crc in self._note_rows(db)] if _version(db) > 1 else []
                if (len(sums), sum(sums) % 2**64) != (state.notes, state.notes_sum):
                    return [f"rows of notes are missing or old ({len(sums)} of {state.notes})"]
                self._fact(db, "index")
        except FisherhashError as error:
            return [str(error)]
        return []

    # Reading

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """One view of the catalogue for several statements; SQLite's errors become ours."""
        inside = self._db.in_transaction
        try:
            if not inside:
                self._db.execute("BEGIN")
            yield self._db
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            raise self._error(error) from error
        finally:
            if not inside and self._db.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("COMMIT")

    @contextlib.contextmanager
    def view(self) -> Iterator[State]:
        """Calls inside see one commit, whatever is written meanwhile; yields its state."""
        self._renew_copy()
        with self._reading() as db:
            yield self._state(db)

    def _error(self, error: Exception) -> FisherhashError:
        name = getattr(error, "sqlite_errorname", "") or ""
        if is_busy(error):
            what = "is locked by another program for too long; try again"
            return FisherhashError(f"{self.path} {what}")
        if name.startswith(("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC")):
            return cannot_write(self.path.parent, error)
        if isinstance(error, UnicodeDecodeError):
            # Python cannot decode SQLite's message about a damaged name.
            return self.damaged("a name in it is not UTF-8")
        return self.damaged(str(error))

    def damaged(self, what: str) -> FisherhashError:
        """The error for a catalogue that is not what was written."""
        if what.startswith(str(self.path)):
            return FisherhashError(what)
        return FisherhashError(
            f"{self.path} is damaged: {what}. Restore the index from a copy, or create it again"
        )

    def _fact(self, db: sqlite3.Connection, name: str) -> dict[str, Any]:
        row = db.execute("SELECT value, crc FROM facts WHERE name = ?", (name,)).fetchone()
        if row is None or not isinstance(row[0], str) or zlib.crc32(row[0].encode()) != row[1]:
            raise self.damaged(f"its row '{name}' is not what was written")
        return json.loads(row[0])

    def _state(self, db: sqlite3.Connection) -> State:
        row = db.execute("SELECT value, crc FROM facts WHERE name = 'state'").fetchone()
        if row != self._state_row:
            self._last_state = State(**self._fact(db, "state"))
            self._state_row = row
        return self._last_state

    def state(self) -> State:
        """The last commit's state; quick enough to be read before every search."""
        with self.view() as state:
            return state

    def _renew_copy(self) -> None:
        if self._copy is not None and self._signature() != self._copied:
            self._db.close()
            self._copy.cleanup()
            self._copy = None
            self._trusted = False
            self._db = self._connect()

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
        return [FileRow(*row[:-1]) for row in rows]

    def _checked(
        self, rows: Iterable[Columns], crc: Callable[[Columns], int], table: str
    ) -> Iterator[Columns]:
        """Stored rows, each compared with the checksum in its last column."""
        for row in rows:
            try:
                right = crc(row[:-1]) == row[-1]
            except (TypeError, ValueError, AttributeError):
                right = False
            if not right:
                which = f"the row of item {row[0]}" if table == "items" else f"a row of {table}"
                raise self.damaged(f"{which} is not what was written")
            yield row

    def _item_rows(
        self, db: sqlite3.Connection, where: str, values: Sequence[Any] = ()
    ) -> Iterator[Columns]:
        rows = db.execute(f"SELECT {ITEM_COLUMNS} FROM items {where}", values)
        return self._checked(rows, item_crc, "items")

    def rows_of_ids(self, ids: Sequence[int]) -> dict[int, ItemRow]:
        """Rows of those ids that have one."""
        return {row.id: row for row in self._rows("id", ids)}

    def rows_of_keys(self, keys: Sequence[str]) -> dict[str, ItemRow]:
        """Rows of those keys that exist."""
        return {row.key: row for row in self._rows("key", [encode_text(key) for key in keys])}

    def _rows(self, column: str, values: Sequence[Any]) -> Iterator[ItemRow]:
        self.trust()
        with self._reading() as db:
            for start in range(0, len(values), _CHUNK):
                part = values[start : start + _CHUNK]
                where = f"WHERE {column} IN ({','.join('?' * len(part))})"
                yield from map(ItemRow.from_stored, self._item_rows(db, where, part))

    def rows_where(self, condition: str, values: Sequence[Any]) -> dict[int, Columns]:
        """Stored columns by id of the rows that match a condition, by ascending id."""
        self.trust()
        with self._reading() as db:
            rows = self._item_rows(db, f"WHERE {condition} ORDER BY id", values)
            return {row[0]: row for row in rows}

    def ids_where(self, condition: str, values: Sequence[Any]) -> list[int]:
        """Ids of the rows that match a condition, ascending."""
        self.trust()
        with self._reading() as db:
            query = f"SELECT id FROM items WHERE {condition} ORDER BY id"
            return [id_ for (id_,) in db.execute(query, values)]

    def files(self) -> dict[str, FileState]:
        """What is known about the file of every item with a key, by ascending id."""
        self.trust()
        with self._reading() as db:
            rows = db.execute("SELECT key, size, mtime_ns, id FROM items ORDER BY id").fetchall()
        return {decode_text(key): FileState(*columns) for key, *columns in rows}

    def notes(self, kind: str) -> dict[str, Any]:
        """The notes of a kind by name."""
        self.trust()
        while True:
            with self._reading() as db:
                if _version(db) > 1:
                    rows = self._note_rows(db, "WHERE kind = ?", (encode_text(kind),))
                    return {decode_text(name): json.loads(value) for _, name, value, _ in rows}
            old = read_old_notes(self.path.parent)
            # The first write deletes the files; then look again.
            if self.format() == 1:
                return old.get(kind, {})

    def _note_rows(
        self, db: sqlite3.Connection, where: str = "", values: Sequence[Any] = ()
    ) -> Iterator[Columns]:
        query = f"SELECT kind, name, value, crc FROM notes {where} ORDER BY kind, name"
        return self._checked(db.execute(query, values), lambda row: row_crc((), row), "notes")

    def metadata_fields(self) -> set[str]:
        """Names of metadata fields, from the first thousand distinct metadata."""
        with self._reading() as db:
            rows = db.execute("SELECT DISTINCT metadata FROM items LIMIT 1000").fetchall()
        return {name for (text,) in rows for name in json.loads(text)}

    def has_field(self, json_path: str) -> bool:
        """Whether any item's metadata has a field."""
        with self._reading() as db:
            query = "SELECT 1 FROM items WHERE json_type(metadata, ?) IS NOT NULL LIMIT 1"
            return db.execute(query, (json_path,)).fetchone() is not None

    def back_up(self, path: Path) -> None:
        """Copy the last commit, as one plain file, while others may write."""
        self._renew_copy()
        target = sqlite3.connect(path, isolation_level=None)
        with contextlib.closing(target):
            try:
                self._db.backup(target)
                target.execute("PRAGMA journal_mode = DELETE").fetchone()
            except sqlite3.Error as error:
                raise self._error(error) from error

    def close(self) -> None:
        """Release the file; again does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._finish()
        finally:
            self._file.release()
            if self._copy is not None:
                self._copy.cleanup()

    def _finish(self) -> None:
        self._db.close()


def connection(path: Path, mode: str) -> sqlite3.Connection:
    """A connection to SQLite that leaves transactions to its caller."""
    uri = f"{path.resolve().as_uri()}?mode={mode}"
    try:
        db = sqlite3.connect(
            uri, uri=True, timeout=WAIT_MS / 1000, isolation_level=None, check_same_thread=False
        )
        db.create_function("has_label", 2, has_label, deterministic=True)
    except sqlite3.Error as error:
        raise FisherhashError(f"{path} cannot be opened: {error}") from None
    return db


def is_busy(error: Exception) -> bool:
    """Whether another connection was in the way."""
    # Errors that Python itself raises, for text that is not UTF-8 for example, have no name.
    name = getattr(error, "sqlite_errorname", None) or ""
    return name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _version(db: sqlite3.Connection) -> int:
    return db.execute("PRAGMA user_version").fetchone()[0]
