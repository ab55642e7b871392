"""Images and labels: where they come from, how they are split, decoded and checked."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fisherhash.data.collection import Collection, Reader
    from fisherhash.data.images import UnreadableImage
    from fisherhash.data.protocols import resolve
    from fisherhash.data.sources import open_data, open_paths
    from fisherhash.data.splits import Split

__all__ = ["Collection", "Reader", "Split", "UnreadableImage", "open_data", "open_paths", "resolve"]

# Loaded on first use: a worker process and a search need few of these modules.
_PLACES = {
    "Collection": "collection",
    "Reader": "collection",
    "Split": "splits",
    "UnreadableImage": "images",
    "open_data": "sources",
    "open_paths": "sources",
    "resolve": "protocols",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'fisherhash.data' has no attribute '{name}'")
    return getattr(importlib.import_module(f"fisherhash.data.{_PLACES[name]}"), name)
