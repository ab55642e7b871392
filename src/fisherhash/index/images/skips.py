"""The list of files that could not be read: a CSV in the index, for people and for the next sync.

A file that is damaged is remembered with its size and its time of change, and is not decoded again
until one of them is another. A passing fault (permission denied, a link that leads nowhere) is
listed without them, and tried again every time.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fisherhash.errors import FisherhashError
from fisherhash.index.local.guards import cannot_write

FILE = "skipped.csv"
COLUMNS = ("name", "reason", "size", "mtime_ns")


@dataclass(frozen=True)
class Skip:
    """A file that is not in the index, and why.

    Attributes:
        name: the key it would have.
        reason: what is wrong with it.
        size: bytes it had when it was tried; None for a fault that may pass.
        mtime_ns: its time of change then.
    """

    name: str
    reason: str
    size: int | None = None
    mtime_ns: int | None = None


class SkipList:
    """The skipped files of an index by name.

    Args:
        folder: the index.

    Attributes:
        path: the CSV.
        damaged: lines of it that cannot be read; :meth:`save` leaves them out.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / FILE
        skips, self.damaged = _read(self.path)
        self._rows = {skip.name: skip for skip in skips}
        self._sorted = not self.damaged

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Skip]:
        return iter(sorted(self._rows.values(), key=lambda skip: skip.name))

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def is_known(self, name: str, size: int, mtime_ns: int) -> bool:
        """Whether exactly this file was tried before and is damaged."""
        skip = self._rows.get(name)
        return skip is not None and (skip.size, skip.mtime_ns) == (size, mtime_ns)

    def is_passing(self, name: str) -> bool:
        """Whether this file could not be opened the last time."""
        skip = self._rows.get(name)
        return skip is not None and skip.size is None

    def add(self, skips: Iterable[Skip]) -> None:
        """List files, and append them to the CSV at once: a killed import keeps its findings."""
        fresh = [skip for skip in skips if self._rows.get(skip.name) != skip]
        if not fresh:
            return
        self._rows |= {skip.name: skip for skip in fresh}
        self._sorted = False
        lines = _lines(fresh, header=not self.path.exists())
        try:
            with _opened(self.path, "a") as file:
                file.writelines(lines)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def drop(self, names: Iterable[str]) -> None:
        """Forget files; the CSV changes with :meth:`save`."""
        for name in names:
            if self._rows.pop(name, None) is not None:
                self._sorted = False

    def save(self) -> None:
        """Write the CSV anew, sorted; without skipped files there is none."""
        if self._sorted:
            return
        draft = self.path.with_name(FILE + ".new")
        try:
            if not self._rows:
                self.path.unlink(missing_ok=True)
            else:
                with _opened(draft, "w") as file:
                    file.writelines(_lines(self, header=True))
                os.replace(draft, self.path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise cannot_write(self.path, error) from error
        self._sorted = True


def _opened(path: Path, mode: str):
    return path.open(mode, encoding="utf-8", errors="surrogateescape", newline="")


def _lines(skips: Iterable[Skip], *, header: bool = False) -> list[str]:
    class Lines(list[str]):
        def write(self, line: str) -> None:
            self.append(line)

    lines = Lines()
    writer = csv.writer(lines, lineterminator="\n")
    if header:
        writer.writerow(COLUMNS)
    for skip in skips:
        writer.writerow((skip.name, skip.reason, skip.size, skip.mtime_ns))
    return lines


def _read(path: Path) -> tuple[list[Skip], int]:
    """Rows that can be read, and how many cannot: those files are tried again."""
    try:
        with _opened(path, "r") as file:
            rows = list(csv.reader(file))
    except FileNotFoundError:
        return [], 0
    except (OSError, csv.Error) as error:
        raise FisherhashError(
            f"{path} cannot be read ({error}); delete it, and the files it lists are tried again"
        ) from None
    skips, damaged = [], int(rows[:1] != [list(COLUMNS)])
    for row in rows[1 - damaged :]:
        try:
            name, reason, *state = row
            size, mtime = (int(text) if text else None for text in state)
        except ValueError:
            damaged += 1
        else:
            skips.append(Skip(name, reason, size, mtime))
    return skips, damaged
