"""From blocks of ranked queries to an :class:`Evaluation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.evaluation.inputs import EvaluationTask
from fisherhash.evaluation.metric import Metric
from fisherhash.evaluation.ranked import RankedQueries
from fisherhash.evaluation.results import BitStatistics, Evaluation
from fisherhash.evaluation.standard_metrics import STANDARD, MeanAveragePrecision

_FIELDS = {field.name for field in fields(Evaluation)}


class Tally:
    """Passes ranked queries on to every metric.

    Args:
        task: The arguments of the evaluation.
        extra: Metrics beside the standard ones.
    """

    def __init__(self, task: EvaluationTask, extra: Sequence[type[Metric]] = ()) -> None:
        self.task = task
        self.counted = 0
        self.headline = MeanAveragePrecision(task)
        taken = _FIELDS.copy()
        for metric in extra:
            if metric.name in taken:
                raise UsageError(
                    f"an evaluation already has the entry '{metric.name}'; "
                    f"give the metric {metric.__name__} another name"
                )
            taken.add(metric.name)
        self.absent = {metric.name for metric in (*STANDARD, *extra) if self._is_absent(metric)}
        self.metrics: list[Metric] = [self.headline]
        self.metrics += [m(task) for m in (*STANDARD, *extra) if m.name not in self.absent]

    def _is_absent(self, metric: type[Metric]) -> bool:
        return (metric.needs_shared_labels and not self.task.graded) or (
            metric.needs_hamming and self.task.bits is None
        )

    def add(self, queries: RankedQueries) -> None:
        """Add some queries."""
        counted = queries.having_relevant()
        self.counted += len(counted.rows)
        for metric in self.metrics:
            if metric.counts_empty:
                metric.add(queries)
            elif len(counted.rows):
                metric.add(counted)

    def evaluation(
        self,
        *,
        ranking: str,
        backend: str,
        statistics: BitStatistics | None = None,
        primary_metric: str = "map",
    ) -> Evaluation:
        """Return the result over all queries added so far."""
        task = self.task
        if not self.counted:
            raise FisherhashError(
                f"none of the {task.queries} queries has a relevant item in the database; "
                "check that both sides use the same class columns"
            )
        share = 1.0 / (self.counted if task.empty == "skip" else task.queries)
        values: dict[str, Any] = dict.fromkeys(self.absent)
        values |= {metric.name: metric.result(share) for metric in self.metrics}
        extra = {name: values.pop(name) for name in sorted(values.keys() - _FIELDS)}
        return Evaluation(
            **values,
            extra=extra,
            top=task.top,
            ties=task.ties,
            denominator=task.denominator,
            empty=task.empty,
            queries=task.queries,
            database=task.database,
            empty_queries=task.queries - self.counted,
            bits=task.bits,
            ranking=ranking,
            bit_statistics=statistics,
            backend=backend,
            primary_metric=primary_metric,
            average_precision=self.headline.per_query.copy(),
        )
