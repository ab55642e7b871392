"""Where downloads and cached features go, and where named data sets are looked for."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "FISHERHASH_CACHE"
DATA_VARIABLE = "FISHERHASH_DATA"


def cache_dir() -> Path:
    """The cache folder (not created here): ``FISHERHASH_CACHE``, else the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG rule: a relative path is to be ignored.
    if base and os.path.isabs(base):
        return Path(base) / "fisherhash"
    return Path("~/.cache/fisherhash").expanduser()


def data_dirs() -> list[Path]:
    """The folders that may hold named data sets, in the order they are searched.

    ``FISHERHASH_DATA`` may name several, separated as in ``PATH``.
    """
    named = os.environ.get(DATA_VARIABLE, "").split(os.pathsep)
    return [Path(part).expanduser().absolute() for part in named if part] + [cache_dir() / "data"]
