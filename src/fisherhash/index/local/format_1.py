"""Notes of an index of format 1: two files beside the catalogue, moved into it by the first write.

``folder.json`` named the folder that the index mirrors, and ``skipped.csv`` the files that could
not be read. What is damaged in them is left out: a sync then finds it out again.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError
from fisherhash.index.items import Problem
from fisherhash.index.local.files import read_inside, unlink_inside

_FOLDER = "folder.json"
_SKIPPED = "skipped.csv"
_COLUMNS = ["name", "reason", "size", "mtime_ns"]

_MOST = {_FOLDER: 1 << 20, _SKIPPED: 256 << 20}

OldNotes = dict[str, dict[str, Any]]


def read_old_notes(index: Path) -> OldNotes:
    """The notes by kind and name.

    Raises:
        FisherhashError: a file exists but cannot be read at all.
    """
    try:
        return _load(index)[0]
    except OSError as error:
        raise FisherhashError(
            f"{error.filename} cannot be read: {error.strerror or error}. "
            "Check the disk and the permissions"
        ) from None


def old_note_problems(index: Path) -> list[Problem]:
    """What is wrong with the two files."""
    try:
        return _load(index)[1]
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        return [Problem(Path(error.filename).name, what, "check the disk and the permissions")]


def _load(index: Path) -> tuple[OldNotes, list[Problem]]:
    problems = []
    notes: OldNotes = {"sync": {}, "skipped": {}}
    text = _read(index, _FOLDER)
    if text is not None:
        try:
            notes["sync"]["folder"] = {"folder": str(json.loads(text)["folder"])}
        except (ValueError, KeyError, TypeError, RecursionError):
            todo = "the next index sync with the folder writes it again"
            problems.append(Problem(_FOLDER, "is damaged", todo))
    text = _read(index, _SKIPPED)
    if text is not None:
        notes["skipped"], damaged = _parse_skipped(text)
        if damaged:
            what = f"has lines that are not what was written ({damaged})"
            todo = "harmless: the next index sync tries those files again"
            problems.append(Problem(_SKIPPED, what, todo))
    return notes, problems


def delete_old_notes(index: Path) -> None:
    """Delete the two files, and their drafts, after their content was committed."""
    for name in (_FOLDER, _SKIPPED):
        for one in (name, f"{name}.new"):
            with contextlib.suppress(OSError):
                unlink_inside(index, one)


def _read(index: Path, name: str) -> str | None:
    try:
        return read_inside(index, name, _MOST[name]).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None


def _parse_skipped(text: str) -> tuple[dict[str, Any], int]:
    """Skipped files by name, and the number of damaged lines."""
    skipped, damaged = {}, 0
    rows = csv.reader(io.StringIO(text, newline=""))
    first = True
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return skipped, damaged + first
        except csv.Error:
            damaged += 1
            continue
        header, first = first, False
        if header and row == _COLUMNS:
            continue
        try:
            name, reason, *state = row
            size, mtime_ns = (int(number) if number else None for number in state)
        except ValueError:
            damaged += 1
            continue
        if name:
            skipped[name] = {"reason": reason, "size": size, "mtime_ns": mtime_ns}
