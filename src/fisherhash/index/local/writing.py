"""New bytes and new rows of code files that one commit adds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import code_bytes
from fisherhash.index.items import Codes, Ids
from fisherhash.index.local.code_files import Appender, codes_path, delete_files, ids_path
from fisherhash.index.local.guards import cannot_write, fsync_folder
from fisherhash.index.local.schema import REMOVED_BLOCK, FileRow, RemovedRow
from fisherhash.index.local.segments import Segment

MAX_LENGTH = 1 << 27
"""Codes in one file; a longer collection continues in the next one."""


@dataclass
class Draft:
    """New bytes and new rows of code files; nothing counts before the catalogue's commit.

    Attributes:
        folder: the index.
        bits: length of a code.
        files: rows of the files as they will be committed.
        next_file: number of the next new file.
        commit: number of the commit that is being made.
    """

    folder: Path
    bits: int
    files: dict[int, FileRow]
    next_file: int
    commit: int
    changed: set[int] = field(default_factory=set)
    removed: list[RemovedRow] = field(default_factory=list)
    _appenders: dict[int, tuple[Appender, Appender | None]] = field(default_factory=dict)
    _new: set[int] = field(default_factory=set)

    def append(self, kind: str, first_id: int, codes: Codes, ids: Ids) -> None:
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
            part = slice(done, done + min(len(codes) - done, MAX_LENGTH - row.length))
            with self._writing():
                code_file, id_file = self._appender(row)
                code_file.write(codes[part])
                if id_file is not None:
                    id_file.write(ids[part].astype("<i8"))
            done = part.stop
            self.files[row.number] = replace(
                row,
                length=row.length + part.stop - part.start,
                code_sums=code_file.sums,
                id_sums=b"" if id_file is None else id_file.sums,
            )
            self.changed.add(row.number)

    def _open_file(self, kind: str, first_id: int) -> FileRow:
        for row in self.files.values():
            if row.kind != kind or row.length >= MAX_LENGTH:
                continue
            # A file of ascending ids is finished with the commit that made it.
            if kind == "sorted" and row.number not in self._new:
                continue
            if kind != "implied" or row.first_id + row.length == first_id:
                return row
        row = FileRow(self.next_file, kind, first_id, 0)
        self.files[row.number] = row
        self._new.add(row.number)
        self.next_file += 1
        return row

    def _appender(self, row: FileRow) -> tuple[Appender, Appender | None]:
        pair = self._appenders.get(row.number)
        if pair is None:
            size = row.length * code_bytes(self.bits)
            code_file = Appender(codes_path(self.folder, row.number), size, row.code_sums)
            # Stored at once, so that an error in what follows finds it.
            self._appenders[row.number] = pair = (code_file, None)
            if row.kind != "implied":
                path = ids_path(self.folder, row.number)
                pair = (code_file, Appender(path, row.length * 8, row.id_sums))
                self._appenders[row.number] = pair
        return pair

    def remove(self, segment: Segment, positions: NDArray[np.int64]) -> None:
        """Mark positions of a file as removed; each must count until now and occur once."""
        if not len(positions):
            return
        number = segment.row.number
        positions = np.sort(positions)
        blocks, starts = np.unique(positions // REMOVED_BLOCK, return_index=True)
        parts = np.split(positions % REMOVED_BLOCK, starts[1:])
        for block, inside in zip(blocks.tolist(), parts, strict=True):
            marks = np.zeros(REMOVED_BLOCK, dtype=bool)
            marks[inside] = True
            bits = np.packbits(marks, bitorder="little")
            if segment.removed is not None:
                old = segment.removed[block * len(bits) : (block + 1) * len(bits)]
                bits[: len(old)] |= old
            self.removed.append(RemovedRow(number, block, self.commit, bits.tobytes()))
        row = self.files[number]
        self.files[number] = replace(row, removed=row.removed + len(positions))
        self.changed.add(number)

    def sync(self) -> None:
        """Wait until all new bytes are on the disk."""
        with self._writing():
            for appender in self._each():
                appender.sync()
            if self._new:
                fsync_folder(codes_path(self.folder, 0).parent)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def undo(self) -> None:
        """Delete what was written, as far as the disk allows; it does not count anyway."""
        for appender in self._each():
            with contextlib.suppress(OSError):
                appender.undo()
        self.close()
        for number in self._new:
            delete_files(self.folder, [number])

    def close(self) -> None:
        """Close the files."""
        for appender in self._each():
            appender.close()
        self._appenders.clear()

    def _each(self) -> Iterable[Appender]:
        return [one for pair in self._appenders.values() for one in pair if one is not None]
