"""Backup beside a writer: a consistent copy of an index, incremental to an earlier backup.

The catalogue is copied through SQLite at one commit. Committed bytes of code files never change, so
only those that the earlier backup lacks are copied, behind its own committed end, where they do not
count yet. When everything was checked, the new catalogue takes the place of the old one in one
step. Killed at any moment, the backup is a complete index: the earlier one or the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Index
from fisherhash.index.local.catalogue import Catalogue
from fisherhash.index.local.code_files import (
    CODES_FOLDER,
    codes_name,
    copy_name,
    delete_files,
    ids_name,
)
from fisherhash.index.local.files import list_inside, open_inside, replace_inside, write_all
from fisherhash.index.local.fine_sums import fine_name
from fisherhash.index.local.folder import MODEL_FOLDER, is_taken, must_be_index, open_catalogue
from fisherhash.index.local.guards import (
    SUM_BLOCK,
    CommitMark,
    Sums,
    cannot_read,
    cannot_write,
    crc_blocks,
)
from fisherhash.index.local.lock import WriterLock
from fisherhash.index.local.records import RecordForm
from fisherhash.index.local.schema import CATALOGUE, SUMS, FileRow, RemovedRow, State
from fisherhash.index.local.spare import Spare, save_spare
from fisherhash.index.local.table_files import TABLES_FOLDER, delete_tables
from fisherhash.system.progress import progress
from fisherhash.system.storage import draft_folder, fsync_file, fsync_folder

NOTE = "backup.json"
_DRAFT = ".backup.new"
_OLD_NOTES = ("folder.json", "skipped.csv")
_TRIES = 20

Advance = Callable[[int], None]


@dataclass(frozen=True)
class BackupReport:
    """What a backup did.

    Attributes:
        dest: the backup.
        commit: the commit that it holds.
        count: items in it.
        copied: bytes of code files that were copied.
        kept: bytes of code files that an earlier backup had already.
        incremental: whether there was an earlier one.
    """

    dest: str
    commit: int
    count: int
    copied: int
    kept: int
    incremental: bool

    def to_json(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        return asdict(self)


@dataclass(frozen=True)
class _Copy:
    """The copied catalogue of one commit.

    Attributes:
        folder: where it lies.
        facts: what the index is.
        state: the commit.
        files: its code files.
        removed: their removed bits.
    """

    folder: Path
    facts: dict[str, Any]
    state: State
    files: list[FileRow]
    removed: list[RemovedRow]

    def parts(self, source: _Source) -> Iterator[tuple[str, FileRow, int, bytes]]:
        """Name, row, committed size and checksums of every file of codes and ids."""
        width = RecordForm.from_facts(self.facts).width
        for row in self.files:
            yield codes_name(row.number), row, row.length * width, row.code_sums
            if row.kind == "implied":
                continue
            name, size = ids_name(row.number, row.kind), row.length * 8
            if row.kind == "runs":
                # Written once, so all of the file counts.
                with source.reading(name) as fd:
                    size = os.fstat(fd).st_size
            yield name, row, size, row.id_sums


class _FileGoneError(Exception):
    """A code file vanished: another process compacted the index."""


class _Source:
    """The code files of an index; those it has now stay readable, even if a writer deletes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[str, int] = {}
        for name in list_inside(folder, CODES_FOLDER):
            name = f"{CODES_FOLDER}/{name}"
            with contextlib.suppress(OSError):
                self._held[name] = open_inside(folder, name, os.O_RDONLY)

    def close(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[int]:
        """An open code file."""
        try:
            fd = open_inside(self.folder, name, os.O_RDONLY)
        except FileNotFoundError:
            if name not in self._held:
                raise _FileGoneError(self.folder / name) from None
            fd = os.dup(self._held[name])
        except OSError as error:
            raise cannot_read(self.folder / name, error) from None
        try:
            yield fd
        finally:
            os.close(fd)


def backup_index(source: str | os.PathLike[str], dest: str | os.PathLike[str]) -> BackupReport:
    """Copy a local index while it may be written, or bring an earlier copy up to date.

    Args:
        source: the index.
        dest: the backup: a folder that does not exist yet, or an earlier backup of this index.

    Raises:
        UsageError: there is no index, or ``dest`` is not an earlier backup of it.
        FisherhashError: something is damaged, or cannot be written; an earlier backup stays.
    """
    folder, place = Path(source), Path(dest)
    must_be_index(folder)
    if place.exists() and folder.resolve() == place.resolve():
        raise UsageError(f"{place} is the index itself; give another folder for its backup")
    for attempt in range(_TRIES):
        try:
            # Before the catalogue is copied: the files that it names are among them, or newer.
            with contextlib.closing(_Source(folder)) as files:
                return _update(files, place) if is_taken(place) else _create(files, place)
        except _FileGoneError as error:
            if attempt == _TRIES - 1:
                raise FisherhashError(
                    f"{error} is missing; check {source} with index verify"
                ) from None
        except OSError as error:
            raise cannot_write(place, error) from None
    raise FisherhashError(f"{source} changes too fast to be copied")


def _create(source: _Source, place: Path) -> BackupReport:
    folder = source.folder
    with draft_folder(place) as draft:
        for part in (CODES_FOLDER, TABLES_FOLDER):
            (draft / part).mkdir()
        copy = _copy_catalogue(folder, draft)
        copied = _copy_codes(source, draft, copy, {})
        _copy_rest(folder, draft)
        _finish(draft, copy)
        problems = Index.examine(draft)
        if problems:
            raise FisherhashError(f"the backup is not right, nothing was kept: {problems[0]}")
        for path in (draft / CODES_FOLDER, draft):
            fsync_folder(path)
    fsync_folder(place.resolve().parent)
    return BackupReport(str(place), copy.state.commit, copy.state.live, copied, 0, False)


def _update(source: _Source, place: Path) -> BackupReport:
    folder = source.folder
    noted = _read_note(place)
    if noted is None:
        raise UsageError(
            f"{place} exists and is not a backup of an index; give a folder that does not exist"
        )
    lock = WriterLock(place / "lock")
    try:
        old, files, _ = _settled(place, noted)
        draft = place / _DRAFT
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            copy = _copy_catalogue(folder, draft)
            have = _same_history(source, place, copy, old, files)
            copied = _copy_codes(source, place, copy, have)
            _copy_rest(folder, place)
            _swap(place, copy, old)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        lock.settle()
    finally:
        lock.release()
    kept = sum(have.values())
    return BackupReport(str(place), copy.state.commit, copy.state.live, copied, kept, True)


# The catalogue


def _copy_catalogue(folder: Path, to: Path) -> _Copy:
    """Copy the catalogue at its last commit, and check every row of the copy."""
    catalogue, _ = open_catalogue(folder, write=False)
    try:
        catalogue.back_up(to / CATALOGUE)
    finally:
        catalogue.close()
    fsync_file(to / CATALOGUE)
    copied = Catalogue(to, locked=True)
    try:
        copied.trust()
        return _Copy(to, copied.facts, *copied.load())
    finally:
        copied.close()


def _settled(place: Path, noted: list[list[int]]) -> tuple[State, list[FileRow], list[RemovedRow]]:
    """The state of an earlier backup that nobody has changed since."""
    catalogue = Catalogue(place, locked=True)
    try:
        state, files, removed = catalogue.load()
    finally:
        catalogue.close()
    left = any((place / (CATALOGUE + end)).exists() for end in ("-wal", "-journal"))
    if left or list(state) not in noted:
        raise UsageError(
            f"{place} was changed after it was made, and a backup would undo that; give a folder "
            "that does not exist"
        )
    return state, files, removed


def _same_history(
    source: _Source, place: Path, copy: _Copy, old: State, files: list[FileRow]
) -> dict[str, int]:
    """Bytes of each code file that the earlier backup has and the index still has."""
    before = {row.number: row for row in files}
    wrong = UsageError(
        f"{place} is a backup of another index, or of a state that {source.folder} never had; "
        "give a folder that does not exist"
    )
    if old.commit > copy.state.commit or old.next_id > copy.state.next_id:
        raise wrong
    have: dict[str, int] = {}
    for name, row, size, sums in copy.parts(source):
        known = before.get(row.number)
        if known is None:
            continue
        ids = name != codes_name(row.number)
        # A file of runs never grows.
        grows = not ids or row.kind != "runs"
        held = size // max(1, row.length) * known.length if grows else size
        noted = known.id_sums if ids else known.code_sums
        whole = held // SUM_BLOCK * 4
        if (known.kind, known.first_id) != (row.kind, row.first_id) or held > size:
            raise wrong
        if noted[:whole] != sums[:whole] or (
            held % SUM_BLOCK and _crc_of_end(source, name, held) != noted[whole : whole + 4]
        ):
            raise wrong
        have[name] = held
    return have


def _crc_of_end(source: _Source, name: str, size: int) -> bytes:
    """Checksum of the bytes of the last, unfinished block of a file of that size."""
    start = size // SUM_BLOCK * SUM_BLOCK
    with source.reading(name) as fd:
        crc = zlib.crc32(os.pread(fd, size - start, start))
    return np.array([crc], dtype="<u4").tobytes()


# The code files


def _copy_codes(files: _Source, to: Path, copy: _Copy, have: dict[str, int]) -> int:
    """Copy what is missing, check all of it, and return the number of copied bytes."""
    folder = files.folder
    total = sum(size for _, _, size, _ in copy.parts(files))
    copied = 0
    with progress(f"backup of {folder.name}", total) as advance:
        for name, _, size, sums in copy.parts(files):
            start = min(have.get(name, 0), size)
            advance(start)
            with files.reading(name) as source:
                copied += _copy_file(source, (folder, to), name, start, size, sums, advance)
            for beside in (fine_name(name), copy_name(name)):
                with (
                    contextlib.suppress(OSError, FisherhashError, _FileGoneError),
                    files.reading(beside) as fd,
                ):
                    replace_inside(to, beside, os.pread(fd, 1 << 30, 0))
    return copied


def _copy_file(
    source: int,
    folders: tuple[Path, Path],
    name: str,
    start: int,
    size: int,
    sums: bytes,
    advance: Advance,
) -> int:
    """Copy one file from the first folder, where it is open, to the second."""
    folder, to = folders
    fd = open_inside(to, name, os.O_RDWR | os.O_CREAT)
    copied = 0
    try:
        # Bytes that an interrupted backup left behind the committed end.
        os.ftruncate(fd, min(os.fstat(fd).st_size, start))
        for number, noted in enumerate(np.frombuffer(sums, dtype="<u4").tolist()):
            first, end = number * SUM_BLOCK, min((number + 1) * SUM_BLOCK, size)
            mine = os.pread(fd, end - first, first)
            if len(mine) == end - first and crc_blocks(memoryview(mine)) == [noted]:
                continue
            data = os.pread(source, end - first, first)
            if len(data) != end - first or zlib.crc32(data) != noted:
                raise FisherhashError(
                    f"{folder / name} is damaged: block {number} of {SUM_BLOCK} bytes is not what "
                    "was written. The backup stays as it was; repair the index first: index repair"
                )
            write_all(fd, data, first)
            copied += end - max(first, start) if end > start else end - first
            advance(max(0, end - max(first, start)))
        os.fsync(fd)
    finally:
        os.close(fd)
    return copied


def _copy_rest(folder: Path, to: Path) -> None:
    """The model, and the notes of format 1."""
    model = folder / MODEL_FOLDER
    names = [*_OLD_NOTES]
    if model.is_dir():
        (to / MODEL_FOLDER).mkdir(exist_ok=True)
        names += [f"{MODEL_FOLDER}/{path.name}" for path in sorted(model.iterdir())]
    for name in names:
        if (folder / name).is_file() and not (folder / name).is_symlink():
            data = (folder / name).read_bytes()
            if not (to / name).is_file() or (to / name).read_bytes() != data:
                replace_inside(to, name, data)


# The end


def _finish(place: Path, copy: _Copy) -> None:
    """Write what goes with the catalogue that is in place now."""
    data = (place / CATALOGUE).read_bytes()
    sums = Sums(copy.state.commit, len(data), tuple(crc_blocks(memoryview(data))))
    CommitMark(place).start(copy.state.commit)
    replace_inside(place, SUMS, sums.dump())
    save_spare(place, Spare(copy.facts, copy.state, copy.files, copy.removed))
    _write_note(place, copy.state)


def _swap(place: Path, copy: _Copy, old: State) -> None:
    _write_note(place, old, copy.state)
    fsync_folder(place / CODES_FOLDER)
    # The sums must not outlive the bytes that they describe.
    (place / SUMS).unlink(missing_ok=True)
    fsync_folder(place)
    os.replace(copy.folder / CATALOGUE, place / CATALOGUE)
    fsync_folder(place)
    _finish(place, copy)
    known = {row.number for row in copy.files}
    names = (path.name.partition(".")[0] for path in (place / CODES_FOLDER).iterdir())
    gone = {int(name) for name in names if name.isdecimal()} - known
    delete_files(place, gone)
    delete_tables(place, gone)


def _write_note(place: Path, *states: State) -> None:
    """Which states of this folder are backups: two while one takes the place of the other."""
    text = json.dumps({"backup": 1, "states": [list(state) for state in states]})
    replace_inside(place, NOTE, f"{text}\n".encode())


def _read_note(place: Path) -> list[list[int]] | None:
    try:
        states = json.loads((place / NOTE).read_bytes())["states"]
        return states if isinstance(states, list) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
