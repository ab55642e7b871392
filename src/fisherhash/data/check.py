"""Reads every image of a data set and reports what would distort a result or stop a run."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.collection import ByteReader, Collection, Reader
from fisherhash.data.images import UnreadableImage
from fisherhash.data.loading import Skipped
from fisherhash.data.splits import SPLIT_PARTS, Split
from fisherhash.data.workers import run_jobs
from fisherhash.system.progress import progress

_SHOWN = 5
_DIGEST = 16


@dataclass(frozen=True)
class Report:
    """What :func:`check` found. Prints as text.

    Attributes:
        name: of the collection.
        images: how many there are.
        class_sizes: number of images per class.
        unreadable: files that cannot be decoded, with the reason.
        unlabelled: names of images without a label, if others have one.
        duplicates: groups of names with the same bytes.
        same_pixels: groups of names with the same pixels in different bytes.
        conflicts: groups of duplicates (of either kind) whose labels differ.
        single_classes: classes with one image.
        overlaps: ``query in database`` and ``query in train``: names of images in both lists.
        copies: for the same two lists, pairs of a query and another image with the same pixels.
        notes: sentences from the source and from the split.
    """

    name: str
    images: int
    class_sizes: dict[str, int]
    unreadable: list[Skipped]
    unlabelled: list[str]
    duplicates: list[list[str]]
    same_pixels: list[list[str]]
    conflicts: list[list[str]]
    single_classes: list[str]
    overlaps: dict[str, list[str]]
    copies: dict[str, list[tuple[str, str]]]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not any((
            self.unreadable,
            self.unlabelled,
            self.duplicates,
            self.same_pixels,
            self.single_classes,
            *self.overlaps.values(),
            *self.copies.values(),
        ))  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return everything that was found, with all names."""
        found = dataclasses.asdict(self)
        found["unreadable"] = [{"name": i.name, "reason": i.reason} for i in self.unreadable]
        return {"name": self.name, "ok": self.ok, **found}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.name}: {self.images:,} images, {self._sizes()}"
        yield from _listed("unreadable", [f"{i.name}: {i.reason}" for i in self.unreadable])
        yield from _listed("without a label", self.unlabelled)
        yield from _listed("classes with one image", self.single_classes)
        groups = (
            ("groups of files with the same bytes", self.duplicates),
            ("groups of files with the same pixels in different bytes", self.same_pixels),
            ("groups of duplicates with different labels", self.conflicts),
        )
        for title, found in groups:
            yield from _listed(title, [" = ".join(group) for group in found])
        for where, names in self.overlaps.items():
            yield from _listed(_title(where), names)
        for where, pairs in self.copies.items():
            lines = [f"{query} = {other}" for query, other in pairs]
            yield from _listed(f"{_title(where)} under another name", lines)
        for note in self.notes:
            yield f"note: {note}"
        yield "nothing wrong was found" if self.ok else "see above for what was found"

    def _sizes(self) -> str:
        sizes = self.class_sizes.values()
        if not sizes:
            return "no labels"
        return f"{len(sizes)} classes of {min(sizes):,} to {max(sizes):,} images"


@dataclass(frozen=True)
class _DigestJob:
    """Computes a digest of the stored bytes, followed by one of the pixels."""

    def __call__(self, reader: Reader, index: int) -> bytes:
        if isinstance(reader, ByteReader):
            data = reader.read(index)
            stored = _digest(data)
            image = reader.parse(index, data)
        else:
            stored = b""
            image = reader.open(index)
        width, height = image.size
        pixels = _digest(f"{width} {height} ".encode() + image.tobytes())
        return (stored or pixels) + pixels


def check(
    collection: Collection, split: Split | None = None, *, workers: int | None = None
) -> Report:
    """Read every image and report bad files, missing labels, duplicates and overlap.

    Args:
        collection: the images.
        split: where to look for overlap; None means the lists of the source, before
            :func:`~fisherhash.data.protocols.resolve` corrects them.
        workers: number of processes, as in :func:`~fisherhash.data.workers.run_jobs`.
    """
    names, labels = collection.names, collection.labels
    unreadable: list[Skipped] = []
    stored: dict[int, bytes] = {}
    pixels: dict[int, bytes] = {}
    answers = run_jobs(
        collection.reader, _DigestJob(), range(len(collection)), names=names, workers=workers
    )
    with progress("Checking images", len(collection)) as advance:
        for index, answer in answers:
            if isinstance(answer, UnreadableImage):
                unreadable.append(Skipped(index, names[index], str(answer)))
            else:
                stored[index], pixels[index] = answer[:_DIGEST], answer[_DIGEST:]
            advance(1)
    same_bytes = _groups(stored)
    same_pixels = _groups(pixels)
    sizes = labels.sum(axis=0, dtype=np.int64)
    parts = {part: getattr(split, part) for part in SPLIT_PARTS} if split else collection.splits
    overlaps, copies = _overlap(parts, same_pixels, names)
    return Report(
        name=collection.name,
        images=len(collection),
        class_sizes=dict(zip(collection.classes, sizes.tolist(), strict=True)),
        unreadable=unreadable,
        unlabelled=_named(np.flatnonzero(~labels.any(axis=1)), names) if labels.shape[1] else [],
        duplicates=[_named(group, names) for group in same_bytes],
        same_pixels=[
            _named(group, names) for group in same_pixels if len({stored[i] for i in group}) > 1
        ],
        conflicts=[
            _named(group, names)
            for group in same_pixels
            if (labels[group] != labels[group[0]]).any()
        ],
        single_classes=[collection.classes[column] for column in np.flatnonzero(sizes == 1)],
        overlaps=overlaps,
        copies=copies,
        notes=(*collection.notes, *(split.notes if split else ())),
    )


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


def _groups(digests: Mapping[int, bytes]) -> list[list[int]]:
    found: defaultdict[bytes, list[int]] = defaultdict(list)
    for index, digest in digests.items():
        found[digest].append(index)
    return [group for group in found.values() if len(group) > 1]


def _overlap(
    parts: Mapping[str, NDArray[np.int64]], groups: Iterable[list[int]], names: Sequence[str]
) -> tuple[dict[str, list[str]], dict[str, list[tuple[str, str]]]]:
    """Find queries in the other lists: the same images, and copies under another name."""
    overlaps, copies = {}, {}
    for part in ("database", "train") if parts else ():
        query, members = set(parts["query"].tolist()), set(parts[part].tolist())
        overlaps[f"query in {part}"] = _named(sorted(query & members), names)
        copies[f"query in {part}"] = [
            (names[one], names[other])
            for group in groups
            for one in group
            for other in group
            if one != other and one in query and other in members
        ]
    return overlaps, copies


def _named(indices: Iterable[int], names: Sequence[str]) -> list[str]:
    return [names[index] for index in indices]


def _title(where: str) -> str:
    return where.replace("query in", "queries in the").replace("the train", "the training list")


def _listed(title: str, lines: Sequence[str]) -> Iterator[str]:
    if not lines:
        return
    yield f"{title}: {len(lines):,}"
    yield from (f"  {line}" for line in lines[:_SHOWN])
    if len(lines) > _SHOWN:
        yield f"  … and {len(lines) - _SHOWN:,} more"
