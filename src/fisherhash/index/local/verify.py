"""Checks of everything that an index holds, file by file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fisherhash.index.checks import as_ids
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
    problems = [*_catalogue(path, catalogue), *_code_files(path, snapshot)]
    if not problems:
        problems += _contents(catalogue, snapshot)
    if catalogue.format() == 1:
        problems += old_note_problems(path)
    return [*problems, *_tables(path)]


def _catalogue(path: Path, catalogue: Catalogue) -> Iterator[Problem]:
    _, wrong = CommitMark(path).read()
    if wrong:
        yield Problem("head", wrong, _HARMLESS)
    rows = catalogue.row_problems()
    for text in rows:
        yield Problem(CATALOGUE, text, RESTORE)
    changed = catalogue.byte_problem()
    if changed and not (rows and changed[0] == CATALOGUE):
        yield Problem(*changed, RESTORE if changed[0] == CATALOGUE else _HARMLESS)


def _code_files(path: Path, snapshot: Snapshot) -> Iterator[Problem]:
    for file, array, sums in (one for segment in snapshot.segments for one in segment.files):
        name = file.relative_to(path).as_posix()
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            yield Problem(name, "is missing", RESTORE)
            continue
        if size < array.nbytes:
            yield Problem(name, "is cut off", RESTORE)
        elif bad := bad_blocks(array, sums):
            what = f"has {len(bad)} blocks of {SUM_BLOCK} bytes that are not what was written"
            yield Problem(name, what, RESTORE)


def _contents(catalogue: Catalogue, snapshot: Snapshot) -> Iterator[Problem]:
    """Whether rows and code files agree; after all checksums were found right."""
    live = sum(segment.live for segment in snapshot.segments)
    if live != snapshot.state.live:
        what = f"lists {snapshot.state.live} items, the code files hold {live}"
        yield Problem(CATALOGUE, what, RESTORE)
    for segment in snapshot.segments:
        loose = segment.row.kind == "loose"
        ids = segment.ids_at(segment.order()) if loose else segment.ids
        if ids is not None and (np.diff(ids) <= 0).any():
            name = f"codes/{segment.row.number:06d}.ids"
            yield Problem(name, "holds an id twice or out of order", RESTORE)
    which, _ = snapshot.locate(as_ids(catalogue.ids_where("1", [])))
    if (which < 0).any():
        what = f"has rows of {(which < 0).sum()} items without a code"
        yield Problem(CATALOGUE, what, RESTORE)


def _tables(path: Path) -> Iterator[Problem]:
    for file in sorted((path / TABLES_FOLDER).glob("*.table")):
        try:
            read_tables(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            name = file.relative_to(path).as_posix()
            todo = "harmless: the next search that needs it builds it again"
            yield Problem(name, f"is damaged ({error})", todo)
