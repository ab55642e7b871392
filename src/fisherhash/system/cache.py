"""The folders for downloads, cached features and named data sets."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "FISHERHASH_CACHE"
DATA_VARIABLE = "FISHERHASH_DATA"


def cache_dir() -> Path:
    """Return ``FISHERHASH_CACHE``, or a folder in the user's cache; it may not exist yet."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says to ignore a relative path.
    if base and os.path.isabs(base):
        return Path(base) / "fisherhash"
    return Path("~/.cache/fisherhash").expanduser()


def data_dirs() -> list[Path]:
    """Return the folders that are searched for named data sets, in order.

    ``FISHERHASH_DATA`` may name several folders, separated as in ``PATH``.
    """
    named = os.environ.get(DATA_VARIABLE, "").split(os.pathsep)
    return [Path(part).expanduser().absolute() for part in named if part] + [cache_dir() / "data"]
