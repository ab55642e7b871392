"""Image files into an index: only what is new or has changed is encoded.

An image of the synced folder has its path inside that folder as its key, in POSIX style, and the
name of the first sub-folder as its label. An image from elsewhere has its absolute path as its key,
and a sync leaves it alone. Every block of images is one commit, so a killed import loses at most
one block.

A file has changed when its size has, or the time at which its content was changed, or the time at
which the system noted any change of it: a program can set the former back, but not the latter.

When and where a photo was taken and with which camera are fields of its item, see
:func:`~fisherhash.data.photo_fields.photo_fields`. They are read when its file is encoded.

The index's notes store what a sync has to know: the folder, when the system noted a change of each
file, and the files that cannot be read. A damaged file is noted with its size and times, and is not
decoded again until one of them changes. A passing fault (permission denied, a broken link, no
decoder) is noted without them, and such a file is tried every time.
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
from fisherhash.data.images import UnreadableImage, check_file, read_failure
from fisherhash.data.photo_fields import PHOTO_FIELDS, photo_fields
from fisherhash.data.readers import FileReader
from fisherhash.errors import UsageError
from fisherhash.index.base import CannotWriteError, Entry, Index
from fisherhash.index.images.known import remember_folders
from fisherhash.index.images.results import SkippedFile, SyncReport, synced_folder
from fisherhash.index.images.stored import FEWEST_REUSED, KnownCodes, in_order, stored_codes
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
        workers: number of processes that encode; None lets the work decide.
    """

    def __init__(
        self,
        index: Index,
        hasher: Callable[[], Hasher],
        codes: KnownCodes | None = None,
        *,
        workers: int | None = None,
    ) -> None:
        self.index, self.hasher = index, hasher
        self.codes: KnownCodes = codes or {}
        self.workers = workers
        self.files = index.files()
        self.skipped = index.notes("skipped")
        self.ctimes = index.notes("ctime")
        self.trust_ctimes = True
        self.runtimes = index.notes(RUNTIMES)
        self.report = SyncReport()
        self._listed = set(self.skipped)
        self._changed: dict[str, Any] = {}
        self._new_ctimes: dict[str, Any] = {}

    def is_unchanged(self, file: ImageFile) -> bool:
        """Whether the index has this file as it is."""
        state = self.files.get(file.key)
        if state is None or (state.size, state.mtime_ns) != (file.size, file.mtime_ns):
            return False
        noted = self.ctimes.get(file.key)
        if noted == file.ctime_ns:
            return True
        if noted is not None and self.trust_ctimes:
            return False
        # An index of an older version, or a copy of the folder, whose times are its own.
        self._new_ctimes[file.key] = file.ctime_ns
        return True

    def may_be_readable(self, file: ImageFile) -> bool:
        """Whether it is worth decoding a file; notes one that still cannot be opened."""
        skip = self.skipped.get(file.key)
        if skip is None:
            return True
        if skip["size"] is not None:
            # Exactly this file was tried before and is damaged.
            same = (skip["size"], skip["mtime_ns"]) == (file.size, file.mtime_ns)
            same = same and skip.get("ctime_ns") in (None, file.ctime_ns)
            return not same or file.key in self.files
        try:
            # Without loading the hasher, which takes seconds.
            check_file(file.path)
        except UnreadableImage as error:
            self.skip(file.key, str(error), None if error.passing else file)
            return False
        return True

    def skip(self, key: str, reason: str, damaged: ImageFile | None = None) -> None:
        """Note a file that cannot be read; ``damaged``: its state, unless the fault may pass."""
        note: dict[str, Any] = {"reason": reason, "size": None, "mtime_ns": None}
        if damaged:
            note |= {"size": damaged.size, "mtime_ns": damaged.mtime_ns}
            note |= {"ctime_ns": damaged.ctime_ns}
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
        self._new_ctimes |= {key: None for key in gone if key in self.ctimes}
        if self._new_ctimes:
            notes["ctime"] = self._new_ctimes
        if encoded is not None and entries:
            notes[RUNTIMES] = self._counted(*encoded, len(entries))
        if folder is not None:
            notes["sync"] = {"folder": {"folder": folder}}
        if entries or (notes and not gone):
            # Notes about images that are removed are written together with their removal.
            self.index.upsert(entries, notes=None if gone else notes, fingerprint=fingerprint)
            for entry in entries:
                known = entry.key in self.files
                (self.report.updated if known else self.report.added).append(entry.key)
        if gone:
            self.index.remove(gone, notes=notes)
            self.report.removed += gone
        self._changed, self._new_ctimes = {}, {}

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
                read = [todo[number] for number in block.indices.tolist()]
                fields = self._fields(read, metadata)
                # An index on a back-end without second codes leaves them out.
                fines = block.fine if self.index.fine_bits else None
                fines = [None] * len(read) if fines is None else fines
                for file, code, fine, own in zip(read, block.codes, fines, fields, strict=True):
                    given = labels
                    if labels is None and file.key not in self.files:
                        given = folder_labels(file.key)
                    state = (file.path, file.size, file.mtime_ns)
                    entries.append(Entry(file.key, code, *state, given, own, fine))
                    self._new_ctimes[file.key] = file.ctime_ns
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

    def refresh_fields(self, name: str, files: Sequence[ImageFile]) -> None:
        """Read the fields of photos again that are in the index and have not changed."""
        with progress(f"reading fields of {name}", len(files)) as advance:
            for start in range(0, len(files), IMAGES_PER_COMMIT):
                some = files[start : start + IMAGES_PER_COMMIT]
                entries = []
                items = self.index.get_items([file.key for file in some])
                for file, item, own in zip(some, items, self._fields(some), strict=True):
                    if item is not None and own is not None and own != item.metadata:
                        entries.append(Entry(file.key, metadata=own))
                if entries:
                    self.index.update(entries)
                    self.report.updated += [entry.key for entry in entries]
                    self.report.unchanged -= len(entries)
                advance(len(some))

    def _fields(
        self, files: Sequence[ImageFile], given: Mapping[str, Any] | None = None
    ) -> Iterator[dict[str, Any] | None]:
        """The metadata of image files: what is stored, what their EXIF data says, what is given.

        None leaves the stored metadata as it is.
        """
        own = [photo_fields(file.path) for file in files]
        known = [f.key for f, new in zip(files, own, strict=True) if new and f.key in self.files]
        items = self.index.get_items(known) if known and given is None else []
        stored = {item.key: item.metadata for item in items if item is not None}
        for file, new in zip(files, own, strict=True):
            if new or given is not None:
                yield {**stored.get(file.key, {}), **new, **(given or {})}
            else:
                yield None

    def _encoded(
        self, hasher: Hasher, name: str, todo: Sequence[ImageFile]
    ) -> Iterator[EncodedBlock]:
        """Yield blocks in the order of the files, so that ids do not depend on which were known."""
        known = {i: self.codes[file.key] for i, file in enumerate(todo) if file.key in self.codes}
        rest = np.array([i for i in range(len(todo)) if i not in known], dtype=np.int64)
        new: Iterable[EncodedBlock] = ()
        if len(rest):
            collection = collection_of(name, todo)
            new = hasher.encode_blocks(
                collection, rest, block=IMAGES_PER_COMMIT, workers=self.workers
            )
        return in_order(known, new, IMAGES_PER_COMMIT)

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
    refresh_fields: bool = False,
) -> SyncReport:
    """Bring an index in sync with the images of a folder.

    Args:
        work: the import.
        folder: the folder.
        found: its images, if they were listed already.
        dry_run: only report what would be done.
        allow_empty: let an empty folder empty the index.
        moved: the index was in sync with another folder, and this one takes its place.
        refresh_fields: read the fields of photos that have not changed, too.

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
    work.trust_ctimes = not new_root
    todo: list[ImageFile] = []
    same: list[ImageFile] = []
    for file in found.files:
        if work.is_unchanged(file):
            report.unchanged += 1
            same.append(file)
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
        if not work.codes and len(todo) >= FEWEST_REUSED:
            work.codes = stored_codes(work.hasher(), root)
        work.encode(root.name, todo)
        if refresh_fields:
            work.refresh_fields(root.name, same)
    remember_folders(work.index.uri, [root])
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
        file = ImageFile.from_state(key, path, state)
        if not work.is_unchanged(file):
            todo += [file] if work.may_be_readable(file) else []
        elif labels is not None or metadata is not None:
            relabelled.append(key)
        else:
            work.report.unchanged += 1
    with work.writing():
        if relabelled:
            work.index.update(_relabelled(work.index, relabelled, labels, metadata))
            work.report.updated = relabelled
        work.commit()
        name = os.path.basename(os.path.abspath(work.index.uri))
        work.encode(name, todo, labels=labels, metadata=metadata)
    remember_folders(work.index.uri, {os.path.dirname(path) for path in paths})
    return work.finish(keys, named)


def _relabelled(
    index: Index,
    keys: Sequence[str],
    labels: Sequence[str] | None,
    metadata: Mapping[str, Any] | None,
) -> Iterator[Entry]:
    """Other labels and metadata for items; the fields of their photos stay."""
    for key, item in zip(keys, index.get_items(keys), strict=True):
        fields = metadata
        if metadata is not None and item is not None:
            own = {name: item.metadata[name] for name in PHOTO_FIELDS if name in item.metadata}
            fields = own | dict(metadata)
        yield Entry(key, labels=labels, metadata=fields)


def check_folder(folder: str | os.PathLike[str], uri: str | os.PathLike[str]) -> Path:
    """A folder of images as an absolute path; refuses what cannot be synced with an index."""
    root = Path(os.path.abspath(Path(folder).expanduser()))
    if os.path.realpath(uri) == os.path.realpath(root):
        raise UsageError(f"{uri} cannot be the index and the folder of images at once")
    if _are_swapped(uri, root):
        raise UsageError(
            f"{uri} is a folder, but not an index; the index comes first: "
            f"fisherhash index sync {folder} {uri}. Nothing was changed"
        )
    if root.is_dir():
        return root
    if root.exists():
        raise UsageError(f"{folder} is a file; sync takes a folder. Add a file with: index add")
    raise UsageError(f"there is no folder '{folder}'; nothing was changed")


def _are_swapped(uri: str | os.PathLike[str], root: Path) -> bool:
    """Whether ``uri`` is surely the folder of images, and ``root`` the index or its new place."""
    if not os.path.isdir(uri) or Index.is_index(uri):
        return False
    if root.exists():
        return Index.is_index(root)
    return bool(find_images(Path(os.path.abspath(uri)), root).files)


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
