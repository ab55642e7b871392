"""The metrics of every evaluation. Each has the name of its field in :class:`Evaluation`.

Notation: a ranking of n items, R of them relevant; r(N) is the number of relevant items among the
first N, and s_i is the number of labels that the item at rank i shares with the query.
"""

# ruff: noqa: D102 - the base classes explain the methods

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from fisherhash.evaluation import ties as closed_forms
from fisherhash.evaluation.groups import Counts, Floats
from fisherhash.evaluation.metric import MeanAt, Metric, QueryMean, RankedQueries
from fisherhash.evaluation.results import Curve, DistanceHistogram


class MeanAveragePrecision(QueryMean):
    """The headline: ``map_expected`` or ``map_stable``, as ``ties`` says.

    AP@K = (sum of r(i) / i over the relevant ranks i <= K) / r(K), or / min(K, R).
    """

    name = "map"

    def values(self, queries: RankedQueries) -> Floats:
        return queries.expected if self.task.ties == "expected" else queries.stable


class ExpectedMap(QueryMean):
    """AP@K, averaged over all orders inside ties."""

    name = "map_expected"

    def values(self, queries: RankedQueries) -> Floats:
        return queries.expected


class StableMap(QueryMean):
    """AP@K with ties in database order."""

    name = "map_stable"

    def values(self, queries: RankedQueries) -> Floats:
        return queries.stable


class LowestMap(QueryMean):
    """The least AP@K that any order inside ties can reach."""

    name = "map_lower"

    def values(self, queries: RankedQueries) -> Floats:
        return queries.bounds[0]


class HighestMap(QueryMean):
    """The greatest AP@K that any order inside ties can reach."""

    name = "map_upper"

    def values(self, queries: RankedQueries) -> Floats:
        return queries.bounds[1]


class WeightedMap(QueryMean):
    """AP@K with the average cumulative gain, (s_1 + … + s_i) / i, in place of precision."""

    name = "weighted_map"
    needs_shared_labels = True

    def values(self, queries: RankedQueries) -> Floats:
        return closed_forms.expected_average_precision(
            queries.groups, queries.top, self.task.denominator, weighted=True
        )


class PrecisionAt(MeanAt):
    """P@N = r(N) / N."""

    name = "precision_at"

    def sums(self, queries: RankedQueries) -> Floats:
        return (queries.found / self.task.all_ranks).sum(axis=0)[: len(self.at)]


class RecallAt(MeanAt):
    """R@N = r(N) / R."""

    name = "recall_at"

    def sums(self, queries: RankedQueries) -> Floats:
        return (queries.found / queries.relevant[:, None]).sum(axis=0)[: len(self.at)]


class PairedSums(Metric):
    """Two rows of sums over the queries, (2, n)."""

    total: Any = 0

    def add(self, queries: RankedQueries) -> None:
        self.total = self.total + np.stack(self.sums(queries))

    @abstractmethod
    def sums(self, queries: RankedQueries) -> Sequence[Floats | Counts]:
        """Return both rows for some queries."""


class CurveByRank(PairedSums):
    """P@N and R@N at growing ranks N up to K."""

    name = "pr_by_rank"

    def sums(self, queries: RankedQueries) -> Sequence[Floats]:
        divisors = self.task.all_ranks, queries.relevant[:, None]
        return [(queries.found / by).sum(axis=0)[len(self.task.ranks) :] for by in divisors]

    def result(self, share: float) -> Curve:
        return Curve(self.task.curve_ranks.tolist(), *(self.total * share).tolist())


class CurveByRadius(PairedSums):
    """Precision and recall of the items within Hamming radius 0, 1, …; 0 where there are none."""

    name = "pr_by_radius"
    needs_hamming = True

    def sums(self, queries: RankedQueries) -> Sequence[Floats]:
        return queries.within.precision.sum(axis=0), queries.within.recall.sum(axis=0)

    def result(self, share: float) -> Curve:
        return Curve(list(range(self.total.shape[1])), *(self.total * share).tolist())


class MapWithin(MeanAt):
    """Average precision of the items within a Hamming radius, expected; 0 where none is found."""

    name = "map_within"
    by_radius = True

    def sums(self, queries: RankedQueries) -> Floats:
        return queries.within.average_precision.sum(axis=0)[self.at]


class PrecisionWithin(MeanAt):
    """Relevant share of the items within a Hamming radius; 0 where there are none."""

    name = "precision_within"
    by_radius = True

    def sums(self, queries: RankedQueries) -> Floats:
        return queries.within.precision.sum(axis=0)[self.at]


class EmptyWithin(MeanAt):
    """Share of the queries with no item within a Hamming radius; empty queries never count."""

    name = "empty_within"
    by_radius = True

    counted = 0

    def sums(self, queries: RankedQueries) -> Floats:
        self.counted += len(queries.rows)
        return (queries.within.items == 0).sum(axis=0, dtype=np.float64)[self.at]

    def result(self, share: float) -> dict[int, float]:
        return dict(zip(self.at, (self.total / self.counted).tolist(), strict=True))


class Distances(PairedSums):
    """Numbers of similar and dissimilar pairs at each Hamming distance, over all queries."""

    name = "distances"
    needs_hamming = True
    counts_empty = True

    def sums(self, queries: RankedQueries) -> Sequence[Counts]:
        similar = queries.groups.relevant.sum(axis=0)
        return similar, queries.groups.items.sum(axis=0) - similar

    def result(self, share: float) -> DistanceHistogram:
        return DistanceHistogram(list(range(self.total.shape[1])), *self.total.tolist())


class GainAt(MeanAt):
    """ACG@N = (s_1 + … + s_N) / N."""

    name = "acg_at"
    needs_shared_labels = True

    def sums(self, queries: RankedQueries) -> Floats:
        ranks = np.array(self.at, dtype=np.int64)
        weight = closed_forms.expected_found(
            queries.groups, ranks, self.task.database, weighted=True
        )
        return (weight / ranks).sum(axis=0)


class NormalisedGainAt(MeanAt):
    """NDCG@N = DCG@N / (greatest possible DCG@N).

    DCG@N = sum over i <= N of (2^s_i - 1) / log2(1 + i).
    """

    name = "ndcg_at"
    needs_shared_labels = True

    def sums(self, queries: RankedQueries) -> Floats:
        gains = [closed_forms.expected_ndcg(queries.groups, rank).sum() for rank in self.at]
        return np.array(gains)


STANDARD: tuple[type[Metric], ...] = tuple(
    value
    for value in list(vars().values())
    if isinstance(value, type) and issubclass(value, Metric) and "name" in vars(value)
)
"""Every metric above. A name that is no field of ``Evaluation`` goes to its ``extra``."""
