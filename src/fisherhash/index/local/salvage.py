"""What verifies of a damaged catalogue: every row whose own checksum is right."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError, counted
from fisherhash.index.local.connect import connection
from fisherhash.index.local.files import NotAFileError, open_inside
from fisherhash.index.local.format_1 import read_old_notes
from fisherhash.index.local.guards import CommitMark
from fisherhash.index.local.raw_pages import PAGE, RawPages, Record
from fisherhash.index.local.rows import decode_text, item_crc, note_columns, row_crc
from fisherhash.index.local.schema import (
    CATALOGUE,
    ITEM_COLUMNS,
    FileRow,
    RemovedRow,
    State,
)
from fisherhash.index.local.spare import read_spare

_FACTS = ("index", "state", "recent")
"""Names in SQLite's index of the facts, which looks like that of the keys."""
_ITEM_WIDTH = len(ITEM_COLUMNS.split(","))


@dataclass
class Salvage:
    """Rows of a catalogue that verify.

    Attributes:
        facts: what the index is; None where that is lost.
        state: of the newest commit that was found.
        files: rows of code files by number.
        removed: removed bits by file and block.
        items: stored columns of items by id.
        notes: stored columns of notes by kind and name.
        keys: keys by id from SQLite's own index of keys, which has no checksum: good enough to
            name what is lost.
        remarks: sentences about what was damaged and what was done about it.
    """

    facts: dict[str, Any] | None = None
    state: State | None = None
    files: dict[int, FileRow] = field(default_factory=dict)
    removed: dict[tuple[int, int], RemovedRow] = field(default_factory=dict)
    items: dict[int, list[Any]] = field(default_factory=dict)
    notes: dict[tuple[Any, Any], tuple[Any, ...]] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    # What was found, compared with what the state says

    def commit(self) -> int:
        """The newest commit that was found."""
        return self.state.commit if self.state else 0

    def missing_rows(self) -> int:
        """How many rows of items are lost."""
        return max(0, self.state.rows - len(self.items)) if self.state else 0

    def missing_notes(self) -> int:
        """How many notes are lost."""
        return max(0, self.state.notes - len(self.notes)) if self.state else 0

    def knows_files(self) -> bool:
        """Whether the rows of code files are exactly those of the last commit."""
        sums = [row.crc() for row in self.files.values()]
        found = (len(sums), sum(sums) % 2**64)
        return self.state is not None and found == (self.state.files, self.state.files_sum)

    def is_exact(self) -> bool:
        """Whether the rows of items are exactly those of the last commit."""
        sums = [row[-1] for row in self.items.values()]
        found = (len(sums), sum(sums) % 2**64)
        return self.state is not None and found == (self.state.rows, self.state.rows_sum)


def salvage_catalogue(folder: Path) -> Salvage:
    """Read everything that verifies from the catalogue of an index, its log and its spare."""
    commit, _ = CommitMark(folder).read()
    found = _salvage(folder, whole_log=False)
    if commit is not None and (found.state is None or found.state.commit < commit):
        # What says that the log's last frames are committed is damaged, but ``head`` knows it.
        whole = _salvage(folder, whole_log=True)
        found = whole if whole.commit() > found.commit() or found.state is None else found
        if found.commit() < commit:
            found.remarks.append(
                f"commit {found.commit()} is the newest that was found, the last one was {commit}: "
                "the newest changes may be missing"
            )
    return found


def _salvage(folder: Path, *, whole_log: bool) -> Salvage:
    found, unsure, old = Salvage(), Salvage(), Salvage()
    with _catalogue(folder, found, whole_log=whole_log) as pages:
        if pages is not None:
            for record in pages.records("table"):
                _take_table_row(found, unsure, record)
            for record in pages.records("index"):
                _take_index_row(found, record)
            for record in pages.old_records():
                _take_table_row(old, old, record)
                _take_index_row(old, record)
            if pages.lost:
                found.remarks.append(f"{len(pages.lost):,} pages of {CATALOGUE} cannot be read")
            if pages.log_damaged:
                found.remarks.append(
                    f"{CATALOGUE}-wal is damaged in the middle; rows on the pages that it held may "
                    "be lost, or be those of an earlier commit"
                )
            _use_old(found, old)
    # Perhaps deleted ones, perhaps the only copies. The id of an item decides: it must have a code.
    if not found.is_exact():
        found.items = unsure.items | found.items
    if not found.knows_files():
        found.files = unsure.files | found.files
    if not found.files and old.files:
        # Codes verify with the checksums in these rows; what was added after them has none.
        found.files = old.files
        found.remarks.append(
            "the list of code files is that of an earlier commit: the newest changes may be "
            "missing, codes without a key among them"
        )
    _use_spare(folder, found)
    if not found.notes and found.state is not None and not found.state.notes:
        _use_old_notes(folder, found)
    return found


def _use_old(found: Salvage, old: Salvage) -> None:
    """Older versions of lost rows: for their keys, and as rows where the state proves them true."""
    found.facts = found.facts or old.facts
    older = {id_: row for id_, row in old.items.items() if id_ not in found.items}
    with_older = replace(found, items=found.items | older)
    if older and with_older.is_exact():
        found.items = with_older.items
    found.keys = old.keys | {i: decode_text(row[1]) for i, row in older.items()} | found.keys


def _take_table_row(found: Salvage, unsure: Salvage, record: Record) -> None:
    rowid, values = record.rowid, record.values
    if rowid is None:
        return
    if len(values) == 3:
        _take_fact(found, values)
        return
    try:
        if len(values) == _ITEM_WIDTH and item_crc((rowid, *values[1:-1])) == values[-1]:
            where = found if record.held else unsure
            where.items[rowid] = [rowid, *values[1:]]
            return
    except (TypeError, ValueError, AttributeError):
        pass
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        if len(values) == len(FileRow._fields) + 1:
            row = FileRow(rowid, *values[1:-1])
            where = (found if record.held else unsure).files
            old = where.get(row.number)
            if row.crc() == values[-1] and (old is None or _age(row) > _age(old)):
                where[row.number] = row


def _age(row: FileRow) -> tuple[int, int]:
    """Files only grow, and removed positions only become more."""
    return row.length, row.removed


def _take_fact(found: Salvage, values: list[Any]) -> None:
    name, text, crc = values
    if not isinstance(text, str) or zlib.crc32(text.encode()) != crc:
        return
    with contextlib.suppress(ValueError, TypeError):
        if name == "index":
            found.facts = json.loads(text)
        elif name == "state":
            state = State(**json.loads(text))
            if found.state is None or state.commit > found.state.commit:
                found.state = state


def _take_index_row(found: Salvage, record: Record) -> None:
    values = record.values
    if record.rowid is not None:
        return
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        if len(values) == 2 and isinstance(values[1], int) and values[0] not in _FACTS:
            found.keys[values[1]] = decode_text(values[0])
        elif len(values) == 4 and row_crc((), values[:-1]) == values[-1]:
            if record.held or (values[0], values[1]) not in found.notes:
                found.notes[values[0], values[1]] = tuple(values)
        elif len(values) == len(RemovedRow._fields) + 1:
            row = RemovedRow(*values[:-1])
            old = found.removed.get((row.file, row.block))
            if row.crc() == values[-1] and (old is None or row.changed > old.changed):
                found.removed[row.file, row.block] = row


def _use_spare(folder: Path, found: Salvage) -> None:
    """Fill in what is missing from the second copy of the small tables."""
    spare = read_spare(folder)
    if spare is None:
        return
    if found.facts is None:
        found.facts = spare.facts
        found.remarks.append("what the index is was taken from its spare copy")
    if found.state is None:
        found.state = spare.state
        found.remarks.append("the state of the last commit was taken from its spare copy")
    if not found.knows_files():
        more = {row.number: row for row in spare.files if row.number not in found.files}
        found.files |= more
        found.remarks.append(f"{counted(len(more), 'row')} of code files taken from the spare copy")
    for row in spare.removed:
        if row.file in found.files:
            found.removed.setdefault((row.file, row.block), row)


def _use_old_notes(folder: Path, found: Salvage) -> None:
    """Notes of format 1 lie beside the catalogue."""
    with contextlib.suppress(Exception):
        for kind, documents in read_old_notes(folder).items():
            for name, value in documents.items():
                row = note_columns(kind, name, json.dumps(value))
                found.notes[row[0], row[1]] = row


# The catalogue's bytes


@contextlib.contextmanager
def _catalogue(folder: Path, found: Salvage, *, whole_log: bool) -> Iterator[RawPages | None]:
    """The pages of the catalogue; the original is only ever read."""
    with contextlib.ExitStack() as stack:
        path = folder / CATALOGUE
        journal = folder / f"{CATALOGUE}-journal"
        if journal.is_file() and journal.stat().st_size:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fisherhash-")))
            path = _rolled_back(folder, place)
        try:
            pages = RawPages(path, whole_log)
        except OSError as error:
            found.remarks.append(f"{CATALOGUE} cannot be read: {error.strerror or error}")
            yield None
            return
        stack.callback(pages.close)
        yield pages


def _rolled_back(folder: Path, place: Path) -> Path:
    """A private copy without what a killed writer wrote in place: SQLite's journal knows it."""
    for end in ("", "-wal", "-journal"):
        copy_readable(folder / (CATALOGUE + end), place / (CATALOGUE + end))
    with contextlib.suppress(sqlite3.Error, FisherhashError):
        db, _ = connection(place / CATALOGUE, "rw")
        with contextlib.closing(db):
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return place / CATALOGUE


def copy_readable(source: Path, target: Path) -> str | None:
    """Copy a regular file, with zeros for what cannot be read; returns what was wrong with it."""
    try:
        fd = open_inside(source.parent, source.name, os.O_RDONLY)
    except FileNotFoundError:
        return "is missing"
    except NotAFileError:
        return "is not a regular file"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    wrong = None
    with open(fd, "rb", buffering=0) as file, target.open("wb") as out:
        try:
            shutil.copyfileobj(file, out, 1 << 20)
        except OSError as error:
            wrong = f"cannot be read in places: {error.strerror or error}"
            for offset in range(0, os.fstat(fd).st_size, PAGE):
                with contextlib.suppress(OSError):
                    data = os.pread(fd, PAGE, offset)
                    out.seek(offset)
                    out.write(data)
    return wrong
