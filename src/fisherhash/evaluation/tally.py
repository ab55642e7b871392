"""From blocks of tie groups to an :class:`Evaluation`: a checked request and its running sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.errors import FisherhashError
from fisherhash.evaluation import inputs
from fisherhash.evaluation import ties as closed_forms
from fisherhash.evaluation.groups import Denominator, TieGroups
from fisherhash.evaluation.hamming import GroupBlock
from fisherhash.evaluation.inputs import Labels
from fisherhash.evaluation.results import BitStatistics, Curve, DistanceHistogram, Evaluation

Ties = Literal["expected", "stable"]
Empty = Literal["skip", "zero"]

RANKS = (1, 5, 10, 50, 100, 500, 1000, 5000)
RADII = (0, 1, 2, 3)
CURVE_POINTS = 40


@dataclass(frozen=True)
class Request:
    """A checked request; see :func:`evaluate` for the words."""

    labels: Labels
    top: int
    ties: Ties
    denominator: Denominator
    empty: Empty
    self_rows: NDArray[np.int64]
    ranks: list[int]
    most: int
    graded: bool


def make_request(
    labels: Labels,
    top: int | None,
    ties: Ties,
    denominator: Denominator,
    empty: Empty,
    self_index: ArrayLike | None,
    precision_at: Sequence[int] | None,
    graded: bool | None,
) -> Request:
    """Check the arguments that :func:`evaluate` and :func:`metrics` share."""
    inputs.check_choice("ties", ties, inputs.TIES)
    inputs.check_choice("denominator", denominator, inputs.DENOMINATORS)
    inputs.check_choice("empty", empty, inputs.EMPTY)
    database = len(labels.database)
    most = labels.most_shared
    graded = most > 1 if graded is None else graded
    return Request(
        labels=labels,
        top=inputs.check_top(top, database),
        ties=ties,
        denominator=denominator,
        empty=empty,
        self_rows=inputs.check_self(self_index, len(labels.query), database),
        ranks=inputs.check_ranks(precision_at, RANKS, database),
        most=most if graded else 1,
        graded=graded,
    )


class Tally:
    """Adds up blocks of tie groups; the sums are over queries that have a relevant item."""

    def __init__(self, request: Request, levels: int | None, radii: list[int]) -> None:
        queries, n = len(request.labels.query), len(request.labels.database)
        self.request = request
        self.radii = radii
        self.expected, self.stable, self.lower, self.upper = np.full((4, queries), np.nan)
        self.weighted = np.zeros(queries)
        # Dense at the first ranks, which people look at, and along the recall, where curves bend.
        points = [f(1, request.top, CURVE_POINTS) for f in (np.geomspace, np.linspace)]
        self.curve_ranks = np.unique(np.concatenate(points).round().astype(np.int64))
        self.ranks = np.array(request.ranks, dtype=np.int64)
        self.found = np.zeros((2, len(self.ranks)))
        self.curve = np.zeros((2, len(self.curve_ranks)))
        self.acg, self.ndcg = np.zeros((2, len(self.ranks)))
        self.within = np.zeros((4, levels or 0))
        self.pairs = np.zeros((2, levels or 0), dtype=np.int64)
        self.n = n

    def add(self, block: GroupBlock) -> None:
        """Add the queries of one block."""
        request = self.request
        if self.pairs.size:
            similar = block.grades.sum(axis=(0, 2))
            self.pairs += np.stack([similar, block.items.sum(axis=0) - similar])
        kept = block.grades.any(axis=(1, 2))
        if not kept.any():
            return
        rows = block.rows[kept]
        groups = TieGroups.from_counts(block.items[kept], block.grades[kept])
        top = np.minimum(request.top, groups.items.sum(axis=1))
        relevant = groups.relevant.sum(axis=1)
        rule = request.denominator
        self.expected[rows] = closed_forms.expected_average_precision(groups, top, rule)
        self.lower[rows], self.upper[rows] = closed_forms.average_precision_bounds(
            groups, top, rule
        )
        divisor = block.stable_found[kept] if rule == "found" else np.minimum(top, relevant)
        self.stable[rows] = block.stable[kept] / np.maximum(divisor, 1)
        self._add_ranks(groups, relevant)
        if request.graded:
            self._add_graded(groups, top, rows)
        if self.within.size:
            self._add_within(groups)

    def _add_ranks(self, groups: TieGroups, relevant: NDArray[np.int64]) -> None:
        at = np.concatenate([self.ranks, self.curve_ranks])
        found = closed_forms.expected_found(groups, at, self.n)
        precision = (found / at).sum(axis=0)
        recall = (found / relevant[:, None]).sum(axis=0)
        both = np.stack([precision, recall])
        self.found += both[:, : len(self.ranks)]
        self.curve += both[:, len(self.ranks) :]

    def _add_graded(
        self, groups: TieGroups, top: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> None:
        weight = closed_forms.expected_weight(groups, self.ranks, self.n)
        self.acg += (weight / self.ranks).sum(axis=0)
        self.ndcg += [closed_forms.expected_ndcg(groups, int(r)).sum() for r in self.ranks]
        self.weighted[rows] = closed_forms.expected_average_precision(
            groups, top, self.request.denominator, weighted=True
        )

    def _add_within(self, groups: TieGroups) -> None:
        within = closed_forms.within_groups(groups)
        nothing = (within.items == 0).sum(axis=0)
        sums = (within.precision, within.recall, within.average_precision)
        self.within += np.stack([*(s.sum(axis=0) for s in sums), nothing])

    def evaluation(
        self,
        *,
        ranking: str,
        bits: int | None,
        backend: str,
        statistics: BitStatistics | None = None,
        primary_metric: str = "map",
    ) -> Evaluation:
        """The means over all queries added so far."""
        request = self.request
        queries = len(self.expected)
        full = ~np.isnan(self.expected)
        counted = int(full.sum())
        if not counted:
            raise FisherhashError(
                f"none of the {queries} queries has a relevant item in the database; "
                "check that both sides use the same class columns"
            )
        share = 1.0 / (counted if request.empty == "skip" else queries)

        def mean(values: NDArray[np.float64]) -> float:
            return float(values[full].sum() * share)

        def by(at: Sequence[int], sums: NDArray[np.float64]) -> dict[int, float]:
            return dict(zip(at, (sums * share).tolist(), strict=True))

        expected, stable = mean(self.expected), mean(self.stable)
        is_expected = request.ties == "expected"
        radii = self.radii
        distances = list(range(self.within.shape[1]))
        by_radius = (self.within * share).tolist()
        return Evaluation(
            map=expected if is_expected else stable,
            map_expected=expected,
            map_stable=stable,
            map_lower=mean(self.lower),
            map_upper=mean(self.upper),
            top=request.top,
            ties=request.ties,
            denominator=request.denominator,
            empty=request.empty,
            queries=queries,
            database=self.n,
            empty_queries=queries - counted,
            bits=bits,
            ranking=ranking,
            precision_at=by(request.ranks, self.found[0]),
            recall_at=by(request.ranks, self.found[1]),
            pr_by_rank=Curve(self.curve_ranks.tolist(), *(self.curve * share).tolist()),
            pr_by_radius=Curve(distances, by_radius[0], by_radius[1]) if distances else None,
            map_within=by(radii, self.within[2][radii]),
            precision_within=by(radii, self.within[0][radii]),
            empty_within={r: float(self.within[3][r] / counted) for r in radii},
            distances=DistanceHistogram(distances, *self.pairs.tolist()) if distances else None,
            bit_statistics=statistics,
            weighted_map=mean(self.weighted) if request.graded else None,
            acg_at=by(request.ranks, self.acg) if request.graded else None,
            ndcg_at=by(request.ranks, self.ndcg) if request.graded else None,
            backend=backend,
            primary_metric=primary_metric,
            average_precision=(self.expected if is_expected else self.stable).copy(),
        )
