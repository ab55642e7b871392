"""``evaluate`` for codes, ``metrics`` for blocks of any distances: rankings → numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.codes import hamming, pack
from fisherhash.errors import UsageError
from fisherhash.evaluation import inputs
from fisherhash.evaluation.bit_statistics import describe_bits
from fisherhash.evaluation.groups import Denominator
from fisherhash.evaluation.hamming import (
    GroupBlock,
    Scan,
    choose_backend,
    rank_block,
    scan_blocks,
    shared_labels,
)
from fisherhash.evaluation.results import Evaluation
from fisherhash.evaluation.tally import RADII, Empty, Request, Tally, Ties, make_request

Backend = Literal["auto", "numpy", "numba", "torch"]

_SORT_PAIRS = 1 << 20


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
    backend: Backend = "auto",
    device: str | None = None,
) -> Evaluation:
    """Rank the database for every query by Hamming distance and say how good the rankings are.

    Items are similar when they share at least one label. Equal distances are ties; the headline
    is the expectation over all their orders, unless ``ties="stable"`` asks for database order.

    Args:
        query_codes: (n_queries, bytes) packed codes.
        database_codes: (n_database, bytes) packed codes.
        query_labels: (n_queries, classes) of 0 and 1.
        database_labels: (n_database, classes) of 0 and 1.
        bits: Bits of a code; by default all bits of its bytes.
        top: Ranks that count in average precision, K of mAP@K; None counts all.
        ties: The headline: ``"expected"`` or ``"stable"``; both are always computed.
        denominator: Of AP@K: relevant items ``"found"`` among the first K, or
            ``"min(K, relevant)"``.
        empty: Queries without a relevant item in the database: ``"skip"`` them or count them as
            ``"zero"``. A query whose relevant items all lie behind ``top`` has the value 0.
        self_index: (n_queries,) database row that is the query itself and is never retrieved by
            it; -1 where there is none.
        precision_at: Ranks N of P@N, R@N, ACG@N and NDCG@N.
        radius: Hamming radii of mAP and precision within a radius; they ignore ``top``.
        graded: Also compute what needs the number of shared labels (ACG, NDCG, weighted mAP); by
            default exactly when a pair can share more than one.
        bit_statistics: Also compute the balance, entropy and correlation of the database's bits.
        backend: ``"numba"``, ``"torch"`` (on a GPU if there is one), ``"numpy"``; ``"auto"`` takes
            numpy for small inputs, else numba, else torch.
        device: Torch device for ``backend="torch"``.

    Returns:
        The numbers, as an :class:`Evaluation`.

    Raises:
        UsageError: The inputs do not fit together.
        FisherhashError: No query has a relevant item.

    One query, two items at the same distance, one of them relevant: the average precision is 1 or
    1/2, whichever comes first.

    >>> result = evaluate([[0]], [[128], [1]], [[1, 0]], [[0, 1], [1, 0]])
    >>> result.map, result.map_stable, result.map_lower, result.map_upper
    (0.75, 0.5, 0.5, 1.0)
    """
    query, database, bits = inputs.check_code_pair(query_codes, database_codes, bits)
    labels = inputs.check_labels(query_labels, database_labels)
    inputs.check_lengths(labels, len(query), len(database))
    request = make_request(labels, top, ties, denominator, empty, self_index, precision_at, graded)
    radii = inputs.check_radii(radius, RADII, bits)
    chosen = choose_backend(backend, len(query) * len(database))
    scan = Scan(
        query=query,
        database=database,
        bits=bits,
        labels=labels,
        self_rows=request.self_rows,
        top=request.top,
        most=request.most,
        device=device,
    )
    tally = Tally(request, levels=bits + 1, radii=radii)
    for block in scan_blocks(scan, chosen):
        tally.add(block)
    return tally.evaluation(
        ranking="Hamming distance",
        bits=bits,
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
    ranking: str = "given distances",
    primary_metric: str = "map",
) -> Evaluation:
    """Say how good any ranking is, from its distances; smaller is nearer, equal is a tie.

    Args:
        distance_blocks: Blocks (b, n_database) of integer or real distances (arrays or tensors),
            the queries in order.
        query_labels: (n_queries, classes) of 0 and 1.
        database_labels: (n_database, classes) of 0 and 1.
        top: As in :func:`evaluate`, like every argument up to ``graded``.
        ties: See there.
        denominator: See there.
        empty: See there.
        self_index: See there.
        precision_at: See there.
        graded: See there.
        ranking: What the distances are, for the table.
        primary_metric: Name of the headline number.

    Returns:
        The numbers; those that need Hamming distances are empty or None.

    >>> result = metrics([[[0.1, 0.4, 0.4]]], [[1]], [[0], [1], [0]])
    >>> round(result.map, 4), round(result.map_stable, 4)
    (0.4167, 0.5)
    """
    labels = inputs.check_labels(query_labels, database_labels)
    inputs.check_sizes(len(labels.query), len(labels.database))
    request = make_request(labels, top, ties, denominator, empty, self_index, precision_at, graded)
    tally = Tally(request, levels=None, radii=[])
    for block in _ranked_blocks(distance_blocks, request):
        tally.add(block)
    return tally.evaluation(
        ranking=ranking, bits=None, backend="numpy", primary_metric=primary_metric
    )


def evaluate_reranked(
    query_logits: ArrayLike,
    database_logits: ArrayLike,
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
) -> Evaluation:
    """Rank by Hamming distance, and inside ties by the inner product of the logits.

    Some papers report this as mAP. It needs the real outputs of the whole database at search time,
    so it is no property of the codes, and it has its own name here: ``map_reranked``.

    Args:
        query_logits: (n_queries, bits).
        database_logits: (n_database, bits).
        query_labels: As in :func:`evaluate`, like all that follows.
        database_labels: See there.
        top: See there.
        ties: See there; what is still equal after re-ranking is a tie.
        denominator: See there.
        empty: See there.
        self_index: See there.
        precision_at: See there.
        graded: See there.

    >>> result = evaluate_reranked([[1.0, 1.0]], [[0.2, 0.1], [2.0, 3.0]], [[1]], [[0], [1]])
    >>> result.primary_metric, result.map
    ('map_reranked', 1.0)
    """
    query, database = (np.asarray(x, dtype=np.float64) for x in (query_logits, database_logits))
    query_codes, database_codes = pack(query), pack(database)
    if query.shape[1] != database.shape[1]:
        raise UsageError(
            f"query logits have {query.shape[1]} bits and database logits {database.shape[1]}"
        )
    inputs.check_sizes(len(query), len(database))
    labels = inputs.check_labels(query_labels, database_labels)
    inputs.check_lengths(labels, len(query), len(database))

    def blocks() -> Iterator[NDArray[np.int64]]:
        step = max(1, _SORT_PAIRS // len(database))
        for start in range(0, len(query), step):
            part = slice(start, start + step)
            near = hamming(query_codes[part], database_codes)
            yield rerank(near, -(query[part] @ database.T))

    return metrics(
        blocks(),
        query_labels,
        database_labels,
        top=top,
        ties=ties,
        denominator=denominator,
        empty=empty,
        self_index=self_index,
        precision_at=precision_at,
        graded=graded,
        ranking="Hamming distance, then inner product of the logits",
        primary_metric="map_reranked",
    )


def rerank(first: ArrayLike, second: ArrayLike) -> NDArray[np.int64]:
    """Distances that order by ``first`` and inside its ties by ``second``, (b, n_database).

    Pairs equal in both stay tied.

    >>> rerank([[1, 0, 1, 1]], [[0.2, 0.9, 0.1, 0.2]]).tolist()
    [[2, 0, 1, 2]]
    """
    one, two = np.asarray(first), np.asarray(second)
    if one.shape != two.shape or one.ndim != 2:
        raise UsageError(f"both distances must have one shape (b, n), got {one.shape}, {two.shape}")
    inputs.check_finite(one, 0)
    inputs.check_finite(two, 0)
    result = np.empty(one.shape, dtype=np.int64)
    for row, (a, b) in enumerate(zip(one, two, strict=True)):
        order = np.lexsort((b, a))
        steps = (np.diff(a[order]) != 0) | (np.diff(b[order]) != 0)
        result[row, order] = np.concatenate([[0], np.cumsum(steps)])
    return result


def _ranked_blocks(blocks: Iterable[Any], request: Request) -> Iterator[GroupBlock]:
    labels = request.labels
    queries, n = len(labels.query), len(labels.database)
    done = 0
    for block in blocks:
        if hasattr(block, "detach"):
            block = block.detach().cpu().numpy()
        distances = np.asarray(block)
        if distances.ndim != 2 or distances.shape[1] != n:
            raise UsageError(
                f"a block of distances must have shape (b, {n}), one column a database item, "
                f"got {distances.shape}"
            )
        if distances.dtype.kind not in "iufb":
            raise UsageError(f"distances must be numbers, got {distances.dtype}")
        if done + len(distances) > queries:
            raise UsageError(f"the blocks hold more rows than the {queries} queries with labels")
        inputs.check_finite(distances, done)
        step = max(1, _SORT_PAIRS // n)
        for start in range(0, len(distances), step):
            part = distances[start : start + step]
            rows = np.arange(done, done + len(part))
            yield rank_block(
                part,
                shared_labels(labels.query[rows], labels.database, request.most),
                request.self_rows[rows],
                rows,
                request.top,
                request.most,
            )
            done += len(part)
    if done != queries:
        raise UsageError(f"the blocks hold {done} rows of distances for {queries} queries")
