"""Searches an index for duplicates: near codes, confirmed by the pixels of their files.

The codes of an index say how similar the content of two images is. Copies are found by other codes,
which are made for them. These are a second index in this user's cache, with the same keys, which is
brought up to date before it is used. Deleting it loses nothing but time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fisherhash.codes import hamming
from fisherhash.data.formats import UnreadableImage, open_image
from fisherhash.data.images import current_limits
from fisherhash.errors import UsageError
from fisherhash.index.base import DamagedError, Index
from fisherhash.index.images.choosing import load_builtin
from fisherhash.index.images.confirming import split_by_likeness
from fisherhash.index.images.duplicates import DuplicateGroup, Duplicates
from fisherhash.index.images.encoding import FileEncoder
from fisherhash.index.images.folders import cache_path, stat_files
from fisherhash.index.images.grouping import (
    NO_PAIRS,
    Chance,
    all_codes,
    complete_groups,
    distinct_codes,
    remembered_pairs,
)
from fisherhash.index.images.options import DuplicateOptions
from fisherhash.index.images.results import Hit, image_path, joined_codes, synced_folder
from fisherhash.index.images.syncing import Import
from fisherhash.index.items import Ids
from fisherhash.model import builtin
from fisherhash.system.files import open_regular
from fisherhash.system.progress import progress

if TYPE_CHECKING:
    from fisherhash.model.hasher import Hasher

MOST_LOOKED = 10_000
"""Groups of other radii than the last one that are remembered."""
_log = logging.getLogger(__name__)


class Candidates(NamedTuple):
    """Items that may be copies of each other.

    Attributes:
        ids: their ids, ascending.
        span: the largest distance between any two of them.
    """

    ids: Ids
    span: int


class DuplicateSearch:
    """The likely duplicates of one state of an index, at any radius.

    The codes are read once, pairs of near codes are searched for once, and the files of a group are
    read once: another radius only groups again. Threads must not share it.

    Args:
        index: the index.
        copies: an index whose codes are compared in place of its own; it has the same keys. It may
            be closed afterwards.
    """

    def __init__(self, index: Index, *, copies: Index | None = None) -> None:
        self._index, source = index, index if copies is None else copies
        self._ids, self._codes = all_codes(source)
        if source is not index:
            own = index.files()
            ids = {s.id: own[key].id for key, s in source.files().items() if key in own}
            # -1: removed from the index since the copy codes were brought up to date.
            numbers = np.array([ids.get(one, -1) for one in self._ids.tolist()], dtype=np.int64)
            order = np.argsort(numbers, kind="stable")[np.count_nonzero(numbers < 0) :]
            self._ids, self._codes = numbers[order], self._codes[order]
        self.bits: int = source.bits
        """Length of the codes that are compared."""
        self._uri, self._builtin = source.uri, source.model.get("builtin")
        self._without_code = len(index) - len(self._ids)
        # Equal codes count once: what a thousand copies of one image have in common is no chance.
        self._unique, self._number = distinct_codes(self._codes)
        known = false_pairs_of(source)
        self._chance = Chance(self._unique, source.bits, known and known.within)
        self._near, self._within = NO_PAIRS, 0
        self._looked: dict[tuple[bytes, DuplicateOptions], list[DuplicateGroup]] = {}

    def find(self, options: DuplicateOptions) -> Duplicates:
        """The duplicates within a radius.

        Raises:
            UsageError: the radius is out of range, or so wide that a code is near most others.
        """
        radius = self._chance.radius() if options.radius is None else options.radius
        if radius > self.bits:
            raise UsageError(f"radius must be between 0 and {self.bits} bits, got {radius}")
        groups = [part for parts in self._look_at(radius, options) for part in parts]
        rate = self._chance.rate(radius) if self._chance.sampled else 0.0
        return Duplicates(
            index=os.path.basename(os.path.abspath(self._index.uri)),
            bits=self.bits,
            count=len(self._ids),
            radius=radius,
            groups=sorted(groups, key=DuplicateGroup.rank),
            folder=synced_folder(self._index),
            compared=options.compare_files,
            comparisons=1 / rate if rate else None,
            distinct=self._chance.count,
            keep=options.keep,
            code=self._builtin,
            without_code=self._without_code,
        )

    def groups(self, radius: int) -> list[Candidates]:
        """Groups of two items or more, any two of which differ in at most ``radius`` bits.

        The groups with the smallest largest distance come first, then the smallest groups, then by
        the smallest id. Only codes are compared, no files.
        """
        if radius > self._within:
            self._near = remembered_pairs(self._uri, self._unique, self.bits, radius)
            self._within = radius
        keep = self._near.distances <= radius
        # Each distinct code is known by the smallest id of its items.
        first = np.full(len(self._unique), np.iinfo(np.int64).max)
        np.minimum.at(first, self._number, self._ids)
        group, widest = complete_groups(first, self._near.where(keep))
        group = group[self._number]
        several = np.flatnonzero(np.bincount(group, minlength=len(widest))[group] > 1)
        order = several[np.lexsort((self._ids[several], group[several]))]
        if not len(order):
            return []
        starts = np.flatnonzero(np.diff(group[order], prepend=-1))
        parts = np.split(self._ids[order], starts[1:])
        found = map(Candidates, parts, widest[group[order[starts]]].tolist())
        return sorted(found, key=lambda one: (one.span, len(one.ids), one.ids[0]))

    def _look_at(self, radius: int, options: DuplicateOptions) -> list[list[DuplicateGroup]]:
        """What each group of candidates is after a look at its files."""
        found, how = self.groups(radius), replace(options, radius=None)
        names = [(group.ids.tobytes(), how) for group in found]
        looked = {name: self._looked[name] for name in names if name in self._looked}
        new = [pair for pair in zip(names, found, strict=True) if pair[0] not in looked]
        # All at once: one query to the index per group would be slow for many groups.
        ids = np.concatenate([np.empty(0, dtype=np.int64), *(group.ids for _, group in new)])
        folder, rows = synced_folder(self._index), self._codes[np.searchsorted(self._ids, ids)]
        items = zip(self._index.get_items(ids), rows, strict=True)
        with progress("comparing images", len(new)) as advance:
            for name, group in new:
                # None: another writer removed the item meanwhile.
                hits = [
                    replace(Hit.of(item, folder=folder), code=row.tobytes())
                    for item, row in itertools.islice(items, len(group.ids))
                    if item is not None
                ]
                looked[name] = _groups_of(hits, options) if len(hits) > 1 else []
                advance(1)
        # Groups of other radii are kept, too, up to some memory.
        full = len(self._looked) > MOST_LOOKED + 2 * len(looked)
        self._looked = looked if full else self._looked | looked
        return [looked[name] for name in names]


def _groups_of(hits: list[Hit], options: DuplicateOptions) -> list[DuplicateGroup]:
    """The groups that candidates are, by their files; the first item of each is to be kept."""
    if options.keep == "best":
        hits = best_first(hits)
    paths = [hit.path for hit in hits]
    if options.compare_files:
        marks = zip(hits, same_bytes(paths), strict=True)
        hits = [replace(hit, same_bytes=mark) for hit, mark in marks]
    parts = split_by_likeness(paths) if options.confirm else [(range(len(hits)), None)]
    return [_group([hits[number] for number in part], sure) for part, sure in parts]


def _group(hits: Sequence[Hit], confirmed: bool | None) -> DuplicateGroup:
    """A group of items with their distances from the first."""
    codes = joined_codes([hit.code for hit in hits])
    distances = hamming(codes[:1], codes)[0].tolist()
    rows = tuple(replace(hit, distance=d) for hit, d in zip(hits, distances, strict=True))
    # In blocks: there may be thousands.
    distinct = np.unique(codes, axis=0)
    blocks = (distinct[start : start + 256] for start in range(0, len(distinct), 256))
    span = max(int(hamming(block, distinct).max()) for block in blocks)
    return DuplicateGroup(rows, span=span, confirmed=confirmed)


# Their files


def best_first(hits: Sequence[Hit]) -> list[Hit]:
    """The items to keep first: files before links, the most pixels, the oldest file, the id.

    All of them are in order, since a group may be split, and then each part keeps its first.
    """

    def worth(hit: Hit) -> tuple[bool, int, float, int]:
        age = float("inf") if hit.mtime_ns is None else hit.mtime_ns
        is_link = hit.path is not None and os.path.islink(hit.path)
        return is_link, -_pixel_count(hit.path), age, hit.id

    return sorted(hits, key=worth)


def _pixel_count(path: str | None) -> int:
    """Pixels of an image file, from its header; 0 if that cannot be read."""
    if path is None:
        return 0
    try:
        with open_regular(path) as file:
            width, height = open_image(file, pixels=current_limits().pixels).size
    except (UnreadableImage, OSError, ValueError):
        return 0
    return width * height


def same_bytes(paths: Sequence[str | None]) -> list[int | None]:
    """For each file the number of its set of byte-identical files; None for one that is unique.

    Only files of equal size are read; a pipe or a device is never opened.
    """
    by_size: dict[int, list[int]] = {}
    for number, path in enumerate(paths):
        with contextlib.suppress(OSError, ValueError):
            if path is not None and stat.S_ISREG((state := os.stat(path)).st_mode):
                by_size.setdefault(state.st_size, []).append(number)
    by_content: dict[tuple[int, bytes], list[int]] = {}
    for size, numbers in by_size.items():
        for number in numbers if len(numbers) > 1 else ():
            path = paths[number] or ""
            with contextlib.suppress(OSError, ValueError), open_regular(path) as file:
                digest = hashlib.file_digest(file, "sha256").digest()  # pyright: ignore
                by_content.setdefault((size, digest), []).append(number)
    found: list[int | None] = [None] * len(paths)
    for mark, numbers in enumerate(sorted(n for n in by_content.values() if len(n) > 1)):
        for number in numbers:
            found[number] = mark
    return found


# Codes that are made for copies


def has_files(index: Index) -> bool:
    """Whether an index is about image files that are there, judged by its first items."""
    folder = synced_folder(index)
    paths = (image_path(item, folder) for item in itertools.islice(index.items(), 100))
    return any(path is not None and os.path.exists(path) for path in paths)


def false_pairs_of(index: Index) -> builtin.FalsePairs | None:
    """What was measured for the hasher of an index; None unless its codes are made for copies.

    The same for codes of another version of a hasher: nothing is known about these.
    """
    name = index.model.get("builtin")
    if name not in builtin.NAMES or index.fingerprint != builtin.fingerprint(name):
        return None
    return builtin.false_pairs(name)


@contextlib.contextmanager
def copy_codes(index: Index, *, device: str = "cpu", workers: int | None = None) -> Iterator[Index]:
    """An index of copy codes with the keys of another index, brought up to date.

    Args:
        index: the index of images.
        device: where to encode.
        workers: number of processes that encode; None lets the work decide.
    """
    if false_pairs_of(index) is not None:
        yield index
        return
    hasher = load_builtin(builtin.COPY_HASHER, device)
    name = os.path.basename(os.path.abspath(index.uri))
    folder = synced_folder(index)
    paths = {item.key: image_path(item, folder) for item in index.items() if item.key is not None}
    named = {key: path for key, path in paths.items() if path is not None}
    with _opened(cache_path(index.uri, "copies", ".index"), hasher) as copies:
        work = Import(copies, FileEncoder(lambda: hasher, workers=workers))
        todo = work.compare(*stat_files(named.items()))
        work.forget(work.skipped.keys() - named.keys())
        gone = sorted(work.files.keys() - named.keys())
        work.run(f"{name} for copies", todo, gone, labels=())
        yield copies


def _opened(file: Path, hasher: Hasher) -> Index:
    """The copy codes of an index, to be written; they begin empty if they cannot be used."""
    if Index.exists(file):
        # A damaged index is computed again; one that another process writes to is not touched.
        with contextlib.suppress(DamagedError):
            copies = Index.open(file, write=True)
            if copies.fingerprint == hasher.fingerprint():
                return copies
            copies.close()
        _log.info("the stored copy codes are of another version, and are computed again")
        for suffix in ("", "-wal", "-shm"):
            file.with_name(f"{file.name}{suffix}").unlink(missing_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    facts = {"fingerprint": hasher.fingerprint(), "model": hasher.about}
    return Index.create(file, bits=hasher.bits, **facts)
