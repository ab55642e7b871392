"""From a hasher and a split to numbers: encode the queries and the database, then evaluate.

Imports no torch: an exported model is measured without it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.collection import Collection
from fisherhash.data.loading import Skipped
from fisherhash.data.splits import Split
from fisherhash.errors import UsageError
from fisherhash.evaluation import Evaluation, evaluate, metrics
from fisherhash.model.hasher import ExportedHead, Hasher

if TYPE_CHECKING:
    from fisherhash.data.pixels import PixelBank
    from fisherhash.model.heads import Head

SPLIT_FILE = "split.json"
"""The split of a trained model, in its folder."""


@dataclass(frozen=True)
class EncodedSplit:
    """Codes and labels of the queries and the database of a split.

    Attributes:
        query_codes: (q, bytes) codes of the queries.
        database_codes: (n, bytes) codes of the database.
        query_labels: (q, classes) labels of the queries.
        database_labels: (n, classes) labels of the database.
        head: the head that computed the codes.
        skipped: the images that could not be read.
        real_queries: (q, …) what the head ranks real-valued queries with, if they were encoded.
    """

    query_codes: NDArray[np.uint8]
    database_codes: NDArray[np.uint8]
    query_labels: NDArray[np.uint8]
    database_labels: NDArray[np.uint8]
    head: Head | ExportedHead
    skipped: list[Skipped]
    real_queries: NDArray[np.float32] | None = None


def encode_split(
    hasher: Hasher,
    collection: Collection,
    split: Split,
    *,
    cached: bool = True,
    bank: PixelBank | None = None,
    real_queries: bool = False,
) -> EncodedSplit:
    """Encode the queries and the database of a split; images that cannot be read are left out.

    Args:
        hasher: computes the codes.
        collection: the images.
        split: which of them.
        cached: store the features on disk.
        bank: the pixels of the images, if they are in memory; nothing is stored then.
        real_queries: also encode real-valued queries; codes without a Hamming distance always do.
    """
    if bank is None:
        encode = functools.partial(hasher.encode_collection, collection, cached=cached)
    else:
        from fisherhash.data.pixels import GRID_BATCH

        encode = functools.partial(hasher.encode_collection, bank, block=GRID_BATCH)
    encoded = encode(np.unique(np.concatenate([split.query, split.database])))
    row = np.full(len(collection), -1, dtype=np.int64)
    row[encoded.indices] = np.arange(len(encoded.indices))
    query, database = (part[row[part] >= 0] for part in (split.query, split.database))
    real = real_queries or not hasher.head.hamming
    return EncodedSplit(
        encoded.codes[row[query]],
        encoded.codes[row[database]],
        collection.labels[query],
        collection.labels[database],
        hasher.head,
        encoded.skipped,
        encode(query, queries=True).queries if real else None,
    )


def measure(
    encoded: EncodedSplit,
    *,
    top: int | None,
    self_index: NDArray[np.int64] | None = None,
    real_queries: bool = False,
) -> Evaluation:
    """Evaluate an encoded split.

    Args:
        encoded: codes and labels.
        top: the K of the protocol's metric, cut to the size of the database; None for all.
        self_index: (q,) the row of the database that is the query itself, or -1.
        real_queries: rank by distances of real-valued queries, which must have been encoded; codes
            without a Hamming distance are always ranked so.
    """
    top = None if top is None else min(top, len(encoded.database_codes))
    head, labels = encoded.head, (encoded.query_labels, encoded.database_labels)
    if real_queries or not head.hamming:
        if encoded.real_queries is None:
            raise UsageError("the split was encoded without real-valued queries")
        import torch

        blocks = head.distances(torch.from_numpy(encoded.real_queries), encoded.database_codes)
        ranking = f"distance of the {head.kind} head"
        return metrics(blocks, *labels, top=top, self_index=self_index, ranking=ranking)
    codes = encoded.query_codes, encoded.database_codes
    return evaluate(*codes, *labels, bits=head.bits, top=top, self_index=self_index)
