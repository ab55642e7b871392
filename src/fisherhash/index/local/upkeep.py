"""Backup and repair: a new file that is complete or not there at all."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fisherhash.codes import code_bytes
from fisherhash.errors import FisherhashError, UsageError, counted
from fisherhash.index.base import DamagedError, Index, Uri
from fisherhash.index.checks import as_ids
from fisherhash.index.local.create import create_tables, new_file
from fisherhash.index.local.file import IndexFile, cannot_write, error_name
from fisherhash.index.local.index import LocalIndex
from fisherhash.index.local.salvage import LostItem, Salvage, salvage
from fisherhash.system.progress import progress

_PAGES = 4096


@dataclass(frozen=True)
class BackupReport:
    """What a backup did.

    Attributes:
        target: the backup.
        count: items in it.
        commit: the commit that it holds.
        bytes: size of the file.
    """

    target: str
    count: int
    commit: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        return asdict(self)


def backup(uri: Uri, target: Uri) -> BackupReport:
    """Copy an index while it may be written, and check the copy.

    Args:
        uri: the file of the index.
        target: the file of the backup; there must be nothing yet.

    Raises:
        UsageError: there is no index, or something is at ``target``.
        FisherhashError: the index is damaged, or the backup cannot be written; nothing is left.
    """
    source = IndexFile(Path(uri), write=False)
    try:
        with new_file(Path(target)) as draft:
            with source.explained():
                # The transaction keeps the copy at one commit, whoever writes meanwhile.
                source.begin()
                source.meter.suspend()
                _copy(source, draft)
            problems = Index.examine(draft)
            if problems:
                raise DamagedError(f"{uri} cannot be backed up: {problems[0]}. Nothing was kept")
    finally:
        source.close()
    with Index.open(target) as made:
        info = made.info()
    return BackupReport(os.fspath(target), info["count"], info["commit"], info["bytes"])


def _copy(source: IndexFile, draft: Path) -> None:
    copy = sqlite3.connect(draft, isolation_level=None)
    try:
        copy.execute("PRAGMA synchronous = OFF")
        done = 0
        with progress(f"copying {source.path}, per cent", 100) as advance:

            def step(_status: int, remaining: int, total: int) -> None:
                nonlocal done
                share = 100 - 100 * remaining // max(total, 1)
                advance(share - done)
                done = share

            source.db.backup(copy, pages=_PAGES, progress=step)
    except sqlite3.Error as error:
        if error_name(error).startswith(
            ("SQLITE_CORRUPT", "SQLITE_IOERR_READ", "SQLITE_IOERR_SHORT")
        ):
            raise
        raise cannot_write(draft.parent, error) from None
    finally:
        copy.close()


@dataclass
class RepairReport:
    """What a repair saved and what it could not.

    Attributes:
        target: the new index.
        kept: items in it.
        lost: items with a key that are lost, by ascending id.
        lost_codes: (first, last) ids of damaged blocks that held codes without a key.
        lost_count: how many items are lost; None if nothing tells.
        lost_notes: how many notes (the synced folder, skipped files) are lost.
        remarks: sentences about what else is damaged and what was done about it.
    """

    target: str
    kept: int = 0
    lost: list[LostItem] = field(default_factory=list)
    lost_codes: list[tuple[int, int]] = field(default_factory=list)
    lost_count: int | None = None
    lost_notes: int = 0
    remarks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lost = "unknown how many" if self.lost_count is None else f"{self.lost_count:,}"
        return f"{counted(self.kept, 'item')} saved, {lost} lost"

    def to_json(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        return asdict(self)


def repair(uri: Uri, target: Uri) -> RepairReport:
    """Save everything that reads and verifies of a damaged index into a new one; ids stay.

    An item with a key is saved if its code and its row verify, a code without a key by itself.

    Args:
        uri: the file of the damaged index; it is only read.
        target: the file of the new index; there must be nothing yet.

    Raises:
        UsageError: there is no index, or something is at ``target``.
        FisherhashError: nothing of it can be read, or not even how long its codes are.
    """
    if os.path.lexists(target):
        raise UsageError(f"{target} exists already; give another name, or remove it first")
    file = IndexFile(Path(uri), write=False)
    try:
        with file.explained():
            file.begin()
            found = salvage(file, keep_rows=True)
    finally:
        file.close()
    if found.facts is None:
        raise FisherhashError(
            f"{uri} cannot be repaired: what says how long its codes are is lost. Restore it from "
            "a copy, or make it again with: fisherhash index sync"
        )
    report = RepairReport(os.fspath(target), lost=found.lost, lost_codes=found.lost_codes)
    report.lost_notes = found.lost_notes
    report.remarks = [problem.what for problem in found.problems]
    if found.state is None:
        report.remarks.append(
            "which ids were given last is lost: ids of items that were removed may be given again"
        )
    if found.files is None:
        report.remarks.append("the model that the index carries is damaged, and was left out")
    _write(Path(target), found, report)
    if found.state is not None:
        report.lost_count = found.state.live - report.kept
    return report


def _write(target: Path, found: Salvage, report: RepairReport) -> None:
    assert found.facts is not None
    blocks = [found.blocks[number][1] for number in sorted(found.blocks)]
    width = code_bytes(found.facts["bits"])
    ids = np.concatenate([as_ids(()), *(block.ids for block in blocks)])
    codes = np.concatenate([np.zeros((0, width), np.uint8), *(block.codes for block in blocks)])
    rows = [row for _, row in sorted(found.rows.items())]
    next_id = 0 if found.state is None else found.state.next_id
    with new_file(target) as draft:
        create_tables(draft, found.facts, found.files or {})
        with LocalIndex.open_at(draft, write=True) as index:
            index.load_rows(ids, codes, rows, found.notes, next_id)
            if problems := index.verify():
                raise FisherhashError(f"the repaired index is not right: {problems[0]}")
    report.kept = len(ids)
