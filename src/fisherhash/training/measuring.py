"""From a hasher and a split to numbers: encode the queries and the database, then evaluate.

Imports no torch: an exported model is measured without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import code_bytes, pack, unpack
from fisherhash.data.collection import Collection
from fisherhash.data.computing import Skipped
from fisherhash.data.splits import Split
from fisherhash.errors import UsageError
from fisherhash.evaluation import Evaluation, evaluate, metrics
from fisherhash.evaluation.looking import NeighbourAgreement, neighbour_agreement
from fisherhash.model.hasher import Hasher
from fisherhash.model.head import FinishedHead
from fisherhash.model.networks import feature_rows
from fisherhash.system.progress import progress

if TYPE_CHECKING:
    from fisherhash.data.pixels import PixelBank

SPLIT_FILE = "split.json"
"""The split of a trained model, in its folder."""
MOST_LOOKS = 500
"""Queries whose neighbours are compared for agreement, evenly spaced."""
MOST_SEARCHED = 10_000
"""Database images among which they are compared, evenly spaced."""


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
        device: where codes are compared.
    """

    query_codes: NDArray[np.uint8]
    database_codes: NDArray[np.uint8]
    query_labels: NDArray[np.uint8]
    database_labels: NDArray[np.uint8]
    head: FinishedHead
    skipped: list[Skipped]
    real_queries: NDArray[np.float32] | None = None
    device: str = "cpu"


def first_bits(encoded: EncodedSplit, hasher: Hasher, bits: int) -> EncodedSplit:
    """Return what was encoded with the first bits of each code alone."""
    query, database = (
        pack(unpack(codes, hasher.bits)[:, :bits] - 0.5)
        for codes in (encoded.query_codes, encoded.database_codes)
    )
    return dataclasses.replace(
        encoded,
        query_codes=query,
        database_codes=database,
        head=hasher.truncated(bits).head,
        real_queries=None,
    )


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
    heads = {hasher.head: real_queries}
    return encode_heads(hasher, collection, split, heads, cached=cached, bank=bank)[0]


def encode_heads(
    hasher: Hasher,
    collection: Collection,
    split: Split,
    heads: Mapping[FinishedHead, bool],
    *,
    cached: bool = True,
    bank: PixelBank | None = None,
) -> list[EncodedSplit]:
    """Encode a split with several heads on one backbone, whose features are computed once.

    Args:
        hasher: has the backbone.
        collection: the images.
        split: which of them.
        heads: the hasher's own head, or others of its features, each with whether it also encodes
            real-valued queries; codes without a Hamming distance always do.
        cached: store the features on disk.
        bank: the pixels of the images, if they are in memory; nothing is stored then.
    """
    wanted = np.unique(np.concatenate([split.query, split.database]))
    source, block = collection, 256
    if bank is not None:
        from fisherhash.data.pixels import GRID_BATCH

        source, block, cached = bank, GRID_BATCH, False
    is_query = np.zeros(len(collection), dtype=np.bool_)
    is_query[split.query] = True
    indices: list[NDArray[np.int64]] = []
    skipped: list[Skipped] = []
    packed = {head: [np.empty((0, code_bytes(head.bits)), dtype=np.uint8)] for head in heads}
    real: dict[FinishedHead, list[NDArray[np.float32]]] = {head: [] for head in heads}
    # Cached features have a bar of their own.
    quiet = nullcontext(lambda _: None)
    with quiet if cached else progress(f"encoding {collection.name}", len(wanted)) as advance:
        for rows in hasher.row_blocks(source, wanted, block, cached):
            chosen = is_query[rows.indices]
            for head in heads:
                logits = head.as_trained().logits(rows.values)
                packed[head].append(pack(logits))
                if not head.hamming:
                    real[head].append(head.as_trained().query(rows.values[chosen]))
                elif heads[head]:
                    real[head].append(logits[chosen])
            indices.append(rows.indices)
            skipped += rows.skipped
            advance(len(rows.indices) + len(rows.skipped))
    found = np.concatenate([np.empty(0, dtype=np.int64), *indices])
    row = np.full(len(collection), -1, dtype=np.int64)
    row[found] = np.arange(len(found))
    query_row = np.cumsum(is_query[found]) - 1
    query, database = (part[row[part] >= 0] for part in (split.query, split.database))
    encoded = []
    on_gpu = hasher.network is not None and hasher.network.kind == "torch-cuda"
    device = "cuda" if on_gpu else "cpu"
    for head, own in packed.items():
        codes = np.concatenate(own)
        queries = np.concatenate(real[head])[query_row[row[query]]] if real[head] else None
        labels = collection.labels[query], collection.labels[database]
        encoded.append(
            EncodedSplit(
                codes[row[query]], codes[row[database]], *labels, head, skipped, queries, device
            )
        )
    return encoded


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
        blocks = head.as_trained().distances(encoded.real_queries, encoded.database_codes)
        ranking = f"distance of the {head.kind} head"
        return metrics(blocks, *labels, top=top, self_index=self_index, ranking=ranking)
    codes = encoded.query_codes, encoded.database_codes
    where: dict[str, Any] = {}
    if encoded.device == "cuda":
        where = {"backend": "torch", "device": encoded.device}
    return evaluate(*codes, *labels, bits=head.bits, top=top, self_index=self_index, **where)


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
    parts = (split.query, MOST_LOOKS), (split.database, MOST_SEARCHED)
    query, database = (part[:: max(1, -(-len(part) // most))] for part, most in parts)
    wanted = np.unique(np.concatenate([query, database]))
    network = hasher.features_network
    if network is hasher.network:
        blocks = list(hasher.row_blocks(collection, wanted, cached=cached))
        features = np.concatenate([block.values for block in blocks])
        codes = np.concatenate([pack(hasher.head.logits(block.values)) for block in blocks])
        indices = np.concatenate([block.indices for block in blocks])
    else:
        # An exported model computes logits; its file computes the features too.
        encoded = hasher.encode_collection(collection, wanted, cached=cached)
        codes, indices = encoded.codes, encoded.indices
        features = feature_rows(network, collection, indices).values
    row = np.full(len(collection), -1)
    row[indices] = np.arange(len(indices))
    # Without images that cannot be read.
    near, far = (part[row[part] >= 0] for part in (query, database))
    position = np.full(len(collection), -1)
    position[far] = np.arange(len(far))
    return neighbour_agreement(
        codes[row[near]],
        codes[row[far]],
        features[row[near]],
        features[row[far]],
        collection.labels[near],
        collection.labels[far],
        bits=hasher.bits,
        self_index=position[near],
    )
