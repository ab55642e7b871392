"""Search: exact Hamming indexes, opened by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fisherhash.index.base import Item, Matches, Within
    from fisherhash.index.opening import Index
    from fisherhash.index.pictures.asking import ask
    from fisherhash.index.pictures.duplicates import duplicates
    from fisherhash.index.pictures.folders import add_images, sync_folder
    from fisherhash.index.store.local import LocalIndex

__all__ = [
    "Index",
    "Item",
    "LocalIndex",
    "Matches",
    "Within",
    "add_images",
    "ask",
    "duplicates",
    "sync_folder",
]

_PLACES = {
    "Index": "fisherhash.index.opening",
    "Item": "fisherhash.index.base",
    "LocalIndex": "fisherhash.index.store.local",
    "Matches": "fisherhash.index.base",
    "Within": "fisherhash.index.base",
    "add_images": "fisherhash.index.pictures.folders",
    "ask": "fisherhash.index.pictures.asking",
    "duplicates": "fisherhash.index.pictures.duplicates",
    "sync_folder": "fisherhash.index.pictures.folders",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'fisherhash.index' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
