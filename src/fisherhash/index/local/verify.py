"""Checks of everything an index holds, file by file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.local import table_files
from fisherhash.index.local.catalogue import NAME, Catalogue
from fisherhash.index.local.code_files import bad_blocks, codes_path, ids_path
from fisherhash.index.local.guards import BLOCK, Head

if TYPE_CHECKING:
    from fisherhash.index.local.index import Snapshot

_RESTORE = "restore the index from a copy, or make it again"
_OPEN = "harmless: the next command that changes the index makes it again"


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was written.

    Attributes:
        file: the file, inside the index.
        what: what is wrong with it.
        todo: what to do.
    """

    file: str
    what: str
    todo: str

    def __str__(self) -> str:
        return f"{self.file} {self.what}; {self.todo}"


def verify_path(place: str | os.PathLike[str]) -> list[Problem]:
    """Check an index that may be too damaged to be opened.

    Raises:
        UsageError: there is no index.
    """
    from fisherhash.index.local.index import LocalIndex

    path = Path(place)
    try:
        with LocalIndex.open(path) as index:
            return index.verify()
    except FisherhashError as error:
        if isinstance(error, UsageError) and not (path / NAME).exists():
            raise
        return [Problem(_named(path, str(error)), f"cannot be opened: {error}", _RESTORE)]


def _named(path: Path, sentence: str) -> str:
    """The file that an error's sentence begins with."""
    first = sentence.split(" ", 1)[0]
    prefix = f"{path}/"
    return sentence[len(prefix) :].split(" ", 1)[0] if sentence.startswith(prefix) else first


def verify_index(path: Path, catalogue: Catalogue, snapshot: Snapshot, head: Head) -> list[Problem]:
    """All that is wrong with an open index."""
    problems = []
    _, wrong = head.read()
    if wrong:
        problems.append(Problem(head.path.name, wrong, _OPEN))
    rows = catalogue.row_problems()
    problems += [Problem(NAME, text, _RESTORE) for text in rows]
    changed = catalogue.byte_problem()
    if changed and not (rows and changed[0] == NAME):
        file, what = changed
        problems.append(Problem(file, what, _OPEN if file != NAME else _RESTORE))
    for segment in snapshot.segments:
        row = segment.row
        files = [(codes_path(path, row.number), segment.codes, row.code_sums)]
        if segment.ids is not None:
            files.append((ids_path(path, row.number), segment.ids, row.id_sums))
        for file, array, sums in files:
            name = file.relative_to(path).as_posix()
            try:
                size = file.stat().st_size
            except FileNotFoundError:
                problems.append(Problem(name, "is missing", _RESTORE))
                continue
            if size < array.nbytes:
                problems.append(Problem(name, "is cut off", _RESTORE))
            elif bad := bad_blocks(array, sums):
                what = f"has {len(bad)} blocks of {BLOCK} bytes that are not what was written"
                problems.append(Problem(name, what, _RESTORE))
    if not problems:
        problems += _contents(catalogue, snapshot)
    return problems + _tables(path)


def _contents(catalogue: Catalogue, snapshot: Snapshot) -> list[Problem]:
    """Whether rows and code files tell the same story; after all checksums hold."""
    problems = []
    live = sum(segment.live for segment in snapshot.segments)
    if live != snapshot.state.live:
        what = f"tells of {snapshot.state.live} items, the code files hold {live}"
        problems.append(Problem(NAME, what, _RESTORE))
    for segment in snapshot.segments:
        ids = segment.ids
        if segment.row.kind == "loose":
            ids = segment.ids_at(segment.order())
        if ids is not None and (np.diff(ids) <= 0).any():
            name = f"codes/{segment.row.number:06d}.ids"
            problems.append(Problem(name, "holds an id twice or out of order", _RESTORE))
    ids = np.array(catalogue.ids_where("1", []), dtype=np.int64)
    which, _ = snapshot.locate(ids)
    if (which < 0).any():
        what = f"has rows of {(which < 0).sum()} items without a code"
        problems.append(Problem(NAME, what, _RESTORE))
    return problems


def _tables(path: Path) -> list[Problem]:
    problems = []
    for file in sorted((path / table_files.FOLDER).glob("*.table")):
        try:
            table_files.read(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            name = file.relative_to(path).as_posix()
            todo = "harmless: the next search that needs it makes it again"
            problems.append(Problem(name, f"is damaged ({error})", todo))
    return problems
