"""Checks of everything that an index holds, file by file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fisherhash.errors import FisherhashError
from fisherhash.index.base import CannotReadError, DamagedError
from fisherhash.index.checks import as_ids
from fisherhash.index.items import Problem
from fisherhash.index.local.catalogue import Catalogue
from fisherhash.index.local.files import list_inside
from fisherhash.index.local.format_1 import old_note_problems
from fisherhash.index.local.guards import SUM_BLOCK, CommitMark
from fisherhash.index.local.schema import CATALOGUE, REMEDY
from fisherhash.index.local.snapshot import Snapshot
from fisherhash.index.local.stored import StoredBytes
from fisherhash.index.local.table_files import TABLES_FOLDER, read_tables, table_names

RESTORE = f"{REMEDY[:1].lower()}{REMEDY[1:]}"
_HARMLESS = "harmless: the next command that changes the index writes it again"


def unreadable(path: Path, name: str, error: FisherhashError) -> Problem:
    """The problem of a file that could not be read; it may be whole."""
    what, _, todo = str(error).removeprefix(f"{path / name} ").partition(". ")
    return Problem(name, what, todo[:1].lower() + todo[1:])


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
    try:
        rows = catalogue.row_problems()
    except CannotReadError as error:
        yield unreadable(path, CATALOGUE, error)
        return
    for text in rows:
        yield Problem(CATALOGUE, text, RESTORE)
    changed = catalogue.byte_problem()
    if changed and not (rows and changed[0] == CATALOGUE):
        yield Problem(*changed, RESTORE if changed[0] == CATALOGUE else _HARMLESS)


def _code_files(path: Path, snapshot: Snapshot) -> Iterator[Problem]:
    for file, sums in (one for segment in snapshot.segments for one in segment.files):
        try:
            # From the disk again: what this process has in memory may be better than that.
            now = StoredBytes(path, file.name, file.size)
            bad = list(now.bad_blocks(sums))
        except FileNotFoundError:
            yield Problem(file.name, "is missing", RESTORE)
        except DamagedError:
            yield Problem(file.name, "is cut off", RESTORE)
        except CannotReadError as error:
            yield unreadable(path, file.name, error)
        else:
            if bad:
                what = f"has {len(bad)} blocks of {SUM_BLOCK} bytes that are not what was written"
                yield Problem(file.name, what, RESTORE)


def _contents(catalogue: Catalogue, snapshot: Snapshot) -> Iterator[Problem]:
    """Whether rows and code files agree; after all checksums were found right."""
    live = sum(segment.live for segment in snapshot.segments)
    if live != snapshot.state.live:
        what = f"lists {snapshot.state.live} items, the code files hold {live}"
        yield Problem(CATALOGUE, what, RESTORE)
    for segment in snapshot.segments:
        loose = segment.row.kind == "loose"
        ids = segment.ids_at(segment.order()) if loose else segment.ids
        if isinstance(ids, np.ndarray) and (np.diff(ids) <= 0).any():
            name = f"codes/{segment.row.number:06d}.ids"
            yield Problem(name, "holds an id twice or out of order", RESTORE)
    which, _ = snapshot.locate(as_ids(catalogue.ids_where("1", [])))
    if (which < 0).any():
        what = f"has rows of {(which < 0).sum()} items without a code"
        yield Problem(CATALOGUE, what, RESTORE)


def _tables(path: Path) -> Iterator[Problem]:
    todo = "harmless: the next search that needs it builds it again"
    try:
        list_inside(path, TABLES_FOLDER)
    except OSError as error:
        yield Problem(TABLES_FOLDER, f"cannot be used: {error.strerror or error}", todo)
    for name, _, _ in table_names(path):
        try:
            read_tables(path, name)
        except FileNotFoundError:
            continue
        except CannotReadError as error:
            yield unreadable(path, name, error)
        except (OSError, ValueError, FisherhashError) as error:
            yield Problem(name, f"is damaged ({error})", todo)
