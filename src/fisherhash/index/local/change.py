"""One commit of a local index: from a request to bytes on the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.checks import NoteTexts, check_notes
from fisherhash.index.items import Codes, Ids
from fisherhash.index.local.catalogue_writer import CatalogueWriter
from fisherhash.index.local.code_files import Appender, codes_path, delete_files, ids_path
from fisherhash.index.local.format_1 import read_old_notes
from fisherhash.index.local.guards import cannot_write, fsync_folder
from fisherhash.index.local.rows import ItemRow
from fisherhash.index.local.schema import REMOVED_BLOCK, FileRow, RemovedRow
from fisherhash.index.local.segments import Segment
from fisherhash.index.local.snapshot import Snapshot

MAX_LENGTH = 1 << 27
"""Codes in one file; a longer collection continues in the next one."""


class Change:
    """What a commit does, on top of the commit before it.

    It adds bytes to code files and rows to the catalogue; nothing counts before :meth:`finish`.

    Attributes:
        before: the commit before.
        state: the state after the commit.
        upgrades: whether it is the first commit of today's format.
    """

    def __init__(self, catalogue: CatalogueWriter, before: Snapshot, folder: Path) -> None:
        self.before = before
        self.state = before.state._replace(commit=before.state.commit + 1)
        self.upgrades = catalogue.format() == 1
        self._catalogue = catalogue
        self._folder = folder
        self._files = {segment.row.number: segment.row for segment in before.segments}
        self._changed: set[int] = set()
        self._new: set[int] = set()
        self._removed: list[RemovedRow] = []
        self._appenders: dict[Path, Appender] = {}
        self._rewritten = False
        self._touched = False

    def begin(self) -> None:
        """Start the commit; the first one of today's format takes over the notes of format 1."""
        self._catalogue.begin()
        if self.upgrades:
            self._catalogue.upgrade()
            self.write_notes(check_notes(read_old_notes(self._folder)))
            self._touched = False

    def is_empty(self) -> bool:
        """Whether nothing was requested."""
        return not (self._touched or self._changed or self._rewritten)

    def _grow(self, **by: int) -> None:
        """Count what the commit adds; sums of checksums are modulo 2**64."""
        old = self.state._asdict()
        self.state = self.state._replace(**{n: (old[n] + more) % 2**64 for n, more in by.items()})

    # Rows

    def insert_rows(self, rows: Iterable[ItemRow]) -> None:
        """Add rows of items."""
        columns = [row.stored_columns() for row in rows]
        self._catalogue.insert_rows(columns)
        self._grow(rows=len(columns), rows_sum=sum(row[-1] for row in columns))
        self._touched |= bool(columns)

    def delete_rows(self, rows: Collection[ItemRow]) -> None:
        """Delete rows of items."""
        self._catalogue.delete_rows(row.id for row in rows)
        self._grow(rows=-len(rows), rows_sum=-sum(row.stored_columns()[-1] for row in rows))
        self._touched |= bool(rows)

    def write_notes(self, notes: NoteTexts) -> None:
        """Write and remove notes."""
        grown = self._catalogue.put_notes(notes)
        if grown is not None:
            self._grow(notes=grown[0], notes_sum=grown[1])
            self._touched = True

    # Codes

    def append(self, codes: Codes) -> None:
        """Add codes of new items, with the next ids."""
        self._append("implied", self.state.next_id, codes, np.zeros(0, dtype=np.int64))
        self._grow(next_id=len(codes), live=len(codes))

    def move(self, ids: Ids, codes: Codes) -> None:
        """Give existing items new codes."""
        self._mark(ids)
        self._append("loose", 0, codes, ids)

    def load(self, ids: Ids, codes: Codes, rows: Iterable[ItemRow], next_id: int) -> None:
        """Add items with ids of their own, ascending and not below the next one."""
        if len(ids):
            gaps = ids[-1] - ids[0] + 1 != len(ids)
            self._append("sorted" if gaps else "implied", int(ids[0]), codes, ids)
        self.insert_rows(rows)
        self._grow(live=len(ids))
        next_id = max(self.state.next_id, next_id, *(ids[-1:] + 1).tolist())
        self._touched |= next_id > self.state.next_id
        self.state = self.state._replace(next_id=next_id)

    def remove(self, ids: Ids) -> None:
        """Remove items."""
        self._mark(ids)
        self.delete_rows(self._catalogue.rows_of_ids(ids.tolist()).values())
        self._grow(live=-len(ids))

    def rewrite(self, blocks: Iterable[tuple[Ids, Codes]]) -> None:
        """Replace all code files by new ones with these ids and codes."""
        self._rewritten = True
        self._files.clear()
        # Ids without a gap need no file: the usual case, and new items can follow in the same file.
        kind = "sorted" if self.before.has_gaps() else "implied"
        for ids, codes in blocks:
            self._append(kind, int(ids[0]), codes, ids)

    def _append(self, kind: str, first_id: int, codes: Codes, ids: Ids) -> None:
        """Add codes to the open file of a kind, or start the next file where that one is full.

        Args:
            kind: of the file, as in :class:`FileRow`.
            first_id: id of the first code, where ids are implied.
            codes: (n, bytes) codes.
            ids: their ids, where they are not implied.
        """
        done = 0
        while done < len(codes):
            row = self._open_file(kind, first_id + done)
            some = codes[done : done + MAX_LENGTH - row.length]
            path = codes_path(self._folder, row.number)
            code_sums, id_sums = self._write(path, row.code_sums, row.length, some), b""
            if kind != "implied":
                path = ids_path(self._folder, row.number)
                some_ids = ids[done : done + len(some)].astype("<i8")
                id_sums = self._write(path, row.id_sums, row.length, some_ids)
            done += len(some)
            length = row.length + len(some)
            self._put_file(row._replace(length=length, code_sums=code_sums, id_sums=id_sums))

    def _put_file(self, row: FileRow) -> None:
        self._files[row.number] = row
        self._changed.add(row.number)

    def _open_file(self, kind: str, first_id: int) -> FileRow:
        for row in self._files.values():
            # A file of ascending ids is finished with the commit that made it.
            unfinished = kind != "sorted" or row.number in self._new
            follows = kind != "implied" or row.first_id + row.length == first_id
            if row.kind == kind and row.length < MAX_LENGTH and unfinished and follows:
                return row
        row = FileRow(self.state.next_file, kind, first_id, 0)
        self._new.add(row.number)
        self._grow(next_file=1)
        return row

    def _write(self, path: Path, sums: bytes, length: int, data: NDArray) -> bytes:
        """Add rows behind the committed ``length`` of a file; returns its new checksums."""
        with self._writing():
            if path not in self._appenders:
                self._appenders[path] = Appender(path, length * data[:1].nbytes, sums)
            self._appenders[path].write(data)
        return self._appenders[path].sums

    def _mark(self, ids: Ids) -> None:
        """Mark the positions of ids, each of which occurs once, as removed."""
        which, places = self.before.locate(ids)
        for number in np.unique(which).tolist():
            self._mark_places(self.before.segments[number], np.sort(places[which == number]))

    def _mark_places(self, segment: Segment, positions: NDArray[np.int64]) -> None:
        number = segment.row.number
        blocks, starts = np.unique(positions // REMOVED_BLOCK, return_index=True)
        parts = np.split(positions % REMOVED_BLOCK, starts[1:])
        for block, inside in zip(blocks.tolist(), parts, strict=True):
            marks = np.zeros(REMOVED_BLOCK, dtype=bool)
            marks[inside] = True
            bits = np.packbits(marks, bitorder="little")
            if segment.removed is not None:
                old = segment.removed[block * len(bits) : (block + 1) * len(bits)]
                bits[: len(old)] |= old
            self._removed.append(RemovedRow(number, block, self.state.commit, bits.tobytes()))
        row = self._files[number]
        self._put_file(row._replace(removed=row.removed + len(positions)))

    # The end

    def finish(self) -> None:
        """Bring the bytes to the disk, then commit."""
        with self._writing():
            for appender in self._appenders.values():
                appender.sync()
            if self._new:
                fsync_folder(codes_path(self._folder, 0).parent)
        rows, catalogue = self._files.values(), self._catalogue
        if self._rewritten:
            catalogue.delete_files()
        catalogue.put_files([row for row in rows if row.number in self._changed], self._removed)
        files_sum = sum(row.crc() for row in rows) % 2**64
        self.state = self.state._replace(files=len(rows), files_sum=files_sum)
        catalogue.put_fact("state", self.state._asdict())
        catalogue.commit()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cannot_write(self._folder, error) from error

    def undo(self) -> None:
        """Delete what was written, as far as the disk allows; it does not count anyway."""
        for appender in self._appenders.values():
            with contextlib.suppress(OSError):
                appender.undo()
        self.close()
        delete_files(self._folder, self._new)

    def close(self) -> None:
        """Close the files."""
        for appender in self._appenders.values():
            appender.close()
        self._appenders.clear()
