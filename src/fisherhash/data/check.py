"""Reads every image of a data set and reports what would distort a result or stop a run."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.collection import Collection, Reader
from fisherhash.data.computing import Skipped
from fisherhash.data.images import UnreadableImage
from fisherhash.data.splits import SPLIT_PARTS, Split
from fisherhash.data.workers import run_jobs
from fisherhash.errors import counted, printable
from fisherhash.system.progress import progress

_SHOWN = 5
_TITLES = {
    "query in database": "queries in the database",
    "query in train": "queries in the training list",
}


@dataclass(frozen=True)
class Report:
    """What :func:`check` found. Prints as text.

    Attributes:
        name: of the collection.
        images: how many there are.
        class_sizes: number of images per class.
        unreadable: files that cannot be decoded, with the reason.
        unlabelled: names of images without a label, if others have one.
        duplicates: groups of names with the same pixels.
        conflicts: those of them whose labels differ.
        single_classes: classes with one image.
        overlaps: ``query in database`` and ``query in train``: names of images in both lists, or of
            a query and another image of the list with the same pixels, as ``a = b``.
        notes: sentences from the source and from the split.
    """

    name: str
    images: int
    class_sizes: dict[str, int]
    unreadable: list[Skipped]
    unlabelled: list[str]
    duplicates: list[list[str]]
    conflicts: list[list[str]]
    single_classes: list[str]
    overlaps: dict[str, list[str]]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not any(lines for _, lines in self._findings())

    def to_json(self) -> dict[str, Any]:
        """Return everything that was found, with all names."""
        found = dataclasses.asdict(self)
        found["unreadable"] = [{"name": i.name, "reason": i.reason} for i in self.unreadable]
        return {"name": self.name, "ok": self.ok, **found}

    def __str__(self) -> str:
        sizes = self.class_sizes.values()
        classes = (
            f"{len(sizes)} classes of {min(sizes):,} to {max(sizes):,} images" if sizes else ""
        )
        text = [
            f"{printable(self.name)}: {counted(self.images, 'image')}, {classes or 'no labels'}"
        ]
        for title, lines in self._findings():
            text += [f"{title}: {len(lines):,}"] if lines else []
            text += [f"  {printable(line)}" for line in lines[:_SHOWN]]
            text += [f"  … and {len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else []
        text += [f"note: {printable(note)}" for note in self.notes]
        text.append("nothing wrong was found" if self.ok else "see above for what was found")
        return "\n".join(text)

    def _findings(self) -> Iterator[tuple[str, list[str]]]:
        """Every kind of fault: its title, and one line per case."""
        yield "unreadable", [f"{item.name}: {item.reason}" for item in self.unreadable]
        yield "without a label", self.unlabelled
        yield "classes with one image", self.single_classes
        for title, groups in (
            ("groups of images with the same pixels", self.duplicates),
            ("groups of duplicates with different labels", self.conflicts),
        ):
            yield title, [" = ".join(group) for group in groups]
        for where, names in self.overlaps.items():
            yield _TITLES[where], names


def _digest(reader: Reader, index: int) -> bytes:
    """Compute a digest of an image's pixels."""
    image = reader.open(index)
    size = "{} {} ".format(*image.size).encode()
    return hashlib.blake2b(size + image.tobytes(), digest_size=16).digest()


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
    found: defaultdict[bytes, list[int]] = defaultdict(list)
    every = range(len(collection))
    answers = run_jobs(collection.reader, _digest, every, names=names, workers=workers)
    with progress("Checking images", len(collection)) as advance:
        for index, answer in answers:
            if isinstance(answer, UnreadableImage):
                unreadable.append(Skipped(index, names[index], str(answer)))
            else:
                found[answer].append(index)
            advance(1)
    groups = [group for group in found.values() if len(group) > 1]
    sizes = labels.sum(axis=0, dtype=np.int64)
    parts = {part: getattr(split, part) for part in SPLIT_PARTS} if split else collection.splits
    return Report(
        name=collection.name,
        images=len(collection),
        class_sizes=dict(zip(collection.classes, sizes.tolist(), strict=True)),
        unreadable=unreadable,
        unlabelled=_named(np.flatnonzero(~labels.any(axis=1)), names) if labels.shape[1] else [],
        duplicates=[_named(group, names) for group in groups],
        conflicts=[_named(g, names) for g in groups if (labels[g] != labels[g[0]]).any()],
        single_classes=[collection.classes[column] for column in np.flatnonzero(sizes == 1)],
        overlaps=_overlap(parts, groups, names),
        notes=(*collection.notes, *(split.notes if split else ())),
    )


def _overlap(
    parts: Mapping[str, NDArray[np.int64]], groups: Iterable[list[int]], names: Sequence[str]
) -> dict[str, list[str]]:
    """Find queries in the other lists: the same images, and copies under another name."""
    found = {}
    for part in ("database", "train") if parts else ():
        query, members = set(parts["query"].tolist()), set(parts[part].tolist())
        found[f"query in {part}"] = _named(sorted(query & members), names) + [
            f"{names[one]} = {names[other]}"
            for group in groups
            for one, other in itertools.permutations(group, 2)
            if one in query and other in members
        ]
    return found


def _named(indices: Iterable[int], names: Sequence[str]) -> list[str]:
    return [names[index] for index in indices]
