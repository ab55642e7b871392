"""The result of an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.codes import check_codes, unpack
from fisherhash.errors import UsageError
from fisherhash.evaluation.groups import over
from fisherhash.evaluation.inputs import padded_words


@dataclass(frozen=True)
class Curve:
    """Mean precision and recall over the queries at increasing ranks or radii.

    Attributes:
        at: Ranks, or Hamming radii.
        precision: Mean precision at each.
        recall: Mean recall at each.
    """

    at: list[int]
    precision: list[float]
    recall: list[float]


@dataclass(frozen=True)
class DistanceHistogram:
    """Numbers of similar and dissimilar pairs at each Hamming distance.

    Attributes:
        distance: 0 to bits.
        similar: Pairs that share a label.
        dissimilar: Pairs that share none.
    """

    distance: list[int]
    similar: list[int]
    dissimilar: list[int]


@dataclass(frozen=True)
class BitStatistics:
    """How well the database codes use their bits.

    Attributes:
        balance: Share of ones per bit; 0.5 is best.
        entropy: Entropy per bit, in bits; 1 is best.
        mean_correlation: Mean absolute correlation between two different bits; 0 is best. A
            constant bit has correlation 0 with every other bit.
        max_correlation: The largest absolute correlation.
        constant_bits: Number of bits that are the same in every code.
        distinct_codes: Number of different codes in the database.
    """

    balance: list[float]
    entropy: list[float]
    mean_correlation: float
    max_correlation: float
    constant_bits: int
    distinct_codes: int


def describe_bits(codes: ArrayLike, bits: int) -> BitStatistics:
    """Return balance, entropy and correlation of the bits of codes (n, bytes).

    It also counts the distinct codes.

    >>> stats = describe_bits([[0b11000000], [0b00000000]], bits=3)
    >>> stats.balance, stats.constant_bits, stats.max_correlation, stats.distinct_codes
    ([0.5, 0.5, 0.0], 1, 1.0, 2)
    """
    array = check_codes(codes, bits)
    if not len(array):
        raise UsageError("there are no codes to describe")
    both = np.zeros((bits, bits))
    for start in range(0, len(array), 1 << 16):
        # counts up to 65,536 are exact in float32
        block = unpack(array[start : start + (1 << 16)], bits).astype(np.float32)
        both += block.T @ block
    share = np.diagonal(both) / len(array)
    spread = np.sqrt(share * (1 - share))
    covariance = both / len(array) - np.outer(share, share)
    correlation = np.abs(over(covariance, np.outer(spread, spread)))
    pairs = correlation[~np.eye(bits, dtype=bool)]
    words = padded_words(array)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [np.where(p > 0, -p * np.log2(p), 0.0) for p in (share, 1 - share)]
    return BitStatistics(
        balance=share.tolist(),
        entropy=(terms[0] + terms[1]).tolist(),
        mean_correlation=float(pairs.mean()) if len(pairs) else 0.0,
        max_correlation=float(pairs.max(initial=0.0)),
        constant_bits=int((spread == 0).sum()),
        distinct_codes=len(np.unique(words, axis=None if words.shape[1] == 1 else 0)),
    )


@dataclass(frozen=True)
class Evaluation:
    """The scores of the rankings. Prints as a table; :meth:`to_json` returns plain numbers.

    With ``empty="skip"`` means are over the queries that have a relevant item in the database.
    With ``empty="zero"`` they are over all queries, and the others have the value 0. Every value
    except ``map_stable`` and the bounds is the expectation over random order inside ties.

    Attributes:
        map: The headline: ``map_expected`` or ``map_stable``, as ``ties`` says.
        map_expected: Mean average precision, averaged over all orders inside ties.
        map_stable: Mean average precision with ties in database order.
        map_lower: The least value that any order inside ties can reach; None if not available.
        map_upper: The greatest such value; None if not available.
        top: Ranks that count (K of AP@K); the database size means all.
        ties: ``"expected"`` or ``"stable"``.
        denominator: Of AP@K: ``"found"`` or ``"min(K, relevant)"``.
        empty: How empty queries were treated: ``"skip"`` or ``"zero"``.
        queries: Queries, including the empty ones.
        database: Database items.
        empty_queries: Queries without a relevant item in the database.
        bits: Code length; None when the ranking did not come from codes.
        ranking: What the database was ranked by.
        precision_at: P@N by N.
        recall_at: R@N by N.
        pr_by_rank: Precision and recall at increasing ranks up to ``top``.
        pr_by_radius: Precision and recall by Hamming radius; precision is 0 where nothing lies
            within the radius.
        map_within: Mean average precision of the items within a Hamming radius, by radius.
        precision_within: Precision of those items, by radius.
        empty_within: Share of queries that find nothing within the radius, by radius.
        distances: Histograms of the distances of similar and dissimilar pairs.
        bit_statistics: Balance, entropy and correlation of the bits, and the distinct codes.
        weighted_map: Mean average cumulative gain (multi-label), up to ``top``.
        acg_at: Average cumulative gain (mean number of shared labels) by N.
        ndcg_at: Normalised discounted cumulative gain by N.
        backend: The backend that computed it.
        average_precision: (n_queries,) the headline's value per query, NaN for empty queries;
            not part of the JSON.
        extra: Values of further metrics by name; in the JSON they stand beside the others.
    """

    map: float
    map_expected: float
    map_stable: float
    map_lower: float | None
    map_upper: float | None
    top: int
    ties: str
    denominator: str
    empty: str
    queries: int
    database: int
    empty_queries: int
    bits: int | None
    ranking: str
    precision_at: dict[int, float]
    recall_at: dict[int, float]
    pr_by_rank: Curve
    pr_by_radius: Curve | None
    map_within: dict[int, float]
    precision_within: dict[int, float]
    empty_within: dict[int, float]
    distances: DistanceHistogram | None
    bit_statistics: BitStatistics | None
    weighted_map: float | None
    acg_at: dict[int, float] | None
    ndcg_at: dict[int, float] | None
    backend: str
    average_precision: NDArray[np.float64] = field(
        default_factory=lambda: np.empty(0), repr=False, compare=False
    )
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def distinct_codes(self) -> int | None:
        """Number of different codes in the database; None when the ranking did not use codes."""
        return self.bit_statistics.distinct_codes if self.bit_statistics else None

    def summary(self) -> dict[str, float | None]:
        """Return the headline, its bounds and its stable value, by readable names."""
        return {
            "mAP": self.map,
            "mAP lower bound": self.map_lower,
            "mAP upper bound": self.map_upper,
            "mAP, ties in database order": self.map_stable,
        }

    def to_json(self) -> dict[str, Any]:
        """Return all fields except ``average_precision`` as plain numbers, lists and dicts.

        Ranks and radii become text keys, as JSON requires. Entries of ``extra`` follow the fields.
        """
        values = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("average_precision", "extra")
        }
        values |= {"distinct_codes": self.distinct_codes, **self.extra}
        return {name: _plain(value) for name, value in values.items()}

    def __str__(self) -> str:
        cut = "ALL" if self.top == self.database else str(self.top)
        rows = [
            (f"mAP@{cut} ({self.ties})", _number(self.map)),
            ("  expected over tie order", _number(self.map_expected)),
            ("  ties in database order", _number(self.map_stable)),
            ("  lower bound", _number(self.map_lower)),
            ("  upper bound", _number(self.map_upper)),
        ]
        if self.weighted_map is not None:
            rows.append((f"weighted mAP@{cut}", _number(self.weighted_map)))
        for title, by in (
            ("P@", self.precision_at),
            ("R@", self.recall_at),
            ("ACG@", self.acg_at),
            ("NDCG@", self.ndcg_at),
            ("mAP within radius ", self.map_within),
            ("P within radius ", self.precision_within),
            *((f"{name} ", by) for name, by in self.extra.items() if isinstance(by, dict)),
        ):
            rows += [(f"{title}{at}", _number(value)) for at, value in (by or {}).items()]
        rows += [(name, _number(x)) for name, x in self.extra.items() if isinstance(x, float)]
        empties = "skipped" if self.empty == "skip" else "counted as 0"
        rows += [
            ("queries", f"{self.queries:,}"),
            ("  without a relevant item", f"{self.empty_queries:,} ({empties})"),
            ("database", f"{self.database:,}"),
            ("denominator of AP", self.denominator),
            ("ranked by", self.ranking),
        ]
        if self.bits is not None:
            rows.append(("bits", str(self.bits)))
        if self.bit_statistics is not None:
            stats = self.bit_statistics
            rows += [
                ("distinct codes", f"{stats.distinct_codes:,}"),
                ("mean entropy of a bit", _number(float(np.mean(stats.entropy)))),
                ("mean |correlation| of bits", _number(stats.mean_correlation)),
            ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _number(value: float | None) -> str:
    return "not available" if value is None else f"{value:.4f}"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value
