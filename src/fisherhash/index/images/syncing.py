"""Sync and add: which image files of a folder, a list or a call an import takes into an index.

An image of the synced folder has its path inside that folder as its key, in POSIX style, and the
name of the first sub-folder as its label. An image from elsewhere has its absolute path as its key,
and a sync leaves it alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fisherhash.data.folders import FoundImages, ImageFile, walk_images
from fisherhash.data.images import read_failure
from fisherhash.data.photo_fields import PHOTO_FIELDS
from fisherhash.errors import UsageError
from fisherhash.index.base import Index
from fisherhash.index.images.choosing import is_outdated, other_hasher
from fisherhash.index.images.importing import Import
from fisherhash.index.images.known import remember_folders
from fisherhash.index.images.options import SyncOptions
from fisherhash.index.images.results import SyncReport, synced_folder
from fisherhash.index.items import Entry

StrPath = str | os.PathLike[str]


def sync_images(
    work: Import, root: Path, options: SyncOptions, *, found: FoundImages | None = None
) -> SyncReport:
    """Bring an index in sync with the images of a folder.

    Args:
        work: the import.
        root: the folder, as :func:`check_folder` returns it.
        options: what is allowed.
        found: its images, if they were listed already.

    Raises:
        UsageError: it is another folder than before, or it is empty.
    """
    report, found = work.report, found or find_images(root)
    report.notes = found.notes()
    present = {file.key for file in found.files} | found.broken.keys()
    ours = {
        key
        for key, state in work.files.items()
        if state.size is not None and not os.path.isabs(key)
    }
    new_root = _is_new_root(work.index, root, present, ours, moved=options.moved)
    if not present and ours and not options.allow_empty:
        of_it = "of another folder" if new_root else "of it"
        raise UsageError(
            f"{root} holds no images, but {work.index.uri} holds {len(ours):,} {of_it}; nothing "
            "was removed. Is a disk not mounted? If they are really gone, add --allow-empty"
        )
    work.trust_ctimes = not new_root
    todo = work.new_files(found.files)
    for key, reason in found.broken.items():
        work.skip(key, reason)
    missing = [key for key in sorted(ours - present) if not found.is_hidden(key)]
    gone = [
        key
        for key, item in zip(missing, work.index.get_items(missing), strict=True)
        # A sync removes only what came from a folder.
        if item and (item.path or "").replace(os.sep, "/").endswith(f"/{key}")
    ]
    work.forget([key for key in work.skipped.keys() - present if _is_gone(key, found)])
    if options.dry_run:
        work.plan(todo, gone)
    else:
        if new_root:
            work.note_folder(root)
        with work.writing():
            work.commit(gone=gone)
            work.encode(root.name, todo)
            if options.refresh_fields:
                new = {file.key for file in todo}
                same = [file for file in found.files if file.key not in new]
                work.refresh_fields(root.name, same)
        remember_folders(work.index.uri, [root])
    if is_outdated(work.index):
        # Where an image was encoded, the hasher was loaded and is the right one.
        name = work.index.model["builtin"]
        report.notes.append(other_hasher(f"the built-in hasher '{name}'", work.index))
    return work.finish()


def take_images(work: Import, name: str, options: SyncOptions, *, found: FoundImages) -> SyncReport:
    """Add the images of a list or behind a URL that an index has not; nothing is removed."""
    work.report.notes = found.notes()
    todo = work.new_files(found.files)
    for key, reason in found.broken.items():
        work.skip(key, reason)
    if options.dry_run:
        return work.plan(todo)
    with work.writing():
        work.commit()
        work.encode(name, todo)
    return work.finish()


def list_files(
    images: Iterable[StrPath], folder: str | None
) -> tuple[list[ImageFile], dict[str, str]]:
    """Image files, and all images in folders: those that are there, and why others are not.

    Args:
        images: files and folders.
        folder: the folder that the index is in sync with; its images have their path inside it as
            their key, any other one its absolute path, in POSIX style.
    """
    from fisherhash.data.sources import open_paths

    files, broken = [], {}
    for path in dict.fromkeys(os.path.abspath(name) for name in open_paths(images).names):
        key = _key_of(path, folder)
        try:
            files.append(ImageFile.from_state(key, path, os.stat(path)))
        except OSError as error:
            broken[key] = read_failure(error)
    return files, broken


def add_images(
    work: Import,
    images: Sequence[StrPath],
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
    folder = synced_folder(work.index)
    files, broken = list_files(images, folder)
    todo = work.new_files(files)
    for key, reason in broken.items():
        work.skip(key, reason)
    name = os.path.basename(os.path.abspath(work.index.uri))
    with work.writing():
        if labels is not None or metadata is not None:
            same = [file.key for file in files if work.is_unchanged(file)]
            work.commit(list(_relabelled(work.index, same, labels, metadata)))
            work.report.unchanged -= len(same)
        work.commit()
        work.encode(name, todo, labels=labels, metadata=metadata)
    remember_folders(work.index.uri, {os.path.dirname(file.path) for file in files})
    named = {_key_of(os.path.abspath(Path(image).expanduser()), folder) for image in images}
    return work.finish({file.key for file in files} | broken.keys(), named)


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


def check_folder(folder: StrPath, uri: StrPath) -> Path:
    """A folder of images as an absolute path; refuses what cannot be synced with an index."""
    root = Path(os.path.abspath(Path(folder).expanduser()))
    if os.path.realpath(uri) == os.path.realpath(root):
        raise UsageError(f"{uri} cannot be the index and the folder of images at once")
    if os.path.isdir(uri):
        raise UsageError(
            f"{uri} is a folder, but an index is a file, and comes first: "
            f"fisherhash index sync {folder} {uri}. Nothing was changed"
        )
    if root.is_dir():
        return root
    if root.exists():
        raise UsageError(f"{folder} is a file; sync takes a folder. Add a file with: index add")
    raise UsageError(f"there is no folder '{folder}'; nothing was changed")


def find_images(root: Path) -> FoundImages:
    """The images of a folder; indexes in it are not among the other files that it lists."""
    found = walk_images(root)
    for kind in [kind for kind in found.other if kind.startswith(".index")]:
        del found.other[kind]
    return found


def _key_of(path: str, folder: str | None) -> str:
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
