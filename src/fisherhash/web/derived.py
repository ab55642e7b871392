"""What is computed from a whole index, in the background: counts of labels, the map, duplicates."""

from __future__ import annotations

import functools
import logging
import threading
import time
from array import array
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import hamming, unpack
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.images.duplicate_search import DuplicateSearch, false_pairs_of, has_files
from fisherhash.index.images.duplicates import Duplicates
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.options import DuplicateCode, DuplicateOptions
from fisherhash.index.items import Codes, Ids, Item
from fisherhash.system.cores import available_cores
from fisherhash.system.progress import describe_progress, progress_to

T = TypeVar("T")
logger = logging.getLogger(__name__)
REST = 20.0
"""A value is computed again at the earliest after this many times the seconds that it took."""


class Derived(Generic[T]):
    """A value that belongs to a version of an index.

    A reader gets the newest value there is. If it is outdated, another one is computed in a thread;
    beside a busy writer, which changes the version all the time, that happens now and then only.

    Args:
        version: returns the version of the index.
        compute: returns the value.
    """

    def __init__(self, version: Callable[[], Hashable], compute: Callable[[], T]) -> None:
        self._version, self._compute = version, compute
        self._changed = threading.Condition()
        self._value: T | None = None
        self._of: Hashable = None
        self._error: Exception | None = None
        self._running, self._rests_until = False, 0.0

    def get(self, wait: float = 0.0) -> T | None:
        """The newest value, None if there is none yet.

        Args:
            wait: how many seconds to wait for a value of the current version.

        Raises:
            FisherhashError: the value could not be computed.
        """
        version = self._version()
        with self._changed:
            resting = self._value is not None and time.monotonic() < self._rests_until
            if self._of != version and not self._running and not resting:
                self._running, self._error = True, None
                threading.Thread(target=self._run, args=(version,), daemon=True).start()
            self._changed.wait_for(lambda: not self._running or self._of == version, wait)
            if self._error is not None and self._value is None:
                if isinstance(self._error, FisherhashError):
                    raise self._error
                raise FisherhashError(str(self._error)) from self._error
            return self._value

    def _run(self, version: Hashable) -> None:
        began, error, value = time.monotonic(), None, None
        try:
            value = self._compute()
        except Exception as reason:  # whatever it is, a reader is told, and the thread ends
            # At the end of the process everything fails, and nobody reads it.
            if threading.main_thread().is_alive() and not isinstance(reason, UsageError):
                logger.warning("could not compute a part of the page: %s", reason)
            error = reason
        with self._changed:
            self._error, self._running = error, False
            if error is None:
                self._value, self._of = value, version
            ended = time.monotonic()
            self._rests_until = ended + REST * (ended - began)
            self._changed.notify_all()


# Labels, dates and fields as columns: counts under any filter in milliseconds

DATE_FIELD = "taken"
MOST_FIELDS = 24
MOST_VALUES = 200
"""A field with more distinct values is no choice among a few, and is not offered as a filter."""


class Column:
    """One property: pairs of the number of an item and a value that it has."""

    def __init__(self) -> None:
        # With their types: 1 and True are equal, but two values.
        self._numbers: dict[tuple[type, Any], int] = {}
        self._pairs = array("i")

    def add(self, row: int, value: Any) -> int:
        """Add a pair; rows ascend. Returns the number of distinct values."""
        number = self._numbers.setdefault((type(value), value), len(self._numbers))
        self._pairs.extend((row, number))
        return len(self._numbers)

    def count(self, chosen: NDArray[np.bool_] | None = None) -> list[tuple[Any, int]]:
        """How many items have each value, the most frequent first.

        Args:
            chosen: for each item whether it counts; None for all.
        """
        pairs = np.asarray(self._pairs).reshape(-1, 2)
        numbers = pairs[:, 1] if chosen is None else pairs[chosen[pairs[:, 0]], 1]
        counts = np.bincount(numbers, minlength=len(self._numbers)).tolist()
        found = [(v, n) for (_, v), n in zip(self._numbers, counts, strict=True) if n]
        return sorted(found, key=lambda pair: -pair[1])

    def rows_of(self, value: Any) -> NDArray[np.int32]:
        """The numbers of the items that have a value, ascending."""
        pairs = np.asarray(self._pairs).reshape(-1, 2)
        return pairs[pairs[:, 1] == self._numbers[type(value), value], 0]


@dataclass(frozen=True)
class Columns:
    """The properties of all items with a key.

    Attributes:
        ids: their ids, ascending.
        labels: their labels; the empty text for an item without one.
        months: when they were taken, as ``2021-06``; items without a date are left out.
        fields: columns of the metadata, by name, those with few values.
    """

    ids: Ids
    labels: Column
    months: Column
    fields: dict[str, Column]


def read_columns(items: Iterable[Item]) -> Columns:
    """Read the columns of items with ascending ids; those without a key are left out."""
    ids, labels, months = array("q"), Column(), Column()
    fields: dict[str, Column | None] = {}  # None: too many values
    for item in items:
        if item.key is None:
            continue
        row = len(ids)
        ids.append(item.id)
        for label in dict.fromkeys(item.labels or ("",)):
            labels.add(row, label)
        for name, value in item.metadata.items():
            if name == DATE_FIELD:
                if month := _month(value):
                    months.add(row, month)
            elif isinstance(value, str | int | float | bool):
                if name not in fields and len(fields) < MOST_FIELDS:
                    fields[name] = Column()
                column = fields.get(name)
                if column is not None and column.add(row, value) > MOST_VALUES:
                    fields[name] = None
    few = {name: column for name, column in sorted(fields.items()) if column is not None}
    return Columns(np.asarray(ids), labels, months, few)


def _month(value: object) -> str | None:
    """The month of a date; None if it is no date.

    >>> _month("2021-06-15T14:03:22"), _month("2021-13"), _month(7)
    ('2021-06', None, None)
    """
    if not (isinstance(value, str) and len(value) >= 7 and value[4] == "-"):
        return None
    year, month = value[:4], value[5:7]
    known = year.isdecimal() and month.isdecimal() and 1 <= int(month) <= 12
    return f"{year}-{month}" if known else None


# The map: codes laid out in two dimensions, so that near codes are near each other

LANDMARKS = 600
_SAMPLE = 20_000
_STEPS, _EARLY = 250, 80
_PERPLEXITY = 20.0
_NEAREST = 3
"""Landmarks among which a code lies."""
_AT_ONCE = 1 << 14
_SIDE = 65_535
_MARGIN = 0.03


def lay_out(codes: Codes, bits: int) -> NDArray[np.uint16]:
    """Points (n, 2) of packed codes (n, bytes), across and down, from 0 to 65,535.

    A few hundred landmarks are laid out by t-SNE over Hamming distances. Every other code lies
    among its nearest landmarks. Nothing is left to chance, so the same collection has the same map.
    A million codes take some seconds.
    """
    if not len(codes):
        return np.zeros((0, 2), dtype=np.uint16)
    sample = np.unique(codes[:: max(1, len(codes) // _SAMPLE)], axis=0)
    marks = sample[np.unique(np.linspace(0, len(sample) - 1, LANDMARKS).astype(np.int64))]
    laid = _embed(marks, bits)
    points = np.empty((len(codes), 2), dtype=np.float32)
    for start in range(0, len(codes), _AT_ONCE):
        block = slice(start, start + _AT_ONCE)
        distances = hamming(codes[block], marks)
        few = min(_NEAREST, len(marks))
        nearest = np.argpartition(distances, few - 1, axis=1)[:, :few]
        # A code that is a landmark stays on it.
        weights = 1 / (np.take_along_axis(distances, nearest, axis=1) + 0.02) ** 2
        weights /= weights.sum(axis=1, keepdims=True)
        points[block] = np.einsum("ij,ijk->ik", weights, laid[nearest])
    # A small offset, so that equal codes do not hide each other.
    size = float(np.ptp(laid, axis=0).max()) * 0.003
    points += np.random.default_rng(0).normal(scale=size, size=points.shape).astype(np.float32)
    low, high = np.quantile(points, [0.0005, 0.9995], axis=0)
    share = (points - low) / np.maximum(high - low, 1e-9)
    return np.rint(np.clip(_MARGIN + (1 - 2 * _MARGIN) * share, 0, 1) * _SIDE).astype(np.uint16)


def _embed(marks: Codes, bits: int) -> NDArray[np.float64]:
    """Points (n, 2) of landmarks by t-SNE, from the principal components of their bits."""
    signs = unpack(marks, bits) * 2.0 - 1
    signs -= signs.mean(axis=0)
    left, sizes, _ = np.linalg.svd(np.pad(signs, ((0, 2), (0, 2))), full_matrices=False)
    points = (left * sizes)[: len(marks), :2]
    # The sign of a component is arbitrary: make its largest part positive.
    points *= np.where(points[np.abs(points).argmax(axis=0), [0, 1]] < 0, -1, 1)
    points *= 1e-2 / max(float(points.std()), 1e-9)
    if len(marks) < 5:
        return points
    near, speed = _affinities(marks), np.zeros_like(points)
    rate = max(len(points) / 12.0, 20.0)
    for step in range(_STEPS):
        early = step < _EARLY
        pull, momentum, pace = (12.0, 0.5, rate) if early else (1.0, 0.8, 4 * rate)
        squared = (points**2).sum(axis=1)
        kernel = 1 / (1 + np.maximum(squared[:, None] + squared - 2 * points @ points.T, 0))
        np.fill_diagonal(kernel, 0)
        force = (pull * near - kernel / kernel.sum()) * kernel
        slope = 4 * (force.sum(axis=1)[:, None] * points - force @ points)
        speed = momentum * speed - pace * slope
        points = points + speed
        points -= points.mean(axis=0)
    return points


def _affinities(marks: Codes) -> NDArray[np.float64]:
    """How strongly each pair attracts: the same number of effective neighbours for every point."""
    squared = hamming(marks, marks).astype(np.float64) ** 2
    np.fill_diagonal(squared, np.inf)
    squared -= squared.min(axis=1, keepdims=True)
    entropy = np.log(min(_PERPLEXITY, (len(marks) - 1) / 3))
    low, high = np.full(len(marks), -12.0), np.full(len(marks), 4.0)
    weights = squared
    for _ in range(40):
        middle = (low + high) / 2
        weights = np.exp(-np.exp(middle)[:, None] * squared)
        weights /= weights.sum(axis=1, keepdims=True)
        found = -(weights * np.log(np.maximum(weights, 1e-300))).sum(axis=1)
        low, high = np.where(found > entropy, (middle, high), (low, middle))
    return np.maximum((weights + weights.T) / (2 * len(weights)), 1e-12)


# Duplicates, once for all radii

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
        choices: the codes that can be compared, the default first.
        found: the groups; None if they are not there yet.
        most: the largest radius that the slider offers.
        waiting: what is being done meanwhile, as a sentence.
        done: how much of that is done, from 0 to 1; None if it is not known.
    """

    code: DuplicateCode
    choices: tuple[DuplicateCode, ...]
    found: Duplicates | None = None
    most: int = 0
    waiting: str = ""
    done: float | None = None


class DuplicateFinder:
    """Groups of duplicates at any radius; threads may share it.

    Codes that are made for copies have to be computed from the image files once. That is done in
    the background, as soon as somebody wants to see them.

    Args:
        images: the open index.
        version: changes whenever the index does.
    """

    def __init__(self, images: ImageIndex, version: Callable[[], Hashable]) -> None:
        self._images = images
        self._searches: dict[DuplicateCode, Derived[DuplicateSearch]] = {
            "copy": Derived(version, lambda: self._prepare("copy")),
            "own": Derived(version, lambda: self._prepare("own")),
        }
        self._groups = functools.lru_cache(MOST_RADII)(
            lambda search, radius: Derived(lambda: "once", lambda: self._find(search, radius))
        )
        self._comparing = threading.Lock()
        self._job: tuple[str, int, int, float] | None = None

    def choices(self) -> tuple[DuplicateCode, ...]:
        """The codes that can be compared, the default first."""
        index = self._images.index
        return ("copy", "own") if has_files(index) and false_pairs_of(index) is None else ("own",)

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

    def _find(self, search: DuplicateSearch, radius: int | None) -> Duplicates:
        # A slider that is dragged wants many radii, and each of them takes all cores.
        with self._comparing, progress_to(self._note):
            return search.find(DuplicateOptions(radius=radius))

    def _prepare(self, code: DuplicateCode) -> DuplicateSearch:
        # One core is left for whoever searches meanwhile.
        with progress_to(self._note):
            return self._images.duplicate_search(code=code, workers=max(1, available_cores() - 1))

    def _note(self, title: str, done: int, total: int) -> None:
        title, job = _TITLES.get(title.partition(" ")[0], title), self._job
        same = job is not None and job[0] == title and job[2] == total
        began = job[3] if job and same else time.monotonic()
        self._job = (title, done, total, began) if done < total else None
