"""Checks of everything that an index holds, file by file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fisherhash.index.items import Problem
from fisherhash.index.local.catalogue import Catalogue
from fisherhash.index.local.code_files import bad_blocks
from fisherhash.index.local.format_1 import old_note_problems
from fisherhash.index.local.guards import SUM_BLOCK, CommitMark
from fisherhash.index.local.schema import CATALOGUE
from fisherhash.index.local.snapshot import Snapshot
from fisherhash.index.local.table_files import TABLES_FOLDER, read_tables

RESTORE = "restore the index from a copy, or create it again"
_HARMLESS = "harmless: the next command that changes the index writes it again"


def verify_index(path: Path, catalogue: Catalogue, snapshot: Snapshot) -> list[Problem]:
    """Everything that is wrong with an open index."""
    problems = []
    _, wrong = CommitMark(path).read()
    if wrong:
        problems.append(Problem("head", wrong, _HARMLESS))
    rows = catalogue.row_problems()
    problems += [Problem(CATALOGUE, text, RESTORE) for text in rows]
    changed = catalogue.byte_problem()
    if changed and not (rows and changed[0] == CATALOGUE):
        file, what = changed
        problems.append(Problem(file, what, _HARMLESS if file != CATALOGUE else RESTORE))
    for segment in snapshot.segments:
        for file, array, sums in segment.files:
            name = file.relative_to(path).as_posix()
            try:
                size = file.stat().st_size
            except FileNotFoundError:
                problems.append(Problem(name, "is missing", RESTORE))
                continue
            if size < array.nbytes:
                problems.append(Problem(name, "is cut off", RESTORE))
            elif bad := bad_blocks(array, sums):
                what = f"has {len(bad)} blocks of {SUM_BLOCK} bytes that are not what was written"
                problems.append(Problem(name, what, RESTORE))
    if not problems:
        problems += _contents(catalogue, snapshot)
    if catalogue.format() == 1:
        problems += old_note_problems(path)
    return problems + _tables(path)


def _contents(catalogue: Catalogue, snapshot: Snapshot) -> list[Problem]:
    """Whether rows and code files agree; after all checksums were found right."""
    problems = []
    live = sum(segment.live for segment in snapshot.segments)
    if live != snapshot.state.live:
        what = f"lists {snapshot.state.live} items, the code files hold {live}"
        problems.append(Problem(CATALOGUE, what, RESTORE))
    for segment in snapshot.segments:
        ids = segment.ids
        if segment.row.kind == "loose":
            ids = segment.ids_at(segment.order())
        if ids is not None and (np.diff(ids) <= 0).any():
            name = f"codes/{segment.row.number:06d}.ids"
            problems.append(Problem(name, "holds an id twice or out of order", RESTORE))
    ids = np.array(catalogue.ids_where("1", []), dtype=np.int64)
    which, _ = snapshot.locate(ids)
    if (which < 0).any():
        what = f"has rows of {(which < 0).sum()} items without a code"
        problems.append(Problem(CATALOGUE, what, RESTORE))
    return problems


def _tables(path: Path) -> list[Problem]:
    problems = []
    for file in sorted((path / TABLES_FOLDER).glob("*.table")):
        try:
            read_tables(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            name = file.relative_to(path).as_posix()
            todo = "harmless: the next search that needs it builds it again"
            problems.append(Problem(name, f"is damaged ({error})", todo))
    return problems
