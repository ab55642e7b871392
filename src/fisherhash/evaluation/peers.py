"""What common evaluators print for the same codes, to explain published numbers.

Four choices describe an evaluator: how it sorts, which ranks it uses, what it divides by, and how
it treats a query that finds nothing. All of them use an unstable sort, so inside ties their result
depends on the order of the database, the NumPy version and the processor.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.codes import hamming
from fisherhash.errors import UsageError, unknown_name
from fisherhash.evaluation import inputs
from fisherhash.evaluation.hamming import query_slices, shared_labels
from fisherhash.evaluation.inputs import Denominator, Empty

UNSTABLE = "unstable (numpy.argsort default): depends on database order, NumPy version, processor"

EVALUATORS: dict[str, tuple[Denominator, Empty, bool]] = {
    "hashnet": ("found", "skip", False),
    "dfh": ("found", "zero", False),
    "swuxyj": ("found", "zero", True),
    "dsh-analysis": ("min(K, relevant)", "zero", False),
}
"""By name: what it divides the sum of precisions by, how it treats a query that finds nothing, and
whether, without ``top``, it slices ``[0:-1]`` and so drops the last item. They are the code of
thuml/HashNet, of Deep Fisher Hashing, of swuxyj/DeepHash-pytorch and of aassxun/DSH_Analysis."""


@dataclass(frozen=True)
class Compat:
    """What an evaluator prints, and what its rules yield with a reproducible sort.

    Attributes:
        name: The evaluator.
        map: The number it prints with its unstable sort on this machine.
        map_stable: The same rules with ties in database order.
        ranks: Ranks it uses.
        last_item_dropped: Whether the last ranked item was left out here.
        denominator: What it divides the sum of precisions by.
        no_hit: How it treats a query that finds nothing in those ranks: ``"skip"`` or ``"zero"``.
        no_hit_queries: How many there are (unstable sort).
        sort: A description of its sort.
    """

    name: str
    map: float
    map_stable: float
    ranks: int
    last_item_dropped: bool
    denominator: Denominator
    no_hit: Empty
    no_hit_queries: int
    sort: str = UNSTABLE

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain Python values."""
        return asdict(self)

    def __str__(self) -> str:
        treated = "skipped" if self.no_hit == "skip" else "counted as 0"
        rows = [
            (f"mAP as {self.name} prints it", f"{self.map:.4f}"),
            ("  same rules, ties in database order", f"{self.map_stable:.4f}"),
            ("sort", self.sort),
            ("ranks looked at", f"{self.ranks:,}" + ", last item dropped" * self.last_item_dropped),
            ("denominator of AP", self.denominator),
            ("queries without a hit", f"{self.no_hit_queries:,} ({treated})"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def compat(
    name: str,
    query_codes: ArrayLike,
    database_codes: ArrayLike,
    query_labels: ArrayLike,
    database_labels: ArrayLike,
    *,
    bits: int | None = None,
    top: int | None = None,
) -> Compat:
    """Evaluate codes by the rules of another evaluator.

    Args:
        name: ``"hashnet"``, ``"dfh"``, ``"swuxyj"`` or ``"dsh-analysis"``.
        query_codes: (n_queries, bytes) packed codes.
        database_codes: (n_database, bytes) packed codes.
        query_labels: (n_queries, classes) of 0 and 1.
        database_labels: (n_database, classes) of 0 and 1.
        bits: Code length; by default all bits of the bytes.
        top: Ranks to use; None is what the evaluator itself does for "all".

    The last item is relevant, and the first evaluator never looks at it:

    >>> codes, labels = [[0], [1], [3]], [[1], [0], [1]]
    >>> compat("swuxyj", [[0]], codes, [[1]], labels).map
    1.0
    >>> round(compat("dfh", [[0]], codes, [[1]], labels).map, 4)
    0.8333
    """
    if name not in EVALUATORS:
        raise unknown_name("evaluator", name, EVALUATORS)
    denominator, no_hit, drops = EVALUATORS[name]
    query, database, labels, _ = inputs.check_code_pair(
        query_codes, database_codes, query_labels, database_labels, bits=bits
    )
    drops = drops and top is None
    ranks = inputs.check_top(top, len(database)) - drops
    if ranks < 1:
        raise UsageError(f"{name} drops the last item, and the database has only one")
    values: dict[str | None, list[float | None]] = {None: [], "stable": []}
    for part in query_slices(len(query), len(database)):
        relevant = shared_labels(labels.query[part], labels.database, 1) > 0
        # they rank by 0.5 * (bits - product of the signs) in single precision; the type matters,
        # because NumPy has a different unstable sort for each type
        distances = hamming(query[part], database).astype(np.float32)
        for row, marks in zip(distances, relevant, strict=True):
            for kind, into in values.items():
                ranked = marks[np.argsort(row, kind=kind)]  # pyright: ignore[reportArgumentType, reportCallIssue]
                into.append(_average_precision(ranked, ranks, denominator))
    printed, stable = (_mean(kind, no_hit) for kind in values.values())
    missed = sum(value is None for value in values[None])
    return Compat(name, printed, stable, ranks, drops, denominator, no_hit, missed)


def _average_precision(
    ranked: NDArray[np.bool_], ranks: int, denominator: Denominator
) -> float | None:
    """Return the AP of one ranking; None where nothing is found."""
    hits = np.flatnonzero(ranked[:ranks]) + 1
    if not len(hits):
        return None
    total = float((np.arange(1, len(hits) + 1) / hits).sum())
    return total / (len(hits) if denominator == "found" else min(ranks, int(ranked.sum())))


def _mean(values: list[float | None], no_hit: Empty) -> float:
    found = [value for value in values if value is not None]
    count = len(found) if no_hit == "skip" else len(values)
    return sum(found) / count if count else 0.0
