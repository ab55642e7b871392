"""How well the codes of a model order the images of a class, on its own split."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import pack
from fisherhash.data.collection import Collection
from fisherhash.data.splits import Split
from fisherhash.evaluation.looking import NeighbourAgreement, neighbour_agreement
from fisherhash.model.hasher import Hasher
from fisherhash.model.networks import feature_rows

MOST_LOOKS = 500
"""Queries whose neighbours are compared, evenly spaced."""
MOST_SEARCHED = 10_000
"""Database images among which they are compared, evenly spaced."""


def measure_agreement(
    hasher: Hasher, collection: Collection, split: Split, *, cached: bool = True
) -> NeighbourAgreement | None:
    """Agreement of a model's codes with its own features, inside the classes of a split.

    Args:
        hasher: the model.
        collection: the images.
        split: their queries and database.
        cached: store the features on disk.

    Returns:
        None for codes without a Hamming distance, and for a model without images.
    """
    if not hasher.head.hamming or hasher.vectors_only:
        return None
    query, database = _some(split.query, MOST_LOOKS), _some(split.database, MOST_SEARCHED)
    wanted = np.unique(np.concatenate([query, database]))
    features, codes, indices = _encoded(hasher, collection, wanted, cached=cached)
    row = np.full(len(collection), -1)
    row[indices] = np.arange(len(indices))
    # Without images that cannot be read.
    near, far = (part[row[part] >= 0] for part in (query, database))
    place = np.full(len(collection), -1)
    place[far] = np.arange(len(far))
    return neighbour_agreement(
        codes[row[near]],
        codes[row[far]],
        features[row[near]],
        features[row[far]],
        collection.labels[near],
        collection.labels[far],
        bits=hasher.bits,
        self_index=place[near],
    )


def _some(indices: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    return indices[:: max(1, -(-len(indices) // most))]


def _encoded(
    hasher: Hasher, collection: Collection, wanted: NDArray[np.int64], *, cached: bool
) -> tuple[NDArray[np.float32], NDArray[np.uint8], NDArray[np.int64]]:
    """Features, codes and numbers of images; those that cannot be read are left out."""
    network = hasher.features_network
    if network is hasher.network:
        blocks = list(hasher.row_blocks(collection, wanted, cached=cached))
        values = np.concatenate([block.values for block in blocks])
        codes = np.concatenate([pack(hasher.head.logits(block.values)) for block in blocks])
        return values, codes, np.concatenate([block.indices for block in blocks])
    encoded = hasher.encode_collection(collection, wanted, cached=cached)
    # An exported model computes logits; its file computes the features too.
    rows = feature_rows(network, collection, encoded.indices)
    return rows.values, encoded.codes, encoded.indices
