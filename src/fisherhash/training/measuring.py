"""From a hasher and a split to numbers: encode the queries and the database, then evaluate."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fisherhash.data.loading import Skipped
from fisherhash.data.protocols import Split
from fisherhash.data.sources import Collection
from fisherhash.errors import UsageError
from fisherhash.evaluation import Evaluation, evaluate, metrics
from fisherhash.model.hasher import Hasher
from fisherhash.model.heads import Head
from fisherhash.training.pixels import PixelBank


@dataclass(frozen=True)
class EncodedSplit:
    """Codes and labels of a split's queries and database.

    Where queries are real-valued, also what ranks the codes: the queries (n, …) and the head.
    """

    query_codes: NDArray[np.uint8]
    database_codes: NDArray[np.uint8]
    query_labels: NDArray[np.uint8]
    database_labels: NDArray[np.uint8]
    bits: int
    skipped: list[Skipped]
    real_queries: NDArray[np.float32] | None = None
    head: Head | None = None


def encode_split(
    hasher: Hasher,
    collection: Collection,
    split: Split,
    *,
    cached: bool = True,
    bank: PixelBank | None = None,
    real_queries: bool = False,
) -> EncodedSplit:
    """Encode a split's queries and database; unreadable images are left out of both.

    Args:
        hasher: what encodes.
        collection: the images.
        split: which of them.
        cached: keep the features on disk.
        bank: the images' pixels, where they are at hand; nothing is cached then.
        real_queries: keep what ranks real-valued queries too; codes that have no Hamming distance
            always do.
    """
    both = np.unique(np.concatenate([split.query, split.database]))
    if bank is None:
        encode = functools.partial(hasher.encode_collection, collection, cached=cached)
    else:
        encode = functools.partial(bank.encode, hasher)
    encoded = encode(both)
    row = np.full(len(collection), -1, dtype=np.int64)
    row[encoded.indices] = np.arange(len(encoded.indices))
    query, database = (part[row[part] >= 0] for part in (split.query, split.database))
    real, ranker = None, None
    if real_queries or not hasher.head.hamming:
        ranker = hasher.head
        real = encode(query, queries=True).queries
    return EncodedSplit(
        encoded.codes[row[query]],
        encoded.codes[row[database]],
        collection.labels[query],
        collection.labels[database],
        hasher.bits,
        encoded.skipped,
        real,
        ranker,
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
        top: the protocol's, cut to the size of the database.
        self_index: (n_queries,) the row of the database that is the query itself, or -1.
        real_queries: rank by the distances of real-valued queries to codes, which the split must
            have been encoded for; codes that have no Hamming distance always are.
    """
    top = None if top is None else min(top, len(encoded.database_codes))
    head, queries = encoded.head, encoded.real_queries
    if head is not None and queries is not None and (real_queries or not head.hamming):
        return metrics(
            head.distances(torch.from_numpy(queries), encoded.database_codes),
            encoded.query_labels,
            encoded.database_labels,
            top=top,
            self_index=self_index,
            ranking=f"distance of the {head.kind} head",
        )
    if real_queries:
        raise UsageError("the split was encoded without real-valued queries")
    return evaluate(
        encoded.query_codes,
        encoded.database_codes,
        encoded.query_labels,
        encoded.database_labels,
        bits=encoded.bits,
        top=top,
        self_index=self_index,
    )
