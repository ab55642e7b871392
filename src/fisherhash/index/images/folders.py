"""The folders and files that an index is filled from.

The folders are noted outside of the index, too: a page with thumbnails embeds only images of these.
An index says where its images are, but whoever wrote the index wrote that too: an index from a
stranger could name any image of this machine, and the page would carry it away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from fisherhash.data.folders import ImageFile
from fisherhash.data.images import read_failure
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Uri
from fisherhash.system.cache import cache_dir
from fisherhash.system.files import read_bounded
from fisherhash.system.storage import dump_json, write_file

StrPath = str | os.PathLike[str]
_MOST_BYTES = 4 << 20


def known_folders(uri: Uri) -> list[str]:
    """The folders that an index was filled from on this machine."""
    try:
        text = read_bounded(cache_path(uri, "indexes", ".json"), _MOST_BYTES)
        return [folder for folder in json.loads(text)["folders"] if isinstance(folder, str)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def remember_folders(uri: Uri, folders: Iterable[str | os.PathLike[str]]) -> None:
    """Note folders that an index is filled from; if they cannot be written, nothing is noted."""
    known = known_folders(uri)
    new = {os.path.realpath(folder) for folder in folders}.difference(known)
    if new:
        text = dump_json({"folders": sorted([*known, *new])})
        with contextlib.suppress(FisherhashError, OSError):
            write_file(cache_path(uri, "indexes", ".json"), text)


def is_inside(path: str | os.PathLike[str], folders: Iterable[str]) -> bool:
    """Whether a file is in one of some folders or below it, all links resolved."""
    try:
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(os.path.realpath(folder)) for folder in folders)
    except (OSError, ValueError):
        return False


def cache_path(uri: Uri, kind: str, suffix: str) -> Path:
    """Where this user's cache keeps something about an index, whatever kind of index it is."""
    name = os.fspath(uri)
    name = name if "://" in name else os.path.realpath(name)
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
    return cache_dir() / kind / f"{digest[:32]}{suffix}"


# Files


def key_of(path: str, folder: str | None) -> str:
    """The key of an image file in an index that is in sync with a folder, or with none."""
    name = Path(path)
    if folder is not None and name.is_relative_to(folder):
        name = name.relative_to(folder)
    return name.as_posix()


def list_files(
    images: Iterable[StrPath], folder: str | None
) -> tuple[list[ImageFile], dict[str, str]]:
    """Image files, and all images in folders: those that are there, and why others are not.

    Args:
        images: files and folders.
        folder: the folder that the index is in sync with; its images have their path inside it as
            their key, any other one its absolute path, in POSIX style.
    """
    from fisherhash.data.sources import open_paths

    paths = dict.fromkeys(os.path.abspath(name) for name in open_paths(images).names)
    return stat_files((key_of(path, folder), path) for path in paths)


def stat_files(named: Iterable[tuple[str, str]]) -> tuple[list[ImageFile], dict[str, str]]:
    """Image files from their keys and paths: those that are there, and why others are not."""
    files, broken = [], {}
    for key, path in named:
        try:
            files.append(ImageFile.from_state(key, path, os.stat(path)))
        except (OSError, ValueError) as error:
            broken[key] = read_failure(error)
    return files, broken


def check_folder(folder: StrPath, uri: StrPath) -> Path:
    """A folder of images as an absolute path; refuses what cannot be synced with an index."""
    root = Path(os.path.abspath(Path(folder).expanduser()))
    if os.path.realpath(uri) == os.path.realpath(root):
        raise UsageError(f"{uri} cannot be the index and the folder of images at once")
    if os.path.isdir(uri):
        raise UsageError(
            f"{uri} is a folder, but an index is a file, and comes first: "
            f"fisherhash index sync {folder} {uri}. Nothing was changed"
        )
    if root.is_dir():
        return root
    if root.exists():
        raise UsageError(f"{folder} is a file; sync takes a folder. Add a file with: index add")
    raise UsageError(f"there is no folder '{folder}'; nothing was changed")
