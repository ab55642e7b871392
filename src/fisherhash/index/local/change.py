"""One commit of a local index: from a request to bytes on the disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from fisherhash.index.checks import NoteTexts, check_notes
from fisherhash.index.items import Codes, Ids
from fisherhash.index.local.catalogue_writer import CatalogueWriter
from fisherhash.index.local.format_1 import read_old_notes
from fisherhash.index.local.rows import ItemRow
from fisherhash.index.local.snapshot import Snapshot
from fisherhash.index.local.writing import Draft


class Change:
    """What a commit does, on top of the commit before it.

    Attributes:
        before: the commit before.
        state: the state after the commit.
        draft: its new bytes and file rows.
        upgrades: whether it is the first commit of today's format.
    """

    def __init__(
        self, catalogue: CatalogueWriter, before: Snapshot, folder: Path, bits: int
    ) -> None:
        self.before = before
        self.state = replace(before.state, commit=before.state.commit + 1)
        files = {segment.row.number: segment.row for segment in before.segments}
        self.draft = Draft(folder, bits, files, before.state.next_file, self.state.commit)
        self.upgrades = catalogue.format() == 1
        self._catalogue = catalogue
        self._rewritten = False
        self._touched = False

    def begin(self) -> None:
        """Start the commit; the first one of today's format takes over the notes of format 1."""
        self._catalogue.begin()
        if self.upgrades:
            self._catalogue.upgrade()
            self.write_notes(check_notes(read_old_notes(self.draft.folder)))
            self._touched = False

    def is_empty(self) -> bool:
        """Whether nothing was requested."""
        return not (self._touched or self.draft.changed or self._rewritten)

    def insert_rows(self, rows: Sequence[ItemRow]) -> None:
        """Add rows of new items."""
        self._count_rows(len(rows), self._catalogue.insert_rows(rows))

    def replace_rows(self, old: Sequence[ItemRow], new: Sequence[ItemRow]) -> None:
        """Replace rows of items."""
        self._count_rows(0, self._catalogue.replace_rows(new) - _sum(old))

    def _count_rows(self, number: int, total: int) -> None:
        state = self.state
        self._touched = True
        self.state = replace(
            state, rows=state.rows + number, rows_sum=(state.rows_sum + total) % 2**64
        )

    def write_notes(self, notes: NoteTexts) -> None:
        """Write and remove notes."""
        grown = self._catalogue.put_notes(notes)
        if grown is not None:
            state = self.state
            self._touched = True
            self.state = replace(
                state,
                notes=state.notes + grown[0],
                notes_sum=(state.notes_sum + grown[1]) % 2**64,
            )

    def append(self, codes: Codes) -> None:
        """Add codes of new items, with the next ids."""
        first = self.state.next_id
        self.draft.append("implied", first, codes, np.zeros(0, dtype=np.int64))
        self.state = replace(
            self.state, next_id=first + len(codes), live=self.state.live + len(codes)
        )

    def move(self, ids: Ids, codes: Codes) -> None:
        """Give existing items new codes."""
        self._mark(ids)
        self.draft.append("loose", 0, codes, ids)

    def remove(self, ids: Ids) -> None:
        """Remove items."""
        if not len(ids):
            return
        self._mark(ids)
        rows = list(self._catalogue.rows_of_ids(ids.tolist()).values())
        self._catalogue.delete_rows([row.id for row in rows])
        self._count_rows(-len(rows), -_sum(rows))
        self.state = replace(self.state, live=self.state.live - len(ids))

    def _mark(self, ids: Ids) -> None:
        which, places = self.before.locate(ids)
        for number in np.unique(which).tolist():
            self.draft.remove(self.before.segments[number], places[which == number])

    def rewrite(self, blocks: Iterable[tuple[Ids, Codes]]) -> None:
        """Replace all code files by new ones with these ids and codes."""
        self._rewritten = True
        self.draft.files.clear()
        # Ids without a gap need no file: the usual case, and new items can follow in the same file.
        ends = self.before.id_range()
        implied = ends is not None and ends[1] - ends[0] + 1 == self.state.live
        for ids, codes in blocks:
            self.draft.append("implied" if implied else "sorted", int(ids[0]), codes, ids)

    def finish(self) -> None:
        """Bring the bytes to the disk, then commit."""
        draft, catalogue = self.draft, self._catalogue
        draft.sync()
        rows = draft.files.values()
        changed = rows if self._rewritten else [row for row in rows if row.number in draft.changed]
        catalogue.put_files(changed, replace_all=self._rewritten)
        catalogue.put_removed(draft.removed)
        self.state = replace(
            self.state,
            next_file=draft.next_file,
            files=len(rows),
            files_sum=sum(row.crc() for row in rows) % 2**64,
        )
        catalogue.put_fact("state", asdict(self.state))
        catalogue.commit()


def _sum(rows: Sequence[ItemRow]) -> int:
    return sum(row.stored_columns()[-1] for row in rows)
