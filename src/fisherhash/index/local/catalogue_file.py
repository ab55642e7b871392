"""The SQLite file of a local index: opened, proven by the sums of its bytes, copied, closed.

While a writer has the catalogue open, it is in SQLite's WAL mode, and readers are not blocked. At
rest it is one plain file, which can be read from a read-only medium.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fisherhash.errors import FisherhashError
from fisherhash.index.base import CannotReadError, DamagedError
from fisherhash.index.local.connect import (
    BESIDE,
    CACHE_KIB,
    check_schema,
    connection,
    damaged_catalogue,
    describe_error,
    is_busy,
)
from fisherhash.index.local.guards import SharedFile, Sums, cannot_read
from fisherhash.index.local.lock import is_held, is_unsettled
from fisherhash.index.local.schema import (
    CATALOGUE,
    SUMS,
)

logger = logging.getLogger(__name__)


class CatalogueFile:
    """An open catalogue as a file, without a meaning of its rows.

    Args:
        folder: the index.
        locked: the caller holds the writer's lock.

    Attributes:
        path: the SQLite file.
    """

    def __init__(self, folder: Path, *, locked: bool = False) -> None:
        self.path = folder / CATALOGUE
        self._locked = locked
        self._sums_path = folder / SUMS
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._copied: tuple[object, ...] = ()
        self._trusted = False
        self._closed = False
        # What began the transaction that is open, if it was a reading.
        self._transaction: object | None = None
        with contextlib.ExitStack() as failed:
            try:
                self._file = SharedFile(self.path)
            except OSError as error:
                raise cannot_read(self.path, error) from None
            failed.callback(self._file.release)
            self._db = self._connect()
            failed.callback(lambda: self._db.close())
            self._start()
            failed.pop_all()

    def _start(self) -> None:
        """Check what was opened."""
        raise NotImplementedError

    def _connect(self) -> sqlite3.Connection:
        db, self._meter = connection(self.path, "ro")
        try:
            check_schema(self.path, db)
            db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            return db
        except DamagedError:
            db.close()
            raise
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
        self._copy = tempfile.TemporaryDirectory(prefix="fisherhash-", ignore_cleanup_errors=True)
        target = Path(self._copy.name) / CATALOGUE
        try:
            _copy_blocks(self._file, target)
            for end in ("-wal", "-journal"):
                beside = self.path.with_name(CATALOGUE + end)
                with contextlib.suppress(FileNotFoundError):
                    file = SharedFile(beside)
                    try:
                        _copy_blocks(file, target.with_name(CATALOGUE + end))
                    finally:
                        file.release()
        except OSError as error:
            raise FisherhashError(f"{self.path} cannot be copied to be read: {error}") from None
        db, self._meter = connection(target, "rw")
        try:
            check_schema(self.path, db)
        except DamagedError:
            db.close()
            raise
        except (sqlite3.Error, UnicodeDecodeError) as error:
            db.close()
            raise self._error(error) from None
        return db

    def _signature(self) -> tuple[object, ...]:
        found = []
        for end in ("", "-wal", "-journal"):
            try:
                status = self.path.with_name(CATALOGUE + end).lstat()
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
            except OSError:
                found.append(None)
        return tuple(found)

    def _bytes_hold(self) -> bool:
        """Whether the bytes match the stored sums. A writer may be changing them."""
        for _ in range(20):
            sums, _wrong = Sums.read(self._sums_path)
            # The size first: a file that was made huge is not read.
            if (
                sums is not None
                and sums.size == self._file.size()
                and (sums.size, list(sums.blocks)) == self._file.sums()
            ):
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
        beside = (self.path.with_name(CATALOGUE + end) for end in BESIDE[:2])
        return any(path.exists() for path in beside) or is_unsettled(self.path.with_name("lock"))

    def noted_commit(self) -> int | None:
        """The commit that the bytes of the catalogue are proven to hold."""
        sums, _wrong = Sums.read(self._sums_path)
        return sums.commit if sums is not None and self._bytes_hold() else None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """One view of the catalogue for several statements; SQLite's errors become ours."""
        inside, own = self._db.in_transaction, object()
        try:
            if not inside:
                self._meter.refill()
                self._transaction = own
                self._db.execute("BEGIN")
            yield self._db
        except (sqlite3.Error, OverflowError, UnicodeDecodeError, MemoryError) as error:
            raise self._error(error) from error
        finally:
            # An interrupted call may come here as late as the garbage collector does, in the middle
            # of another transaction, which is not its own to end.
            if self._transaction is own and self._db.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("COMMIT")

    def heal(self) -> None:
        """End a transaction that an interrupted call left open; the caller is in no other."""
        self._transaction = None
        if self._db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    def _error(self, error: Exception) -> BaseException:
        found = describe_error(self.path, error, self._meter)
        return self._unreadable() or found if isinstance(found, DamagedError) else found

    def _unreadable(self) -> CannotReadError | None:
        """The error of a disk that fails; SQLite calls that damage."""
        try:
            for _ in self._file.blocks():
                pass
        except CannotReadError as error:
            return error
        return None

    def damaged(self, what: str) -> DamagedError:
        """The error for a catalogue that is not what was written."""
        return damaged_catalogue(self.path, what)

    def _renew_copy(self) -> None:
        if self._copy is not None and self._signature() != self._copied:
            self._reconnect()

    def _reconnect(self) -> None:
        self._db.close()
        if self._copy is not None:
            self._copy.cleanup()
            self._copy = None
        self._trusted = False
        self._db = self._connect()

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
        try:
            self._db.close()
        except sqlite3.Error as error:
            logger.warning("%s was not closed properly: %s", self.path, error)


def _copy_blocks(file: SharedFile, target: Path) -> None:
    with target.open("wb") as copy:
        for block in file.blocks():
            copy.write(block)
