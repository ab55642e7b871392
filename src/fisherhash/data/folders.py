"""Folders of images: the one walk through a folder, and class sub-folders as labels."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fisherhash.data.collection import Collection, one_hot
from fisherhash.data.images import read_failure
from fisherhash.data.readers import FileReader
from fisherhash.errors import UsageError

_EXTENSIONS = """
    .jpg .jpeg .jpe .jfif .jp2 .j2k .jpf .jpx .png .apng .gif .webp .avif .avifs .bmp .dib .tif
    .tiff .mpo .pbm .pgm .ppm .pnm .pfm .ico .icns .tga .qoi .pcx .sgi .rgb .dds .psd .heic
    .heif
"""
IMAGE_EXTENSIONS = frozenset(_EXTENSIONS.split())
"""Files that are read as images, in upper or lower case; HEIC too, so that it is reported."""


def is_image_name(name: str) -> bool:
    """Whether a file has the extension of an image.

    >>> is_image_name("Übung 1.JPEG"), is_image_name("notes.txt")
    (True, False)
    """
    return os.path.splitext(name)[1].lower() in IMAGE_EXTENSIONS


def is_own_output(folder: str | os.PathLike[str]) -> bool:
    """Whether fisherhash wrote this folder (a model, a demo): its images are not data."""
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and (
        "fisherhash" in config or {"bits", "backbone", "preprocessing"} <= config.keys()
    )


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


def image_keys(found: FoundImages, root: Path) -> list[str]:
    """Every image of a walk, sorted, broken ones included so that reading reports them.

    Raises:
        UsageError: a sub-folder cannot be listed, so the data would be incomplete.
    """
    for folder, reason in found.closed.items():
        raise UsageError(f"{root / folder} cannot be read: {reason}")
    return sorted([*(file.key for file in found.files), *found.broken])


def open_folder(root: Path) -> Collection:
    """Open a folder with one sub-folder per class; without sub-folders, images without labels."""
    top = FoundImages()
    folders, links = _list(os.fspath(root), "", top, is_own_output)
    names: list[str] = []
    numbers: list[int] = []
    classes: list[str] = []
    notes: list[str] = []
    for folder in sorted(folders + links):
        found = walk_images(root / folder)
        top.other += found.other
        keys = image_keys(found, root / folder)
        if not keys:
            notes.append(f"the sub-folder '{folder}' holds no images and is not a class")
            continue
        names += [f"{folder}/{key}" for key in keys]
        numbers += [len(classes)] * len(keys)
        classes.append(folder)
    loose = image_keys(top, root)
    names += loose
    numbers += [-1] * len(loose)
    if not names:
        reason = top.nothing(root) if any(os.scandir(root)) else f"{root} is an empty folder"
        raise UsageError(
            f"{reason}. Give a folder with one sub-folder of images per class, a CSV file "
            "'path,label', or a folder with train.txt, query.txt and database.txt"
        )
    if classes and loose:
        notes.append(f"images outside the class sub-folders, without a label: {len(loose)}")
    if top.other:
        notes.append(f"files that are not images were skipped: {sum(top.other.values())}")
    return Collection(
        name=root.name or str(root),
        names=names,
        labels=one_hot(numbers, len(classes)),
        classes=tuple(classes),
        reader=FileReader(root, names),
        kind="folder" if classes else "photos",
        notes=tuple(notes),
    )
