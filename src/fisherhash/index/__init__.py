"""Exact Hamming search: ``Index.open(uri)`` opens an index, whatever stores it."""

from fisherhash.index.base import Index, register_backend
from fisherhash.index.items import Entry, Hit, Item, Matches, Problem, Within

__all__ = ["Entry", "Hit", "Index", "Item", "Matches", "Problem", "Within", "register_backend"]
