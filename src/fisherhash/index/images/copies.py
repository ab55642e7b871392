"""Codes that are made for copies, beside the codes of an index, which are made for similar content.

They are a second index in this user's cache, with the same keys. It is brought up to date before it
is used: only files that are new or have changed are encoded. Deleting it loses nothing but time.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fisherhash.data.folders import ImageFile
from fisherhash.data.images import read_failure
from fisherhash.errors import FisherhashError
from fisherhash.index.base import DamagedError, Index
from fisherhash.index.images.choosing import load_builtin
from fisherhash.index.images.encoding import Encoder
from fisherhash.index.images.importing import Import
from fisherhash.index.images.known import cache_place
from fisherhash.index.images.results import image_path, synced_folder
from fisherhash.model import builtin

if TYPE_CHECKING:
    from fisherhash.model.hasher import Hasher

_log = logging.getLogger(__name__)


def has_files(index: Index) -> bool:
    """Whether an index is about image files that are there, judged by its first items."""
    folder = synced_folder(index)
    paths = (image_path(item, folder) for item in itertools.islice(index.items(), 100))
    return any(path is not None and os.path.exists(path) for path in paths)


def is_copy_index(index: Index) -> bool:
    """Whether the codes of an index are made for copies already."""
    return false_pairs_of(index) is not None


def false_pairs_of(index: Index) -> builtin.FalsePairs | None:
    """What was measured for the hasher of an index; None for one that is not for copies.

    The same for codes of an earlier version of a hasher: nothing is known about these.
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
    if is_copy_index(index):
        yield index
        return
    hasher = load_builtin(builtin.COPY_HASHER, device)
    with _opened(index, hasher) as copies:
        work = Import(copies, Encoder(lambda: hasher, workers=workers))
        _update(index, work)
        yield copies


def missing_copies(index: Index) -> int:
    """About how many images have no copy code yet, without a look at their files."""
    if is_copy_index(index):
        return 0
    place, known = _place(index), 0
    with contextlib.suppress(FisherhashError):
        if Index.exists(place):
            with Index.open(place) as copies:
                known = len(copies) + len(copies.notes("skipped"))
    return max(0, index.info()["keyed"] - known)


def _place(index: Index) -> Path:
    return cache_place(index.uri, "copies", ".index")


def _opened(index: Index, hasher: Hasher) -> Index:
    """The copy codes of an index, to be written; they begin empty if they cannot be used."""
    place = _place(index)
    if Index.exists(place):
        copies = None
        # A damaged index is computed again; one that another process writes to is not touched.
        with contextlib.suppress(DamagedError):
            copies = Index.open(place, write=True)
        if copies is not None and copies.fingerprint == hasher.fingerprint():
            return copies
        if copies is not None:
            copies.close()
        _log.info("the copy codes of %s are of another version, and are computed again", index.uri)
        for name in (place.name, f"{place.name}-wal", f"{place.name}-shm"):
            place.with_name(name).unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    facts = {"fingerprint": hasher.fingerprint(), "model": hasher.about}
    return Index.create(place, bits=hasher.bits, **facts)


def _update(index: Index, work: Import) -> None:
    folder, keys, files = synced_folder(index), set(), []
    for item in index.items():
        path = image_path(item, folder)
        if item.key is None or path is None:
            continue
        keys.add(item.key)
        try:
            files.append(ImageFile.from_state(item.key, path, os.stat(path)))
        except (OSError, ValueError) as error:
            work.skip(item.key, read_failure(error))
    todo = work.new_files(files)
    with work.writing():
        work.forget(work.skipped.keys() - keys)
        work.commit(gone=sorted(work.files.keys() - keys))
        name = os.path.basename(os.path.abspath(index.uri))
        work.encode(f"{name} for copies", todo, labels=())
