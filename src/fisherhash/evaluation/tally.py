"""From blocks of ranked queries to an :class:`Evaluation`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.evaluation.inputs import EvaluationTask
from fisherhash.evaluation.metric import Metric
from fisherhash.evaluation.ranked import RankedQueries
from fisherhash.evaluation.results import BitStatistics, Evaluation
from fisherhash.evaluation.standard_metrics import STANDARD, MeanAveragePrecision

_FIELDS = {field.name for field in fields(Evaluation)}
_SHARED = ("top", "ties", "denominator", "empty", "queries", "database", "bits")


def tally(
    task: EvaluationTask,
    blocks: Iterable[RankedQueries],
    extra_metrics: Sequence[type[Metric]] = (),
    *,
    ranking: str,
    backend: str = "numpy",
    statistics: BitStatistics | None = None,
    primary_metric: str = "map",
) -> Evaluation:
    """Pass blocks of ranked queries to every metric and return the result over all queries.

    Args:
        task: The arguments of the evaluation.
        blocks: All queries, in any order.
        extra_metrics: Metrics beside the standard ones.
        ranking: What the database was ranked by.
        backend: The backend that ranked it.
        statistics: The bits of the database codes, if it has codes.
        primary_metric: Name of the headline number.
    """
    taken = _FIELDS.copy()
    for kind in extra_metrics:
        if kind.name in taken:
            raise UsageError(
                f"an evaluation already has the entry '{kind.name}'; "
                f"give the metric {kind.__name__} another name"
            )
        taken.add(kind.name)
    kinds = (*STANDARD, *extra_metrics)
    metrics = [kind(task) for kind in kinds if _applies(kind, task)]
    counted = 0
    for queries in blocks:
        full = queries.having_relevant()
        counted += len(full.rows)
        for metric in metrics:
            if metric.counts_empty:
                metric.add(queries)
            elif len(full.rows):
                metric.add(full)
    if not counted:
        raise FisherhashError(
            f"none of the {task.queries} queries has a relevant item in the database; "
            "check that both sides use the same class columns"
        )
    share = 1.0 / (counted if task.empty == "skip" else task.queries)
    values: dict[str, Any] = {kind.name: None for kind in kinds}
    values |= {metric.name: metric.result(share) for metric in metrics}
    extra = {name: values.pop(name) for name in sorted(values.keys() - _FIELDS)}
    headline = next(metric for metric in metrics if isinstance(metric, MeanAveragePrecision))
    return Evaluation(
        **values,
        **{name: getattr(task, name) for name in _SHARED},
        extra=extra,
        empty_queries=task.queries - counted,
        ranking=ranking,
        bit_statistics=statistics,
        backend=backend,
        primary_metric=primary_metric,
        average_precision=headline.per_query,
    )


def _applies(kind: type[Metric], task: EvaluationTask) -> bool:
    lacks_labels = kind.needs_shared_labels and not task.graded
    return not (lacks_labels or (kind.needs_hamming and task.bits is None))
