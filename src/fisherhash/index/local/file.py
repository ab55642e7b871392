"""The SQLite file of an index: its tables, and a connection that a stranger's file cannot misuse.

The file is in WAL mode and every commit waits for the disk. Its schema is compared with ours before
anything else is read, so that there are no views, triggers or computed columns, and a statement may
take only as many steps as the size of the file explains.

The file is never opened but through SQLite: closing any other handle to it would drop the locks
that SQLite holds for this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import stat
import time
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import CannotReadError, CannotWriteError, DamagedError
from fisherhash.index.local.schema import (
    APPLICATION,
    FORMAT,
    REMEDY,
    State,
    check_facts,
    expected_schema,
    schema_of,
)

WAIT_SECONDS = 30.0
"""How long a change waits for the changes of other processes."""
_BUSY_SECONDS = 0.2
_TICK = 20_000
_FEWEST_STEPS = 20_000_000
_STEPS_PER_BYTE = 16
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1 << 28,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 1_000_000,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 4,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
    sqlite3.SQLITE_LIMIT_ATTACHED: 1,
}
_CALLS = ("WRITE", "SHM", "FSYNC", "DIR_FSYNC", "TRUNCATE", "DELETE")
_NOT_WRITTEN = ("SQLITE_FULL", "SQLITE_READONLY", *(f"SQLITE_IOERR_{call}" for call in _CALLS))
_BAD_CONTENT = ("SQLITE_IOERR_SHORT_READ", "SQLITE_IOERR_DATA")
_NOT_READ = ("SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_NOMEM", "SQLITE_PROTOCOL")


class _Meter:
    """Ends statements that take more steps than the size of their file explains.

    It also lets Python handle signals while SQLite works.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.refill(0)

    def refill(self, values: int) -> None:
        """Allow the steps for the next statements, which compare with that many values."""
        size = 0
        for end in ("", "-wal"):
            with contextlib.suppress(OSError):
                size += os.stat(f"{self._path}{end}").st_size
        self.left = _FEWEST_STEPS + _STEPS_PER_BYTE * size * (1 + values)

    def suspend(self) -> None:
        """Allow any number of steps."""
        self.left = 1 << 62

    def tick(self) -> bool:
        """Called by SQLite every few steps; True ends the statement."""
        self.left -= _TICK
        return self.left < 0


class IndexFile:
    """A connection to the file of an index; with ``write``, it may be changed."""

    def __init__(self, path: Path, *, write: bool) -> None:
        self.path, self.write = path, write
        self._place = os.path.realpath(path)
        self._identity = _check_files(path, Path(self._place))
        folder = os.path.dirname(self._place)
        self.writable = os.access(self._place, os.W_OK) and os.access(folder, os.W_OK)
        if write and not self.writable:
            raise FisherhashError(
                f"{path} cannot be opened for writing: no permission to write it or its folder. "
                "Reading it may still work; to change it, get the permission or copy the file"
            )
        # A connection that may write clears up after the last one; queries only do not write.
        self.immutable = not self.writable and not _size(f"{self._place}-wal")
        mode = "rw" if self.writable else "ro&immutable=1" if self.immutable else "ro"
        self.meter = _Meter(path)
        with self.explained():
            self.db = sqlite3.connect(
                f"{Path(self._place).as_uri()}?mode={mode}",
                uri=True,
                timeout=_BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            # Also without close(): the log must not stay beside the file.
            self._closing = weakref.finalize(self, _close, self.db, os.getpid())
            try:
                self._prepare()
            except BaseException:
                self.close()
                raise

    def _prepare(self) -> None:
        db = self.db
        for name, most in _LIMITS.items():
            db.setlimit(name, most)
        if hasattr(db, "setconfig"):
            db.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)  # type: ignore[attr-defined]
        db.set_progress_handler(self.meter.tick, _TICK)
        db.text_factory = bytes
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
            db.execute(f"PRAGMA {pragma}")
        found = [
            db.execute(f"PRAGMA {n}").fetchone()[0] for n in ("application_id", "user_version")
        ]
        if found[0] != APPLICATION:
            raise UsageError(f"{self.path} is no index of fisherhash, but another file of SQLite")
        if found[1] != FORMAT:
            raise FisherhashError(
                f"{self.path} has the format {found[1]}, and this version of fisherhash reads "
                f"format {FORMAT}; update fisherhash, or make the index again with: fisherhash "
                "index sync"
            )
        found, expected = schema_of(db), expected_schema()
        if found != expected:
            names = ", ".join(sorted(row[1][:40] for row in found ^ expected)[:3])
            raise self.damaged(f"its tables are not those of an index ({names})")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA cache_size = -65536")
        if self.write:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute(f"PRAGMA journal_size_limit = {64 << 20}")
        else:
            db.execute("PRAGMA query_only = ON")

    def close(self) -> None:
        """Release the file; again does nothing."""
        self._closing()

    @property
    def is_open(self) -> bool:
        """Whether it was not closed."""
        return self._closing.alive

    def is_the_file(self) -> bool:
        """Whether the file is still the one that its path names."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def version(self) -> Any:
        """Something that differs after every commit of another connection."""
        if self.immutable:
            with contextlib.suppress(OSError):
                found = os.stat(self._place)
                return found.st_size, found.st_mtime_ns
        return self.db.execute("PRAGMA data_version").fetchone()[0]

    # Transactions

    def begin(self, *, write: bool = False) -> None:
        """Start a transaction; one that writes waits for its turn.

        Raises:
            FisherhashError: other processes kept on writing for too long.
        """
        self.rollback()
        self.meter.refill(0)
        end = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                self.db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                self.db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
            except sqlite3.OperationalError as error:
                self.rollback()
                if not _is_busy(error) or time.monotonic() > end:
                    raise
            else:
                break
        if write:
            self.meter.suspend()

    def rollback(self) -> None:
        """End a transaction, if there is one; nothing of it happened."""
        if self.db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self.db.execute("ROLLBACK")

    def commit(self) -> None:
        """End a transaction that writes; it is on the disk then."""
        try:
            self.db.execute("COMMIT")
        except sqlite3.Error as error:
            self.rollback()
            if not self._forget_log():
                raise CannotWriteError(
                    f"{self.path} cannot be written: {error}",
                    "check the disk, look whether the change is there",
                    "It is not known whether the last change was stored",
                ) from error
            raise

    def _forget_log(self) -> bool:
        """Empty the log: else a commit that did not reach the disk could count after a crash."""
        with contextlib.suppress(sqlite3.Error):
            return not self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        return False

    def meta(self) -> tuple[dict[str, Any], State]:
        """What the index is, and the state of the last commit.

        Raises:
            DamagedError: one of both is not what was written.
        """
        found = self.readable_meta()
        for name in ("index", "state"):
            if isinstance(found[name], str):
                raise self.damaged(f"the row {name!r} of its table meta {found[name]}")
        return found["index"], found["state"]

    def readable_meta(self) -> dict[str, Any]:
        """The rows of the table meta by name; a text says what is wrong with one."""
        found: dict[str, Any] = {"index": "is missing", "state": "is missing"}
        for name, value, crc in self.db.execute("SELECT name, value, crc FROM meta LIMIT 10"):
            name = name.decode(errors="replace") if isinstance(name, bytes) else ""
            try:
                if zlib.crc32(value, zlib.crc32(name.encode())) != crc:
                    raise ValueError("does not match its checksum")
                # A copy serves to repair.
                kind = State.read if name == "state" else check_facts
                found[name] = kind(json.loads(value))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                found[name] = f"is damaged: {error}"
        return found

    def put_meta(self, *, facts: dict[str, Any] | None = None, state: State | None = None) -> None:
        """Write what the index is, or the state, or both."""
        given: dict[str, Any] = {"index": facts, "index copy": facts}
        given["state"] = None if state is None else state._asdict()
        for name, value in given.items():
            if value is not None:
                text = json.dumps(value).encode()
                crc = zlib.crc32(text, zlib.crc32(name.encode()))
                row = (name, text.decode(), crc)
                self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", row)

    # Errors

    def damaged(self, what: str) -> DamagedError:
        """The error for something that is not what was written."""
        return DamagedError(f"{self.path} is damaged: {what}. {REMEDY}")

    def read_error(self) -> CannotReadError | None:
        """The error if the system cannot read all bytes of the file."""
        try:
            if self._identity not in _HANDLES:
                _HANDLES[self._identity] = os.open(self._place, os.O_RDONLY)
            handle = _HANDLES[self._identity]
            os.lseek(handle, 0, os.SEEK_SET)
            while os.read(handle, 1 << 24):
                pass
        except OSError as error:
            return CannotReadError(
                f"{self.path} cannot be read: {error.strerror or error}. Check the disk, then try "
                "again; what was written may still be whole"
            )
        return None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors of SQLite into errors that say what to do."""
        try:
            yield
        except (sqlite3.Error, MemoryError, OverflowError, UnicodeError) as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> BaseException:
        path, name = self.path, error_name(error)
        if _is_busy(error):
            return FisherhashError(
                f"{path} is being changed by another process, and did not become free within "
                f"{WAIT_SECONDS:.0f} s. Nothing was changed; try again when that one has finished"
            )
        if name == "SQLITE_INTERRUPT":
            if self.meter.left >= 0:
                # SQLite ends a statement when Python's signal handler raised, and hides the reason.
                return KeyboardInterrupt()
            return self.damaged("reading it takes more steps than its size explains")
        if name == "SQLITE_NOTADB":
            return UsageError(f"{path} is no index, or its first bytes are damaged: {error}")
        if not self.writable and name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
            return CannotReadError(
                f"{path} cannot be read: it or its folder cannot be written, and beside it is the "
                "log of a writer that did not end; copy it with the files beside it to a folder "
                "that can be written"
            )
        if name.startswith(_NOT_WRITTEN):
            return cannot_write(path, error)
        if isinstance(error, MemoryError):
            return CannotReadError(f"{path} cannot be read: there is not enough memory. Try again")
        if name.startswith(_NOT_READ) and not name.startswith(_BAD_CONTENT):
            return CannotReadError(
                f"{path} cannot be read: {error} ({name}). Check the disk and the permissions, "
                "then try again; what was written may still be whole"
            )
        if name.startswith(("SQLITE_CONSTRAINT", "SQLITE_TOOBIG", "SQLITE_MISUSE")):
            return FisherhashError(f"{path} refused a change: {error}. Nothing was changed")
        # SQLite calls it damage, too, if the system could not read.
        if name.startswith("SQLITE_CORRUPT") and (refused := self.read_error()):
            return refused
        return self.damaged(str(error))


def cannot_write(path: Path, error: Exception) -> CannotWriteError:
    """The error for a write that the system or SQLite refused."""
    reason = getattr(error, "strerror", None) or error
    if error_name(error).startswith(("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE")):
        return CannotWriteError(f"no room to write {path} ({reason})", "make room on the disk")
    return CannotWriteError(
        f"{path} cannot be written: {reason}", "check the disk and the permissions"
    )


def _close(db: sqlite3.Connection, process: int) -> None:
    if process != os.getpid():
        # A forked child: the file is its parent's, and SQLite must not tidy it up here.
        _INHERITED.append(db)
        return
    with contextlib.suppress(sqlite3.Error):
        db.close()


_INHERITED: list[sqlite3.Connection] = []
_HANDLES: dict[tuple[int, int], int] = {}
"""Handles to damaged files: they stay open, as closing one would drop the locks of SQLite."""


def error_name(error: Exception) -> str:
    """SQLite's name of an error; none for those that Python itself raises."""
    return getattr(error, "sqlite_errorname", None) or ""


def _is_busy(error: Exception) -> bool:
    return error_name(error).startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _check_files(path: Path, place: Path) -> tuple[int, int]:
    """Refuse what is no file of an index; returns which file it is."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; fisherhash index sync creates an index") from None
    except OSError as error:
        raise CannotReadError(f"{path} cannot be read: {error.strerror or error}") from None
    if stat.S_ISDIR(found.st_mode):
        if (path / "catalogue.sqlite").exists():
            raise UsageError(
                f"{path} is a folder, as an earlier version of fisherhash made it. An index is one "
                "file now: delete the folder, and make the index with fisherhash index sync again"
            )
        raise UsageError(f"{path} is a folder, and an index is a file")
    if not stat.S_ISREG(found.st_mode):
        raise CannotReadError(f"{path} cannot be read: it is not a regular file")
    for end in ("-wal", "-shm", "-journal"):
        beside = place.with_name(place.name + end)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(beside).st_mode):
                raise CannotReadError(f"{beside} is not a regular file; delete it")
            if end == "-journal":
                raise DamagedError(
                    f"{beside} is beside {path.name}, and no index has such a file: SQLite could "
                    "change or delete other files by it. Delete it if you trust the index"
                )
    return found.st_dev, found.st_ino
