"""What a metric is: a name, a formula in its docstring, and a tally that grows block by block.

A new metric is one subclass of :class:`Metric`, usually of :class:`QueryMean` or :class:`MeanAt`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from fisherhash.evaluation.groups import Floats
from fisherhash.evaluation.inputs import EvaluationTask
from fisherhash.evaluation.ranked import RankedQueries


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
