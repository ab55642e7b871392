"""Search: exact Hamming indexes, opened by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fisherhash.index.base import Item, Matches, Within
    from fisherhash.index.opening import Index
    from fisherhash.index.store.local import LocalIndex

__all__ = ["Index", "Item", "LocalIndex", "Matches", "Within"]

_PLACES = {
    "Index": "fisherhash.index.opening",
    "Item": "fisherhash.index.base",
    "LocalIndex": "fisherhash.index.store.local",
    "Matches": "fisherhash.index.base",
    "Within": "fisherhash.index.base",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'fisherhash.index' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
