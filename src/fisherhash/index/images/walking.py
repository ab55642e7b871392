"""The pictures of a folder with their sizes and times of change, in one walk.

As :mod:`fisherhash.data.folders` does: hidden entries and folders that fisherhash wrote are passed
over, links to folders are followed once (here after all folders), names are POSIX style and need
not be UTF-8.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fisherhash.data.folders import is_image_name, is_own_output
from fisherhash.errors import UsageError


@dataclass
class Found:
    """What a folder holds.

    Attributes:
        files: (size, mtime_ns) of every picture, by its path inside the folder.
        broken: files named like pictures that cannot be looked at, with the reason.
        closed: sub-folders that may not be listed, with a slash at the end, and the reason.
        other: how many files are no pictures, by extension.
    """

    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    other: Counter[str] = field(default_factory=Counter)

    def is_hidden(self, key: str) -> bool:
        """Whether nobody can say if a picture is still there: its folder may not be listed."""
        return any(key.startswith(folder) for folder in self.closed)

    def notes(self) -> list[str]:
        """Sentences about what was left out."""
        notes = [
            f"the folder {name} may not be read ({reason}); what the index has of it stays"
            for name, reason in self.closed.items()
        ]
        if self.other:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in self.other.most_common(3))
            notes.append(f"files that are no pictures were left out: {kinds}")
        return notes

    def nothing(self, root: Path) -> str:
        """Why there is no picture here."""
        if self.broken:
            name, reason = next(iter(self.broken.items()))
            return f"{root} holds no picture that can be read; {name}: {reason}"
        if self.other:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in self.other.most_common(3))
            return f"{root} holds no pictures ({kinds})"
        return f"{root} holds no pictures"


def walk(root: Path, *, without: str | os.PathLike[str] | None = None) -> Found:
    """Every picture in and below a folder.

    Args:
        root: the folder.
        without: a folder that is passed over, the index itself.
    """
    found = Found()
    seen = set() if without is None else {os.path.realpath(without)}
    # Links last: one that is added must not take over the pictures of a folder, or their keys
    # would change, and with new keys come new items.
    waiting, links = [""], []
    while waiting or links:
        inside = waiting.pop() if waiting else links.pop()
        place = os.path.join(root, inside) if inside else os.fspath(root)
        real = os.path.realpath(place)
        if real in seen:
            continue
        seen.add(real)
        prefix = f"{inside}/" if inside else ""
        try:
            folders, linked = _look(place, prefix, found)
        except OSError as error:
            if not inside:
                reason = (error.strerror or str(error)).lower()
                raise UsageError(f"{root} may not be read: {reason}") from None
            found.closed[prefix] = (error.strerror or str(error)).lower()
            continue
        waiting += [prefix + name for name in sorted(folders, reverse=True)]
        links += [prefix + name for name in sorted(linked, reverse=True)]
    return found


def _look(place: str, prefix: str, found: Found) -> tuple[list[str], list[str]]:
    """Take in the pictures of a folder; its sub-folders, and links to folders."""
    folders, links = [], []
    with os.scandir(place) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                continue
            if _is_dir(entry):
                if not is_own_output(entry.path) and not _is_index(entry.path):
                    (links if entry.is_symlink() else folders).append(name)
            elif not is_image_name(name):
                found.other[os.path.splitext(name)[1].lower() or "no extension"] += 1
            else:
                _take(entry, prefix + name, found)
    return folders, links


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A loop of links, a share that is gone: whatever it is, it has no pictures below it.
        return False


def _is_index(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, "catalogue.sqlite"))


def _take(entry: os.DirEntry[str], key: str, found: Found) -> None:
    try:
        state = entry.stat()
    except OSError as error:
        found.broken[key] = cannot_read(error)
        return
    if stat.S_ISREG(state.st_mode):
        found.files[key] = (state.st_size, state.st_mtime_ns)
    else:
        found.broken[key] = "a pipe, socket or device, not a file"


def cannot_read(error: OSError) -> str:
    """The reason in words, as for a picture that is decoded."""
    if isinstance(error, FileNotFoundError):
        return "the file does not exist (moved or deleted?)"
    if isinstance(error, PermissionError):
        return "permission denied"
    return f"cannot be read: {(error.strerror or str(error)).lower()}"
