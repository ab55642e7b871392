"""One import of image files: what the index knows of them, what is encoded, what is noted.

Every block of images is one commit, so a killed import loses at most one block, and the same
command goes on from there.

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
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fisherhash.data.folders import ImageFile
from fisherhash.data.images import UnreadableImage, check_file
from fisherhash.data.photo_fields import photo_fields
from fisherhash.index.base import CannotWriteError, Index
from fisherhash.index.images.encoding import IMAGES_PER_COMMIT, Encoder
from fisherhash.index.images.results import SkippedFile, SyncReport
from fisherhash.index.items import Entry
from fisherhash.system.progress import progress
from fisherhash.system.remote import is_url


class Import:
    """One import in progress: what the index knows, what is to be noted, what was done.

    Args:
        index: the index.
        encoder: makes the codes.
    """

    def __init__(self, index: Index, encoder: Encoder) -> None:
        self.index, self.encoder = index, encoder
        self.files = index.files()
        self.skipped = index.notes("skipped")
        self.ctimes = index.notes("ctime")
        self.trust_ctimes = True
        self.report = SyncReport()
        self._listed = set(self.skipped)
        self._notes: defaultdict[str, dict[str, Any]] = defaultdict(dict)

    def new_files(self, files: Iterable[ImageFile]) -> list[ImageFile]:
        """Those of some files that are to be encoded; the others are counted or noted."""
        todo = []
        for file in files:
            if self.is_unchanged(file):
                self.report.unchanged += 1
            elif self._may_be_readable(file):
                todo.append(file)
        return todo

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
        # A copy of the folder, whose times are its own.
        self._notes["ctime"][file.key] = file.ctime_ns
        return True

    def _may_be_readable(self, file: ImageFile) -> bool:
        """Whether it is worth decoding a file; notes one that still cannot be opened."""
        skip = self.skipped.get(file.key)
        if skip is None:
            return True
        if skip["size"] is not None:
            # Exactly this file was tried before and is damaged.
            state = {"size": file.size, "mtime_ns": file.mtime_ns, "ctime_ns": file.ctime_ns}
            return {"reason": skip["reason"], **state} != skip or file.key in self.files
        if is_url(file.path):
            return True
        try:
            # Without loading the hasher, which takes seconds.
            check_file(file.path)
        except UnreadableImage as error:
            self.skip(file.key, str(error), None if error.passing else file)
            return False
        return True

    def skip(self, key: str, reason: str, damaged: ImageFile | None = None) -> None:
        """Note a file that cannot be read; ``damaged``: its state, unless the fault may pass."""
        note: dict[str, Any] = {"reason": reason, "size": None}
        if damaged:
            note |= {"size": damaged.size, "mtime_ns": damaged.mtime_ns}
            note |= {"ctime_ns": damaged.ctime_ns}
        if self.skipped.get(key) != note:
            self.skipped[key] = self._notes["skipped"][key] = note

    def forget(self, keys: Iterable[str]) -> None:
        """Drop the notes of files that can be read again or are gone."""
        for key in keys:
            if self.skipped.pop(key, None) is not None:
                self._notes["skipped"][key] = None

    def note_folder(self, root: Path) -> None:
        """Note that the index is in sync with a folder from now on."""
        self._notes["sync"]["folder"] = {"folder": os.path.abspath(root)}

    def commit(
        self,
        entries: Sequence[Entry] = (),
        *,
        gone: Sequence[str] = (),
        fingerprint: str | None = None,
    ) -> None:
        """Write a block: images that were read, keys to remove, and the notes that changed."""
        self.forget(entry.key for entry in entries)
        self._notes["ctime"] |= {key: None for key in gone if key in self.ctimes}
        notes, self._notes = {k: v for k, v in self._notes.items() if v}, defaultdict(dict)
        if entries or (notes and not gone):
            # Notes about images that are removed are written together with their removal.
            self.index.upsert(entries, notes=None if gone else notes, fingerprint=fingerprint)
            for entry in entries:
                known = entry.key in self.files
                (self.report.updated if known else self.report.added).append(entry.key)
        if gone:
            self.index.remove(gone, notes=notes)
            self.report.removed += gone

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
        fingerprint = self.encoder.hasher().fingerprint()
        with progress(f"encoding {name}", len(todo)) as advance:
            for block in self.encoder.blocks(name, todo):
                read = [todo[number] for number in block.indices.tolist()]
                entries = []
                for file, code, own in zip(
                    read, block.codes, self._fields(read, metadata), strict=True
                ):
                    given = labels
                    if labels is None and file.key not in self.files:
                        given = folder_labels(file.key)
                    state = (file.path, file.size, file.mtime_ns)
                    entries.append(Entry(file.key, code, *state, given, own))
                    self._notes["ctime"][file.key] = file.ctime_ns
                damaged = []
                for skip in block.skipped:
                    file = todo[skip.index]
                    self.skip(file.key, skip.reason, None if skip.passing else file)
                    if not skip.passing and file.key in self.files:
                        # The image was overwritten with something that is no image.
                        damaged.append(file.key)
                self.commit(entries, gone=damaged, fingerprint=fingerprint)
                advance(len(block.indices) + len(block.skipped))

    def refresh_fields(self, name: str, files: Sequence[ImageFile]) -> None:
        """Read the fields of photos again that are in the index and have not changed."""
        with progress(f"reading fields of {name}", len(files)) as advance:
            for start in range(0, len(files), IMAGES_PER_COMMIT):
                some = files[start : start + IMAGES_PER_COMMIT]
                items = self.index.get_items([file.key for file in some])
                entries = [
                    Entry(file.key, metadata=own)
                    for file, item, own in zip(some, items, self._fields(some), strict=True)
                    if item is not None and own is not None and own != item.metadata
                ]
                self.commit(entries)
                self.report.unchanged -= len(entries)
                advance(len(some))

    def _fields(
        self, files: Sequence[ImageFile], given: Mapping[str, Any] | None = None
    ) -> Iterator[dict[str, Any] | None]:
        """The metadata of image files: what is stored, what their EXIF data says, what is given.

        None leaves the stored metadata as it is.
        """
        own = [{} if is_url(file.path) else photo_fields(file.path) for file in files]
        known = [f.key for f, new in zip(files, own, strict=True) if new and f.key in self.files]
        items = self.index.get_items(known) if known and given is None else []
        stored = {item.key: item.metadata for item in items if item is not None}
        for file, new in zip(files, own, strict=True):
            if new or given is not None:
                yield {**stored.get(file.key, {}), **new, **(given or {})}
            else:
                yield None

    def plan(self, todo: Sequence[ImageFile], gone: Sequence[str] = ()) -> SyncReport:
        """The report of a dry run: what would be encoded, and what would be removed."""
        self.forget(file.key for file in todo)
        self.report.added = [file.key for file in todo if file.key not in self.files]
        self.report.updated = [file.key for file in todo if file.key in self.files]
        self.report.removed = list(gone)
        return self.finish()

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


def folder_labels(key: str) -> tuple[str, ...]:
    """The first sub-folder is the label.

    >>> folder_labels("cats/old/tom.jpg"), folder_labels("tom.jpg")
    (('cats',), ())
    """
    first, slash, _ = key.partition("/")
    return (first,) if slash and first else ()
