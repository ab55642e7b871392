"""Vectors into an index: codes of an .npy file under the user's keys."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fisherhash.data.vectors import open_vectors, read_keys
from fisherhash.errors import UsageError
from fisherhash.index.base import Entry, Index, Uri
from fisherhash.index.images.creating import load_hasher, opened_index
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.results import SyncReport
from fisherhash.index.images.syncing import RUNTIMES
from fisherhash.system.progress import progress

VECTORS_PER_COMMIT = 16_384
"""Less than a second of work."""


def add_vectors(
    uri: Uri,
    features: str | os.PathLike[str],
    *,
    keys: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    labels: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> SyncReport:
    """Add the vectors of an .npy file to an index; create the index if there is none.

    The file is checked as a whole before anything is written. Every block is one commit; the same
    call continues where an interrupted one stopped.

    Args:
        uri: the index.
        features: the file with vectors (n, d).
        keys: a text file with one key per line; by default the numbers of the rows, from 0. A
            vector under a key that exists replaces the item, except under such a number.
        model: a model folder; by default the index's own.
        labels: of all these vectors.
        metadata: of all these vectors.
        device: where to encode.

    Raises:
        UsageError: a file is missing or does not hold what it should, a row's number is the key of
            another vector, or the model is another one.
    """
    vectors = open_vectors(features)
    names = None if keys is None else read_keys(keys, len(vectors))
    if Index.exists(uri):
        checked, opened = False, opened_index(uri, model, device=device)
    else:
        if model is None:
            raise UsageError(
                f"{uri} does not exist yet; say which model encodes its vectors: --model MODEL"
            )
        hasher = load_hasher(model, device)
        # Before an index is created that would stay empty.
        hasher.check_vectors(vectors, str(features))
        checked, opened = True, ImageIndex.create(uri, hasher)
    with opened as images:
        hasher, index, report = images.hasher, images.index, SyncReport()
        if not checked:
            hasher.check_vectors(vectors, str(features))
        fingerprint, runtimes = hasher.fingerprint(), index.notes(RUNTIMES)
        made = {"codes": 0, "unsure_bits": 0} | runtimes.get(hasher.runtime_name, {})
        with progress("encoding vectors", len(vectors)) as advance:
            for block in hasher.encode_feature_blocks(vectors, block=VECTORS_PER_COMMIT):
                numbers = block.indices.tolist()
                own = [str(i) if names is None else names[i] for i in numbers]
                entries = []
                fines = block.fine if index.fine_bits else None
                fines = [None] * len(own) if fines is None else fines
                rows = zip(own, block.codes, fines, index.get_items(own), strict=True)
                for key, code, fine, item in rows:
                    same = item is not None and bytes(item.code) == code.tobytes()
                    if same and labels is None and metadata is None:
                        report.unchanged += 1
                        continue
                    if item is not None and not same and names is None:
                        raise UsageError(
                            f"{uri} has another vector under the key '{key}', which is the number "
                            "of a row; give these vectors keys of their own: --keys FILE"
                        )
                    about = {"labels": labels, "metadata": metadata, "fine": fine}
                    entries.append(Entry(key, code, **about))
                    (report.added if item is None else report.updated).append(key)
                if entries:
                    made["codes"] += len(entries)
                    made["unsure_bits"] += block.unsure
                    notes = {RUNTIMES: {hasher.runtime_name: made}}
                    index.upsert(entries, notes=notes, fingerprint=fingerprint)
                advance(len(numbers))
        report.count = len(index)
    return report
