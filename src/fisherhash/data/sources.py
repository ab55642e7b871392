"""Opens images and labels: folders, CSV and list files, CIFAR-10, the built-in sample."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fisherhash.data.cifar import (
    CIFAR_FOLDER,
    download_cifar10,
    find_cifar10,
    open_cifar10,
    open_sample,
)
from fisherhash.data.collection import Collection, FileReader
from fisherhash.data.folders import image_keys, left_out_notes, open_folder, walk_images
from fisherhash.data.formats import is_image_name
from fisherhash.data.lists import is_list_folder, open_csv, open_lists
from fisherhash.errors import UsageError
from fisherhash.system.cache import DATA_VARIABLE, cache_dir, data_dirs

NAMED = ("cifar10", "coco21", "sample", "tiny100")
"""The data sets that can be opened by name."""

_FORMS = (
    "a folder with one sub-folder of images per class, a CSV file 'path,label', a folder with "
    f"train.txt, query.txt and database.txt, or one of {', '.join(NAMED)}"
)


def open_data(spec: str | os.PathLike[str], *, download: bool = False) -> Collection:
    """Open images and labels from a path or by the name of a data set.

    A named data set is searched for in ``FISHERHASH_DATA``, then in the cache folder, then in the
    current folder; write ``./cifar10`` to mean a folder of that name.

    Args:
        spec: a folder of class sub-folders or of images, a CSV ``path,label[;label…]``, a folder
            with list files, CIFAR-10's binary files, or ``cifar10``, ``coco21``, ``sample``,
            ``tiny100``.
        download: fetch ``cifar10`` from its home page if it is not on this machine.

    Raises:
        UsageError: there is nothing to open; the message says what was found and what to do.

    >>> data = open_data("sample")
    >>> len(data), data.labels.shape, data.names[0]
    (2000, (2000, 10), 'data_batch_1/00048')
    """
    if isinstance(spec, str) and spec in NAMED:
        return _open_named(spec, download=download)
    if isinstance(spec, str) and not spec.strip():
        raise UsageError(f"no data was named; give {_FORMS}")
    # abspath, so that '..' gets the name of the folder it refers to.
    path = Path(os.path.abspath(Path(spec).expanduser()))
    try:
        if path.is_dir():
            return _open_directory(path)
        if path.is_file():
            return _open_file(path)
    except PermissionError:
        raise UsageError(f"{path} cannot be read: permission denied") from None
    near = difflib.get_close_matches(str(spec).lower(), NAMED, n=1, cutoff=0.6)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    raise UsageError(f"there is no file or folder '{spec}'. {hint}Give {_FORMS}")


def open_paths(paths: Iterable[str | os.PathLike[str]]) -> Collection:
    """Open image files without labels, in the given order.

    A folder stands for the images in and below it, sorted. Names are the paths as given, in
    POSIX style; a path given twice is read twice.
    """
    names: list[str] = []
    notes: list[str] = []
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            found = walk_images(path)
            notes += [f"{path}: {note}" for note in left_out_notes(found)]
            inside = [(path / key).as_posix() for key in image_keys(found, path)]
            if not inside:
                raise UsageError(f"the folder {path} holds no images")
            names += inside
        elif path.exists() or path.is_symlink():
            names.append(path.as_posix())
        else:
            raise UsageError(f"there is no file or folder '{given}'")
    if not names:
        raise UsageError("no images were given; name at least one file or folder")
    return Collection(
        name="files",
        names=names,
        labels=np.zeros((len(names), 0), dtype=np.uint8),
        classes=(),
        reader=FileReader(Path.cwd(), names),
        kind="photos",
        notes=tuple(notes),
    )


def _open_directory(path: Path) -> Collection:
    if is_list_folder(path):
        return open_lists(path)
    if cifar := find_cifar10(path):
        return open_cifar10(cifar)
    return open_folder(path)


def _open_file(path: Path) -> Collection:
    if path.suffix.lower() in (".csv", ".tsv"):
        return open_csv(path)
    if is_image_name(path.name):
        raise UsageError(f"{path} is one image, not a data set; give {_FORMS}")
    if path.suffix.lower() == ".txt" and is_list_folder(path.parent):
        raise UsageError(f"{path} is one of three lists; give its folder: {path.parent}")
    raise UsageError(f"{path} is neither a folder nor a CSV file; give {_FORMS}")


def _open_named(name: str, *, download: bool) -> Collection:
    if name == "sample":
        return open_sample()
    for folder in [*data_dirs(), Path.cwd()]:
        if name == "cifar10":
            if found := find_cifar10(folder) or find_cifar10(folder / name):
                return open_cifar10(found)
        elif is_list_folder(folder / name):
            return open_lists(folder / name)
    if name == "cifar10" and download:
        return open_cifar10(download_cifar10(cache_dir() / "data"))
    searched = ", ".join(str(folder) for folder in data_dirs())
    if name == "cifar10":
        raise UsageError(
            f"CIFAR-10 is not on this machine (looked for {CIFAR_FOLDER} in {searched}). Allow the "
            "download (162 MB; fisherhash train cifar10 --download, or download=True), or unpack "
            "cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html into a folder "
            f"and set {DATA_VARIABLE} to that folder"
        )
    raise UsageError(
        f"the data set '{name}' is not on this machine (looked for a folder '{name}' with "
        f"train.txt, query.txt and database.txt in {searched}). Build it as described in "
        f"docs/data.md and set {DATA_VARIABLE} to the folder that holds '{name}'"
    )
