"""Keeps an index in sync with a folder for as long as the process runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fisherhash.data.formats import IMAGE_EXTENSIONS
from fisherhash.errors import FisherhashError
from fisherhash.index.base import CannotReadError, DamagedError, Index, Uri
from fisherhash.index.images.choosing import hasher_of
from fisherhash.index.images.encoding import Encoder
from fisherhash.index.images.importing import Import
from fisherhash.index.images.options import SyncOptions
from fisherhash.index.images.results import SyncReport
from fisherhash.index.images.syncing import check_folder, sync_images
from fisherhash.system.extras import require_package

if TYPE_CHECKING:
    from fisherhash.model.hasher import Hasher

QUIET_MS = 1500
"""A sync begins when nothing changed for a moment: a file may take a while to be copied."""
LOOK_MS = 2000
"""How often the watcher looks whether it is to stop, and tries again what failed."""


def watch_folder(
    uri: Uri,
    folder: str | os.PathLike[str],
    *,
    device: str = "cpu",
    workers: int | None = None,
    stop: threading.Event | None = None,
    say: Callable[[str], object] = print,
) -> Iterator[SyncReport]:
    """Sync an index whenever the images of its folder change.

    The index is open for writing only while it is synced. A sync that fails, because another
    process writes to the index or the folder is not there, is tried again.

    Args:
        uri: the index; it must be in sync with the folder already.
        folder: the images.
        device: where to encode images.
        workers: number of processes that encode images; None lets the work decide.
        stop: ends the watch when it is set.
        say: called with a sentence about a sync that failed.

    Yields:
        What each sync that changed anything did.

    Raises:
        FisherhashError: the extra ``web`` is missing, or the index is damaged.
    """
    require_package("watchfiles", "web", "--watch")
    from watchfiles import watch

    root = check_folder(folder, uri)
    loaded: list[Hasher] = []

    def hasher(index: Index) -> Hasher:
        """The hasher of the index, loaded when it is first needed and kept for the next sync."""
        if not loaded:
            loaded.append(hasher_of(index, device=device))
        return loaded[0]

    own = None if "://" in os.fspath(uri) else os.path.realpath(uri)
    changes = watch(
        root,
        watch_filter=lambda _, path: _matters(path, own),
        debounce=QUIET_MS,
        step=QUIET_MS // 3,
        stop_event=stop,
        rust_timeout=LOOK_MS,
        yield_on_timeout=True,
        raise_interrupt=True,
        ignore_permission_denied=True,
    )
    # Once at the start: something may have changed before the watch began.
    todo, said = True, ""
    for changed in changes:
        if not (todo or changed):
            continue
        try:
            with Index.open(uri, write=True) as index:
                encoder = Encoder(lambda index=index: hasher(index), workers=workers)
                report = sync_images(Import(index, encoder), root, SyncOptions())
        except (DamagedError, CannotReadError):
            raise
        except FisherhashError as error:
            todo = True
            if str(error) != said:
                said = str(error)
                say(f"{said}; trying again")
            continue
        todo, said = False, ""
        if report.added or report.updated or report.removed or report.new_skipped:
            yield report


def _matters(path: str, own: str | None) -> bool:
    """Whether a change of a file may change the index: an image, or a folder, outside the index."""
    if own is not None and (path == own or path.startswith(f"{own}-")):
        return False  # SQLite writes its journal beside the file
    suffix = os.path.splitext(path)[1].lower()
    return suffix in IMAGE_EXTENSIONS or not suffix or os.path.isdir(path)
