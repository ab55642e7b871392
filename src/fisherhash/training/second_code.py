"""What a trained hasher gets for an index: a second code, and the ranking that suits it.

Codes that were learned from labels put many images of a class on one code. The second code knows no
labels: it is fitted to the same features, so that it comes from the same pass over an image, and it
orders what the first one leaves tied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fisherhash import methods
from fisherhash.data.sources import Collection
from fisherhash.data.splits import Split, hash_order
from fisherhash.model.head_base import Head
from fisherhash.model.torch_hasher import TorchHasher
from fisherhash.training.measuring import WAYS, EncodedSplit, held_out_top, measure

FINE_BITS = 128
"""Length of the second code by default."""
FEWEST_BITS = 8
"""Of features or images too few for more bits than these, no second code is made."""
MOST_IMAGES = 20_000
"""Training images that the second code is fitted to."""
COMPARED = 1000
"""Images with which the rankings are compared."""
FEWEST_HELD_OUT = 100
"""With fewer images of the database that were not trained on, nothing is compared."""
LEAST_GAIN = 0.001
"""The gain in mAP from which on real-valued queries are worth being the default."""


def fit_second_code(features: NDArray[np.float32], bits: int, *, seed: int) -> Head | None:
    """A head for a second code, fitted to features (n, d) without labels; None for too few.

    Args:
        features: of the training images.
        bits: length of the code; less where the features or the images allow no more.
        seed: of what is drawn at random.
    """
    bits = min(bits, features.shape[1], len(features) - 1)
    if bits < FEWEST_BITS:
        return None
    learner = methods.create("itq", bits=bits, classes=0, options={})
    if not isinstance(learner, methods.FeatureMethod):
        raise TypeError("itq is fitted to features")
    return learner.fit(torch.from_numpy(features), seed=seed)


def add_second_code(
    hasher: TorchHasher,
    collection: Collection,
    indices: NDArray[np.int64],
    bits: int,
    *,
    cached: bool,
    seed: int,
) -> None:
    """Give a hasher a second code, fitted to its features of some images.

    Args:
        hasher: gets the code.
        collection: the images.
        indices: (n,) the training images.
        bits: length of the code.
        cached: whether the features are stored on disk.
        seed: of what is drawn at random.
    """
    chosen = np.sort(hash_order(collection.names, indices.tolist(), seed)[:MOST_IMAGES])
    rows = [part.values for part in hasher.row_blocks(collection, chosen, 256, cached)]
    hasher.fine = fit_second_code(np.concatenate(rows), bits, seed=seed) if rows else None
    hasher.to(hasher.device)


def compare_rankings(
    hasher: TorchHasher, collection: Collection, split: Split, *, cached: bool, seed: int
) -> dict[str, Any]:
    """mAP by Hamming distance and with real-valued queries, and the ranking that is better.

    Images of the database that were not trained on are each queried against the others. Where a
    split has too few of them, nothing is compared: training images cannot tell the rankings apart,
    and the split's queries must not choose what they measure.

    Args:
        hasher: its codes have a Hamming distance.
        collection: the images.
        split: what was trained on.
        cached: whether the features are stored on disk.
        seed: of the choice of images.
    """
    fresh = np.setdiff1d(split.database, np.concatenate([split.train, split.query]))
    if len(fresh) < FEWEST_HELD_OUT:
        return {}
    chosen = np.sort(hash_order(collection.names, fresh.tolist(), seed)[:COMPARED])
    found = hasher.encode_collection(collection, chosen, cached=cached, queries=True)
    labels = collection.labels[found.indices]
    encoded = EncodedSplit(found.codes, found.codes, labels, labels, hasher.head, [], found.queries)
    itself = np.arange(len(labels))
    share = held_out_top(split)
    top = None if share is None else max(10, round(share * max(1, len(labels) - 1)))
    scores = {
        way: float(measure(encoded, top=top, self_index=itself, real_queries=way == "real").map)
        for way in WAYS
    }
    better = "real" if scores["real"] > scores["hamming"] + LEAST_GAIN else "hamming"
    return {
        "default": better,
        **{f"mAP, {way}": round(score, 4) for way, score in scores.items()},
        "queries": len(labels),
        "images": len(labels),
    }
