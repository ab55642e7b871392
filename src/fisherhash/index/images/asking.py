"""Questions to an index by picture or by key, with answers that know their keys and files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import code_bytes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Item
from fisherhash.index.images.folders import file_of, mirrored_folder
from fisherhash.index.images.hashers import hasher_of
from fisherhash.index.local.index import LocalIndex

if TYPE_CHECKING:
    from fisherhash.model.hasher import Hasher

K = 10


@dataclass(frozen=True)
class Answer:
    """One item that a query found.

    Attributes:
        item: what the index knows about it.
        distance: Hamming distance from the query.
        path: where its picture lies now.
        code: (bytes,) its code.
    """

    item: Item
    distance: int
    path: str | None
    code: NDArray[np.uint8]

    @property
    def name(self) -> str:
        """Its key; bulk codes have none and are called by their id."""
        return name_of(self.item)


@dataclass(frozen=True)
class Answers:
    """One query and what it found, ordered by (distance, id).

    Attributes:
        name: the file or the key that was asked with.
        path: the file of the query.
        code: (bytes,) its code.
        found: the answers.
    """

    name: str
    path: str | None
    code: NDArray[np.uint8]
    found: list[Answer]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        rows = [
            {
                "rank": rank,
                "distance": answer.distance,
                "id": answer.item.id,
                "key": answer.item.key,
                "path": answer.path,
                "labels": list(answer.item.labels),
                "metadata": answer.item.metadata,
            }
            for rank, answer in enumerate(self.found, start=1)
        ]
        return {"query": self.name, "code": self.code.tobytes().hex(), "results": rows}


def name_of(item: Item) -> str:
    """The key of an item, or its id in words."""
    return f"id {item.id}" if item.key is None else item.key


def ask(
    path: str | os.PathLike[str],
    images: Sequence[str | os.PathLike[str]] = (),
    *,
    keys: Sequence[str] = (),
    k: int | None = None,
    radius: int | None = None,
    where: Sequence[str] | None = None,
    device: str = "cpu",
    unreadable: list[str] | None = None,
) -> list[Answers]:
    """Search an index with picture files and with items that are in it.

    Args:
        path: the index.
        images: picture files.
        keys: items of the index; they do not find themselves.
        k: how many answers a query; by default 10, within a radius all.
        radius: only items whose codes differ in at most this many bits.
        where: filters, ``label=cat``; all must hold.
        device: where to encode the pictures.
        unreadable: takes a sentence for each picture that cannot be read, and the others are
            answered; without it, or if no other is left, that is an error.

    Raises:
        UsageError: there is no such file, item or field, or a number is wrong.
    """
    if not images and not keys:
        raise UsageError("nothing to search for: give an image, or --key KEY")
    if k is not None and k < 1:
        raise UsageError(f"k must be at least 1, got {k}")
    names = [os.fspath(image) for image in images]
    for name in names:
        if not os.path.lexists(name):
            raise UsageError(f"there is no file '{name}' (it does not exist)")
    with LocalIndex.open(path) as index:
        if radius is not None and not 0 <= radius <= index.bits:
            raise UsageError(f"radius must be between 0 and {index.bits} bits, got {radius}")
        items = [index.item(key) for key in keys]
        root = mirrored_folder(path)
        codes = [index.codes(np.array([item.id], dtype=np.int64)) for item in items]
        if names:
            hasher = hasher_of(index, path, device=device)
            names, encoded = _encode(hasher, names, unreadable, last=not items)
            codes.insert(0, encoded)
        queries = np.concatenate(codes)
        own = [None] * len(names) + [item.id for item in items]
        labels = [*names, *keys]
        files = [*names, *(file_of(item, root) for item in items)]
        found = _search(index, queries, own, k, radius, where)
        answers = []
        for row, (ids, distances) in enumerate(found):
            listed = [one for one in answers_of(index, ids, distances, root) if one is not None]
            answers.append(Answers(labels[row], files[row], queries[row], listed))
    return answers


def _encode(
    hasher: Hasher, names: list[str], unreadable: list[str] | None, *, last: bool
) -> tuple[list[str], NDArray[np.uint8]]:
    """The pictures that can be read with their codes; ``last``: one at least has to be."""
    try:
        return names, hasher.encode(names)
    except FisherhashError:
        if unreadable is None or (len(names) == 1 and last):
            raise
    good = []
    for name in names:
        try:
            hasher.encode([name])
            good.append(name)
        except FisherhashError as error:
            unreadable.append(str(error))
    if last and not good:
        raise FisherhashError("; ".join(unreadable))
    return good, hasher.encode(good)


def ids_where(index: LocalIndex, where: Sequence[str]) -> NDArray[np.int64]:
    """Ids of all items for which the filters hold."""
    any_code = np.zeros((1, code_bytes(index.bits)), dtype=np.uint8)
    # Every item is within so many bits of any code.
    return np.sort(index.within(any_code, index.bits, where=where).ids)


def answers_of(
    index: LocalIndex, ids: NDArray[np.int64], distances: NDArray[np.int64], root: Path | None
) -> list[Answer | None]:
    """Items by their ids, with what else belongs to an answer; None for those removed meanwhile."""
    there, items, codes = index.still_there(ids)
    found = iter(zip(items, codes, strict=True))
    answers: list[Answer | None] = []
    for away, kept in zip(distances.tolist(), there.tolist(), strict=True):
        if not kept:
            answers.append(None)
            continue
        item, code = next(found)
        answers.append(Answer(item, away, file_of(item, root), code))
    return answers


def _search(
    index: LocalIndex,
    queries: NDArray[np.uint8],
    own: Sequence[int | None],
    k: int | None,
    radius: int | None,
    where: Sequence[str] | None,
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Ids and distances of each query, without the item that was asked with."""
    rows = []
    if radius is None:
        # One more, for an item that finds itself.
        matches = index.search(queries, (k or K) + any(o is not None for o in own), where=where)
        rows = list(zip(matches.ids, matches.distances, strict=True))
        k = k or K
    else:
        within = index.within(queries, radius, where=where)
        rows = [within.of(row) for row in range(len(queries))]
    answers = []
    for (ids, distances), self_id in zip(rows, own, strict=True):
        keep = np.ones(len(ids), dtype=bool) if self_id is None else ids != self_id
        answers.append((ids[keep][:k], distances[keep][:k]))
    return answers
