"""Folders of pictures into an index: only what is new or has changed is encoded.

A picture of the folder has its path inside the folder as its key, in POSIX style, and the name of
the first sub-folder as its label. Whether it has changed is told by its size and its time of
change. A picture from elsewhere (:func:`add_images`) has its absolute path as its key; ``sync``
leaves it alone. Every block of pictures is a commit, so that a killed import loses at most one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Item
from fisherhash.index.images import hashers
from fisherhash.index.images.hashers import Chosen
from fisherhash.index.images.importing import (
    BLOCK,
    Files,
    Picture,
    SyncReport,
    import_pictures,
    telling,
)
from fisherhash.index.images.skips import FILE as SKIPPED
from fisherhash.index.images.skips import Skip, SkipList
from fisherhash.index.images.walking import Found, cannot_read, walk
from fisherhash.index.local.guards import cannot_write
from fisherhash.index.local.index import LocalIndex
from fisherhash.index.local.verify import Problem

MIRRORED = "folder.json"
"""Names the folder that the index is kept in step with."""


def sync_folder(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    fit: str | None = None,
    bits: int | None = None,
    device: str = "cpu",
    dry_run: bool = False,
    allow_empty: bool = False,
    moved: bool = False,
    block: int = BLOCK,
) -> SyncReport:
    """Bring an index in step with a folder of pictures; the index is made if there is none.

    Args:
        path: the index.
        folder: the pictures, in sub-folders of any depth.
        model: a model folder or the name of a built-in hasher; by default the index's own, for a
            new index the default built-in one.
        fit: fit a hasher to these pictures by this method instead (``itq``), for a new index.
        bits: length of the codes of the fitted hasher.
        device: where to encode.
        dry_run: only report what would be done.
        allow_empty: let an empty folder empty the index.
        moved: the index was in step with another folder, and this one takes its place.
        block: pictures a commit.

    Raises:
        UsageError: no folder, no pictures in it, another folder than before, another model.
    """
    root = _root(folder)
    place = Path(path)
    if fit is not None and model is not None:
        raise UsageError("--fit and --model exclude each other")
    if bits is not None and fit is None and not hashers.is_index(place):
        raise UsageError("--bits goes with --fit; a model has its own length")
    if os.path.realpath(place) == os.path.realpath(root):
        raise UsageError(f"{place} cannot be the index and the folder of pictures at once")
    found = walk(root, without=place)
    if not hashers.is_index(place):
        if not found.files:
            raise UsageError(found.nothing(root))
        report = SyncReport(added=sorted(found.files), notes=found.notes())
        if dry_run:
            return report
        collection = hashers.image_files(
            root.name, report.added, [str(root / key) for key in report.added]
        )
        chosen = (
            hashers.load_model(model, device=device)
            if fit is None
            else hashers.fit_model(collection, fit, bits=bits, device=device)
        )
        with hashers.create_index(place, chosen) as index:
            return _sync(index, place, root, found, chosen=chosen, device=device, block=block)
    hashers.drop_old_drafts(place)
    with LocalIndex.open(place, write=not dry_run) as index:
        hashers.check_same_model(index, place, model=model, fit=fit, bits=bits)
        return _sync(
            index,
            place,
            root,
            found,
            chosen=_given(index, model, device),
            device=device,
            dry_run=dry_run,
            allow_empty=allow_empty,
            moved=moved,
            block=block,
        )


def _sync(
    index: LocalIndex,
    place: Path,
    root: Path,
    found: Found,
    *,
    chosen: Chosen | None = None,
    device: str = "cpu",
    dry_run: bool = False,
    allow_empty: bool = False,
    moved: bool = False,
    block: int = BLOCK,
) -> SyncReport:
    files = dict(index.files())
    ours = {key for key, (size, _, _) in files.items() if size is not None and not _outside(key)}
    report = SyncReport(notes=found.notes())
    new_root = _is_new_root(place, root, found, ours, moved=moved)
    if not found.files and not found.broken and ours and not allow_empty:
        of_it = "of another folder" if new_root else "of it"
        raise UsageError(
            f"{root} holds no pictures, but {place} holds {len(ours):,} {of_it}; nothing was "
            "removed. Is a disk not mounted? If they are really gone, add --allow-empty"
        )
    skips = SkipList(place)
    listed = {skip.name for skip in skips}
    refused = [Skip(key, reason) for key, reason in found.broken.items()]
    todo: list[Picture] = []
    for key, (size, mtime) in sorted(found.files.items()):
        before = files.get(key)
        if before is not None and before[:2] == (size, mtime):
            report.unchanged += 1
        elif before is not None or not skips.is_known(key, size, mtime):
            path = os.path.join(root, key)
            if skips.is_passing(key) and (reason := _cannot_open(path)):
                refused.append(Skip(key, reason))
            else:
                todo.append(Picture(key, path, size, mtime))
    kept = found.files.keys() | found.broken.keys()
    gone = _mirrored(index, [k for k in sorted(ours - kept) if not found.is_hidden(k)], files)
    if dry_run:
        report.added = [picture.key for picture in todo if picture.key not in files]
        report.updated = [picture.key for picture in todo if picture.key in files]
        report.removed, report.count = gone, len(index)
        skips.drop(picture.key for picture in todo)
        skips.drop(name for name in listed - kept if _is_gone(name, found))
        report.skipped = list(skips)
        return report
    with telling(report):
        if new_root:
            _write_root(place, root)
        skips.drop(name for name in listed - kept if _is_gone(name, found))
        skips.add(refused)
        if gone:
            index.remove(gone)
            report.removed = gone
        import_pictures(index, place, root.name, todo, files, skips, report, chosen, device, block)
    _report_skipped(report, skips, listed)
    report.count = len(index)
    return report


def add_images(
    path: str | os.PathLike[str],
    images: Iterable[str | os.PathLike[str]],
    *,
    model: str | os.PathLike[str] | None = None,
    labels: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    device: str = "cpu",
    block: int = BLOCK,
) -> SyncReport:
    """Add picture files, and all pictures in folders, to an index; it is made if there is none.

    A picture that the index has is encoded again only if it has changed; labels and metadata that
    are given replace those it had.

    Args:
        path: the index.
        images: files and folders.
        model: as for :func:`sync_folder`.
        labels: of all these pictures.
        metadata: of all these pictures.
        device: where to encode.
        block: pictures a commit.
    """
    from fisherhash.data.sources import open_paths

    place = Path(path)
    images = list(images)
    names = list(dict.fromkeys(os.path.abspath(name) for name in open_paths(images).names))
    given = {os.path.abspath(Path(image).expanduser()) for image in images}
    by_name = [name for name in names if name in given]
    if not hashers.is_index(place):
        chosen = hashers.load_model(model, device=device)
        with hashers.create_index(place, chosen) as index:
            return _add(index, place, names, by_name, labels, metadata, chosen, device, block)
    with LocalIndex.open(place, write=True) as index:
        hashers.check_same_model(index, place, model=model)
        chosen = _given(index, model, device)
        return _add(index, place, names, by_name, labels, metadata, chosen, device, block)


def _given(index: LocalIndex, model: str | os.PathLike[str] | None, device: str) -> Chosen | None:
    """The model that was given, for an index that does not say what made its codes."""
    return None if index.model or model is None else hashers.load_model(model, device=device)


def _add(
    index: LocalIndex,
    place: Path,
    names: Sequence[str],
    by_name: Sequence[str],
    labels: Sequence[str] | None,
    metadata: Mapping[str, Any] | None,
    chosen: Chosen | None,
    device: str,
    block: int,
) -> SyncReport:
    root = mirrored_folder(place)
    files, skips = dict(index.files()), SkipList(place)
    listed = {skip.name for skip in skips}
    report = SyncReport()
    todo: list[Picture] = []
    relabelled: list[Picture] = []
    for name in names:
        key = _key(name, root)
        try:
            state = os.stat(name)
        except OSError as error:
            skips.add([Skip(key, cannot_read(error))])
            continue
        size, mtime = state.st_size, state.st_mtime_ns
        picture = Picture(key, name, size, mtime, labels, metadata)
        before = files.get(key)
        if before is not None and before[:2] == (size, mtime):
            if labels is not None or metadata is not None:
                relabelled.append(picture)
            else:
                report.unchanged += 1
        elif before is not None or not skips.is_known(key, size, mtime):
            todo.append(picture)
    with telling(report):
        if relabelled:
            keys = [picture.key for picture in relabelled]
            index.update(
                keys,
                labels=None if labels is None else [list(labels)] * len(keys),
                metadata=None if metadata is None else [dict(metadata)] * len(keys),
            )
            report.updated = keys
        import_pictures(index, place, place.name, todo, files, skips, report, chosen, device, block)
    all_keys = {_key(name, root) for name in names}
    named = {_key(name, root) for name in by_name}
    _report_skipped(report, [skip for skip in skips if skip.name in all_keys], listed, named)
    report.count = len(index)
    return report


def _report_skipped(
    report: SyncReport, skips: Iterable[Skip], listed: set[str], named: Collection[str] = ()
) -> None:
    order = {skip.name: (skip.name not in named, skip.name in listed, skip.name) for skip in skips}
    report.skipped = sorted(skips, key=lambda skip: order[skip.name])
    report.new_skipped = sum(skip.name not in listed for skip in report.skipped)
    report.named = sum(skip.name in named for skip in report.skipped)


def mirrored_folder(path: str | os.PathLike[str]) -> Path | None:
    """The folder that an index is kept in step with, or None."""
    return _read_root(Path(path))[0]


def _read_root(place: Path) -> tuple[Path | None, str | None]:
    """The folder that an index is kept in step with, and what is wrong with the note of it."""
    try:
        text = (place / MIRRORED).read_text(encoding="utf-8")
        return Path(json.loads(text)["folder"]), None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"cannot be read ({error.strerror or error})"
    except (ValueError, KeyError, TypeError):
        return None, "is damaged"


def verify_lists(path: str | os.PathLike[str]) -> list[Problem]:
    """What is wrong with the name of an index's folder and with its list of skipped files."""
    problems = []
    _, wrong = _read_root(Path(path))
    if wrong:
        todo = "the next index sync with the folder writes it again"
        problems.append(Problem(MIRRORED, wrong, todo))
    try:
        damaged = SkipList(path).damaged
    except FisherhashError:
        problems.append(
            Problem(SKIPPED, "cannot be read", "delete it, and its files are tried again")
        )
    else:
        if damaged:
            what = f"has lines that are not what was written ({damaged})"
            problems.append(Problem(SKIPPED, what, "harmless: the next index sync writes it again"))
    return problems


def file_of(item: Item, root: Path | None) -> str | None:
    """Where the picture of an item lies now, also after its folder was moved."""
    if root is not None and item.key is not None and item.size is not None:
        return item.path if _outside(item.key) else os.path.join(root, item.key)
    return item.path


def _write_root(place: Path, root: Path) -> None:
    draft = place / (MIRRORED + ".new")
    try:
        draft.write_text(json.dumps({"folder": os.path.abspath(root)}) + "\n", encoding="utf-8")
        os.replace(draft, place / MIRRORED)
    except OSError as error:
        raise cannot_write(draft, error) from error


def _is_new_root(place: Path, root: Path, found: Found, ours: set[str], *, moved: bool) -> bool:
    """Whether the index has to learn of this folder; refuses one that would empty it."""
    before = mirrored_folder(place)
    if before is not None and os.path.realpath(before) == os.path.realpath(root):
        return False
    if moved or not ours:
        return True
    still = sum(key in ours for key in found.files)
    there = before is not None and before.is_dir()
    if there or 2 * still < len(ours):
        was = f"{place} is in step with {before}" if before else f"{place} has other pictures"
        raise UsageError(
            f"{was}, and {root} is another folder: of {len(ours):,} pictures {still:,} have their "
            f"names there and would be compared with those, {len(ours) - still:,} would be "
            "removed; nothing was changed. Make an index of its own for this folder, or add "
            "--moved if it takes the other's place"
        )
    return True


def _mirrored(index: LocalIndex, keys: list[str], files: Files) -> list[str]:
    """The keys that came from a folder: other items are never removed by a sync."""
    items = index.items([files[key][2] for key in keys])
    return [
        item.key
        for item in items
        if item.key and item.path and item.path.replace(os.sep, "/").endswith("/" + item.key)
    ]


def _key(path: str, root: Path | None) -> str:
    """Inside the index's folder the path from there, else the absolute path; POSIX style."""
    name = Path(path)
    if root is not None and name.is_relative_to(root):
        name = name.relative_to(root)
    return name.as_posix()


def _outside(key: str) -> bool:
    return os.path.isabs(key)


def _is_gone(name: str, found: Found) -> bool:
    """Whether a skipped file that the folder does not hold is to be forgotten."""
    return not os.path.lexists(name) if _outside(name) else not found.is_hidden(name)


def _cannot_open(path: str) -> str | None:
    try:
        with open(path, "rb"):
            return None
    except OSError as error:
        return cannot_read(error)


def _root(folder: str | os.PathLike[str]) -> Path:
    root = Path(os.path.abspath(Path(folder).expanduser()))
    if root.is_dir():
        return root
    if root.exists():
        raise UsageError(f"{folder} is a file; sync takes a folder. Add a file with: index add")
    raise UsageError(f"there is no folder '{folder}'; nothing was changed")
