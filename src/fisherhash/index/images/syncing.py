"""Image files into an index: only what is new or has changed is encoded.

An image of the synced folder has its path inside that folder as its key, in POSIX style, and the
name of the first sub-folder as its label. An image from elsewhere has its absolute path as its key,
and a sync leaves it alone. A file has changed when its size or modification time has. Every block
of images is one commit, so a killed import loses at most one block.

The index's notes store what a sync has to know: the folder, and the files that cannot be read. A
damaged file is noted with its size and modification time, and is not decoded again until one of
them changes. A passing fault (permission denied, a broken link) is noted without them, and such a
file is tried every time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fisherhash.data.collection import Collection
from fisherhash.data.folders import FoundImages, ImageFile, is_own_output, walk_images
from fisherhash.data.images import read_failure
from fisherhash.data.readers import FileReader
from fisherhash.errors import UsageError
from fisherhash.index.base import CannotWriteError, Codes, Entry, Index
from fisherhash.index.images.results import SkippedFile, SyncReport, synced_folder
from fisherhash.system.progress import progress

if TYPE_CHECKING:
    from fisherhash.model.hasher import EncodedBlock, Hasher

RUNTIMES = "runtimes"
"""The note that counts the codes of each runtime, and their bits whose logit is near zero."""
IMAGES_PER_COMMIT = 128
"""A few seconds of work."""


class Import:
    """One import in progress: what the index knows, what is to be noted, what was done.

    Args:
        index: the index.
        hasher: returns its hasher; called only if there are images to encode.
        codes: codes that are known already, by key.
    """

    def __init__(
        self,
        index: Index,
        hasher: Callable[[], Hasher],
        codes: Mapping[str, Codes] | None = None,
    ) -> None:
        self.index, self.hasher, self.codes = index, hasher, codes or {}
        self.files = index.files()
        self.skipped = index.notes("skipped")
        self.runtimes = index.notes(RUNTIMES)
        self.report = SyncReport()
        self._listed = set(self.skipped)
        self._changed: dict[str, Any] = {}

    def is_unchanged(self, file: ImageFile) -> bool:
        """Whether the index has this file as it is."""
        state = self.files.get(file.key)
        return state is not None and (state.size, state.mtime_ns) == (file.size, file.mtime_ns)

    def may_be_readable(self, file: ImageFile) -> bool:
        """Whether it is worth decoding a file; notes one that still cannot be opened."""
        skip = self.skipped.get(file.key)
        if skip is None:
            return True
        if skip["size"] is not None:
            # Exactly this file was tried before and is damaged.
            same = (skip["size"], skip["mtime_ns"]) == (file.size, file.mtime_ns)
            return not same or file.key in self.files
        try:
            with open(file.path, "rb"):
                return True
        except OSError as error:
            self.skip(file.key, read_failure(error))
            return False

    def skip(self, key: str, reason: str, damaged: ImageFile | None = None) -> None:
        """Note a file that cannot be read; ``damaged``: its state, unless the fault may pass."""
        size, mtime_ns = (damaged.size, damaged.mtime_ns) if damaged else (None, None)
        note = {"reason": reason, "size": size, "mtime_ns": mtime_ns}
        if self.skipped.get(key) != note:
            self.skipped[key] = self._changed[key] = note

    def forget(self, keys: Iterable[str]) -> None:
        """Drop the notes of files that can be read again or are gone."""
        for key in keys:
            if self.skipped.pop(key, None) is not None:
                self._changed[key] = None

    def commit(
        self,
        entries: Sequence[Entry] = (),
        gone: Sequence[str] = (),
        folder: str | None = None,
        fingerprint: str | None = None,
        encoded: tuple[str, int] | None = None,
    ) -> None:
        """Write a block: images that were read, keys to remove, and the notes that changed.

        Args:
            entries: images that were read.
            gone: keys to remove.
            folder: the folder that the index is in sync with from now on.
            fingerprint: of the model that made the codes.
            encoded: the runtime that made the codes, and how many of their bits are unsure.
        """
        self.forget(entry.key for entry in entries)
        notes: dict[str, Any] = {"skipped": self._changed} if self._changed else {}
        if encoded is not None and entries:
            notes[RUNTIMES] = self._counted(*encoded, len(entries))
        if folder is not None:
            notes["sync"] = {"folder": {"folder": folder}}
        if entries:
            # Notes about images that are removed are written together with their removal.
            self.index.upsert(entries, notes=None if gone else notes, fingerprint=fingerprint)
            for entry in entries:
                known = entry.key in self.files
                (self.report.updated if known else self.report.added).append(entry.key)
        if gone or (notes and not entries):
            self.index.remove(gone, notes=notes)
            self.report.removed += gone
        self._changed = {}

    def _counted(self, runtime: str, unsure: int, codes: int) -> dict[str, Any]:
        """Count codes of a runtime; returns the note."""
        before = self.runtimes.get(runtime, {"codes": 0, "unsure_bits": 0})
        now = {"codes": before["codes"] + codes, "unsure_bits": before["unsure_bits"] + unsure}
        self.runtimes[runtime] = now
        return {runtime: now}

    def encode(
        self,
        name: str,
        todo: Sequence[ImageFile],
        *,
        labels: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Encode image files and write them, one commit per block.

        Args:
            name: what the progress bar shows.
            todo: the files.
            labels: of all of them; by default a new image has the label of its folder.
            metadata: of all of them.
        """
        if not todo:
            return
        hasher = self.hasher()
        fingerprint = hasher.fingerprint()
        with progress(f"encoding {name}", len(todo)) as advance:
            for block in self._encoded(hasher, name, todo):
                entries = []
                for number, code in zip(block.indices.tolist(), block.codes, strict=True):
                    file, given = todo[number], labels
                    if labels is None and file.key not in self.files:
                        given = folder_labels(file.key)
                    state = (file.path, file.size, file.mtime_ns)
                    entries.append(Entry(file.key, code, *state, given, metadata))
                damaged = []
                for skip in block.skipped:
                    file = todo[skip.index]
                    self.skip(file.key, skip.reason, None if skip.passing else file)
                    if not skip.passing and file.key in self.files:
                        # The image was overwritten with something that is no image.
                        damaged.append(file.key)
                encoded = (hasher.runtime_name, block.unsure)
                self.commit(entries, damaged, fingerprint=fingerprint, encoded=encoded)
                advance(len(block.indices) + len(block.skipped))

    def _encoded(
        self, hasher: Hasher, name: str, todo: Sequence[ImageFile]
    ) -> Iterator[EncodedBlock]:
        from fisherhash.model.hasher import EncodedBlock

        known = [i for i, file in enumerate(todo) if file.key in self.codes]
        for start in range(0, len(known), IMAGES_PER_COMMIT):
            some = known[start : start + IMAGES_PER_COMMIT]
            packed = np.stack([self.codes[todo[i].key] for i in some])
            yield EncodedBlock(np.array(some), packed, None, [])
        if rest := [i for i, file in enumerate(todo) if file.key not in self.codes]:
            source = collection_of(name, todo)
            yield from hasher.encode_blocks(source, np.array(rest), block=IMAGES_PER_COMMIT)

    def finish(self, among: Container[str] | None = None, named: Container[str] = ()) -> SyncReport:
        """The report; ``among`` selects the skipped files it lists, ``named`` those named."""
        names = [name for name in self.skipped if among is None or name in among]
        names.sort(key=lambda name: (name not in named, name in self._listed, name))
        self.report.skipped = [SkippedFile(name, self.skipped[name]["reason"]) for name in names]
        self.report.new_skipped = sum(name not in self._listed for name in names)
        self.report.named = sum(name in named for name in names)
        self.report.count = len(self.index)
        return self.report

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Makes the error of a disk that fails in the middle say what is in the index already."""
        try:
            yield
        except CannotWriteError as error:
            report = self.report
            if not (report.added or report.updated or report.removed):
                raise
            done = f"What came before is in the index: {report.changes()}"
            raise CannotWriteError(error.what, error.todo, done, "it goes on from there") from error


def sync_images(
    work: Import,
    folder: str | os.PathLike[str],
    *,
    found: FoundImages | None = None,
    dry_run: bool = False,
    allow_empty: bool = False,
    moved: bool = False,
) -> SyncReport:
    """Bring an index in sync with the images of a folder.

    Args:
        work: the import.
        folder: the folder.
        found: its images, if they were listed already.
        dry_run: only report what would be done.
        allow_empty: let an empty folder empty the index.
        moved: the index was in sync with another folder, and this one takes its place.

    Raises:
        UsageError: there is no such folder, it is another one than before, or it is empty.
    """
    report, root = work.report, check_folder(folder, work.index.uri)
    found = found or find_images(root, work.index.uri)
    report.notes = found.notes()
    present = {file.key for file in found.files}
    ours = {
        key
        for key, state in work.files.items()
        if state.size is not None and not os.path.isabs(key)
    }
    new_root = _is_new_root(work.index, root, present, ours, moved=moved)
    if not present and not found.broken and ours and not allow_empty:
        of_it = "of another folder" if new_root else "of it"
        raise UsageError(
            f"{root} holds no images, but {work.index.uri} holds {len(ours):,} {of_it}; nothing "
            "was removed. Is a disk not mounted? If they are really gone, add --allow-empty"
        )
    todo: list[ImageFile] = []
    for file in found.files:
        if work.is_unchanged(file):
            report.unchanged += 1
        elif work.may_be_readable(file):
            todo.append(file)
    for key, reason in found.broken.items():
        work.skip(key, reason)
    present |= found.broken.keys()
    missing = [key for key in sorted(ours - present) if not found.is_hidden(key)]
    gone = []
    for key, item in zip(missing, work.index.get_items(missing), strict=True):
        # A sync removes only what came from a folder.
        if item and (item.path or "").replace(os.sep, "/").endswith(f"/{key}"):
            gone.append(key)
    work.forget([key for key in work.skipped.keys() - present if _is_gone(key, found)])
    if dry_run:
        work.forget(file.key for file in todo)
        report.added = [file.key for file in todo if file.key not in work.files]
        report.updated = [file.key for file in todo if file.key in work.files]
        report.removed = gone
        return work.finish()
    with work.writing():
        work.commit(gone=gone, folder=os.path.abspath(root) if new_root else None)
        work.encode(root.name, todo)
    return work.finish()


def add_images(
    work: Import,
    images: Iterable[str | os.PathLike[str]],
    *,
    labels: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> SyncReport:
    """Add image files, and all images in folders, to an index.

    Args:
        work: the import.
        images: files and folders.
        labels: of all these images; they replace those that an image had.
        metadata: of all these images, likewise.
    """
    from fisherhash.data.sources import open_paths

    images = list(images)
    folder = synced_folder(work.index)
    paths = {os.path.abspath(name): None for name in open_paths(images).names}
    named = {key_of(os.path.abspath(Path(image).expanduser()), folder) for image in images}
    keys, todo, relabelled = set(), [], []
    for path in paths:
        key = key_of(path, folder)
        keys.add(key)
        try:
            state = os.stat(path)
        except OSError as error:
            work.skip(key, read_failure(error))
            continue
        file = ImageFile(key, path, state.st_size, state.st_mtime_ns)
        if not work.is_unchanged(file):
            todo += [file] if work.may_be_readable(file) else []
        elif labels is not None or metadata is not None:
            relabelled.append(Entry(key, labels=labels, metadata=metadata))
        else:
            work.report.unchanged += 1
    with work.writing():
        if relabelled:
            work.index.update(relabelled)
            work.report.updated = [entry.key for entry in relabelled]
        work.commit()
        name = os.path.basename(os.path.abspath(work.index.uri))
        work.encode(name, todo, labels=labels, metadata=metadata)
    return work.finish(keys, named)


def check_folder(folder: str | os.PathLike[str], uri: str | os.PathLike[str]) -> Path:
    """A folder of images as an absolute path; refuses what cannot be synced with an index."""
    root = Path(os.path.abspath(Path(folder).expanduser()))
    if os.path.realpath(uri) == os.path.realpath(root):
        raise UsageError(f"{uri} cannot be the index and the folder of images at once")
    if root.is_dir():
        return root
    if root.exists():
        raise UsageError(f"{folder} is a file; sync takes a folder. Add a file with: index add")
    raise UsageError(f"there is no folder '{folder}'; nothing was changed")


def find_images(root: Path, uri: str | os.PathLike[str]) -> FoundImages:
    """The images of a folder, without those of the index and of other indexes in it."""
    return walk_images(
        root, without=uri, is_own=lambda path: is_own_output(path) or Index.is_index(path)
    )


def collection_of(name: str, files: Sequence[ImageFile]) -> Collection:
    """Image files under their keys, without labels."""
    return Collection(
        name=name,
        names=[file.key for file in files],
        labels=np.zeros((len(files), 0), dtype=np.uint8),
        classes=(),
        reader=FileReader(os.sep, [file.path for file in files]),
        kind="photos",
    )


def folder_labels(key: str) -> tuple[str, ...]:
    """The first sub-folder is the label.

    >>> folder_labels("cats/old/tom.jpg"), folder_labels("tom.jpg")
    (('cats',), ())
    """
    first, slash, _ = key.partition("/")
    return (first,) if slash and first else ()


def key_of(path: str, folder: str | None) -> str:
    """The path inside the synced folder, or the absolute path of any other file; POSIX style."""
    name = Path(path)
    if folder is not None and name.is_relative_to(folder):
        name = name.relative_to(folder)
    return name.as_posix()


def _is_new_root(
    index: Index, root: Path, present: set[str], ours: set[str], *, moved: bool
) -> bool:
    """Whether the index must note this folder; refuses one that would empty the index."""
    before = synced_folder(index)
    if before is not None and os.path.realpath(before) == os.path.realpath(root):
        return False
    still = len(present & ours)
    if not moved and ours and ((before and os.path.isdir(before)) or 2 * still < len(ours)):
        was = f"is in sync with {before}" if before else "has other images"
        raise UsageError(
            f"{index.uri} {was}, and {root} is another folder: of {len(ours):,} images {still:,} "
            f"have their names there and would be compared with those, {len(ours) - still:,} would "
            "be removed; nothing was changed. Create a separate index for this folder, or add "
            "--moved if it takes the other's place"
        )
    return True


def _is_gone(name: str, found: FoundImages) -> bool:
    """Whether to forget a skipped file that is not in the folder."""
    return not os.path.lexists(name) if os.path.isabs(name) else not found.is_hidden(name)
