"""Duplicates for the page and the API: computed in the background, once for all radii."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from fisherhash.index.images.duplicate_search import (
    DuplicateSearch,
    false_pairs_of,
    has_files,
    missing_copies,
)
from fisherhash.index.images.duplicates import Duplicates
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.known import cache_place
from fisherhash.index.images.options import DuplicateCode, DuplicateOptions
from fisherhash.system.cores import available_cores
from fisherhash.system.progress import describe_progress, progress_to
from fisherhash.system.storage import write_file
from fisherhash.web.derived import Derived

MOST_UNASKED = 5000
"""Images whose copy codes are computed without a confirmation: a few minutes of work."""
MOST_RADII = 8
"""Radii of the slider whose groups are kept."""
_WIDEST = 3 / 8
"""The largest radius of the slider, as a share of the bits."""
_TITLES = {
    "encoding": "Codes for copies are computed from the image files, once",
    "comparing": "The images of each group are compared",
}


@dataclass(frozen=True)
class FoundDuplicates:
    """Duplicates, or why there are none yet.

    Attributes:
        code: which codes are compared: those made for copies, or the index's own.
        choices: the codes that can be compared.
        found: the groups; None if they are not there yet.
        most: the largest radius that the slider offers.
        waiting: what is being done meanwhile, as a sentence.
        done: how much of that is done, from 0 to 1; None if it is not known.
        missing: how many image files would have to be read first, if somebody allows that.
    """

    code: DuplicateCode
    choices: tuple[DuplicateCode, ...]
    found: Duplicates | None = None
    most: int = 0
    waiting: str = ""
    done: float | None = None
    missing: int = 0


class DuplicateFinder:
    """Groups of duplicates at any radius; threads may share it.

    Codes that are made for copies have to be computed from the image files once. That is done in
    the background, for a large collection only after :meth:`allow`.

    Args:
        images: the open index.
        version: changes whenever the index does.
    """

    def __init__(self, images: ImageIndex, version: Callable[[], Hashable]) -> None:
        self._images = images
        # Other processes of the server see it, too.
        self._allowed = cache_place(images.index.uri, "copies", ".allowed")
        self._searches: dict[DuplicateCode, Derived[DuplicateSearch]] = {
            "copy": Derived(version, lambda: self._prepare("copy")),
            "own": Derived(version, lambda: self._prepare("own")),
        }
        self._found: OrderedDict[tuple[int, int | None], Derived[Duplicates]] = OrderedDict()
        self._lock, self._comparing = threading.Lock(), threading.Lock()
        self._job: tuple[str, int, int, float] | None = None

    def choices(self) -> tuple[DuplicateCode, ...]:
        """The codes that can be compared, the default first."""
        index = self._images.index
        return ("copy", "own") if has_files(index) and false_pairs_of(index) is None else ("own",)

    def allow(self) -> None:
        """Compute the copy codes of a large collection as soon as somebody wants to see them."""
        write_file(self._allowed, b"")

    def at(
        self, radius: int | None = None, *, code: DuplicateCode = "auto", wait: float = 0.0
    ) -> FoundDuplicates:
        """The groups within a radius.

        Args:
            radius: None chooses it as ``dedup`` does.
            code: the codes to compare; auto takes those that are made for copies, if possible.
            wait: the most seconds to wait for them.

        Raises:
            UsageError: the radius is out of range, or so wide that a code is near most others.
            FisherhashError: files cannot be read or written.
        """
        until, choices = time.monotonic() + wait, self.choices()
        chosen = code if code in choices else choices[0]
        missing = missing_copies(self._images.index) if chosen == "copy" else 0
        if missing > MOST_UNASKED and not self._allowed.exists():
            return FoundDuplicates(chosen, choices, missing=missing)
        search = self._searches[chosen].get(wait)
        if search is not None:
            found = self._groups(search, radius).get(max(0.0, until - time.monotonic()))
            if found is not None:
                most = max(int(search.bits * _WIDEST), found.radius)
                return FoundDuplicates(chosen, choices, found, most)
        if self._job is None:
            return FoundDuplicates(chosen, choices, waiting="Searching for duplicates …")
        title, done, total, began = self._job
        rate = done / max(time.monotonic() - began, 1e-3)
        waiting = f"{title}: {describe_progress(done, total, rate)}."
        return FoundDuplicates(chosen, choices, waiting=waiting, done=done / max(total, 1))

    def _groups(self, search: DuplicateSearch, radius: int | None) -> Derived[Duplicates]:
        with self._lock:
            name = id(search), radius
            if name not in self._found:
                # The search is held by the function, so that no other one can get its number.
                self._found[name] = Derived(lambda: "once", lambda: self._find(search, radius))
            self._found.move_to_end(name)
            while len(self._found) > MOST_RADII:
                self._found.popitem(last=False)
            return self._found[name]

    def _find(self, search: DuplicateSearch, radius: int | None) -> Duplicates:
        # A slider that is dragged wants many radii, and each of them takes all cores.
        with self._comparing, progress_to(self._note):
            try:
                return search.find(DuplicateOptions(radius=radius))
            finally:
                self._job = None

    def _prepare(self, code: DuplicateCode) -> DuplicateSearch:
        # One core is left for whoever searches meanwhile.
        workers = max(1, available_cores() - 1)
        with progress_to(self._note):
            try:
                return self._images.duplicate_search(code=code, workers=workers)
            finally:
                self._job = None

    def _note(self, title: str, done: int, total: int) -> None:
        title, job = _TITLES.get(title.partition(" ")[0], title), self._job
        same = job is not None and job[0] == title and job[2] == total and done >= job[1]
        self._job = title, done, total, job[3] if job and same else time.monotonic()
