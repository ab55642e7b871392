"""Search: exact Hamming indexes, opened by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fisherhash.index.base import Item, Matches, Within
    from fisherhash.index.images.asking import ask
    from fisherhash.index.images.duplicates import duplicates
    from fisherhash.index.images.folders import add_images, sync_folder
    from fisherhash.index.local.index import LocalIndex
    from fisherhash.index.opening import Index

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
    "LocalIndex": "fisherhash.index.local.index",
    "Matches": "fisherhash.index.base",
    "Within": "fisherhash.index.base",
    "add_images": "fisherhash.index.images.folders",
    "ask": "fisherhash.index.images.asking",
    "duplicates": "fisherhash.index.images.duplicates",
    "sync_folder": "fisherhash.index.images.folders",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'fisherhash.index' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
