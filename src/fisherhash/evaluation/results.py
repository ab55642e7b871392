"""What an evaluation says: who was retrieved (:class:`Matches`) and how good it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.errors import UsageError
from fisherhash.evaluation.inputs import check_labels


@dataclass(frozen=True)
class Matches:
    """Who was retrieved: the nearest database rows of each query by (distance, row).

    Attributes:
        ids: (n_queries, k) database rows; -1 where nothing was left to retrieve.
        distances: (n_queries, k) Hamming distances; -1 where ids is -1.
    """

    ids: NDArray[np.int64]
    distances: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)

    def similar(self, query_labels: ArrayLike, database_labels: ArrayLike) -> NDArray[np.bool_]:
        """Mark the retrieved items that share a label with their query, (n_queries, k).

        >>> matches = Matches(np.array([[1, 0]]), np.array([[0, 2]]))
        >>> matches.similar([[1, 0]], [[0, 1], [1, 1]]).tolist()
        [[True, False]]
        """
        labels = check_labels(query_labels, database_labels)
        if len(labels.query) != len(self.ids):
            raise UsageError(
                f"{len(labels.query)} rows of query labels for {len(self.ids)} queries"
            )
        if self.ids.max(initial=-1) >= len(labels.database):
            raise UsageError(
                f"row {self.ids.max()} was retrieved, there are labels for {len(labels.database)}"
            )
        marks = [
            labels.database[np.maximum(ids, 0)] @ row > 0
            for ids, row in zip(self.ids, labels.query.astype(np.int64), strict=True)
        ]
        return np.array(marks).reshape(self.ids.shape) & (self.ids >= 0)


@dataclass(frozen=True)
class Curve:
    """Mean precision and recall over the queries at growing ranks or radii.

    Attributes:
        at: Ranks, or Hamming radii.
        precision: Mean precision at each.
        recall: Mean recall at each.
    """

    at: list[int]
    precision: list[float]
    recall: list[float]


@dataclass(frozen=True)
class DistanceHistogram:
    """How many similar and dissimilar pairs lie at each Hamming distance.

    Attributes:
        distance: 0 to bits.
        similar: Pairs that share a label.
        dissimilar: Pairs that share none.
    """

    distance: list[int]
    similar: list[int]
    dissimilar: list[int]


@dataclass(frozen=True)
class BitStatistics:
    """How well the database codes use their bits.

    Attributes:
        balance: Share of ones of each bit; 0.5 is best.
        entropy: Entropy of each bit in bits; 1 is best.
        mean_correlation: Mean absolute correlation between two different bits; 0 is best. A bit
            that never changes correlates with nothing.
        max_correlation: The largest of them.
        constant_bits: Bits that are the same in every code.
        distinct_codes: Different codes in the database.
    """

    balance: list[float]
    entropy: list[float]
    mean_correlation: float
    max_correlation: float
    constant_bits: int
    distinct_codes: int


@dataclass(frozen=True)
class Evaluation:
    """How good a ranking is; prints as a table, :meth:`to_json` gives plain numbers.

    All means are over the queries that count: with ``empty="skip"`` those with a relevant item in
    the database, with ``empty="zero"`` all of them, the empty ones with the value 0. Every value
    but ``map_stable`` and the bounds is the expectation over random order inside ties.

    Attributes:
        map: The headline: ``map_expected`` or ``map_stable``, as ``ties`` says.
        map_expected: Mean average precision, averaged over all orders inside ties.
        map_stable: The same with ties in database order.
        map_lower: The least value any order inside ties can give; None: not available.
        map_upper: The greatest value; None: not available.
        top: Ranks that count (K of AP@K); the database size means all.
        ties: ``"expected"`` or ``"stable"``.
        denominator: Of AP@K: ``"found"`` or ``"min(K, relevant)"``.
        empty: What happened to empty queries: ``"skip"`` or ``"zero"``.
        queries: Queries, the empty ones included.
        database: Database items.
        empty_queries: Queries without a relevant item in the database.
        bits: Code length; None when the ranking did not come from codes.
        ranking: What was ranked by.
        precision_at: P@N by N.
        recall_at: R@N by N.
        pr_by_rank: Precision and recall at growing ranks up to ``top``.
        pr_by_radius: The same by Hamming radius; an empty ball has precision 0.
        map_within: Mean average precision of the items within a Hamming radius, by radius.
        precision_within: Precision of those items, by radius.
        empty_within: Share of queries that find nothing within the radius, by radius.
        distances: Histogram of the distances of similar and dissimilar pairs.
        bit_statistics: Balance, entropy, correlation of the bits and the distinct codes.
        weighted_map: Mean average of the cumulative gain (multi-label), up to ``top``.
        acg_at: Average cumulative gain (mean number of shared labels) by N.
        ndcg_at: Normalised discounted cumulative gain by N.
        backend: What computed it.
        primary_metric: The name of the number to select by.
        greater_is_better: True.
        average_precision: (n_queries,) the headline's value of each query, NaN for empty ones;
            not part of the JSON.
    """

    map: float
    map_expected: float
    map_stable: float
    map_lower: float | None
    map_upper: float | None
    top: int
    ties: str
    denominator: str
    empty: str
    queries: int
    database: int
    empty_queries: int
    bits: int | None
    ranking: str
    precision_at: dict[int, float]
    recall_at: dict[int, float]
    pr_by_rank: Curve
    pr_by_radius: Curve | None
    map_within: dict[int, float]
    precision_within: dict[int, float]
    empty_within: dict[int, float]
    distances: DistanceHistogram | None
    bit_statistics: BitStatistics | None
    weighted_map: float | None
    acg_at: dict[int, float] | None
    ndcg_at: dict[int, float] | None
    backend: str
    primary_metric: str = "map"
    greater_is_better: bool = True
    average_precision: NDArray[np.float64] = field(
        default_factory=lambda: np.empty(0), repr=False, compare=False
    )

    @property
    def distinct_codes(self) -> int | None:
        """Different codes in the database; None when the ranking did not come from codes."""
        return self.bit_statistics.distinct_codes if self.bit_statistics else None

    def summary(self) -> dict[str, float | None]:
        """The headline and what belongs to it, by the names people read."""
        return {
            "mAP": self.map,
            "mAP lower bound": self.map_lower,
            "mAP upper bound": self.map_upper,
            "mAP, ties in database order": self.map_stable,
        }

    def to_json(self) -> dict[str, Any]:
        """All fields but ``average_precision`` as plain Python numbers, lists and dicts.

        The keys of the dicts by rank or radius become text, as JSON wants them.
        """
        values = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name != "average_precision"
        }
        values["distinct_codes"] = self.distinct_codes
        if self.primary_metric != "map":
            values[self.primary_metric] = self.map
        return {name: _plain(value) for name, value in values.items()}

    def __str__(self) -> str:
        cut = "ALL" if self.top == self.database else str(self.top)
        name = self.primary_metric.replace("map", "mAP")
        rows = [
            (f"{name}@{cut} ({self.ties})", _number(self.map)),
            ("  expected over tie order", _number(self.map_expected)),
            ("  ties in database order", _number(self.map_stable)),
            ("  lower bound", _number(self.map_lower)),
            ("  upper bound", _number(self.map_upper)),
        ]
        if self.weighted_map is not None:
            rows.append((f"weighted mAP@{cut}", _number(self.weighted_map)))
        for title, by in (
            ("P@", self.precision_at),
            ("R@", self.recall_at),
            ("ACG@", self.acg_at),
            ("NDCG@", self.ndcg_at),
            ("mAP within radius ", self.map_within),
            ("P within radius ", self.precision_within),
        ):
            rows += [(f"{title}{at}", _number(value)) for at, value in (by or {}).items()]
        empties = "skipped" if self.empty == "skip" else "counted as 0"
        rows += [
            ("queries", f"{self.queries:,}"),
            ("  without a relevant item", f"{self.empty_queries:,} ({empties})"),
            ("database", f"{self.database:,}"),
            ("denominator of AP", self.denominator),
            ("ranked by", self.ranking),
        ]
        if self.bits is not None:
            rows.append(("bits", str(self.bits)))
        if self.bit_statistics is not None:
            stats = self.bit_statistics
            rows += [
                ("distinct codes", f"{stats.distinct_codes:,}"),
                ("mean entropy of a bit", _number(float(np.mean(stats.entropy)))),
                ("mean |correlation| of bits", _number(stats.mean_correlation)),
            ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _number(value: float | None) -> str:
    return "not available" if value is None else f"{value:.4f}"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value
