"""Stands in for the walker of :mod:`fisherhash.data.folders`; delete this module once it does."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fisherhash.data.folders import is_image_name, is_own_output
from fisherhash.errors import UsageError


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file as the disk lists it.

    Attributes:
        key: its POSIX-style path inside the folder; need not be UTF-8.
        path: where it lies.
        size: bytes.
        mtime_ns: time of its last change.
    """

    key: str
    path: str
    size: int
    mtime_ns: int


@dataclass
class FoundImages:
    """What a folder holds.

    Attributes:
        files: every image file, sorted by key.
        broken: the keys of files named like images that cannot be opened, with the reason.
        closed: sub-folders that cannot be listed, with a slash at the end, with the reason.
        other: number of files that are not images, by extension.
    """

    files: list[ImageFile] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    other: Counter[str] = field(default_factory=Counter)

    def is_hidden(self, key: str) -> bool:
        """Whether an image may still exist in a sub-folder that cannot be listed."""
        return any(key.startswith(folder) for folder in self.closed)

    def notes(self) -> list[str]:
        """Sentences about what was skipped."""
        notes = [
            f"the folder {name} cannot be read ({reason}); its images stay in the index"
            for name, reason in self.closed.items()
        ]
        if self.other:
            notes.append(f"files that are not images were skipped: {self._kinds()}")
        return notes

    def nothing(self, root: Path) -> str:
        """Why there is no image in ``root``."""
        if self.broken:
            name, reason = next(iter(self.broken.items()))
            return f"{root} holds no image that can be read; {name}: {reason}"
        return f"{root} holds no images" + (f" ({self._kinds()})" if self.other else "")

    def _kinds(self) -> str:
        return ", ".join(f"{count} x {kind}" for kind, count in self.other.most_common(3))


def walk_images(
    root: str | os.PathLike[str],
    *,
    without: str | os.PathLike[str] | None = None,
    is_own: Callable[[str], bool] = is_own_output,
) -> FoundImages:
    """Find every image in and below a folder, with its size and time of change.

    Hidden entries are skipped. A link to a folder is followed once, after all real folders: adding
    a link must not change the keys of images that are also reachable without it.

    Args:
        root: the folder.
        without: a folder to skip, such as the index that is being filled.
        is_own: whether fisherhash wrote a folder; such folders are skipped.

    Raises:
        UsageError: ``root`` itself cannot be listed.
    """
    found = FoundImages()
    root = os.fspath(root)
    seen = set() if without is None else {os.path.realpath(without)}
    waiting, links = [""], []
    while waiting or links:
        inside = waiting.pop() if waiting else links.pop()
        place = os.path.join(root, inside) if inside else root
        real = os.path.realpath(place)
        if real in seen:
            continue
        seen.add(real)
        prefix = f"{inside}/" if inside else ""
        try:
            folders, linked = _list(place, prefix, found, is_own)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            if not inside:
                raise UsageError(f"{root} cannot be read: {reason}") from None
            found.closed[prefix] = reason
            continue
        waiting += [prefix + name for name in sorted(folders, reverse=True)]
        links += [prefix + name for name in sorted(linked, reverse=True)]
    found.files.sort(key=lambda file: file.key)
    return found


def _list(
    place: str, prefix: str, found: FoundImages, is_own: Callable[[str], bool]
) -> tuple[list[str], list[str]]:
    """Add the images of one folder to ``found``; return its sub-folders and links to folders."""
    folders, links = [], []
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if _is_dir(entry):
                if not is_own(entry.path):
                    (links if entry.is_symlink() else folders).append(entry.name)
            elif not is_image_name(entry.name):
                found.other[os.path.splitext(entry.name)[1].lower() or "no extension"] += 1
            else:
                _add(entry, prefix + entry.name, found)
    return folders, links


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A loop of links, or a share that is gone: either way there are no images below it.
        return False


def _add(entry: os.DirEntry[str], key: str, found: FoundImages) -> None:
    try:
        state = entry.stat()
    except OSError as error:
        found.broken[key] = read_failure(error)
        return
    if stat.S_ISREG(state.st_mode):
        found.files.append(ImageFile(key, entry.path, state.st_size, state.st_mtime_ns))
    else:
        found.broken[key] = "a pipe, socket or device, not a file"


def read_failure(error: OSError) -> str:
    """Why a file cannot be read, in words."""
    if isinstance(error, FileNotFoundError):
        return "the file does not exist (moved or deleted?)"
    if isinstance(error, PermissionError):
        return "permission denied"
    return f"cannot be read: {(error.strerror or str(error)).lower()}"
