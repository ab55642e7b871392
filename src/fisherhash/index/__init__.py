"""Exact Hamming search: ``Index.open(uri)`` opens an index, whatever stores it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fisherhash.index.base import Index
    from fisherhash.index.items import Entry, Item, Match, Matches, Problem, Within

__all__ = ["Entry", "Index", "Item", "Match", "Matches", "Problem", "Within"]


def __getattr__(name: str) -> Any:
    # On first use: the command line reads the options of a search, and answers before numpy is in.
    if name not in __all__:
        raise AttributeError(f"module 'fisherhash.index' has no attribute '{name}'")
    module = "base" if name == "Index" else "items"
    return getattr(importlib.import_module(f"fisherhash.index.{module}"), name)
