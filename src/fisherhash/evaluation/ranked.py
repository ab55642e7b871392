"""Ranked queries: what every backend yields and every metric is computed from."""

from __future__ import annotations

import functools
from dataclasses import dataclass

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
