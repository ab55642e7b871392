"""Folders of images: class sub-folders, or plain photos without labels."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fisherhash.data.collection import Collection, one_hot
from fisherhash.data.readers import FileReader
from fisherhash.errors import UsageError

_EXTENSIONS = """
    .jpg .jpeg .jpe .jfif .jp2 .j2k .jpf .jpx .png .apng .gif .webp .avif .avifs .bmp .dib .tif
    .tiff .mpo .pbm .pgm .ppm .pnm .pfm .ico .icns .tga .qoi .pcx .sgi .rgb .dds .psd .heic
    .heif
"""
IMAGE_EXTENSIONS = frozenset(_EXTENSIONS.split())
"""Read as pictures, in any case; HEIC is among them so that it is listed, not passed over."""


def is_image_name(name: str) -> bool:
    """Whether a file name ends like a picture's.

    >>> is_image_name("Übung 1.JPEG"), is_image_name("notes.txt")
    (True, False)
    """
    return os.path.splitext(name)[1].lower() in IMAGE_EXTENSIONS


def open_folder(root: Path) -> Collection:
    """A folder whose sub-folders are classes; without sub-folders, photos without labels."""
    names: list[str] = []
    numbers: list[int] = []
    classes: list[str] = []
    notes: list[str] = []
    other: Counter[str] = Counter()
    folders, loose = _entries(root, other)
    for folder in folders:
        found = sorted(f"{folder}/{name}" for name in walk_images(root / folder, other))
        if not found:
            notes.append(f"the sub-folder '{folder}' holds no images and is no class")
            continue
        names += found
        numbers += [len(classes)] * len(found)
        classes.append(folder)
    names += loose
    numbers += [-1] * len(loose)
    if not names:
        raise UsageError(_nothing_found(root, other))
    if classes and loose:
        notes.append(f"{len(loose)} images lie outside the class sub-folders and have no label")
    if other:
        notes.append(f"{sum(other.values())} files that are no images were left out")
    return Collection(
        name=root.name or str(root),
        names=names,
        labels=one_hot(numbers, len(classes)),
        classes=tuple(classes),
        reader=FileReader(root, names),
        kind="folder" if classes else "photos",
        notes=tuple(notes),
    )


def walk_images(folder: Path, other: Counter[str] | None = None) -> Iterator[str]:
    """Every image below ``folder`` as a POSIX-style relative name.

    Hidden entries and folders that fisherhash wrote are passed over; links to folders are followed
    once. Extensions of the files that are no images are counted in ``other``.
    """
    other = Counter() if other is None else other
    seen: set[str] = set()
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        place = folder / inside
        real = os.path.realpath(place)
        if real in seen:
            continue
        seen.add(real)
        folders, images = _entries(place, other)
        prefix = f"{inside}/" if inside else ""
        yield from (prefix + name for name in images)
        waiting += [prefix + name for name in reversed(folders)]


def is_own_output(folder: str | os.PathLike[str]) -> bool:
    """Whether fisherhash wrote this folder (a model, a demo): its pictures are no data."""
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and (
        "fisherhash" in config or {"bits", "backbone", "preprocessing"} <= config.keys()
    )


def _entries(folder: Path, other: Counter[str]) -> tuple[list[str], list[str]]:
    """The visible sub-folders and the images directly in ``folder``, each sorted by name."""
    folders, images = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    if not is_own_output(entry.path):
                        folders.append(entry.name)
                elif is_image_name(entry.name):
                    images.append(entry.name)
                else:
                    other[os.path.splitext(entry.name)[1].lower() or "no extension"] += 1
    except PermissionError:
        raise UsageError(f"{folder} may not be read: permission denied") from None
    return sorted(folders), sorted(images)


def _nothing_found(root: Path, other: Counter[str]) -> str:
    if not any(os.scandir(root)):
        found = f"{root} is an empty folder"
    elif other:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in other.most_common(3))
        found = f"{root} holds no images ({kinds})"
    else:
        found = f"{root} holds no images"
    return (
        f"{found}. Give a folder with one sub-folder of images a class, a CSV file "
        "'path,label', or a folder with train.txt, query.txt and database.txt"
    )
