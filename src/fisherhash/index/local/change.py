"""One commit of a local index: from a request to bytes on the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import FisherhashError
from fisherhash.index.checks import NoteTexts, as_ids, check_notes
from fisherhash.index.items import Codes, Ids
from fisherhash.index.local.catalogue import Columns
from fisherhash.index.local.catalogue_writer import CatalogueWriter
from fisherhash.index.local.code_files import (
    CODES_FOLDER,
    Appender,
    codes_name,
    copy_name,
    delete_files,
    ids_name,
)
from fisherhash.index.local.files import replace_inside
from fisherhash.index.local.format_1 import read_old_notes
from fisherhash.index.local.guards import cannot_write
from fisherhash.index.local.rows import ItemRow
from fisherhash.index.local.runs import RunsWriter
from fisherhash.index.local.schema import (
    DELETE_FILE,
    DELETE_ITEM,
    INSERT_ITEM,
    PLAIN_FORMAT,
    PUT_FACT,
    PUT_FILE,
    PUT_REMOVED,
    REMOVED_BLOCK,
    FileRow,
    RemovedRow,
    fact_columns,
)
from fisherhash.index.local.segments import Segment
from fisherhash.index.local.snapshot import Snapshot
from fisherhash.index.local.subsets import RECENT, note_commit
from fisherhash.system.storage import fsync_folder

MAX_LENGTH = 1 << 27
"""Codes in one file; a longer collection continues in the next one."""


class Change:
    """What a commit does, on top of the commit before it.

    It adds bytes to code files and rows to the catalogue; nothing counts before :meth:`finish`.

    Attributes:
        before: the commit before.
        state: the state after the commit.
        upgrades: whether it is the first commit after format 1.
    """

    def __init__(self, catalogue: CatalogueWriter, before: Snapshot, folder: Path) -> None:
        self.before = before
        self.state = before.state._replace(commit=before.state.commit + 1)
        self._format = catalogue.format()
        self.upgrades = self._format == 1
        self._catalogue = catalogue
        self._folder = folder
        self._files = {segment.row.number: segment.row for segment in before.segments}
        self._changed: set[int] = set()
        self._new: set[int] = set()
        self._removed: list[RemovedRow] = []
        self._appenders: dict[str, Appender] = {}
        self._dropped: set[int] = set()
        self._touched = False
        self._ids: list[Ids] = []

    def begin(self) -> None:
        """Start the commit; the first one of today's format takes over the notes of format 1.

        Raises:
            FisherhashError: another process has committed since :attr:`before`.
        """
        if self._catalogue.begin() != self.before.state:
            raise self._other_writer()
        if self._format < PLAIN_FORMAT:
            self._catalogue.upgrade(notes=self.upgrades)
        if self.upgrades:
            self.write_notes(check_notes(read_old_notes(self._folder)))
            self._touched = False

    def _other_writer(self) -> FisherhashError:
        return FisherhashError(
            f"{self._folder} was changed by another process while it was open for writing here. "
            "Nothing was changed; close it and open it again"
        )

    def is_empty(self) -> bool:
        """Whether nothing was requested."""
        return not (self._touched or self._changed or self._dropped)

    def _grow(self, **by: int) -> None:
        """Count what the commit adds; sums of checksums are modulo 2**64."""
        old = self.state._asdict()
        self.state = self.state._replace(**{n: (old[n] + more) % 2**64 for n, more in by.items()})

    # Rows

    def insert_rows(self, rows: Iterable[ItemRow]) -> None:
        """Add rows of items."""
        columns = [row.stored_columns() for row in rows]
        self._ids.append(as_ids([row[0] for row in columns]))
        self._catalogue.write(INSERT_ITEM, columns)
        self._grow(rows=len(columns), rows_sum=sum(row[-1] for row in columns))
        self._touched |= bool(columns)

    def delete_rows(self, rows: Collection[Columns]) -> None:
        """Delete stored rows of items."""
        if rows:
            self._ids.append(as_ids([row[0] for row in rows]))
            self._catalogue.write(DELETE_ITEM, [row[:1] for row in rows])
            self._grow(rows=-len(rows), rows_sum=-sum(row[-1] for row in rows))
            self._touched = True

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
        self._ids.append(ids)
        self._mark(ids)
        self._append("loose", 0, codes, ids)

    def load(self, ids: Ids, codes: Codes, rows: Iterable[ItemRow], next_id: int) -> None:
        """Add items with ids of their own, ascending and not below the next one."""
        for start in range(0, len(ids), MAX_LENGTH):
            part, some = ids[start : start + MAX_LENGTH], codes[start : start + MAX_LENGTH]
            runs = RunsWriter()
            runs.add(part)
            if runs.has_gaps():
                self.rewrite((), runs, [(part, some)])
            else:
                self._append("implied", int(part[0]), some, part)
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

    def rewrite(
        self, old: Sequence[Segment], runs: RunsWriter, blocks: Iterable[tuple[Ids, Codes]]
    ) -> None:
        """Replace code files by one file.

        Args:
            old: the files; items in loose files stay there unless they are moved.
            runs: the ids in the new file; without any, there is none.
            blocks: the same ids, with their codes.
        """
        for segment in old:
            self.drop(segment)
        row, width = None, self.before.form.width
        for ids, codes in blocks:
            if row is None:
                kind = "runs" if runs.has_gaps() else "implied"
                row = self._new_file(kind, runs.first_id)
            sums = self._write(codes_name(row.number), row.code_sums, row.length, codes)
            row = row._replace(length=row.length + len(ids), code_sums=sums)
        if row is not None:
            if row.kind == "runs":
                data = runs.encode()
                name = ids_name(row.number, "runs")
                sums = self._write(name, b"", 0, np.frombuffer(data, dtype=np.uint8))
                row = row._replace(id_sums=sums)
                room = sum(file.size for one in old for file, _ in one.files) - runs.count * width
                if not old or 2 * len(data) <= room:
                    # Only repair reads it; without it, less can be repaired.
                    with contextlib.suppress(OSError):
                        replace_inside(self._folder, copy_name(name), data)
            self._put_file(row)

    def drop(self, segment: Segment) -> None:
        """Forget a code file; what it holds was moved, or no longer counts."""
        self._dropped.add(segment.row.number)
        del self._files[segment.row.number]

    def mark(self, segment: Segment, positions: NDArray[np.int64]) -> None:
        """Mark positions of a file, in ascending order, as removed."""
        self._mark_places(segment, positions)

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
            name = codes_name(row.number)
            code_sums, id_sums = self._write(name, row.code_sums, row.length, some), b""
            if kind != "implied":
                some_ids = ids[done : done + len(some)].astype("<i8")
                id_sums = self._write(ids_name(row.number), row.id_sums, row.length, some_ids)
            done += len(some)
            length = row.length + len(some)
            self._put_file(row._replace(length=length, code_sums=code_sums, id_sums=id_sums))

    def _put_file(self, row: FileRow) -> None:
        self._files[row.number] = row
        self._changed.add(row.number)

    def _open_file(self, kind: str, first_id: int) -> FileRow:
        for row in self._files.values():
            follows = kind != "implied" or row.first_id + row.length == first_id
            if row.kind == kind and row.length < MAX_LENGTH and follows:
                return row
        return self._new_file(kind, first_id)

    def _new_file(self, kind: str, first_id: int) -> FileRow:
        row = FileRow(self.state.next_file, kind, first_id, 0)
        self._new.add(row.number)
        self._grow(next_file=1)
        return row

    def _write(self, name: str, sums: bytes, length: int, data: NDArray) -> bytes:
        """Add rows behind the committed ``length`` of a file; returns its new checksums."""
        with self._writing():
            if name not in self._appenders:
                size = length * data[:1].nbytes
                self._appenders[name] = Appender(self._folder, name, size, sums)
            self._appenders[name].write(data)
        return self._appenders[name].sums

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
                fsync_folder(self._folder / CODES_FOLDER)
        rows, catalogue = self._files.values(), self._catalogue
        for delete in DELETE_FILE if self._dropped else ():
            catalogue.write(delete, [(number,) for number in self._dropped])
        changed = [row for row in rows if row.number in self._changed]
        catalogue.write(PUT_FILE, [(*row, row.crc()) for row in changed])
        marks = [row for row in self._removed if row.file not in self._dropped]
        catalogue.write(PUT_REMOVED, [(*row, row.crc()) for row in marks])
        files_sum = sum(row.crc() for row in rows) % 2**64
        self.state = self.state._replace(files=len(rows), files_sum=files_sum)
        # Only ids of items with a key: no filter matches the others.
        ids = np.concatenate([as_ids([]), *self._ids])
        recent = note_commit(catalogue.recent(), self.state.commit, ids)
        facts = {"state": self.state._asdict(), RECENT: recent}
        catalogue.write(PUT_FACT, [fact_columns(*fact) for fact in facts.items()])
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
