"""``evaluate`` for codes, ``metrics`` for blocks of any distances."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.evaluation import inputs
from fisherhash.evaluation.hamming import (
    Backend,
    choose_backend,
    query_slices,
    rank_block,
    scan_blocks,
)
from fisherhash.evaluation.inputs import Denominator, Empty, EvaluationTask, Ties
from fisherhash.evaluation.metric import Metric, RankedQueries
from fisherhash.evaluation.results import BitStatistics, Evaluation, describe_bits
from fisherhash.evaluation.standard_metrics import STANDARD, MeanAveragePrecision

_FIELDS = {field.name for field in fields(Evaluation)}
_SHARED = ("top", "ties", "denominator", "empty", "queries", "database", "bits")


def evaluate(
    query_codes: ArrayLike,
    database_codes: ArrayLike,
    query_labels: ArrayLike,
    database_labels: ArrayLike,
    *,
    bits: int | None = None,
    top: int | None = None,
    ties: Ties = "expected",
    denominator: Denominator = "found",
    empty: Empty = "skip",
    self_index: ArrayLike | None = None,
    precision_at: Sequence[int] | None = None,
    radius: Sequence[int] | None = None,
    graded: bool | None = None,
    bit_statistics: bool = True,
    extra_metrics: Sequence[type[Metric]] = (),
    backend: Backend = "auto",
    device: str | None = None,
) -> Evaluation:
    """Rank the database by Hamming distance for every query and score the rankings.

    Items are similar when they share at least one label. Equal distances are ties. The headline
    is the expectation over all orders inside ties, or with ``ties="stable"`` the database order.

    Args:
        query_codes: (n_queries, bytes) packed codes.
        database_codes: (n_database, bytes) packed codes.
        query_labels: (n_queries, classes) of 0 and 1.
        database_labels: (n_database, classes) of 0 and 1.
        bits: Code length; by default all bits of the bytes.
        top: Ranks that count in average precision, K of mAP@K; None counts all.
        ties: Which value is the headline: ``"expected"`` or ``"stable"``; both are computed.
        denominator: Of AP@K: relevant items ``"found"`` among the first K, or
            ``"min(K, relevant)"``.
        empty: Queries without a relevant item in the database: ``"skip"`` them or count them as
            ``"zero"``. A query whose relevant items all rank below ``top`` has the value 0.
        self_index: (n_queries,) database row that is the query itself, which is left out of its
            ranking; -1 where there is none.
        precision_at: Ranks N of P@N, R@N, ACG@N and NDCG@N.
        radius: Hamming radii of mAP and precision within a radius; they ignore ``top``.
        graded: Also compute the metrics that use the number of shared labels (ACG, NDCG, weighted
            mAP); by default only when a pair can share more than one.
        bit_statistics: Also compute the balance, entropy and correlation of the database's bits.
        extra_metrics: More metrics to compute; their values are in ``extra`` and in the JSON.
        backend: ``"numba"``, ``"torch"`` (on a GPU if there is one) or ``"numpy"``; ``"auto"``
            chooses numpy for small inputs, else numba, else torch.
        device: Torch device for ``backend="torch"``.

    Returns:
        An :class:`Evaluation`.

    Raises:
        UsageError: The arguments do not fit together.
        FisherhashError: No query has a relevant item.

    One query and two items at the same distance, one of them relevant: the average precision is 1
    if the relevant item comes first, else 1/2.

    >>> result = evaluate([[0]], [[128], [1]], [[1, 0]], [[0, 1], [1, 0]])
    >>> result.map, result.map_stable, result.map_lower, result.map_upper
    (0.75, 0.5, 0.5, 1.0)
    """
    query, database, labels, bits = inputs.check_code_pair(
        query_codes, database_codes, query_labels, database_labels, bits=bits
    )
    shared = (top, ties, denominator, empty, self_index, precision_at, graded)
    task = EvaluationTask(labels, *shared, bits=bits, radius=radius)
    chosen = choose_backend(backend, len(query) * len(database))
    return tally(
        task,
        scan_blocks(query, database, task, backend=chosen, device=device),
        extra_metrics,
        ranking="Hamming distance",
        backend=chosen,
        statistics=describe_bits(database, bits) if bit_statistics else None,
    )


def metrics(
    distance_blocks: Iterable[Any],
    query_labels: ArrayLike,
    database_labels: ArrayLike,
    *,
    top: int | None = None,
    ties: Ties = "expected",
    denominator: Denominator = "found",
    empty: Empty = "skip",
    self_index: ArrayLike | None = None,
    precision_at: Sequence[int] | None = None,
    graded: bool | None = None,
    extra_metrics: Sequence[type[Metric]] = (),
    ranking: str = "given distances",
) -> Evaluation:
    """Score rankings by any distances; smaller is nearer, and equal distances are ties.

    Args:
        distance_blocks: Blocks (b, n_database) of integer or real distances (arrays or tensors),
            queries in order.
        query_labels: (n_queries, classes) of 0 and 1.
        database_labels: (n_database, classes) of 0 and 1.
        top: Ranks that count, as in :func:`evaluate`, like every argument up to ``extra_metrics``.
        ties, denominator, empty, self_index, precision_at, graded, extra_metrics: As there.
        ranking: What the distances are; shown in the table.

    Returns:
        An :class:`Evaluation`; entries that need Hamming distances are empty or None.

    >>> result = metrics([[[0.1, 0.4, 0.4]]], [[1]], [[0], [1], [0]])
    >>> round(result.map, 4), round(result.map_stable, 4)
    (0.4167, 0.5)
    """
    labels = inputs.check_labels(query_labels, database_labels)
    inputs.check_sizes(len(labels.query), len(labels.database))
    shared = (top, ties, denominator, empty, self_index, precision_at, graded)
    task = EvaluationTask(labels, *shared)
    return tally(task, _ranked_blocks(distance_blocks, task), extra_metrics, ranking=ranking)


def _ranked_blocks(blocks: Iterable[Any], task: EvaluationTask) -> Iterator[RankedQueries]:
    queries, n = task.queries, task.database
    done = 0
    for block in blocks:
        if hasattr(block, "detach"):
            block = block.detach().cpu().numpy()
        distances = np.asarray(block)
        if distances.ndim != 2 or distances.shape[1] != n:
            raise UsageError(
                f"a block of distances must have shape (b, {n}), one column per database item, "
                f"got {distances.shape}"
            )
        if distances.dtype.kind not in "iufb":
            raise UsageError(f"distances must be numbers, got {distances.dtype}")
        if done + len(distances) > queries:
            raise UsageError(f"the blocks hold more rows than the {queries} queries with labels")
        inputs.check_finite(distances, done)
        for part in query_slices(len(distances), n):
            yield rank_block(distances[part], done + np.arange(part.start, part.stop), task)
        done += len(distances)
    if done != queries:
        raise UsageError(f"the blocks hold {done} rows of distances for {queries} queries")


def tally(
    task: EvaluationTask,
    blocks: Iterable[RankedQueries],
    extra_metrics: Sequence[type[Metric]] = (),
    *,
    ranking: str,
    backend: str = "numpy",
    statistics: BitStatistics | None = None,
) -> Evaluation:
    """Pass blocks of ranked queries to every metric and return the result over all queries.

    Args:
        task: The arguments of the evaluation.
        blocks: All queries, in any order.
        extra_metrics: Metrics beside the standard ones.
        ranking: What the database was ranked by.
        backend: The backend that ranked it.
        statistics: The bits of the database codes, if it has codes.
    """
    kinds = (*STANDARD, *_checked(extra_metrics))
    tallies = [kind(task) for kind in kinds if _applies(kind, task)]
    counted = 0
    for queries in blocks:
        full = queries.having_relevant()
        counted += len(full.rows)
        for metric in tallies:
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
    values |= {metric.name: metric.result(share) for metric in tallies}
    extra = {name: values.pop(name) for name in sorted(values.keys() - _FIELDS)}
    headline = next(metric for metric in tallies if isinstance(metric, MeanAveragePrecision))
    return Evaluation(
        **values,
        **{name: getattr(task, name) for name in _SHARED},
        extra=extra,
        empty_queries=task.queries - counted,
        ranking=ranking,
        bit_statistics=statistics,
        backend=backend,
        average_precision=headline.per_query,
    )


def _checked(kinds: Sequence[type[Metric]]) -> Sequence[type[Metric]]:
    """Refuse metrics whose name is taken."""
    taken = _FIELDS.copy()
    for kind in kinds:
        if kind.name in taken:
            raise UsageError(
                f"an evaluation already has the entry '{kind.name}'; "
                f"give the metric {kind.__name__} another name"
            )
        taken.add(kind.name)
    return kinds


def _applies(kind: type[Metric], task: EvaluationTask) -> bool:
    lacks_labels = kind.needs_shared_labels and not task.graded
    return not (lacks_labels or (kind.needs_hamming and task.bits is None))
