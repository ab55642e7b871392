"""Exact searches on Milvus, which returns ties in any order and a page of results at most.

The k nearest by (distance, id) are those nearer than the k-th distance, which Milvus finds, and of
those at that distance the ones with the smallest ids. The latter are collected by ranges of ids:
a range that fills a page is split.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fisherhash.index.items import Ids
from fisherhash.index.milvus.collection import PAGE, Collection, MilvusState, one_of, visible

_QUERIES = 64
_LISTED = 4096
"""Ids in one expression."""

Hits = list[tuple[int, int]]


class Nearest:
    """Searches in one commit, perhaps only among some ids."""

    def __init__(
        self, collection: Collection, state: MilvusState, bits: int, wanted: Ids | None
    ) -> None:
        self._collection, self._bits, self._end = collection, bits, state.next_id
        self._visible = f"id >= 0 and {visible(state.commit)}"
        self._wanted = wanted

    def search(self, queries: list[bytes], k: int) -> list[Hits]:
        """The k nearest by (distance, id)."""
        if k > PAGE:
            return [hits[:k] for hits in self.within(queries, self._bits)]
        found: list[Hits] = [[] for _ in queries]
        for expression in self._parts():
            for start in range(0, len(queries), _QUERIES):
                some = queries[start : start + _QUERIES]
                answers = self._collection.search(some, k, expression)
                for i, hits in enumerate(answers, start):
                    hits = self._untie(queries[i], hits, k, expression)
                    found[i] = sorted([*found[i], *hits], key=_by_distance)[:k]
        return found

    def _untie(self, query: bytes, hits: Hits, k: int, expression: str) -> Hits:
        """The hits with the smallest ids at the last distance."""
        if len(hits) < k or self._collection.place.search == "ivf":
            return hits
        last = max(distance for _, distance in hits)
        nearer = [hit for hit in hits if hit[1] < last]
        ties: Hits = []
        for part in self._ranges(query, last, last, expression):
            ties += sorted(part)
            if len(nearer) + len(ties) >= k:
                break
        return nearer + ties[: k - len(nearer)]

    def within(self, queries: list[bytes], radius: int) -> list[Hits]:
        """Everything up to a distance, by (distance, id)."""
        return [
            sorted(
                (
                    hit
                    for expression in self._parts()
                    for part in self._ranges(query, 0, radius, expression)
                    for hit in part
                ),
                key=_by_distance,
            )
            for query in queries
        ]

    def _parts(self) -> Iterator[str]:
        """Expressions that together match everything that may be found, each once."""
        if self._wanted is None:
            yield self._visible
            return
        for start in range(0, len(self._wanted), _LISTED):
            ids = self._wanted[start : start + _LISTED]
            yield f"{self._visible} and {one_of('id', np.asarray(ids).tolist())}"

    def _ranges(self, query: bytes, least: int, most: int, expression: str) -> Iterator[Hits]:
        """Everything between two distances, by ascending ranges of ids."""
        waiting = [(0, self._end)]
        while waiting:
            first, end = waiting.pop()
            test = f"{expression} and id >= {first} and id < {end}"
            (hits,) = self._collection.search(
                [query], PAGE, test, radius=most + 1, range_filter=least, **self._everything()
            )
            # Distances are whole numbers, but a range may be open on either side.
            hits = [hit for hit in hits if least <= hit[1] <= most]
            if len(hits) < PAGE or end - first <= 1:
                yield hits
            else:
                middle = (first + end) // 2
                waiting += [(middle, end), (first, middle)]

    def _everything(self) -> dict[str, int]:
        """A radius is exact with an inverted file, too: all of its lists are read."""
        place = self._collection.place
        return {"nprobe": place.nlist} if place.search == "ivf" else {}


def _by_distance(hit: tuple[int, int]) -> tuple[int, int]:
    return hit[1], hit[0]
