"""The folder of a local index: created complete or not at all, opened, tidied.

images.index/
  catalogue.sqlite      what is in the index; a change is true when it is committed here
  catalogue.sums        checksums of the catalogue's bytes
  catalogue.spare       the catalogue's small tables once more, for repair
  head                  number of the last commit
  codes/NNNNNN.codes    packed codes, only appended to; NNNNNN.ids or NNNNNN.runs where ids are
                        not implied; beside each, "-sums": checksums of its small blocks, and
                        "-copy": a second copy of the runs, both for repair
  tables/               search tables, built when they help; may be deleted at any time
  model/                the model that makes its codes, if the index carries it
  lock                  held by the one writer
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import DamagedError
from fisherhash.index.local.catalogue import Catalogue
from fisherhash.index.local.catalogue_writer import CatalogueWriter, create_catalogue
from fisherhash.index.local.code_files import CODES_FOLDER, delete_files
from fisherhash.index.local.files import list_inside
from fisherhash.index.local.format_1 import delete_old_notes
from fisherhash.index.local.guards import CommitMark, cannot_write
from fisherhash.index.local.lock import WriterLock
from fisherhash.index.local.schema import CATALOGUE, REMEDY, State
from fisherhash.index.local.table_files import TABLES_FOLDER, delete_tables, table_names
from fisherhash.system.storage import draft_folder, fsync_folder, remove_old_drafts

logger = logging.getLogger(__name__)

MODEL_FOLDER = "model"
_CODE_FILE = re.compile(r"(\d{1,18})\.(?:codes|ids|runs)(?:-sums|-copy)?", re.ASCII)


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
    draft = place
    try:
        with draft_folder(place) as draft:
            for part in (CODES_FOLDER, TABLES_FOLDER):
                (draft / part).mkdir()
                fsync_folder(draft / part)
            CommitMark(draft).start(State().commit)
            create_catalogue(draft, facts)
            if save_model is not None:
                save_model(draft / MODEL_FOLDER)
    except (OSError, sqlite3.Error) as error:
        raise cannot_write(path, error) from None
    except FisherhashError as error:
        if str(draft) not in str(error):
            raise
        raise FisherhashError(str(error).replace(str(draft), os.fspath(path))) from error


def must_be_index(folder: Path) -> None:
    """Refuse a path that is no index, with the reason."""
    if not folder.exists():
        raise UsageError(f"{folder} does not exist. Create an index first: index sync or index add")
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; an index is a folder")
    if os.path.lexists(folder / CATALOGUE):
        return
    if (folder / "head").exists() and (folder / CODES_FOLDER).is_dir():
        raise DamagedError(f"{folder / CATALOGUE} is missing. {REMEDY}")
    raise UsageError(
        f"{folder} is a folder, not an index: it holds no {CATALOGUE}. Create one from its images "
        f"with: fisherhash index sync {folder}.index {folder}"
    )


def open_catalogue(folder: Path, *, write: bool) -> tuple[Catalogue, WriterLock | None]:
    """Open the catalogue, checked against the number of the last commit, with a writer's lock."""
    must_be_index(folder)
    with contextlib.ExitStack() as failed:
        lock = WriterLock(folder / "lock") if write else None
        if lock is not None:
            failed.callback(lock.release)
        mark = CommitMark(folder)
        # Before the catalogue: a commit that happens in between must not look lost.
        commit, wrong = mark.read()
        catalogue = Catalogue(folder, locked=write)
        failed.callback(catalogue.close)
        _check_mark(catalogue, mark, commit, wrong)
        if write:
            # A writer checks as a reader first, which changes nothing in an index that it refuses.
            catalogue.trust()
            catalogue.close()
            catalogue = CatalogueWriter(folder)
            failed.callback(catalogue.close)
            commit = catalogue.state().commit
            if mark.read() != (commit, None):
                mark.start(commit)
            # Not while a writer whose lock was deleted is in the middle of a commit.
            catalogue.begin()
            try:
                _clean(folder, catalogue)
            finally:
                catalogue.rollback()
        failed.pop_all()
        return catalogue, lock


def _check_mark(
    catalogue: Catalogue, mark: CommitMark, commit: int | None, wrong: str | None
) -> None:
    state = catalogue.state()
    if commit is not None and state.commit < commit:
        raise DamagedError(
            f"{catalogue.path} (or its log, {CATALOGUE}-wal) has lost commits: it holds "
            f"commit {state.commit}, {mark.path.name} says {commit}. {REMEDY}"
        )
    if commit is None and catalogue.noted_commit() != state.commit:
        # Only damage of a second file, the log, could lose a commit unnoticed.
        what = f"the index is opened at commit {state.commit}, the last one in {CATALOGUE}"
        logger.warning("%s %s; %s. The next writer writes it again", mark.path, wrong, what)
    elif wrong:
        logger.warning("%s %s; the next writer writes it again", mark.path, wrong)


def _clean(folder: Path, catalogue: CatalogueWriter) -> None:
    """Delete files that no commit knows: a writer that ended left them."""
    _, files, _ = catalogue.load()
    known = {row.number for row in files}
    stems = map(_CODE_FILE.fullmatch, list_inside(folder, CODES_FOLDER))
    delete_files(folder, {int(stem[1]) for stem in stems if stem} - known)
    delete_tables(folder, {number for _, number, _ in table_names(folder)} - known)
    if catalogue.format() > 1:
        delete_old_notes(folder)
    remove_old_drafts(os.path.realpath(folder))
