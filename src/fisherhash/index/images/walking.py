"""Every image of a folder with its size and modification time, in one walk.

Hidden entries and folders that fisherhash wrote are passed over, links to folders are followed
once and after all other folders, names are POSIX style and need not be UTF-8.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from fisherhash.data.folders import is_image_name, is_own_output
from fisherhash.errors import UsageError


class ImageFile(NamedTuple):
    """An image file: its key, where it is, its size in bytes and its modification time."""

    key: str
    path: str
    size: int
    mtime_ns: int


@dataclass
class FoundImages:
    """What a folder holds.

    Attributes:
        files: the images, sorted by key.
        broken: files named like images that cannot be examined, with the reason.
        closed: sub-folders that cannot be listed, with a slash at the end, and the reason.
        other: how many files are no images, by extension.
    """

    files: list[ImageFile] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    other: Counter[str] = field(default_factory=Counter)

    def is_hidden(self, key: str) -> bool:
        """Whether nobody can say if an image still exists: its folder cannot be listed."""
        return any(key.startswith(folder) for folder in self.closed)

    def notes(self) -> list[str]:
        """Sentences about what was left out."""
        notes = [
            f"the folder {name} may not be read ({reason}); what the index has of it stays"
            for name, reason in self.closed.items()
        ]
        if self.other:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in self.other.most_common(3))
            notes.append(f"files that are no images were left out: {kinds}")
        return notes

    def nothing(self, root: str | os.PathLike[str]) -> str:
        """Why there is no image here."""
        if self.broken:
            name, reason = next(iter(self.broken.items()))
            return f"{root} holds no image that can be read; {name}: {reason}"
        if self.other:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in self.other.most_common(3))
            return f"{root} holds no images ({kinds})"
        return f"{root} holds no images"


def walk_images(
    root: str | os.PathLike[str],
    *,
    without: str | os.PathLike[str] | None = None,
    is_own: Callable[[str], bool] = is_own_output,
) -> FoundImages:
    """Find every image in and below a folder.

    Args:
        root: the folder.
        without: a folder that is passed over.
        is_own: whether fisherhash wrote a folder, whose images are no data.
    """
    found = FoundImages()
    seen = set() if without is None else {os.path.realpath(without)}
    # Links last: one that is added must not take over the images of a folder, or their keys
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
            folders, linked = _list(place, prefix, found, is_own)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            if not inside:
                raise UsageError(f"{root} may not be read: {reason}") from None
            found.closed[prefix] = reason
            continue
        waiting += [prefix + name for name in sorted(folders, reverse=True)]
        links += [prefix + name for name in sorted(linked, reverse=True)]
    found.files.sort()
    return found


def _list(
    place: str, prefix: str, found: FoundImages, is_own: Callable[[str], bool]
) -> tuple[list[str], list[str]]:
    """Take in the images of a folder; its sub-folders, and links to folders."""
    folders, links = [], []
    with os.scandir(place) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                continue
            if _is_dir(entry):
                if not is_own(entry.path):
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
        # A loop of links, a share that is gone: whatever it is, it has no images below it.
        return False


def _take(entry: os.DirEntry[str], key: str, found: FoundImages) -> None:
    try:
        state = entry.stat()
    except OSError as error:
        found.broken[key] = cannot_read(error)
        return
    if stat.S_ISREG(state.st_mode):
        found.files.append(ImageFile(key, entry.path, state.st_size, state.st_mtime_ns))
    else:
        found.broken[key] = "a pipe, socket or device, not a file"


def cannot_read(error: OSError) -> str:
    """The reason in words, as for an image that is decoded."""
    if isinstance(error, FileNotFoundError):
        return "the file does not exist (moved or deleted?)"
    if isinstance(error, PermissionError):
        return "permission denied"
    return f"cannot be read: {(error.strerror or str(error)).lower()}"
