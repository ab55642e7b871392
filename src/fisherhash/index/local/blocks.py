"""Blocks of codes: how they are stored, and all of them in memory as one commit left them.

Ids are given in order, so the block of an item is ``id // 4096``. A block holds the codes of its
items by ascending id, one bit per slot that says which ids exist and one that says which of them
have a row in ``items``, and a hash of each key. So a block proves what is in the index: a row or a
key that SQLite does not find is either known not to exist, or missing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import code_bytes
from fisherhash.index.checks import as_ids
from fisherhash.index.engine import Engine
from fisherhash.index.items import Codes, Ids
from fisherhash.index.local.file import IndexFile
from fisherhash.index.local.schema import State

SLOTS = 4096
"""Ids per block."""
MOST_IDS = 1 << 60
SELECT_BLOCKS = "SELECT block, changed, crc, present, named, hashes, codes FROM blocks"
PUT_BLOCK = "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?)"
_ALL = b"\xff" * (SLOTS // 8)
_FEW = 8


class Block(NamedTuple):
    """What a block holds.

    Attributes:
        ids: of its items, ascending.
        codes: (n, bytes) their codes.
        named: those ids that have a row, and so a key.
        hashes: of their keys.
    """

    ids: Ids
    codes: Codes
    named: Ids
    hashes: NDArray[np.uint32]

    def columns(self, number: int, commit: int) -> tuple[Any, ...]:
        """The block as it is stored."""
        first = number * SLOTS
        bits = [_bitmap(self.ids - first), _bitmap(self.named - first)]
        data = (*bits, self.hashes.astype("<u4").tobytes(), self.codes.tobytes())
        return number, commit, _crc(number, commit, data), *data


def joined(blocks: Iterable[Block]) -> Block:
    """Several blocks, by ascending ids, as one."""
    parts: Any = (np.concatenate(column) for column in zip(*blocks, strict=True))
    return Block(*parts)


def read_block(columns: Sequence[Any], width: int) -> Block:
    """A block from its columns, for codes of ``width`` bytes.

    Raises:
        ValueError: it is not what was written; the message says what is wrong.
    """
    number, changed, crc, *data = columns
    if not all(isinstance(cell, bytes) for cell in data) or crc != _crc(number, changed, data):
        raise ValueError("does not match its checksum")
    present, named = (_slots(bits) for bits in data[:2])
    sizes = (SLOTS // 8, SLOTS // 8, len(named) * 4, len(present) * width)
    fits = tuple(map(len, data)) == sizes and 0 <= number < MOST_IDS // SLOTS
    if not fits or int.from_bytes(data[1]) & ~int.from_bytes(data[0]):
        raise ValueError("is none that fisherhash writes")
    first = number * SLOTS
    codes = np.frombuffer(data[3], np.uint8).reshape(len(present), width)
    return Block(present + first, codes, named + first, np.frombuffer(data[2], "<u4"))


def block_name(number: int) -> str:
    """How messages call a block."""
    return f"block {number} of its codes (ids {number * SLOTS} to {(number + 1) * SLOTS - 1})"


def load_blocks(file: IndexFile, bits: int, since: int = -1) -> dict[int, tuple[int, Block]]:
    """The blocks that changed after a commit, by number, with their checksums.

    Raises:
        DamagedError: a block is not what was written.
    """
    found, width = {}, code_bytes(bits)
    which = f"WHERE changed > {since}" if since >= 0 else "ORDER BY block"
    for row in file.db.execute(f"{SELECT_BLOCKS} {which}"):
        try:
            found[row[0]] = (row[2], read_block(row, width))
        except ValueError as error:
            raise file.damaged(f"{block_name(row[0])} {error}") from None
    return found


def _slots(bits: bytes) -> Ids:
    if bits == _ALL:
        return np.arange(SLOTS)
    return np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8)))


def _bitmap(slots: Ids) -> bytes:
    marks = np.zeros(SLOTS, dtype=bool)
    marks[slots] = True
    return np.packbits(marks).tobytes()


def _crc(number: int, changed: int, data: Sequence[bytes]) -> int:
    crc = zlib.crc32(f"{number} {changed} ".encode())
    for part in data:
        crc = zlib.crc32(part, crc)
    return crc


class _Growing:
    """An array that grows at its end; parts of it that were returned stay as they are."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._data, self._used = array, len(array)

    def extended(self, length: int, more: NDArray[Any]) -> NDArray[Any]:
        """The first ``length`` rows, then those of ``more``."""
        end = length + len(more)
        if not length:
            self._data, self._used = more, end
            return more
        if length != self._used or end > len(self._data):
            data = np.empty((end + end // 4 + SLOTS, *more.shape[1:]), dtype=more.dtype)
            data[:length] = self._data[:length]
            self._data = data
        self._data[length:end] = more
        self._used = end
        return self._data[:end]


class Snapshot:
    """All blocks as one commit left them; it never changes.

    Attributes:
        state: the state after the commit.
        unavailable: items that were left out because they are damaged.
        whole: the ids, codes, ids with a row and hashes of all blocks.
        filters: the ids that match the last few filters, by the text of the filter.
    """

    def __init__(self, bits: int, state: State, blocks: Mapping[int, tuple[int, Block]]) -> None:
        codes = np.zeros((0, code_bytes(bits)), np.uint8)
        self.bits, self.state, self.unavailable = bits, state, 0
        self.numbers, self.sums = sorted(blocks), {n: crc for n, (crc, _) in blocks.items()}
        empty = Block(as_ids(()), codes, as_ids(()), np.zeros(0, np.uint32))
        parts = [empty, *(blocks[n][1] for n in self.numbers)]
        self.whole = joined(parts)
        self._growing = [_Growing(array) for array in self.whole]
        self._start()

    def _start(self) -> None:
        self.filters: dict[str, Ids] = {}
        self._engine: Engine | None = None

    def engine(self) -> Engine:
        """An engine over all codes."""
        if self._engine is None:
            self._engine = Engine(self.whole.codes, self.bits)
        return self._engine

    def is_complete(self) -> bool:
        """Whether these are the blocks that the commit left, none more and none less."""
        state, ids = self.state, self.whole.ids
        found = (len(self.sums), sum(self.sums.values()), len(ids))
        given = not len(ids) or ids[-1] < state.next_id
        return found == (state.blocks, state.blocks_sum, state.live) and bool(given)

    def block(self, number: int) -> Block:
        """What a block holds; one that is not stored is empty."""
        return self._part(number, number + 1)

    def _part(self, start: int, end: int) -> Block:
        bounds = (start * SLOTS, end * SLOTS)
        ids = slice(*np.searchsorted(self.whole.ids, bounds).tolist())
        named = slice(*np.searchsorted(self.whole.named, bounds).tolist())
        whole = self.whole
        return Block(whole.ids[ids], whole.codes[ids], whole.named[named], whole.hashes[named])

    def after(self, state: State, blocks: Mapping[int, tuple[int, Block]]) -> Snapshot:
        """The snapshot of a later commit, which changed some blocks."""
        new = Snapshot.__new__(Snapshot)
        new.bits, new.state, new.unavailable = self.bits, state, 0
        new.sums = self.sums | {number: crc for number, (crc, _) in blocks.items()}
        new.numbers = sorted(new.sums) if len(new.sums) > len(self.sums) else self.numbers
        new.whole, new._growing = self.whole, self._growing
        new._start()
        if not blocks:
            new._engine = self._engine
        elif more := self._appended(blocks):
            pairs: Any = zip(self._growing, self.whole, more, strict=True)
            new.whole = Block(*(g.extended(len(old), tail) for g, old, tail in pairs))
        else:
            new.whole = joined(self._merged(blocks))
            new._growing = [_Growing(array) for array in new.whole]
        return new

    def _appended(self, blocks: Mapping[int, tuple[int, Block]]) -> Block | None:
        """What blocks add behind everything else, if that is all that they do."""
        last = self.numbers[-1] if self.numbers else -1
        if min(blocks) < last:
            return None
        parts = [blocks[number][1] for number in sorted(blocks)]
        if last in blocks:
            old = self.block(last)
            for before, now in zip(old, parts[0], strict=True):
                if not np.array_equal(before, now[: len(before)]):
                    return None
            tails: Any = (now[len(b) :] for b, now in zip(old, parts[0], strict=True))
            parts[0] = Block(*tails)
        return joined(parts)

    def _merged(self, blocks: Mapping[int, tuple[int, Block]]) -> Iterator[Block]:
        """All blocks, in runs of those that stay and one by one where they changed."""
        place = 0
        for number in sorted(blocks):
            yield self._part(place, number)
            yield blocks[number][1]
            place = number + 1
        yield self._part(place, 1 << 50)

    # Lookups

    def positions(self, ids: Ids) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Which ids exist, and the positions of those."""
        return _found(self.whole.ids, ids)

    def have_rows(self, ids: Ids) -> NDArray[np.bool_]:
        """Which ids have a row."""
        return _found(self.whole.named, ids)[0]

    def candidates(self, keys: Sequence[int]) -> Ids:
        """Ids of the items whose keys have one of these hashes, ascending."""
        hashes = self.whole.hashes
        if len(keys) <= _FEW:
            found = [np.flatnonzero(hashes == np.uint32(key)) for key in keys]
            return self.whole.named[np.unique(np.concatenate([as_ids(()), *found]))]
        wanted = np.array(keys, np.uint32)
        # Most of the others differ in their last bits already.
        near = np.zeros(1 << 16, dtype=bool)
        near[wanted & 0xFFFF] = True
        some = np.flatnonzero(near[hashes.astype(np.uint16)])
        return self.whole.named[some[np.isin(hashes[some], wanted)]]


def _found(all_ids: Ids, ids: Ids) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    places = np.searchsorted(all_ids, ids)
    exists = places < len(all_ids)
    exists[exists] = all_ids[places[exists]] == ids[exists]
    return exists, places[exists]
