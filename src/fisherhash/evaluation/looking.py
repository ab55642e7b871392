"""How well codes serve somebody who looks at the results, which mAP does not say.

A code that is the same for all images of a class has a perfect mAP, and orders the images of the
class at random. Agreement measures that order: inside each query's class, how many of the nearest
images by the float features are also nearest by the codes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.codes import check_codes, hamming
from fisherhash.errors import UsageError
from fisherhash.evaluation.inputs import check_labels

QUERIES_AT_ONCE = 256


@dataclass(frozen=True)
class NeighbourAgreement:
    """Agreement of codes with float features, inside the classes.

    Attributes:
        k: neighbours per query.
        value: the share of a query's k nearest of its class by features that are among its k
            nearest of its class by codes, in expectation over ties, as a mean over the queries;
            None without queries.
        chance: what codes that are equal for all images of a class would reach.
        queries: queries that were measured; one needs more than k images of its class.
    """

    k: int
    value: float | None
    chance: float | None
    queries: int

    def __str__(self) -> str:
        if self.value is None or self.chance is None:
            return f"agreement inside a class: no query has more than {self.k} images of its class"
        return (
            f"agreement with the float features inside a class: {self.value:.3f} of the "
            f"{self.k} nearest (chance {self.chance:.3f}, {self.queries:,} queries)"
        )

    def summary(self) -> dict[str, str]:
        """Its line for a model card; nothing where nothing could be measured."""
        if self.value is None or self.chance is None:
            return {}
        name = f"agreement with its features inside a class, {self.k} nearest"
        return {name: f"{self.value:.3f} (chance {self.chance:.3f})"}

    def to_json(self) -> dict[str, Any]:
        """Its numbers as JSON can hold them."""
        return asdict(self)


def neighbour_agreement(
    query_codes: ArrayLike,
    database_codes: ArrayLike,
    query_features: NDArray[np.floating[Any]],
    database_features: NDArray[np.floating[Any]],
    query_labels: ArrayLike,
    database_labels: ArrayLike,
    *,
    bits: int,
    k: int = 10,
    self_index: NDArray[np.int64] | None = None,
) -> NeighbourAgreement:
    """Compare the neighbours by codes with those by features, among images that share a label.

    Args:
        query_codes: (q, bytes).
        database_codes: (n, bytes).
        query_features: (q, d); compared by cosine.
        database_features: (n, d).
        query_labels: (q, classes) of 0 and 1.
        database_labels: (n, classes) of 0 and 1.
        bits: length of the codes.
        k: neighbours per query.
        self_index: (q,) the row of the database that is the query itself, or -1.

    >>> codes = np.array([[0], [1], [3], [255]], dtype=np.uint8)
    >>> features = np.array([[1.0, 0.0], [1.0, 0.1], [1.0, 0.3], [0.0, 1.0]])
    >>> labels = np.ones((4, 1))
    >>> found = neighbour_agreement(
    ...     codes[:1], codes, features[:1], features, labels[:1], labels, bits=8, k=1,
    ...     self_index=np.array([0]))
    >>> found.value, round(found.chance, 3)
    (1.0, 0.333)
    """
    near, far = check_codes(query_codes, bits), check_codes(database_codes, bits)
    labels = check_labels(query_labels, database_labels)
    own = np.full(len(near), -1) if self_index is None else np.asarray(self_index)
    if len(query_features) != len(near) or len(database_features) != len(far):
        raise UsageError(
            f"features of {len(query_features)} queries and {len(database_features)} images, codes "
            f"of {len(near)} and {len(far)}"
        )
    queries, database = _unit(query_features), _unit(database_features)
    values, chances = [], []
    for start in range(0, len(near), QUERIES_AT_ONCE):
        part = slice(start, start + QUERIES_AT_ONCE)
        distances = hamming(near[part], far)
        similar = queries[part] @ database.T
        shared = labels.query[part].astype(np.float32) @ labels.database.T.astype(np.float32) > 0
        for row, (distance, cosine, same) in enumerate(
            zip(distances, similar, shared, strict=True)
        ):
            if own[start + row] >= 0:
                same[own[start + row]] = False
            members = np.flatnonzero(same)
            if len(members) > k:
                values.append(_overlap(distance[members], cosine[members], k))
                chances.append(k / len(members))
    if not values:
        return NeighbourAgreement(k, None, None, 0)
    return NeighbourAgreement(k, float(np.mean(values)), float(np.mean(chances)), len(values))


def _overlap(distances: NDArray[np.uint16], cosines: NDArray[Any], k: int) -> float:
    """The expected share of the k most similar that are among the k nearest."""
    nearest = np.argpartition(-cosines, k - 1)[:k]
    last = np.partition(distances, k - 1)[k - 1]
    below, tied = np.count_nonzero(distances < last), np.count_nonzero(distances == last)
    chosen = distances[nearest]
    # Of the tied ones, as many are among the k as the nearer ones leave room for.
    return float((chosen < last).sum() + (chosen == last).sum() * (k - below) / tied) / k


def _unit(features: NDArray[Any]) -> NDArray[np.float32]:
    rows = np.asarray(features, dtype=np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
