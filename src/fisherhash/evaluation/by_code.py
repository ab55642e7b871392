"""Average precision of distances between real-valued queries and codes, by distinct code.

Images with equal codes are at equal distances, so it is enough to rank the distinct codes, of which
a trained hasher has far fewer than images; and of a cut ranking only the codes above the cut. The
values are those of :func:`~fisherhash.evaluation.metrics`, which ranks every image.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.evaluation import inputs
from fisherhash.evaluation import ties as closed_forms
from fisherhash.evaluation.groups import Counts, Floats, TieGroups

_PAIRS_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class CodePrecision:
    """Average precision per query; NaN for queries without a relevant item.

    Attributes:
        expected: (n_queries,) averaged over all orders inside ties.
        lower: (n_queries,) the least value that any order inside ties can reach.
        upper: (n_queries,) the greatest such value.
        top: ranks that count; the database size means all.
    """

    expected: Floats
    lower: Floats
    upper: Floats
    top: int

    @property
    def means(self) -> dict[str, float]:
        """Means over the queries that have a relevant item, by the names of an evaluation."""
        names = {"map": self.expected, "map_lower": self.lower, "map_upper": self.upper}
        return {name: float(np.nanmean(values)) for name, values in names.items()}


def precision_by_code(
    distance_blocks: Iterable[Tensor],
    code_of: NDArray[np.int64],
    query_labels: ArrayLike,
    database_labels: ArrayLike,
    *,
    top: int | None = None,
    device: torch.device | str = "cpu",
) -> CodePrecision:
    """Score rankings by distances to the distinct codes of a database.

    Args:
        distance_blocks: blocks (b, codes) of real distances, queries in order.
        code_of: (n_database,) which of the codes each database item has.
        query_labels: (n_queries, classes) of 0 and 1.
        database_labels: (n_database, classes) of 0 and 1.
        top: ranks that count in average precision, K of mAP@K; None counts all.
        device: where to sort.

    Raises:
        UsageError: the arguments do not fit together.
        FisherhashError: no query has a relevant item.
    """
    labels = inputs.check_labels(query_labels, database_labels)
    queries, n = len(labels.query), len(labels.database)
    inputs.check_sizes(queries, n)
    most = inputs.check_top(top, n)
    where = torch.from_numpy(np.asarray(code_of, dtype=np.int64)).to(device)
    if len(where) != n:
        raise UsageError(
            f"there are {len(where)} numbers of codes for {n} database items with labels"
        )
    counts = torch.bincount(where)
    ours = torch.from_numpy(labels.query).to(device).float()
    theirs = torch.from_numpy(labels.database).to(device).float()
    found, done = [], 0
    for block in distance_blocks:
        _check_block(block, len(counts))
        for part in block.split(max(1, _PAIRS_AT_ONCE // n)):
            shared = (ours[done : done + len(part)] @ theirs.T > 0).float()
            done += len(part)
            relevant = torch.zeros(len(shared), len(counts), device=device)
            relevant.index_add_(1, where, shared)
            found.append(_scores(part[: len(shared)].to(device), counts, relevant.long(), most))
    if done != queries:
        raise UsageError(f"the blocks hold {done} rows of distances for {queries} queries")
    expected, lower, upper = (np.concatenate(values) for values in zip(*found, strict=True))
    if np.isnan(expected).all():
        raise FisherhashError("no query has a relevant item in the database")
    return CodePrecision(expected, lower, upper, most)


def _check_block(block: Tensor, codes: int) -> None:
    if block.ndim != 2 or block.shape[1] != codes:
        raise UsageError(
            f"a block of distances must have shape (b, {codes}), one column per distinct code, got "
            f"{(*block.shape,)}"
        )
    if not bool(torch.isfinite(block).all()):
        raise FisherhashError("distances hold NaN or infinite values")


def _scores(
    distances: Tensor, counts: Tensor, relevant: Tensor, top: int
) -> tuple[Floats, Floats, Floats]:
    """Expected value and bounds of a block: distances (b, codes), relevant items (b, codes)."""
    total = relevant.sum(1)
    ranked, order = distances.sort(dim=1)
    items, hits = counts.expand_as(relevant).gather(1, order), relevant.gather(1, order)
    # Different codes at one distance are one tie group.
    items, hits = _joined(items, hits, ranked[:, 1:] == ranked[:, :-1])
    # Groups that begin below the cut do not matter; together they are the last group.
    before = items.cumsum(1) - items
    kept = int((before < top).sum(1).max())
    items, hits = (
        torch.cat([values[:, :kept], values[:, kept:].sum(1, keepdim=True)], dim=1)
        for values in (items, hits)
    )
    # Neighbours without relevant items count like one group; most groups are of that kind.
    items, hits = _joined(items, hits, (hits[:, 1:] == 0) & (hits[:, :-1] == 0))
    groups = TieGroups.from_counts(_numpy(items), _numpy(hits)[:, :, None])
    most = np.full(len(distances), top, dtype=np.int64)
    expected = closed_forms.expected_average_precision(groups, most, "found")
    lower, upper = closed_forms.average_precision_bounds(groups, most, "found")
    empty = _numpy(total) == 0
    one, two, three = (np.where(empty, np.nan, values) for values in (expected, lower, upper))
    return one, two, three


def _joined(items: Tensor, hits: Tensor, same: Tensor) -> tuple[Tensor, Tensor]:
    """Join each group (b, groups) with the one before it where ``same`` (b, groups - 1) says so."""
    if not bool(same.any()):
        return items, hits
    group = torch.zeros_like(items)
    torch.cumsum(~same, dim=1, out=group[:, 1:])
    shape = len(items), int(group[:, -1].max()) + 1
    found = (values.new_zeros(shape).scatter_add_(1, group, values) for values in (items, hits))
    return next(found), next(found)


def _numpy(values: Tensor) -> Counts:
    return values.cpu().numpy().astype(np.int64)
