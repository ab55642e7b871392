"""Pictures into an index: encoded a block at a time, each block one commit, bad files listed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.images import hashers
from fisherhash.index.images.skips import Skip, SkipList
from fisherhash.index.local.guards import CannotWriteError
from fisherhash.index.local.index import LocalIndex
from fisherhash.system.progress import progress

if TYPE_CHECKING:
    from fisherhash.model.hasher import Hasher

BLOCK = 128
"""Pictures a commit: a few seconds of work."""

Files = Mapping[str, tuple[int | None, int | None, int]]
"""(size, mtime_ns, id) of the items of an index, by key."""


@dataclass
class SyncReport:
    """What a sync did or, as a dry run, would do.

    Attributes:
        added: keys of pictures that were new.
        updated: keys of pictures that had changed.
        removed: keys of pictures that are gone.
        unchanged: how many were left as they are.
        skipped: files that are not in the index, with reasons, those known from before at the end.
        new_skipped: how many of them were found now.
        named: how many of them, the first ones, were asked for by name.
        count: items in the index afterwards.
        notes: sentences about what was left out or assumed.
    """

    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unchanged: int = 0
    skipped: list[Skip] = field(default_factory=list)
    new_skipped: int = 0
    named: int = 0
    count: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = f"{self.changes()}, {self.unchanged:,} unchanged"
        if self.skipped:
            counts += f", {len(self.skipped):,} skipped ({self.new_skipped:,} of them new)"
        return counts

    def changes(self) -> str:
        """The counts of what was changed, in words."""
        return (
            f"{len(self.added):,} added, {len(self.updated):,} updated, "
            f"{len(self.removed):,} removed"
        )

    def to_json(self) -> dict[str, Any]:
        """Counts, and the skipped files with their reasons."""
        return {
            "added": len(self.added),
            "updated": len(self.updated),
            "removed": len(self.removed),
            "unchanged": self.unchanged,
            "skipped": [{"name": skip.name, "reason": skip.reason} for skip in self.skipped],
            "count": self.count,
        }


@dataclass(frozen=True)
class Picture:
    """A file that is to be in the index; labels and metadata of None stay as they are."""

    key: str
    path: str
    size: int
    mtime_ns: int
    labels: Sequence[str] | None = None
    metadata: Mapping[str, Any] | None = None


@contextlib.contextmanager
def telling(report: SyncReport) -> Iterator[None]:
    """Lets a disk that fails in the middle say what of this run is in the index."""
    try:
        yield
    except CannotWriteError as error:
        if not (report.added or report.updated or report.removed):
            raise
        done = f"What came before is in the index: {report.changes()}"
        raise CannotWriteError(error.what, error.todo, done, "it goes on from there") from error


def import_pictures(
    index: LocalIndex,
    place: str | os.PathLike[str],
    name: str,
    todo: list[Picture],
    files: Files,
    skips: SkipList,
    report: SyncReport,
    chosen: hashers.Chosen | None,
    device: str,
    block: int,
) -> None:
    """Encode pictures and put them into the index, one commit a block."""
    if todo:
        hasher = hashers.hasher_of(index, place, device=device) if chosen is None else chosen.hasher
        fingerprint = hasher.fingerprint()
        ready = {} if chosen is None else chosen.codes
        known = [picture for picture in todo if picture.key in ready]
        unknown = [picture for picture in todo if picture.key not in ready]
        with progress(f"encoding {name}", len(todo)) as advance:
            for start in range(0, len(known), block):
                some = known[start : start + block]
                codes = np.stack([ready[picture.key] for picture in some])
                write_block(index, some, codes, fingerprint, files, skips, report)
                advance(len(some))
            for some, codes, bad in _encoded(hasher, name, unknown, block):
                if some:
                    write_block(index, some, codes, fingerprint, files, skips, report)
                _refuse(index, bad, files, skips, report)
                advance(len(some) + len(bad))
    skips.save()


def _encoded(
    hasher: Hasher, name: str, pictures: Sequence[Picture], block: int
) -> Iterator[tuple[list[Picture], NDArray[np.uint8], list[Skip]]]:
    """The pictures that could be read with their codes, and the others, a block at a time."""
    collection = hashers.image_files(name, [p.key for p in pictures], [p.path for p in pictures])
    for part in hasher.encode_blocks(collection, block=block):
        bad = []
        for item in part.skipped:
            picture = pictures[item.index]
            state = (None, None) if item.passing else (picture.size, picture.mtime_ns)
            bad.append(Skip(item.name, item.reason, *state))
        yield [pictures[int(i)] for i in part.indices], part.codes, bad


def write_block(
    index: LocalIndex,
    pictures: list[Picture],
    codes: NDArray[np.uint8],
    fingerprint: str,
    files: Files,
    skips: SkipList,
    report: SyncReport,
) -> None:
    """One commit: new pictures are added, those the index has are replaced."""
    known = [picture.key for picture in pictures if picture.key in files]
    before = {item.key: item for item in index.items([files[key][2] for key in known])}
    labels, metadata = [], []
    for picture in pictures:
        item = before.get(picture.key)
        default = folder_labels(picture.key) if item is None else item.labels
        labels.append(default if picture.labels is None else tuple(picture.labels))
        old = {} if item is None else item.metadata
        metadata.append(old if picture.metadata is None else dict(picture.metadata))
    index.upsert(
        [picture.key for picture in pictures],
        codes,
        paths=[picture.path for picture in pictures],
        sizes=[picture.size for picture in pictures],
        mtimes_ns=[picture.mtime_ns for picture in pictures],
        labels=labels,
        metadata=metadata,
        fingerprint=fingerprint,
    )
    report.added += [picture.key for picture in pictures if picture.key not in files]
    report.updated += known
    skips.drop(picture.key for picture in pictures)


def _refuse(
    index: LocalIndex, bad: list[Skip], files: Files, skips: SkipList, report: SyncReport
) -> None:
    """List bad files; the index forgets a picture that was overwritten with something unreadable.

    One that cannot be opened now may be the same as before, and stays.
    """
    if not bad:
        return
    skips.add(bad)
    gone = [skip.name for skip in bad if skip.size is not None and skip.name in files]
    if gone:
        index.remove(gone)
        report.removed += gone


def folder_labels(key: str) -> tuple[str, ...]:
    """The first sub-folder is the label.

    >>> folder_labels("cats/old/tom.jpg"), folder_labels("tom.jpg")
    (('cats',), ())
    """
    first, slash, _ = key.partition("/")
    return (first,) if slash and first else ()
