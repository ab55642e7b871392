"""Exact Hamming search: ``Index.open(uri)`` opens an index, whatever stores it."""

from fisherhash.index.base import Index
from fisherhash.index.items import Entry, Hit, Item, Matches, Problem, Within

__all__ = ["Entry", "Hit", "Index", "Item", "Matches", "Problem", "Within"]
