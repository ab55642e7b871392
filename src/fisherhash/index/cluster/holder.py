"""The actor that holds shards: it loads them from storage and searches them with our engine."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import code_bytes
from fisherhash.index.base import Index
from fisherhash.index.cluster.storage import downloaded
from fisherhash.index.engine import Engine
from fisherhash.index.items import Codes, Ids


class Shard(NamedTuple):
    """One of the parts of an index: a range of its items, by ascending id.

    Attributes:
        storage: the folder or the URL.
        version: of what lies behind a URL; empty for a folder.
        shards: how many parts there are.
        number: which of them this is.
    """

    storage: str
    version: str
    shards: int
    number: int


class Answer(NamedTuple):
    """What a shard returns.

    Attributes:
        commit: the commit that it holds.
        found: its results; None if that is not the commit that was asked about.
    """

    commit: int
    found: tuple[NDArray[Any], ...] | None


class _Held:
    """A shard in memory."""

    def __init__(self, index: Index, shard: Shard) -> None:
        while True:
            info = index.info()
            self.commit = int(info["commit"])
            self.ids, self.codes = _part(index, int(info["count"]), shard)
            if index.info()["commit"] == self.commit:
                break
        self.bits = index.bits
        self.engine = Engine(self.codes, self.bits)

    def among(self, wanted: Ids | None) -> tuple[Ids, Engine]:
        """What is searched: everything, or some ids."""
        if wanted is None:
            return self.ids, self.engine
        own = np.isin(self.ids, wanted, assume_unique=True)
        return self.ids[own], Engine(self.codes[own], self.bits)


def _part(index: Index, count: int, shard: Shard) -> tuple[Ids, Codes]:
    first = count * shard.number // shard.shards
    end = count * (shard.number + 1) // shard.shards
    none = np.zeros((0, code_bytes(index.bits)), dtype=np.uint8)
    ids, codes, done = [np.zeros(0, dtype=np.int64)], [none], 0
    for some, block in index.scan():
        part = slice(max(0, first - done), max(0, end - done))
        ids.append(some[part])
        codes.append(block[part])
        done += len(some)
        if done >= end:
            break
    return np.concatenate(ids), np.concatenate(codes)


class ShardHolder:
    """Holds shards of any number of indexes; what it does not hold, it loads when it is needed."""

    def __init__(self) -> None:
        self._held: dict[Shard, _Held] = {}
        self._opened: dict[tuple[str, str], Index] = {}

    def search(
        self, shard: Shard, commit: int, queries: Codes, k: int, wanted: Ids | None
    ) -> Answer:
        """Ids and distances of the k nearest items of each query."""
        held = self._at(shard, commit)
        if held.commit != commit:
            return Answer(held.commit, None)
        ids, engine = held.among(wanted)
        places, distances = engine.search(queries, k)
        return Answer(commit, (ids[places], distances))

    def within(
        self, shard: Shard, commit: int, queries: Codes, radius: int, wanted: Ids | None
    ) -> Answer:
        """Offsets, ids and distances of everything up to a radius."""
        held = self._at(shard, commit)
        if held.commit != commit:
            return Answer(held.commit, None)
        ids, engine = held.among(wanted)
        offsets, places, distances = engine.within(queries, radius)
        return Answer(commit, (offsets, ids[places], distances))

    def drop(self, shard: Shard) -> None:
        """Forget a shard."""
        self._held.pop(shard, None)
        name = (shard.storage, shard.version)
        if name not in {(other.storage, other.version) for other in self._held}:
            opened = self._opened.pop(name, None)
            if opened is not None:
                opened.close()

    def ping(self) -> None:
        """Say that it is there."""

    def _at(self, shard: Shard, commit: int) -> _Held:
        held = self._held.get(shard)
        if held is None or held.commit != commit:
            name = (shard.storage, shard.version)
            if name not in self._opened:
                remote = bool(shard.version)
                place = downloaded(*name) if remote else shard.storage
                self._opened[name] = Index.open(place)
            held = self._held[shard] = _Held(self._opened[name], shard)
        return held
