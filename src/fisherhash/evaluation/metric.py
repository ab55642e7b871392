"""What a metric is: a name, a formula in its docstring, and a tally that grows block by block.

A new metric is one subclass of :class:`Metric`, usually of :class:`QueryMean` or :class:`MeanAt`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fisherhash.evaluation import ties as closed_forms
from fisherhash.evaluation.groups import Counts, Floats, TieGroups
from fisherhash.evaluation.inputs import EvaluationTask


@dataclass(frozen=True)
class RankedQueries:
    """The rankings of b queries as tie groups: everything a metric may use.

    Quantities that several metrics need are computed once, on first use.

    Attributes:
        task: The arguments of the evaluation.
        rows: (b,) query numbers.
        groups: Their tie groups, nearest first.
        stable_sum: (b,) sum of the precisions at relevant ranks up to ``task.top``, with ties in
            database order.
        stable_found: (b,) number of those ranks.
    """

    task: EvaluationTask
    rows: NDArray[np.int64]
    groups: TieGroups
    stable_sum: Floats
    stable_found: Counts

    def having_relevant(self) -> RankedQueries:
        """Return the queries that have a relevant item."""
        full = self.relevant > 0
        if full.all():
            return self
        return RankedQueries(
            self.task,
            self.rows[full],
            self.groups.of(full),
            self.stable_sum[full],
            self.stable_found[full],
        )

    @functools.cached_property
    def top(self) -> Counts:
        """Ranks that count, (b,): at most the number of ranked items."""
        return np.minimum(self.task.top, self.groups.items.sum(axis=1))

    @functools.cached_property
    def relevant(self) -> Counts:
        """Relevant items in the whole ranking, (b,)."""
        return self.groups.relevant.sum(axis=1)

    @functools.cached_property
    def expected(self) -> Floats:
        """Average precision, averaged over all orders inside ties, (b,)."""
        return closed_forms.expected_average_precision(self.groups, self.top, self.task.denominator)

    @functools.cached_property
    def stable(self) -> Floats:
        """Average precision with ties in database order, (b,)."""
        found = self.task.denominator == "found"
        divisor = self.stable_found if found else np.minimum(self.top, self.relevant)
        return self.stable_sum / np.maximum(divisor, 1)

    @functools.cached_property
    def bounds(self) -> tuple[Floats, Floats]:
        """Least and greatest average precision over all orders inside ties, (b,) each."""
        return closed_forms.average_precision_bounds(self.groups, self.top, self.task.denominator)

    @functools.cached_property
    def found(self) -> Floats:
        """Expected relevant items among the first N, (b, ranks): N of ``task.all_ranks``."""
        return closed_forms.expected_found(self.groups, self.task.all_ranks, self.task.database)

    @functools.cached_property
    def within(self) -> closed_forms.WithinGroups:
        """Metrics of the items within Hamming radius 0, 1, …, (b, bits + 1) each."""
        return closed_forms.within_groups(self.groups)


class Metric(ABC):
    """One entry of an :class:`Evaluation`, computed from blocks of ranked queries.

    Attributes:
        name: Its key in the JSON.
        needs_shared_labels: Whether it is computed only with ``graded``; otherwise it is None.
        needs_hamming: Whether it is computed only from Hamming distances; otherwise it is None.
        counts_empty: Whether ``add`` also receives the queries without a relevant item.
    """

    name: ClassVar[str]
    needs_shared_labels: ClassVar[bool] = False
    needs_hamming: ClassVar[bool] = False
    counts_empty: ClassVar[bool] = False

    def __init__(self, task: EvaluationTask) -> None:
        self.task = task

    @abstractmethod
    def add(self, queries: RankedQueries) -> None:
        """Add the queries of one block. Blocks come in any order of queries."""

    @abstractmethod
    def result(self, share: float) -> Any:
        """Return the value as plain Python numbers.

        Args:
            share: 1 / (number of queries in a mean); an empty query counts as 0 or not at all.
        """


class QueryMean(Metric):
    """The mean over queries of one value per query. Subclasses compute the values.

    Attributes:
        per_query: (n_queries,) the values so far; NaN for empty queries.
    """

    def __init__(self, task: EvaluationTask) -> None:
        super().__init__(task)
        self.per_query = np.full(task.queries, np.nan)

    @abstractmethod
    def values(self, queries: RankedQueries) -> Floats:
        """Return one value per query, (b,)."""

    def add(self, queries: RankedQueries) -> None:
        """Store the values by query number."""
        self.per_query[queries.rows] = self.values(queries)

    def result(self, share: float) -> float:
        """Return the mean."""
        return float(self.per_query[~np.isnan(self.per_query)].sum() * share)


class MeanAt(Metric):
    """Means over queries at several ranks, or radii. Subclasses compute the sums.

    Attributes:
        by_radius: Whether the values are taken at ``task.radii`` instead of ``task.ranks``.
    """

    by_radius: ClassVar[bool] = False

    def __init__(self, task: EvaluationTask) -> None:
        super().__init__(task)
        self.at = task.radii if self.by_radius else task.ranks
        self.total: Floats = np.zeros(len(self.at))

    @abstractmethod
    def sums(self, queries: RankedQueries) -> Floats:
        """Return the values summed over the queries, one sum for each of ``at``."""

    def add(self, queries: RankedQueries) -> None:
        """Add the sums."""
        if self.at:
            self.total += self.sums(queries)

    def result(self, share: float) -> dict[int, float]:
        """Return the means by rank or radius."""
        return dict(zip(self.at, (self.total * share).tolist(), strict=True))
