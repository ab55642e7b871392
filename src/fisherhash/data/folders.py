"""Folders of images: the one walk through a folder, and class sub-folders as labels."""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fisherhash.data.collection import Collection, one_hot
from fisherhash.data.formats import (
    HEAD,
    RAW_REASON,
    is_image_name,
    is_raw_name,
    looks_like_image,
)
from fisherhash.data.images import read_failure
from fisherhash.data.readers import FileReader
from fisherhash.errors import UsageError, counted, printable
from fisherhash.system.files import open_regular, read_bounded

_CONFIG_BYTES = 4 << 20
"""The config of a model is shorter."""
_OWN = "fisherhash wrote it (a model, an index or a demo)"


def is_own_output(folder: str | os.PathLike[str]) -> bool:
    """Whether fisherhash wrote this folder (a model, a demo): its images are not data."""
    try:
        config = json.loads(read_bounded(Path(folder) / "config.json", _CONFIG_BYTES))
    except (OSError, ValueError, RecursionError, MemoryError):
        # Whatever a stranger's file of that name is, it must not stop a walk.
        return False
    if not isinstance(config, dict):
        return False
    return "fisherhash" in config or {"bits", "backbone", "preprocessing"} <= config.keys()


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file as the disk lists it.

    Attributes:
        key: its POSIX-style path inside the folder; need not be UTF-8.
        path: where it lies.
        size: bytes.
        mtime_ns: time at which its content was last changed, as a program may have set it.
        ctime_ns: time at which anything about it was last changed, as the system noted it.
    """

    key: str
    path: str
    size: int
    mtime_ns: int
    ctime_ns: int | None = None

    @classmethod
    def from_state(cls, key: str, path: str, state: os.stat_result) -> ImageFile:
        """An image file from what the system says about it."""
        return cls(key, path, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


@dataclass
class FoundImages:
    """What a folder holds.

    Attributes:
        files: every image file, sorted by key.
        broken: the keys of files named like images that cannot be opened or are never read, with
            the reason.
        closed: sub-folders that cannot be listed, with a slash at the end, with the reason.
        own: sub-folders that fisherhash wrote, with a slash at the end; they were left out.
        other: number of files that are not images, by extension.
    """

    files: list[ImageFile] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)
    other: Counter[str] = field(default_factory=Counter)

    def is_hidden(self, key: str) -> bool:
        """Whether an image may still exist in a sub-folder that was not listed."""
        return key.startswith((*self.closed, *self.own))

    def notes(self) -> list[str]:
        """Sentences about what was skipped."""
        notes = [
            f"the folder {printable(name)} cannot be read ({reason}); its images stay in the index"
            for name, reason in self.closed.items()
        ]
        notes += [
            f"the folder {printable(name)} was left out: {_OWN}; "
            "images of it that are in the index stay there"
            for name in self.own
        ]
        if self.other:
            notes.append(f"files that are not images were skipped: {self.kinds()}")
        return notes

    def nothing(self, root: Path) -> str:
        """Why there is no image in ``root``."""
        if self.broken:
            name, reason = next(iter(self.broken.items()))
            return f"{root} holds no image that can be read; {printable(name)}: {reason}"
        return f"{root} holds no images" + (f" ({self.kinds()})" if self.other else "")

    def kinds(self) -> str:
        """The extensions of the files that are not images, with their numbers."""
        return ", ".join(f"{count} x {printable(kind)}" for kind, count in self.other.most_common())


def walk_images(
    root: str | os.PathLike[str],
    *,
    without: str | os.PathLike[str] | None = None,
    elsewhere: AbstractSet[str] = frozenset(),
    is_own: Callable[[str], bool] = is_own_output,
) -> FoundImages:
    """Find every image in and below a folder, with its size and time of change.

    Hidden entries are skipped. A file without an extension is an image if it begins like one. A
    link to a folder is followed once, after all real folders: adding a link must not change the
    keys of images that are also reachable without it.

    Args:
        root: the folder.
        without: a folder to skip, such as the index that is being filled.
        elsewhere: real paths of folders whose images belong to another walk; links to them are not
            followed.
        is_own: whether fisherhash wrote a folder; such folders are skipped.

    Raises:
        UsageError: ``root`` itself cannot be listed.
    """
    found = FoundImages()
    root = os.fspath(root)
    seen = {*elsewhere} - {os.path.realpath(root)}
    if without is not None:
        seen.add(os.path.realpath(without))
    waiting, links = [""], []
    while waiting or links:
        inside = waiting.pop() if waiting else links.pop()
        path = os.path.join(root, inside) if inside else root
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        prefix = f"{inside}/" if inside else ""
        try:
            folders, linked = _list(path, prefix, found, is_own)
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
    path: str, prefix: str, found: FoundImages, is_own: Callable[[str], bool]
) -> tuple[list[str], list[str]]:
    """Add the images of one folder to ``found``; return its sub-folders and links to folders."""
    folders, links = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            linked = entry.is_symlink()
            # os.path.isdir is False for a loop of links, or one to a share that is gone.
            if os.path.isdir(entry.path) if linked else entry.is_dir():
                if is_own(entry.path):
                    found.own.append(f"{prefix}{entry.name}/")
                else:
                    (links if linked else folders).append(entry.name)
                continue
            extension = os.path.splitext(entry.name)[1].lower()
            if is_image_name(entry.name) or (not extension and _begins_like_image(entry.path)):
                _add(entry, prefix + entry.name, found)
            elif is_raw_name(entry.name):
                found.broken[prefix + entry.name] = RAW_REASON
            else:
                found.other[extension or "no extension"] += 1
    return folders, links


def _begins_like_image(path: str) -> bool:
    try:
        with open_regular(path) as file:
            return looks_like_image(file.read(HEAD))
    except OSError:
        return False


def _add(entry: os.DirEntry[str], key: str, found: FoundImages) -> None:
    try:
        state = entry.stat()
    except OSError as error:
        found.broken[key] = read_failure(error)
        return
    if stat.S_ISREG(state.st_mode):
        found.files.append(ImageFile.from_state(key, entry.path, state))
    else:
        found.broken[key] = "a pipe, socket or device, not a file"


def image_keys(found: FoundImages, root: Path) -> list[str]:
    """Every image of a walk, sorted, broken ones included so that reading reports them.

    Raises:
        UsageError: a sub-folder cannot be listed, so the data would be incomplete.
    """
    for folder, reason in found.closed.items():
        raise UsageError(f"{root / folder} cannot be read: {reason}")
    return sorted([*(file.key for file in found.files), *found.broken])


def left_out_notes(found: FoundImages) -> list[str]:
    """Sentences about what a data set leaves out of its folder."""
    notes = [f"the sub-folder {printable(name)} was left out: {_OWN}" for name in found.own]
    if found.other:
        count = counted(sum(found.other.values()), "other file was", "other files were")
        notes.append(f"{count} left out: {found.kinds()}")
    return notes


def open_folder(root: Path) -> Collection:
    """Open a folder with one sub-folder per class; without sub-folders, images without labels."""
    top = FoundImages()
    folders, links = _list(os.fspath(root), "", top, is_own_output)
    inside: dict[str, list[str]] = {}
    notes: list[str] = []
    # A link from one class to another, or to all of them, adds no images to it.
    real = {os.path.realpath(path) for path in (root, *(root / name for name in folders))}
    for folder in sorted(folders + links):
        found = walk_images(root / folder, elsewhere=real)
        top.other += found.other
        top.own += [f"{folder}/{name}" for name in found.own]
        if keys := image_keys(found, root / folder):
            inside[folder] = [f"{folder}/{key}" for key in keys]
        else:
            notes.append(f"the sub-folder '{printable(folder)}' holds no images and is not a class")
    classes, loose = tuple(inside), image_keys(top, root)
    names = [*itertools.chain(*inside.values()), *loose]
    sizes = [len(own) for own in inside.values()]
    if not names:
        reason = top.nothing(root) if any(os.scandir(root)) else f"{root} is an empty folder"
        raise UsageError(
            f"{reason}. Give a folder with one sub-folder of images per class, a CSV file "
            "'path,label', or a folder with train.txt, query.txt and database.txt"
        )
    if classes and loose:
        notes.append(
            f"{counted(len(loose), 'image')} outside the class sub-folders: without a label"
        )
    notes += left_out_notes(top)
    return Collection(
        name=root.name or str(root),
        names=names,
        labels=one_hot(np.repeat([*range(len(classes)), -1], [*sizes, len(loose)]), len(classes)),
        classes=classes,
        reader=FileReader(root, names),
        kind="folder" if classes else "photos",
        notes=tuple(notes),
    )
