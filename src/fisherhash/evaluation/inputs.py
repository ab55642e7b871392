"""Checks of the arguments; every error says what was found and what to do."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.codes import check_bits, check_codes
from fisherhash.errors import FisherhashError, UsageError, counted, unknown_name

Denominator = Literal["found", "min(K, relevant)"]
Ties = Literal["expected", "stable"]
Empty = Literal["skip", "zero"]

RANKS = (1, 5, 10, 50, 100, 500, 1000, 5000)
RADII = (0, 1, 2, 3)
CURVE_POINTS = 40


@dataclass(frozen=True)
class Labels:
    """The checked labels of both sides.

    Attributes:
        query: (n_queries, classes) of uint8, 0 or 1.
        database: (n_database, classes) of uint8, 0 or 1.
    """

    query: NDArray[np.uint8]
    database: NDArray[np.uint8]

    @functools.cached_property
    def masks(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """The rows of both sides packed into bits, (n, words)."""
        # padded to whole bytes per row, so that one call packs all rows
        edges = (0, 0), (0, -self.query.shape[1] % 8)
        query, database = (
            padded_words(np.packbits(np.pad(side, edges)).reshape(len(side), -1))
            for side in (self.query, self.database)
        )
        return query, database


class EvaluationTask:
    """The arguments that an evaluation and its metrics share, checked.

    The arguments are those of :func:`evaluate`.

    Attributes:
        labels: Labels of both sides.
        top: Ranks that count (K of AP@K).
        ties: What the headline is: ``"expected"`` or ``"stable"``.
        denominator: Of AP@K.
        empty: How queries without a relevant item are treated.
        self_rows: (n_queries,) database row of the query itself, or -1.
        ranks: Ranks N of P@N and the like.
        graded: Whether metrics that use the number of shared labels are computed.
        most: Largest number of shared labels to tell apart; 1 where only yes or no matters.
        bits: Code length; None where the distances are not Hamming distances.
        levels: Number of Hamming distances: 0 to bits.
        radii: Hamming radii of the metrics within a radius.
    """

    def __init__(
        self,
        labels: Labels,
        top: int | None,
        ties: Ties,
        denominator: Denominator,
        empty: Empty,
        self_index: ArrayLike | None,
        precision_at: Sequence[int] | None,
        graded: bool | None,
        *,
        bits: int | None = None,
        radius: Sequence[int] | None = None,
    ) -> None:
        check_choice("ties", ties, get_args(Ties))
        check_choice("denominator", denominator, get_args(Denominator))
        check_choice("empty", empty, get_args(Empty))
        self.labels = labels
        self.top = check_top(top, self.database)
        self.ties: Ties = ties
        self.denominator: Denominator = denominator
        self.empty: Empty = empty
        self.self_rows = check_self(self_index, self.queries, self.database)
        self.ranks = _check_ranks(precision_at, self.database)
        # An upper bound on the labels that a query and an item share.
        shared = (int(np.bitwise_count(m).sum(axis=1, dtype=int).max()) for m in labels.masks)
        most = max(1, min(shared))
        self.graded = most > 1 if graded is None else graded
        self.most = most if self.graded else 1
        self.bits = bits
        self.levels = 0 if bits is None else bits + 1
        self.radii = [] if bits is None else _check_radii(radius, bits)

    @property
    def queries(self) -> int:
        """Number of queries."""
        return len(self.labels.query)

    @property
    def database(self) -> int:
        """Number of database items."""
        return len(self.labels.database)

    @functools.cached_property
    def curve_ranks(self) -> NDArray[np.int64]:
        """Ranks of the precision-recall curve.

        They are dense at the first ranks, which people look at, and along the recall, where curves
        bend.
        """
        points = [f(1, self.top, CURVE_POINTS) for f in (np.geomspace, np.linspace)]
        return np.unique(np.concatenate(points).round().astype(np.int64))

    @functools.cached_property
    def all_ranks(self) -> NDArray[np.int64]:
        """``ranks``, then ``curve_ranks``."""
        return np.concatenate([np.array(self.ranks, dtype=np.int64), self.curve_ranks])


def padded_words(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return bytes (n, width) as zero-padded words (n, ceil(width / 8)).

    >>> padded_words(np.ones((2, 9), dtype=np.uint8)).shape
    (2, 2)
    """
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))
    return np.ascontiguousarray(padded).view(np.uint64)


def check_choice(kind: str, value: str, known: Sequence[str]) -> None:
    """Reject a word that is not in ``known``."""
    if value not in known:
        raise unknown_name(kind, str(value), known)


def check_code_pair(
    query_codes: ArrayLike,
    database_codes: ArrayLike,
    query_labels: ArrayLike,
    database_labels: ArrayLike,
    *,
    bits: int | None,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Labels, int]:
    """Return both code arrays (n, bytes), the labels of both sides, and the number of bits."""
    query, database = np.asarray(query_codes), np.asarray(database_codes)
    for side, array in (("query", query), ("database", database)):
        if array.ndim != 2:
            raise UsageError(f"{side} codes must have shape (n, bytes), got {array.shape}")
    if query.shape[1] != database.shape[1]:
        raise UsageError(
            f"query codes have {query.shape[1]} bytes and database codes {database.shape[1]}; "
            "encode both with one model"
        )
    length = check_bits(query.shape[1] * 8 if bits is None else bits)
    query, database = check_codes(query, length), check_codes(database, length)
    check_sizes(len(query), len(database))
    labels = check_labels(query_labels, database_labels, sizes=(len(query), len(database)))
    return query, database, labels, length


def check_sizes(queries: int, database: int) -> None:
    """Reject an empty side."""
    if database == 0:
        raise UsageError("the database is empty; there is nothing to rank")
    if queries == 0:
        raise UsageError("there are no queries")


def check_labels(
    query_labels: ArrayLike,
    database_labels: ArrayLike,
    *,
    sizes: tuple[int | None, int | None] = (None, None),
) -> Labels:
    """Return both label matrices as 0/1 bytes.

    Args:
        query_labels: (n_queries, classes) of 0 and 1.
        database_labels: (n_database, classes) of 0 and 1.
        sizes: Expected numbers of query and database rows, if known.
    """
    labels = Labels(
        _label_matrix("query", query_labels, sizes[0]),
        _label_matrix("database", database_labels, sizes[1]),
    )
    classes = labels.query.shape[1], labels.database.shape[1]
    if classes[0] != classes[1]:
        raise UsageError(
            f"query labels have {classes[0]} classes and database labels {classes[1]}; "
            "both need the same columns"
        )
    return labels


def _label_matrix(side: str, labels: ArrayLike, rows: int | None) -> NDArray[np.uint8]:
    array = np.asarray(labels)
    if array.ndim != 2 or array.shape[1] == 0:
        raise UsageError(
            f"{side} labels must be a 0/1 matrix of shape (n, classes), got shape {array.shape}; "
            "turn class numbers into rows with numpy.eye(classes)[numbers]"
        )
    if array.dtype.kind not in "biuf" or not ((array == 0) | (array == 1)).all():
        raise UsageError(f"{side} labels must hold only 0 and 1")
    if rows is not None and len(array) != rows:
        raise UsageError(
            f"{counted(len(array), 'row')} of {side} labels for {counted(rows, f'{side} item')}"
        )
    return array.astype(np.uint8)


def check_top(top: int | None, database: int) -> int:
    """Return the number of ranks that count; None means all."""
    if top is None:
        return database
    if isinstance(top, bool) or not isinstance(top, int | np.integer):
        raise UsageError(f"top must be a whole number or None for all, got {top!r}")
    if not 1 <= top <= database:
        raise UsageError(
            f"top must be between 1 and the database size {database}, got {top}; "
            "None ranks everything"
        )
    return int(top)


def _check_ranks(ranks: Sequence[int] | None, database: int) -> list[int]:
    """Return the sorted ranks; drop defaults beyond the database, reject given ranks beyond it."""
    if ranks is None:
        return [rank for rank in RANKS if rank <= database] or [database]
    return sorted({check_top(rank, database) for rank in ranks})


def _check_radii(radii: Sequence[int] | None, bits: int) -> list[int]:
    """Return the sorted radii; drop defaults above ``bits``, reject given radii above it."""
    if radii is None:
        return [radius for radius in RADII if radius <= bits]
    for radius in radii:
        if not isinstance(radius, int | np.integer) or not 0 <= radius <= bits:
            raise UsageError(f"a radius must be a whole number from 0 to {bits}, got {radius!r}")
    return sorted({int(radius) for radius in radii})


def check_self(self_index: ArrayLike | None, queries: int, database: int) -> NDArray[np.int64]:
    """Return the database row of each query, -1 where it is not in the database."""
    if self_index is None:
        return np.full(queries, -1, dtype=np.int64)
    rows = np.asarray(self_index)
    if rows.shape != (queries,) or rows.dtype.kind not in "iu":
        raise UsageError(
            f"self_index must be {queries} whole numbers, one per query (-1: not in the database), "
            f"got shape {rows.shape} of {rows.dtype}"
        )
    rows = rows.astype(np.int64)
    if ((rows < -1) | (rows >= database)).any():
        bad = int(rows[(rows < -1) | (rows >= database)][0])
        raise UsageError(f"self_index holds {bad}; the database has rows 0 to {database - 1}")
    return rows


def check_finite(block: NDArray[np.generic], first_query: int) -> None:
    """Reject NaN distances."""
    if block.dtype.kind == "f" and np.isnan(block).any():
        row, column = np.argwhere(np.isnan(block))[0]
        raise FisherhashError(
            f"the distance of query {first_query + row} to database row {column} is NaN; "
            "check the logits it was computed from for NaN"
        )
