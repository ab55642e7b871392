"""Exact Hamming search: ``Index.open(uri)`` opens an index, whatever stores it."""

from fisherhash.index.base import (
    Entry,
    Hit,
    Index,
    Item,
    Matches,
    Problem,
    Within,
    register_backend,
)

__all__ = [
    "Entry",
    "Hit",
    "Index",
    "Item",
    "Matches",
    "Problem",
    "Within",
    "register_backend",
]
