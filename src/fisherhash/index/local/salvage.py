"""Everything of a file that reads and verifies, and what does not: for verify, repair and more."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fisherhash.codes import code_bytes
from fisherhash.index.base import DamagedError
from fisherhash.index.checks import NoteTexts, as_ids
from fisherhash.index.items import Problem
from fisherhash.index.local.blocks import SELECT_BLOCKS, SLOTS, Block, block_name, read_block
from fisherhash.index.local.create import read_files
from fisherhash.index.local.file import IndexFile, error_name
from fisherhash.index.local.rows import (
    COLUMNS,
    ItemRow,
    decode_text,
    is_note,
    item_of,
    key_hash,
    read_row,
    row_problem,
)
from fisherhash.index.local.schema import REMEDY, State

_FAILURES = 200_000
"""After so many failed attempts to read something, the rest counts as lost."""
_MOST_MISSING = 10_000


@dataclass(frozen=True)
class LostItem:
    """An item that could not be saved.

    Attributes:
        key: its key; None if that is lost, too.
        id: its id.
        reason: what of it is damaged.
    """

    key: str | None
    id: int
    reason: str


@dataclass
class Salvage:
    """What reads and verifies.

    Attributes:
        facts: what the index is; None if that is lost.
        state: what the last commit left; None if that is lost.
        blocks: the blocks of codes with their checksums, without the items in ``lost``.
        rows: the rows of their items by id, if they were asked for.
        lost: items with a key that are damaged.
        lost_codes: (first, last) ids of blocks that are damaged and held codes without a key.
        notes: the notes.
        lost_notes: how many notes are damaged.
        files: the files that the index carries; None if one is damaged.
        problems: all that is wrong.
    """

    facts: dict[str, Any] | None = None
    state: State | None = None
    blocks: dict[int, tuple[int, Block]] = field(default_factory=dict)
    rows: dict[int, ItemRow] = field(default_factory=dict)
    lost: list[LostItem] = field(default_factory=list)
    lost_codes: list[tuple[int, int]] = field(default_factory=list)
    notes: NoteTexts = field(default_factory=dict)
    lost_notes: int = 0
    files: dict[str, bytes] | None = None
    problems: list[Problem] = field(default_factory=list)


def salvage(file: IndexFile, *, keep_rows: bool = False) -> Salvage:
    """Read all of a file, inside a transaction; what is damaged is left out and named."""
    found = Salvage()

    def report(part: str, what: object) -> None:
        found.problems.append(Problem(str(file.path), f"is damaged: {part} {what}", REMEDY))

    try:
        meta = file.readable_meta()
    except sqlite3.DatabaseError as error:
        _must_be_damage(error)
        report("its table meta", error)
        return found
    for name in ("index", "index copy", "state"):
        if isinstance(what := meta.get(name, "is missing"), str):
            report(f"the row {name!r} of its table meta", what)
    facts = [meta.get(name) for name in ("index", "index copy")]
    found.facts = next((one for one in facts if isinstance(one, dict)), None)
    found.state = meta["state"] if isinstance(meta["state"], State) else None
    if found.facts is None:
        return found
    damaged = _read_blocks(file, found, code_bytes(found.facts["bits"]))
    for number, what in damaged.items():
        report(block_name(number), what)
    _read_rows(file, found, keep_rows=keep_rows)
    for item in found.lost:
        key = None if item.key is None else item.key.encode(errors="surrogateescape")
        report(row_problem(item.id, key, ""), item.reason)
    _count_lost_codes(found, damaged)
    _read_notes(file, found)
    if found.lost_notes:
        report(f"{found.lost_notes} of its notes", "do not match their checksums, or are missing")
    if found.state is not None:
        try:
            found.files = read_files(file, found.state)
        except (DamagedError, sqlite3.DatabaseError, UnicodeDecodeError) as error:
            found.problems.append(Problem(str(file.path), str(error), REMEDY))
    return found


def structure_problems(file: IndexFile) -> list[Problem]:
    """What SQLite itself finds wrong with a file."""
    file.meter.suspend()
    try:
        lines = [
            row[0].decode(errors="replace") for row in file.db.execute("PRAGMA integrity_check(20)")
        ]
    except sqlite3.DatabaseError as error:
        _must_be_damage(error)
        lines = [str(error)]
    return [
        Problem(str(file.path), f"is damaged in its structure: {line}", REMEDY)
        for line in lines
        if line != "ok"
    ]


def _must_be_damage(error: sqlite3.DatabaseError) -> None:
    if error_name(error).startswith(
        ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_INTERRUPT", "SQLITE_NOMEM")
    ):
        raise error


def _each(file: IndexFile, select: str, key: str, first: int, last: int) -> Iterator[Any]:
    """Rows by their key; those that SQLite cannot read are left out."""
    todo, failures = [(first, last)], 0
    query = f"{select} WHERE {key} BETWEEN ? AND ? ORDER BY {key}"
    while todo and failures < _FAILURES:
        first, last = todo.pop()
        try:
            for row in file.db.execute(query, (first, last)):
                yield row
                first = max(first, row[0] + 1)
        except sqlite3.DatabaseError as error:
            _must_be_damage(error)
            failures += 1
            if first < last:
                middle = (first + last) // 2
                todo += [(middle + 1, last), (first, middle)]


def _read_blocks(file: IndexFile, found: Salvage, width: int) -> dict[int, str]:
    """Read the blocks; returns what is wrong with the others, by number."""
    damaged: dict[int, str] = {}
    state = found.state
    last = (1 << 48) - 1 if state is None else state.next_id // SLOTS
    for row in _each(file, SELECT_BLOCKS, "block", 0, last):
        number = row[0]
        try:
            block = read_block(row, width)
            if state is not None and len(block.ids) and block.ids[-1] >= state.next_id:
                raise ValueError("has ids that were not given yet")
        except ValueError as error:
            damaged[number] = str(error)
        else:
            found.blocks[number] = (row[2], block)
    if state is None:
        return damaged
    missing = [n for n in range(min(last + 1, _MOST_MISSING)) if n not in found.blocks]
    missing = [number for number in missing if number not in damaged]
    lacking = state.blocks - len(found.blocks) - len(damaged)
    if lacking > 0:
        # Without a gap in the ids these are exactly the missing ones.
        damaged |= dict.fromkeys(missing, "is missing")
    elif not damaged and state.blocks_sum != sum(crc for crc, _ in found.blocks.values()):
        damaged[-1] = "are not those of the last commit"
    return damaged


def _read_rows(file: IndexFile, found: Salvage, *, keep_rows: bool) -> None:
    """Read the rows of items; items whose rows are damaged leave their blocks."""
    parts = [block for _, block in found.blocks.values()]
    named = np.concatenate([as_ids(()), *(block.named for block in parts)])
    hashes = np.concatenate([np.zeros(0, np.uint32), *(block.hashes for block in parts)])
    expected = dict(zip(named.tolist(), hashes.tolist(), strict=True))
    bad: dict[int, tuple[str | None, str]] = {}
    keys: dict[str, int] = {}
    last = (1 << 62) if found.state is None else found.state.next_id
    for columns in _each(file, f"SELECT {COLUMNS} FROM items", "id", 0, last):
        id_, key = columns[0], columns[1]
        name = decode_text(key) if isinstance(key, bytes) else None
        if id_ not in expected and id_ // SLOTS in found.blocks:
            what = f"is damaged: {row_problem(id_, None, 'belongs to no item')}"
            found.problems.append(Problem(str(file.path), what, REMEDY))
            continue
        try:
            row = read_row(columns)
            item_of(row, b"")
        except ValueError as error:
            # The hash in the block tells whether the key is what it was.
            known = name is not None and key_hash(name) == expected.get(id_)
            bad[id_] = (name if known else None, str(error))
            continue
        if id_ not in expected:
            found.lost.append(LostItem(row.key, id_, "its code is damaged"))
        elif expected.pop(id_) != key_hash(row.key) or row.key in keys:
            bad[id_] = (row.key, "has the key of another item")
        else:
            keys[row.key] = id_
            # A row whose id was damaged may have come under this id, too.
            bad.pop(id_, None)
            if keep_rows:
                found.rows[id_] = row
    for id_ in expected:
        bad.setdefault(id_, (None, "is missing"))
    found.lost += [LostItem(key, id_, reason) for id_, (key, reason) in bad.items()]
    found.lost.sort(key=lambda item: item.id)
    gone = as_ids(sorted(bad))
    for number in set((gone // SLOTS).tolist()) & found.blocks.keys():
        crc, block = found.blocks[number]
        stays, named = ~np.isin(block.ids, gone), ~np.isin(block.named, gone)
        found.blocks[number] = (
            crc,
            Block(block.ids[stays], block.codes[stays], block.named[named], block.hashes[named]),
        )


def _count_lost_codes(found: Salvage, damaged: dict[int, str]) -> None:
    """Name the ids of damaged blocks, unless every item that they held is known by its key."""
    state = found.state
    if state is not None:
        here = sum(len(block.ids) for _, block in found.blocks.values())
        if here + len(found.lost) >= state.live:
            return
    for number in sorted(damaged):
        first, last = number * SLOTS, (number + 1) * SLOTS - 1
        found.lost_codes.append((first, last if state is None else min(last, state.next_id - 1)))


def _read_notes(file: IndexFile, found: Salvage) -> None:
    bad, totals = 0, dict[str, list[int]]()
    try:
        for kind, name, value, crc in file.db.execute("SELECT kind, name, value, crc FROM notes"):
            if not is_note(kind, name, value, crc):
                bad += 1
                continue
            total = totals.setdefault(decode_text(kind), [0, 0])
            total[:] = [total[0] + 1, total[1] + crc]
            found.notes[decode_text(kind), decode_text(name)] = value.decode()
    except sqlite3.DatabaseError as error:
        _must_be_damage(error)
    if found.state is not None and totals != found.state.notes:
        expected = sum(pair[0] for pair in found.state.notes.values())
        bad = max(1, bad, expected - len(found.notes))
    found.lost_notes = bad
