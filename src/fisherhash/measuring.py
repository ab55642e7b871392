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
from fisherhash.evaluation import Evaluation, evaluate, metrics
from fisherhash.hasher import Hasher
from fisherhash.heads import Head
from fisherhash.pixels import PixelBank


@dataclass(frozen=True)
class EncodedSplit:
    """Codes and labels of a split's queries and database.

    Where the codes have no Hamming distance, also what ranks them: the queries' real outputs
    (n, …) and the head.
    """

    query_codes: NDArray[np.uint8]
    database_codes: NDArray[np.uint8]
    query_labels: NDArray[np.uint8]
    database_labels: NDArray[np.uint8]
    bits: int
    skipped: list[Skipped]
    query_outputs: NDArray[np.float32] | None = None
    head: Head | None = None


def encode_split(
    hasher: Hasher,
    collection: Collection,
    split: Split,
    *,
    cached: bool = True,
    bank: PixelBank | None = None,
) -> EncodedSplit:
    """Encode a split's queries and database; unreadable images are left out of both.

    Args:
        hasher: what encodes.
        collection: the images.
        split: which of them.
        cached: keep the features on disk.
        bank: the images' pixels, where they are at hand; nothing is cached then.
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
    outputs, ranker = None, None
    if not hasher.head.hamming:
        ranker = hasher.head
        outputs = encode(query, outputs=True).outputs
    return EncodedSplit(
        encoded.codes[row[query]],
        encoded.codes[row[database]],
        collection.labels[query],
        collection.labels[database],
        hasher.bits,
        encoded.skipped,
        outputs,
        ranker,
    )


def measure(
    encoded: EncodedSplit, *, top: int | None, self_index: NDArray[np.int64] | None = None
) -> Evaluation:
    """Evaluate an encoded split.

    Args:
        encoded: codes and labels.
        top: the protocol's, cut to the size of the database.
        self_index: (n_queries,) the row of the database that is the query itself, or -1.
    """
    top = None if top is None else min(top, len(encoded.database_codes))
    if encoded.head is not None and encoded.query_outputs is not None:
        outputs = torch.from_numpy(encoded.query_outputs)
        return metrics(
            encoded.head.distances(outputs, encoded.database_codes),
            encoded.query_labels,
            encoded.database_labels,
            top=top,
            self_index=self_index,
            ranking=f"distance of the {encoded.head.kind} head",
        )
    return evaluate(
        encoded.query_codes,
        encoded.database_codes,
        encoded.query_labels,
        encoded.database_labels,
        bits=encoded.bits,
        top=top,
        self_index=self_index,
    )
