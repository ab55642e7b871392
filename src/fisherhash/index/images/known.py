"""The folders that this user filled an index from, noted outside of the index.

A page with thumbnails embeds only images of these folders. An index says where its images are, but
whoever wrote the index wrote that too: an index from a stranger could name any image of this
machine, and the page would carry it away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from fisherhash.errors import FisherhashError
from fisherhash.index.base import Uri
from fisherhash.system.cache import cache_dir
from fisherhash.system.files import read_bounded
from fisherhash.system.storage import dump_json, write_file

_MOST_BYTES = 4 << 20


def known_folders(uri: Uri) -> list[str]:
    """The folders that an index was filled from on this machine."""
    try:
        folders = json.loads(read_bounded(cache_place(uri, "indexes", ".json"), _MOST_BYTES))[
            "folders"
        ]
        return [folder for folder in folders if isinstance(folder, str)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def remember_folders(uri: Uri, folders: Iterable[str | os.PathLike[str]]) -> None:
    """Note folders that an index is filled from; without a place to write, nothing is noted."""
    known = known_folders(uri)
    new = {os.path.realpath(folder) for folder in folders}.difference(known)
    if new:
        text = dump_json({"index": _name(uri), "folders": sorted([*known, *new])})
        with contextlib.suppress(FisherhashError, OSError):
            write_file(cache_place(uri, "indexes", ".json"), text)


def is_inside(path: str | os.PathLike[str], folders: Iterable[str]) -> bool:
    """Whether a file is in one of some folders or below it, all links resolved."""
    try:
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(os.path.realpath(folder)) for folder in folders)
    except (OSError, ValueError):
        return False


def _name(uri: Uri) -> str:
    text = os.fspath(uri)
    return text if "://" in text else os.path.realpath(text)


def cache_place(uri: Uri, kind: str, suffix: str) -> Path:
    """Where this user's cache keeps something about an index, whatever kind of index it is."""
    digest = hashlib.sha256(_name(uri).encode(errors="surrogateescape")).hexdigest()
    return cache_dir() / kind / f"{digest[:32]}{suffix}"
