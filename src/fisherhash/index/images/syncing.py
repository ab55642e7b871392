"""Takes image files into an index: list them, compare, encode what is new, store it.

An image of the synced folder has its path inside that folder as its key, in POSIX style, and the
name of the first sub-folder as its label. An image from elsewhere has its absolute path as its key,
and a sync leaves it alone.

Every block of images is one commit, so a killed import loses at most one block, and the same
command continues from there.

A file has changed when its size has, or the time at which its content was changed, or the time at
which the system noted any change of it: a program can set the former back, but not the latter.

The index's notes store what a sync has to know: the folder (``sync``), when the system noted a
change of each file (``ctime``), and the files that cannot be read (``skipped``). A damaged file is
noted with its size and times, and is not decoded again until one of them changes. A fault that may
pass (permission denied, a broken link, no decoder) is noted without them, and such a file is tried
every time.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fisherhash.data.folders import FoundImages, ImageFile, walk_images
from fisherhash.data.images import UnreadableImage, check_file
from fisherhash.data.photo_fields import PHOTO_FIELDS, photo_fields
from fisherhash.errors import UsageError
from fisherhash.index.base import CannotWriteError, Index
from fisherhash.index.images.encoding import FileEncoder
from fisherhash.index.images.folders import StrPath, key_of, list_files, remember_folders
from fisherhash.index.images.options import SyncOptions
from fisherhash.index.images.results import SkippedFile, SyncReport, synced_folder
from fisherhash.index.items import Entry
from fisherhash.system.progress import progress
from fisherhash.system.remote import is_url

SYNC = SyncOptions()


def sync_images(
    index: Index,
    encoder: FileEncoder,
    source: StrPath,
    options: SyncOptions = SYNC,
    *,
    found: FoundImages | None = None,
    remove: bool = True,
) -> SyncReport:
    """Bring an index in sync with the images of a folder, or take the images of a list.

    Args:
        index: open for writing, unless it is a dry run.
        encoder: makes the codes.
        source: the folder, as :func:`check_folder` returns it; or the name of a list or a URL.
        options: what is allowed.
        found: the images, if they were listed already.
        remove: remove what is no longer there. False for a list or a URL, whose images are added.

    Raises:
        UsageError: it is another folder than before, or it is empty.
    """
    found, work = found or walk_images(source), Import(index, encoder)
    for kind in [kind for kind in found.other if kind.startswith(".index")]:
        del found.other[kind]  # indexes inside the folder need no mention
    work.report.notes = found.notes()
    gone, moved = [], False
    if remove:
        present = {file.key for file in found.files} | found.broken.keys()
        ours = {
            key
            for key, state in work.files.items()
            if state.size is not None and not os.path.isabs(key)
        }
        moved = _is_another_folder(index, source, present, ours, options)
        missing = [key for key in sorted(ours - present) if not found.is_hidden(key)]
        items = zip(missing, index.get_items(missing) if missing else (), strict=True)
        # A sync removes only what came from a folder.
        gone = [
            key
            for key, item in items
            if item and (item.path or "").replace(os.sep, "/").endswith(f"/{key}")
        ]
        work.forget([key for key in work.skipped.keys() - present if _is_gone(key, found)])
    todo = work.compare(found.files, found.broken, copied=moved)
    if options.dry_run:
        return work.plan(todo, gone)
    if moved:
        work.notes["sync"]["folder"] = {"folder": os.fspath(source)}
    work.run(os.path.basename(source), todo, gone)
    if remove:
        remember_folders(index.uri, [source])
    return work.finish()


def add_images(
    index: Index,
    encoder: FileEncoder,
    images: Sequence[StrPath],
    *,
    labels: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> SyncReport:
    """Add image files, and all images in folders, to an index.

    Args:
        index: open for writing.
        encoder: makes the codes.
        images: files and folders.
        labels: of all these images; they replace those that an image had.
        metadata: of all these images, likewise.
    """
    folder, work = synced_folder(index), Import(index, encoder)
    files, broken = list_files(images, folder)
    todo, relabelled = work.compare(files, broken), []
    if labels is not None or metadata is not None:
        relabelled = list(_relabelled(index, work.unchanged, labels, metadata))
        work.unchanged = []
    name = os.path.basename(os.path.abspath(index.uri))
    work.run(name, todo, entries=relabelled, labels=labels, metadata=metadata)
    remember_folders(index.uri, {os.path.dirname(file.path) for file in files})
    named = {key_of(os.path.abspath(Path(image).expanduser()), folder) for image in images}
    return work.finish({file.key for file in files} | broken.keys(), named)


class Import:
    """One import in progress: what the index knows, what was done, what is to be noted.

    Args:
        index: the index.
        encoder: makes the codes.

    Attributes:
        files: what the index knows about each file, by key.
        skipped: the note about each file that cannot be read, by key.
        unchanged: the files that the index has as they are.
        notes: what the next commit stores beside its images.
        report: what was done so far.
    """

    def __init__(self, index: Index, encoder: FileEncoder) -> None:
        self.index, self.encoder = index, encoder
        self.files = index.files()
        self.skipped, self._ctimes = index.notes("skipped"), index.notes("ctime")
        self.unchanged: list[ImageFile] = []
        self.notes: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        self.report = SyncReport()
        self._known_skips = set(self.skipped)

    def compare(
        self, files: Iterable[ImageFile], broken: Mapping[str, str], *, copied: bool = False
    ) -> list[ImageFile]:
        """The files that are to be encoded; those that cannot be opened are noted.

        Args:
            files: the files that are there.
            broken: those that are not, with the reason.
            copied: the folder is another one, so the system noted new times for all of its files.
        """
        todo = []
        for file in files:
            known, ctime = self.files.get(file.key), self._ctimes.get(file.key)
            same = known is not None and known[:2] == (file.size, file.mtime_ns)
            if same and (ctime is None or ctime == file.ctime_ns or copied):
                if ctime != file.ctime_ns:
                    self.notes["ctime"][file.key] = file.ctime_ns
                self.unchanged.append(file)
                continue
            if file.key not in self.skipped or self._may_be_readable(file, known is not None):
                todo.append(file)
        for key, reason in broken.items():
            self._skip(key, reason)
        return todo

    def _may_be_readable(self, file: ImageFile, indexed: bool) -> bool:
        """Whether to decode a file that was skipped before; notes one that still is no image."""
        note = self.skipped[file.key]
        if note["size"] is not None:
            # Exactly this file was tried before and is damaged.
            return indexed or note != _skip_note(note["reason"], file)
        if is_url(file.path):
            return True
        try:
            # Without loading the hasher, which takes seconds.
            check_file(file.path)
        except UnreadableImage as error:
            self._skip(file.key, str(error), None if error.passing else file)
            return False
        return True

    def _skip(self, key: str, reason: str, damaged: ImageFile | None = None) -> None:
        note = _skip_note(reason, damaged)
        if self.skipped.get(key) != note:
            self.skipped[key] = self.notes["skipped"][key] = note

    def forget(self, keys: Iterable[str]) -> None:
        """Drop the notes of files that can be read again or are gone."""
        for key in keys:
            if self.skipped.pop(key, None) is not None:
                self.notes["skipped"][key] = None

    def run(
        self,
        name: str,
        todo: Sequence[ImageFile],
        gone: Sequence[str] = (),
        *,
        entries: Sequence[Entry] = (),
        labels: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Remove items, encode files and store them, one commit per block.

        Args:
            name: what the progress bar shows.
            todo: the files to encode.
            gone: keys of items to remove.
            entries: items to update without encoding.
            labels: of all files; by default a new image has the label of its folder.
            metadata: of all files, beside the fields of the photos.
        """
        try:
            self._store(entries, gone)
            if not todo:
                return
            fingerprint = self.encoder.hasher().fingerprint()
            with progress(f"encoding {name}", len(todo)) as advance:
                for block in self.encoder.blocks(name, todo):
                    read = [todo[number] for number in block.indices.tolist()]
                    self.notes["ctime"] |= {file.key: file.ctime_ns for file in read}
                    fields = self._fields(read, metadata)
                    new = [
                        Entry(
                            file.key,
                            code,
                            file.path,
                            file.size,
                            file.mtime_ns,
                            folder_labels(file.key)
                            if labels is None and file.key not in self.files
                            else labels,
                            own,
                        )
                        for file, code, own in zip(read, block.codes, fields, strict=True)
                    ]
                    overwritten = []
                    for skip in block.skipped:
                        file = todo[skip.index]
                        self._skip(file.key, skip.reason, None if skip.passing else file)
                        if not skip.passing and file.key in self.files:
                            # The image was overwritten with something that is no image.
                            overwritten.append(file.key)
                    self._store(new, overwritten, fingerprint)
                    advance(len(block.indices) + len(block.skipped))
        except CannotWriteError as error:
            if not (self.report.added or self.report.updated or self.report.removed):
                raise
            done = f"What came before is in the index: {self.report.changes()}"
            raise CannotWriteError(error.what, error.todo, done, "it goes on from there") from error

    def _store(
        self, entries: Sequence[Entry], gone: Sequence[str], fingerprint: str | None = None
    ) -> None:
        """Write one block: images, what changed in the notes, and then what is to be removed."""
        self.forget(entry.key for entry in entries)
        self.notes["ctime"] |= {key: None for key in gone if key in self._ctimes}
        notes, self.notes = {k: v for k, v in self.notes.items() if v}, defaultdict(dict)
        if entries or (notes and not gone):
            # Notes about images that are removed are written together with their removal.
            self.index.upsert(entries, notes=None if gone else notes, fingerprint=fingerprint)
        for entry in entries:
            known = entry.key in self.files
            (self.report.updated if known else self.report.added).append(entry.key)
        if gone:
            self.index.remove(gone, notes=notes)
            self.report.removed += gone

    def _fields(
        self, files: Sequence[ImageFile], given: Mapping[str, Any] | None
    ) -> Iterator[dict[str, Any] | None]:
        """The metadata of files: what is stored, what their EXIF data says, what is given.

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

    def plan(self, todo: Sequence[ImageFile], gone: Sequence[str]) -> SyncReport:
        """The report of a dry run: what would be encoded, and what would be removed."""
        self.forget(file.key for file in todo)
        self.report.added = [file.key for file in todo if file.key not in self.files]
        self.report.updated = [file.key for file in todo if file.key in self.files]
        self.report.removed = list(gone)
        return self.finish()

    def finish(self, among: Container[str] | None = None, named: Container[str] = ()) -> SyncReport:
        """The report; ``among`` selects the skipped files it lists, ``named`` those named."""
        names = [name for name in self.skipped if among is None or name in among]
        names.sort(key=lambda name: (name not in named, name in self._known_skips, name))
        self.report.skipped = [SkippedFile(name, self.skipped[name]["reason"]) for name in names]
        self.report.new_skipped = sum(name not in self._known_skips for name in names)
        self.report.named = sum(name in named for name in names)
        self.report.unchanged = len(self.unchanged)
        self.report.count = len(self.index)
        return self.report


def folder_labels(key: str) -> tuple[str, ...]:
    """The first sub-folder is the label.

    >>> folder_labels("cats/old/tom.jpg"), folder_labels("tom.jpg")
    (('cats',), ())
    """
    first, slash, _ = key.partition("/")
    return (first,) if slash and first else ()


def _skip_note(reason: str, damaged: ImageFile | None) -> dict[str, Any]:
    """The note about a file that cannot be read; with its state, unless the fault may pass."""
    if damaged is None:
        return {"reason": reason, "size": None}
    state = {"size": damaged.size, "mtime_ns": damaged.mtime_ns, "ctime_ns": damaged.ctime_ns}
    return {"reason": reason} | state


def _relabelled(
    index: Index,
    files: Sequence[ImageFile],
    labels: Sequence[str] | None,
    metadata: Mapping[str, Any] | None,
) -> Iterator[Entry]:
    """Other labels and metadata for items; the fields of their photos stay."""
    keys = [file.key for file in files]
    for key, item in zip(keys, index.get_items(keys), strict=True):
        fields = metadata
        if metadata is not None and item is not None:
            own = {name: item.metadata[name] for name in PHOTO_FIELDS if name in item.metadata}
            fields = own | dict(metadata)
        yield Entry(key, labels=labels, metadata=fields)


def _is_another_folder(
    index: Index, root: StrPath, present: set[str], ours: set[str], options: SyncOptions
) -> bool:
    """Whether this is not the folder of before; refuses one that would empty the index.

    Args:
        index: the index.
        root: the folder.
        present: the keys of its images.
        ours: the keys of the images that the index has from a folder.
        options: what is allowed.
    """
    before = synced_folder(index)
    other = before is None or os.path.realpath(before) != os.path.realpath(root)
    still = len(present & ours)
    replaced = (before and os.path.isdir(before)) or 2 * still < len(ours)
    if other and not options.moved and ours and replaced:
        was = f"is in sync with {before}" if before else "has other images"
        raise UsageError(
            f"{index.uri} {was}, and {root} is another folder: of {len(ours):,} images {still:,} "
            f"have their names there and would be compared with those, {len(ours) - still:,} would "
            "be removed; nothing was changed. Create a separate index for this folder, or add "
            "--moved if it takes the other's place"
        )
    if not present and ours and not options.allow_empty:
        of_it = "of another folder" if other else "of it"
        raise UsageError(
            f"{root} holds no images, but {index.uri} holds {len(ours):,} {of_it}; nothing "
            "was removed. Is a disk not mounted? If they are really gone, add --allow-empty"
        )
    return other


def _is_gone(name: str, found: FoundImages) -> bool:
    """Whether to forget a skipped file that is not in the folder."""
    return not os.path.lexists(name) if os.path.isabs(name) else not found.is_hidden(name)
