"""Images in folders, behind URLs and in lists, and folders whose sub-folders are classes."""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from fisherhash.data.collection import Collection, FileReader, one_hot
from fisherhash.data.formats import RAW_REASON, UnreadableImage, is_image_name, is_raw_name
from fisherhash.data.images import check_file, read_failure
from fisherhash.errors import FisherhashError, UsageError, counted, printable
from fisherhash.system.files import read_bounded
from fisherhash.system.remote import file_system, is_url

_CONFIG_BYTES = 4 << 20
"""The config of a model is shorter."""
_OWN = "fisherhash wrote it (a model or a demo)"
_TIMES = ("LastModified", "mtime", "last_modified", "updated", "created")
"""What file systems behind URLs call the time of change."""


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


def walk_images(root: str | os.PathLike[str]) -> FoundImages:
    """Find every image in and below a folder, with its size and time of change.

    Hidden entries and folders that fisherhash wrote are skipped. A file without an extension is an
    image if it begins like one. A link to a folder is followed once, after all real folders: adding
    a link must not change the keys of images that are also reachable without it.

    Raises:
        UsageError: ``root`` itself cannot be listed.
    """
    found = FoundImages()
    root = os.fspath(root)
    seen: set[str] = set()
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
            folders, linked = _list(path, prefix, found)
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


def _list(path: str, prefix: str, found: FoundImages) -> tuple[list[str], list[str]]:
    """Add the images of one folder to ``found``; return its sub-folders and links to folders."""
    folders, links = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            linked = entry.is_symlink()
            # os.path.isdir is False for a loop of links, or one to a share that is gone.
            if os.path.isdir(entry.path) if linked else entry.is_dir():
                if is_own_output(entry.path):
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
        check_file(path)
    except UnreadableImage as error:
        return error.passing and os.access(path, os.R_OK)
    return True


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
    found = walk_images(root)
    inside: dict[str, list[str]] = {}
    loose: list[str] = []
    for key in image_keys(found, root):
        folder, slash, _ = key.partition("/")
        (inside.setdefault(folder, []) if slash else loose).append(key)
    classes = tuple(sorted(inside))
    names = [*itertools.chain(*(inside[name] for name in classes)), *loose]
    sizes = [len(inside[name]) for name in classes]
    if not names:
        reason = found.nothing(root) if any(os.scandir(root)) else f"{root} is an empty folder"
        raise UsageError(
            f"{reason}. Give a folder with one sub-folder of images per class, a CSV file "
            "'path,label', or a folder with train.txt, query.txt and database.txt"
        )
    notes = left_out_notes(found)
    if classes and loose:
        notes.insert(
            0, f"{counted(len(loose), 'image')} outside the class sub-folders: without a label"
        )
    return Collection(
        name=root.name or str(root),
        names=names,
        labels=one_hot(np.repeat([*range(len(classes)), -1], [*sizes, len(loose)]), len(classes)),
        classes=classes,
        reader=FileReader(root, names),
        kind="folder" if classes else "photos",
        notes=tuple(notes),
    )


def list_images(source: str) -> FoundImages:
    """The images behind a URL, or in a list: a text file with a path or a URL per line.

    The key of an image is its path behind the URL; in a list, its line.

    Raises:
        UsageError: there is no such thing.
    """
    if is_url(source) and not source.endswith(".txt"):
        return _list_url(source)
    try:
        if is_url(source):
            fs, path = file_system(source)
            text = fs.cat_file(path).decode(errors="surrogateescape")
        else:
            text = os.fsdecode(Path(source).read_bytes())
    except OSError as error:
        raise UsageError(f"the list {source} cannot be read: {error}") from None
    found = FoundImages()
    for line in dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()):
        try:
            if is_url(line):
                fs, path = file_system(line)
                found.files.append(_remote_file(line, line, fs.info(path)))
            else:
                path = os.path.join(os.path.dirname(os.path.abspath(source)), line)
                found.files.append(ImageFile.from_state(line, path, os.stat(path)))
        except OSError as error:
            found.broken[line] = f"cannot be read: {error.strerror or error}"
    return found


def _list_url(url: str) -> FoundImages:
    fs, root = file_system(url)
    found = FoundImages()
    try:
        if not fs.exists(root):
            raise UsageError(f"{url} does not exist")
        listed: Mapping[str, Any] = fs.find(root, detail=True)
    except FisherhashError:
        raise
    except Exception as error:  # every file system has errors of its own
        raise FisherhashError(f"{url} cannot be listed: {error}") from error
    for name, about in sorted(listed.items()):
        key = name[len(root) :].lstrip("/") or os.path.basename(name)
        if is_image_name(key):
            found.files.append(_remote_file(key, fs.unstrip_protocol(name), about))
        else:
            found.other[os.path.splitext(key)[1] or "(none)"] += 1
    return found


def _remote_file(key: str, url: str, about: Mapping[str, Any]) -> ImageFile:
    when = next((about[name] for name in _TIMES if about.get(name) is not None), 0)
    if isinstance(when, str):
        try:
            when = datetime.fromisoformat(when)
        except ValueError:
            when = 0
    seconds = when.timestamp() if isinstance(when, datetime) else float(when)
    return ImageFile(key, url, int(about.get("size") or 0), int(seconds * 1e9))
