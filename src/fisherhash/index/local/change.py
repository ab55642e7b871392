"""One commit of an embedded index, from what is asked for to what is on the disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from fisherhash.index.local.catalogue_writer import CatalogueWriter
from fisherhash.index.local.rows import Row
from fisherhash.index.local.snapshot import Codes, Ids, Snapshot, id_range
from fisherhash.index.local.writing import Draft


class Change:
    """What a commit does, on top of the commit before it.

    Attributes:
        before: the commit before.
        state: the state as it will be.
        draft: its new bytes and file rows.
    """

    def __init__(
        self, catalogue: CatalogueWriter, before: Snapshot, folder: Path, bits: int
    ) -> None:
        self.before = before
        self.state = replace(before.state, commit=before.state.commit + 1)
        files = {segment.row.number: segment.row for segment in before.segments}
        self.draft = Draft(folder, bits, files, before.state.next_file, self.state.commit)
        self._catalogue = catalogue
        self._rewritten = False
        self._touched = False

    def is_empty(self) -> bool:
        """Whether nothing was asked for."""
        return not (self._touched or self.draft.changed or self._rewritten)

    def insert_rows(self, rows: list[Row]) -> None:
        """Rows of new items."""
        total = self._catalogue.insert_rows(rows)
        self._count_rows(len(rows), total)

    def replace_rows(self, old: list[Row], new: list[Row]) -> None:
        """Other rows for the same items."""
        total = self._catalogue.replace_rows(new)
        self._count_rows(0, total - sum(row.crc() for row in old))

    def _count_rows(self, number: int, total: int) -> None:
        state = self.state
        self._touched = True
        self.state = replace(
            state, rows=state.rows + number, rows_sum=(state.rows_sum + total) % 2**64
        )

    def append(self, codes: Codes) -> None:
        """Codes of new items, with the next ids."""
        first = self.state.next_id
        self.draft.append("implied", first, codes, np.zeros(0, dtype=np.int64))
        self.state = replace(
            self.state, next_id=first + len(codes), live=self.state.live + len(codes)
        )

    def move(self, ids: Ids, codes: Codes) -> None:
        """New codes for items that are there."""
        self._mark(ids)
        self.draft.append("loose", 0, codes, ids)

    def remove(self, ids: Ids) -> None:
        """Take items away."""
        if not len(ids):
            return
        self._mark(ids)
        rows = list(self._catalogue.rows_of_ids(ids.tolist()).values())
        self._catalogue.delete_rows([row.id for row in rows])
        self._count_rows(-len(rows), -sum(row.crc() for row in rows))
        self.state = replace(self.state, live=self.state.live - len(ids))

    def _mark(self, ids: Ids) -> None:
        which, places = self.before.locate(ids)
        for number in np.unique(which).tolist():
            self.draft.remove(self.before.segments[number], places[which == number])

    def rewrite(self, blocks: Iterable[tuple[Ids, Codes]]) -> None:
        """All code files anew, with these ids and codes."""
        self._rewritten = True
        state, draft = self.state, self.draft
        draft.files.clear()
        # Ids without a gap need no file: the usual case, and then new items can follow.
        ends = id_range(self.before)
        implied = ends is not None and ends[1] - ends[0] + 1 == state.live
        for ids, codes in blocks:
            draft.append("implied" if implied else "sorted", int(ids[0]), codes, ids)

    def finish(self) -> None:
        """Bring the bytes to the disk, then commit."""
        draft, catalogue = self.draft, self._catalogue
        draft.sync()
        rows = draft.files.values()
        if self._rewritten:
            catalogue.put_files(rows, replace_all=True)
        else:
            catalogue.put_files(row for row in rows if row.number in draft.changed)
        catalogue.put_removed(draft.removed)
        self.state = replace(
            self.state,
            next_file=draft.next_file,
            files=len(rows),
            files_sum=sum(row.crc() for row in rows) % 2**64,
        )
        catalogue.put_state(self.state)
        catalogue.commit()
