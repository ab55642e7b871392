"""One commit of a local index: what it changes in memory, then one transaction of SQLite."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fisherhash.index.checks import NoteTexts, as_ids
from fisherhash.index.items import Codes, Ids
from fisherhash.index.local.blocks import PUT_BLOCK, SLOTS, Block, Snapshot, joined
from fisherhash.index.local.file import IndexFile
from fisherhash.index.local.rows import (
    PUT_ITEM,
    ItemRow,
    encode_text,
    key_hash,
    note_crc,
    text_bytes,
)


class Change:
    """What a commit does on top of the commit before it; it counts when the transaction ends.

    Args:
        file: inside a transaction that writes.
        before: the commit before.
    """

    def __init__(self, file: IndexFile, before: Snapshot) -> None:
        self._file, self.before, self._blocks = file, before, dict[int, Block]()
        self.state = before.state
        self._touched = False

    def _block(self, number: int) -> Block:
        return self._blocks.get(number) or self.before.block(number)

    def append(self, ids: Ids, codes: Codes, rows: Sequence[ItemRow] = ()) -> None:
        """Add items, whose ids ascend and are new; some of them have rows, in the same order."""
        named = as_ids([row.id for row in rows])
        hashes = np.array([key_hash(row.key) for row in rows], np.uint32)
        for number, _, here in by_block(ids):
            some = slice(*np.searchsorted(named, ids[here][[0, -1]] + [0, 1]).tolist())
            new = Block(ids[here], codes[here], named[some], hashes[some])
            old = self._block(number)
            self._blocks[number] = joined([old, new]) if len(old.ids) else new
        self.put_rows(rows)
        last = int(ids[-1]) + 1 if len(ids) else 0
        self._grow(next_id=max(self.state.next_id, last), live=self.state.live + len(ids))

    def put_rows(self, rows: Sequence[ItemRow]) -> None:
        """Write rows of items; an older row of the same item goes."""
        self._file.db.executemany(PUT_ITEM, [row.stored() for row in rows])
        self._touched |= bool(rows)

    def recode(self, ids: Ids, codes: Codes) -> None:
        """Give existing items new codes; their ids ascend."""
        for number, own, mine in by_block(ids):
            block = self._block(number)
            changed = block.codes.copy()
            changed[np.searchsorted(block.ids, own)] = codes[mine]
            self._blocks[number] = block._replace(codes=changed)

    def remove(self, ids: Ids) -> None:
        """Remove existing items; their ids ascend."""
        for number, own, _ in by_block(ids):
            block = self._block(number)
            stays, named = ~np.isin(block.ids, own), ~np.isin(block.named, own)
            parts = (block.ids[stays], block.codes[stays], block.named[named], block.hashes[named])
            self._blocks[number] = Block(*parts)
        rows = ids[self.before.have_rows(ids)]
        self._file.db.executemany("DELETE FROM items WHERE id = ?", [(i,) for i in rows.tolist()])
        self._grow(live=self.state.live - len(ids))

    def reserve(self, next_id: int) -> None:
        """Give no new item an id below this one."""
        self._touched |= next_id > self.state.next_id
        self._grow(next_id=max(self.state.next_id, next_id))

    def put_notes(self, notes: NoteTexts) -> None:
        """Write and remove notes."""
        totals = {kind: list(pair) for kind, pair in self.state.notes.items()}
        for (kind, name), text in notes.items():
            names = (encode_text(kind), encode_text(name))
            total = totals.setdefault(kind, [0, 0])
            found = self._file.db.execute(
                "SELECT crc FROM notes WHERE kind = ? AND name = ?", names
            ).fetchone()
            self._touched |= found is not None or text is not None
            for sign, crc in ((-1, found and found[0]), (1, _note_crc(names, text))):
                if crc is not None:
                    total[:] = [total[0] + sign, total[1] + sign * crc]
            if text is not None:
                row = (*names, text, _note_crc(names, text))
                self._file.db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?, ?, ?)", row)
            elif found:
                self._file.db.execute("DELETE FROM notes WHERE kind = ? AND name = ?", names)
        self._grow(notes={kind: pair for kind, pair in totals.items() if pair[0]})

    def _grow(self, **by: Any) -> None:
        self.state = self.state._replace(**by)

    def finish(self, facts: dict[str, Any] | None = None) -> Snapshot:
        """Write the blocks and the state; returns what the index is after the commit.

        Args:
            facts: what the index is, if that changes.
        """
        if not (self._touched or self._blocks or facts):
            return self.before
        commit, sums = self.state.commit + 1, dict(self.before.sums)
        blocks: dict[int, tuple[int, Block]] = {}
        for number, block in sorted(self._blocks.items()):
            columns = block.columns(number, commit)
            self._file.db.execute(PUT_BLOCK, columns)
            blocks[number], sums[number] = (columns[2], block), columns[2]
        self._grow(commit=commit, blocks=len(sums), blocks_sum=sum(sums.values()))
        self._file.put_meta(facts=facts, state=self.state)
        return self.before.after(self.state, blocks)


def by_block(ids: Ids) -> Iterator[tuple[int, Ids, slice]]:
    """The blocks of ascending ids, each with its ids and where they are."""
    numbers = ids // SLOTS
    cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(ids)]
    for start, end in itertools.pairwise(cuts if len(ids) else ()):
        yield int(numbers[start]), ids[start:end], slice(start, end)


def _note_crc(names: Sequence[str | bytes], text: str | None) -> int | None:
    if text is None:
        return None
    kind, name = map(text_bytes, names)
    return note_crc(kind, name, text.encode())
