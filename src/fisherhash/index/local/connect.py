"""Connections to SQLite that a file from a stranger cannot turn against its reader.

The schema of a catalogue is compared with the one that fisherhash writes before anything is
queried, so that there are no views, triggers or computed columns. Statements may take only as many
steps as the size of the file explains. The files beside the catalogue must be regular ones, and a
journal must not name another file, because SQLite would delete that one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import stat
from pathlib import Path

from fisherhash.errors import FisherhashError
from fisherhash.index.base import CannotReadError, DamagedError
from fisherhash.index.local.files import not_a_file, open_inside
from fisherhash.index.local.guards import cannot_read, cannot_write
from fisherhash.index.local.schema import NOTES_SCHEMA, REMEDY, SCHEMA

WAIT_MS = 30_000
CACHE_KIB = 256 << 10
"""Pages that SQLite may keep in memory; with its own default it reads most rows again."""
BESIDE = ("-wal", "-journal", "-shm")

_TICK = 20_000
_FEWEST_STEPS = 5_000_000
_STEPS_PER_BYTE = 8
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
_LIMITS = {
    "SQLITE_LIMIT_LENGTH": 1 << 28,
    "SQLITE_LIMIT_SQL_LENGTH": 1_000_000,
    "SQLITE_LIMIT_COMPOUND_SELECT": 4,
    "SQLITE_LIMIT_TRIGGER_DEPTH": 1,
    "SQLITE_LIMIT_WORKER_THREADS": 0,
    "SQLITE_LIMIT_ATTACHED": 1,
}
_CONFIG = {
    "SQLITE_DBCONFIG_DEFENSIVE": True,
    "SQLITE_DBCONFIG_TRUSTED_SCHEMA": False,
    "SQLITE_DBCONFIG_ENABLE_TRIGGER": False,
    "SQLITE_DBCONFIG_ENABLE_VIEW": False,
    "SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION": False,
}
_NOT_WRITTEN = (
    "SQLITE_FULL",
    "SQLITE_IOERR_WRITE",
    "SQLITE_IOERR_SHM",
    "SQLITE_IOERR_FSYNC",
    "SQLITE_IOERR_DIR_FSYNC",
    "SQLITE_IOERR_TRUNCATE",
    "SQLITE_IOERR_DELETE",
    "SQLITE_READONLY",
)
_BAD_CONTENT = ("SQLITE_IOERR_SHORT_READ", "SQLITE_IOERR_CORRUPTFS", "SQLITE_IOERR_DATA")
_NOT_READ = ("SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_NOMEM", "SQLITE_PROTOCOL")


class Meter:
    """Ends statements that take more steps than the size of their file explains.

    It also lets Python handle signals while SQLite works.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = self._values = 0
        self.refill()

    def refill(self, values: int = 0) -> None:
        """Allow the steps for the next statements, each with at most ``values`` values."""
        self._left, self._values, self._sized = _FEWEST_STEPS, values, False

    def suspend(self) -> None:
        """Allow any number of steps, until the next refill: for changes, which are our own."""
        self._left = 1 << 62

    @property
    def is_empty(self) -> bool:
        """Whether the steps were used up."""
        return self._left < 0

    def tick(self) -> bool:
        """Called by SQLite every few steps; True ends the statement."""
        self._left -= _TICK
        if self._left < 0 and not self._sized:
            # Only now, because most statements are short.
            size = 0
            for end in ("", "-wal"):
                with contextlib.suppress(OSError):
                    size += os.stat(f"{self._path}{end}").st_size
            self._left += _STEPS_PER_BYTE * size * (1 + self._values)
            self._sized = True
        return self._left < 0


def connection(path: Path, mode: str) -> tuple[sqlite3.Connection, Meter]:
    """A connection to SQLite that leaves transactions to its caller.

    Args:
        path: the catalogue.
        mode: ``ro`` or ``rw``.
    """
    _check_files(path)
    uri = f"{Path(os.path.abspath(path)).as_uri()}?mode={mode}"
    try:
        db = sqlite3.connect(
            uri, uri=True, timeout=WAIT_MS / 1000, isolation_level=None, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise FisherhashError(f"{path} cannot be opened: {error}") from None
    try:
        meter = Meter(path)
        db.set_progress_handler(meter.tick, _TICK)
        for name, most in _LIMITS.items():
            db.setlimit(getattr(sqlite3, name), most)
        if hasattr(db, "setconfig"):
            for name, on in _CONFIG.items():
                db.setconfig(getattr(sqlite3, name), on)  # type: ignore[attr-defined]
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
            db.execute(f"PRAGMA {pragma}")
    except BaseException:
        db.close()
        raise
    return db, meter


def _check_files(path: Path) -> None:
    """Refuse links, pipes and devices, and a journal that names another file."""
    for end in ("", *BESIDE):
        one = path.with_name(path.name + end)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(one, follow_symlinks=False).st_mode):
                raise cannot_read(one, not_a_file(one, "no regular file"))
    journal = f"{path.name}-journal"
    try:
        fd = open_inside(path.parent, journal, os.O_RDONLY)
    except OSError:
        return
    with open(fd, "rb") as file:
        size = os.fstat(fd).st_size
        file.seek(max(0, size - len(_SUPER_JOURNAL)))
        if file.read() == _SUPER_JOURNAL:
            raise DamagedError(
                f"{path.parent / journal} names another file, as no journal of an index does. "
                "Do not open this folder with SQLite: it could delete that file. Delete the "
                "journal if you trust the rest of the index, or restore the index from a copy"
            )


@functools.cache
def _expected(*, notes: bool) -> frozenset[tuple[str, ...]]:
    db = sqlite3.connect(":memory:")
    db.executescript(SCHEMA if notes else SCHEMA.replace(NOTES_SCHEMA, ""))
    try:
        return _schema(db)
    finally:
        db.close()


def _schema(db: sqlite3.Connection) -> frozenset[tuple[str, ...]]:
    rows = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT 100")
    return frozenset(tuple(" ".join(str(part).split()) for part in row) for row in rows)


def check_schema(path: Path, db: sqlite3.Connection) -> None:
    """Refuse a catalogue that holds anything but the tables that fisherhash makes.

    Raises:
        DamagedError: it does; nothing of it was evaluated.
    """
    found = _schema(db)
    if found in (_expected(notes=True), _expected(notes=False)):
        return
    strange = sorted(found - _expected(notes=True)) or sorted(_expected(notes=False) - found)
    names = ", ".join(f"{row[0]} {row[1][:40]!r}" for row in strange[:3])
    raise DamagedError(
        f"{path} is damaged: its tables are not those of an index ({names}). {REMEDY}"
    )


def is_busy(error: Exception) -> bool:
    """Whether another connection was in the way."""
    return error_name(error).startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def error_name(error: Exception) -> str:
    """SQLite's name of an error; none for those that Python itself raises."""
    return getattr(error, "sqlite_errorname", None) or ""


def describe_error(path: Path, error: Exception, meter: Meter | None = None) -> BaseException:
    """What an error of SQLite means for the user: damaged, unreadable just now, full or misused."""
    name = error_name(error)
    if is_busy(error):
        return FisherhashError(f"{path} is locked by another program for too long; try again")
    if name == "SQLITE_INTERRUPT":
        if meter is None or not meter.is_empty:
            # SQLite ends a statement when Python's signal handler raised, and hides the reason.
            return KeyboardInterrupt()
        return damaged_catalogue(path, "reading it takes more steps than its size explains")
    if name.startswith(_NOT_WRITTEN):
        return cannot_write(path.parent, error)
    if isinstance(error, MemoryError):
        return CannotReadError(f"{path} cannot be read: there is not enough memory. Try again")
    if name.startswith(_NOT_READ) and not name.startswith(_BAD_CONTENT):
        return CannotReadError(
            f"{path} cannot be read: {error} ({name}). Check the disk and the permissions, then "
            "try again; what was written may still be whole"
        )
    if name.startswith(("SQLITE_CONSTRAINT", "SQLITE_TOOBIG", "SQLITE_MISUSE")):
        return FisherhashError(
            f"{path} refused a change: {error}. Nothing was changed. Another program may have "
            "written to the index: close it and open it again"
        )
    if isinstance(error, UnicodeDecodeError):
        # Python cannot decode SQLite's message about a damaged name.
        return damaged_catalogue(path, "a name in it is not UTF-8")
    return damaged_catalogue(path, str(error))


def damaged_catalogue(path: Path, what: str) -> DamagedError:
    """The error for a catalogue that is not what was written."""
    if what.startswith(str(path)):
        return DamagedError(what)
    return DamagedError(f"{path} is damaged: {what}. {REMEDY}")
