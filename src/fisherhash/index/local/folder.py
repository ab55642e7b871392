"""The folder of a local index: created complete or not at all, opened, tidied.

images.index/
  catalogue.sqlite      what is in the index; a change is true when it is committed here
  catalogue.sums        checksums of the catalogue's bytes
  head                  number of the last commit
  codes/NNNNNN.codes    packed codes, only appended to; NNNNNN.ids where ids are not implied
  tables/               search tables, built when they help; may be deleted at any time
  model/                the model that makes its codes, if the index carries it
  lock                  held by the one writer
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.local.catalogue import Catalogue
from fisherhash.index.local.catalogue_writer import CatalogueWriter, create_catalogue
from fisherhash.index.local.code_files import CODES_FOLDER, delete_files
from fisherhash.index.local.format_1 import delete_old_notes
from fisherhash.index.local.guards import CommitMark, cannot_write, fsync_folder
from fisherhash.index.local.schema import CATALOGUE, State
from fisherhash.index.local.table_files import TABLES_FOLDER, delete_tables

logger = logging.getLogger(__name__)

MODEL_FOLDER = "model"
_DRAFT, _OLD_SECONDS = ".new", 3600.0


def commit_mark(folder: Path) -> CommitMark:
    """The file with the number of the last commit."""
    return CommitMark(folder / "head")


def is_taken(path: Path) -> bool:
    """Whether there is anything but an empty folder."""
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


def create_folder(
    path: Path, facts: dict[str, Any], save_model: Callable[[Path], object] | None
) -> None:
    """Create an empty index with its model: complete, or not at all."""
    # A link stays one: the index is created where it leads.
    place = Path(os.path.realpath(path))
    if (place / CATALOGUE).exists():
        raise UsageError(f"{path} is an index already; open it instead")
    if place.exists() and not place.is_dir():
        raise UsageError(f"{path} is a file; give the name of a folder that does not exist")
    if is_taken(place):
        raise UsageError(
            f"{path} exists already and is not empty; nothing in it was changed. "
            "Give the name of a folder that does not exist"
        )
    # Its own name: another process may be creating the same index.
    draft = place.with_name(f".{place.name}.{os.getpid()}-{time.time_ns():x}{_DRAFT}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        drop_old_drafts(place)
        for part in (CODES_FOLDER, TABLES_FOLDER):
            (draft / part).mkdir(parents=True)
        commit_mark(draft).start(State().commit)
        create_catalogue(draft, facts)
        if save_model is not None:
            save_model(draft / MODEL_FOLDER)
        fsync_folder(draft)
        if place.is_dir():
            place.rmdir()
        os.replace(draft, place)
        fsync_folder(place.parent)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError | sqlite3.Error):
            raise cannot_write(path, error) from None
        if isinstance(error, FisherhashError) and str(draft) in str(error):
            raise FisherhashError(str(error).replace(str(draft), os.fspath(path))) from error
        raise


def drop_old_drafts(place: Path) -> None:
    """Delete what a process that was killed while it created this index left."""
    place = Path(os.path.realpath(place))
    form = re.compile(rf"\.{re.escape(place.name)}\.(\d+)-[0-9a-f]+{re.escape(_DRAFT)}")
    with contextlib.suppress(OSError), os.scandir(place.parent) as entries:
        for beside in entries:
            if match := form.fullmatch(beside.name):
                old = time.time() - beside.stat().st_mtime > _OLD_SECONDS
                if old or not _is_running(int(match[1])):
                    shutil.rmtree(beside.path, ignore_errors=True)


def _is_running(process: int) -> bool:
    """Whether there is such a process; True where that cannot be found out."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def must_be_index(folder: Path) -> None:
    """Refuse a path that is no index, with the reason."""
    if not folder.exists():
        raise UsageError(
            f"{folder} does not exist. Create an index with: fisherhash index sync INDEX FOLDER "
            "(in Python: ImageIndex.create)"
        )
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; an index is a folder")
    if (folder / CATALOGUE).is_file():
        return
    if (folder / "head").exists() and (folder / CODES_FOLDER).is_dir():
        raise FisherhashError(
            f"{folder / CATALOGUE} is missing. Restore the index from a copy, or create it again"
        )
    raise UsageError(f"{folder} is not an index: it holds no {CATALOGUE}")


def open_catalogue(folder: Path, *, write: bool) -> Catalogue:
    """Open the catalogue and check it against the number of the last commit."""
    mark = commit_mark(folder)
    # Before the catalogue: a commit that happens in between must not look lost.
    commit, wrong = mark.read()
    catalogue = Catalogue(folder, locked=write)
    try:
        _check_mark(catalogue, mark, commit, wrong)
        if not write:
            return catalogue
        # A writer checks as a reader first, which changes nothing in an index that it refuses.
        catalogue.trust()
    except BaseException:
        catalogue.close()
        raise
    catalogue.close()
    writer = CatalogueWriter(folder)
    try:
        commit = writer.state().commit
        if mark.read() != (commit, None):
            mark.start(commit)
        _clean(folder, writer)
    except BaseException:
        writer.close()
        raise
    return writer


def _check_mark(
    catalogue: Catalogue, mark: CommitMark, commit: int | None, wrong: str | None
) -> None:
    state = catalogue.state()
    if commit is not None and state.commit < commit:
        raise FisherhashError(
            f"{catalogue.path} (or its log, {CATALOGUE}-wal) has lost commits: it holds "
            f"commit {state.commit}, {mark.path.name} says {commit}. Restore the whole "
            "index from a copy, or create it again"
        )
    if commit is None and catalogue.noted_commit() != state.commit:
        raise FisherhashError(
            f"{mark.path} {wrong}, so that lost commits would not be noticed. Restore "
            "the index from a copy, or create it again"
        )
    if wrong:
        logger.warning("%s %s; the next writer writes it again", mark.path, wrong)


def _clean(folder: Path, catalogue: CatalogueWriter) -> None:
    """Delete files that no commit knows: a writer that ended left them."""
    _, files, _ = catalogue.load()
    known = {row.number for row in files}
    for path in (folder / CODES_FOLDER).glob("*"):
        ours = path.suffix in (".codes", ".ids") and path.stem.isdecimal()
        if ours and int(path.stem) not in known:
            delete_files(folder, [int(path.stem)])
    stale = {
        int(number)
        for path in (folder / TABLES_FOLDER).glob("*.table")
        if (number := path.name.partition("-")[0]).isdecimal()
    }
    delete_tables(folder, stale - known)
    if catalogue.format() > 1:
        delete_old_notes(folder)
    drop_old_drafts(folder)
