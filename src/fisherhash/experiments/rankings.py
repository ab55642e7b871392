"""Measures a training in both rankings, without and with the class step, from one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fisherhash.data.pixels import PixelBank
from fisherhash.errors import UsageError
from fisherhash.evaluation.by_code import precision_by_code
from fisherhash.experiments.significance import pack_shares
from fisherhash.training.fitting import Trained
from fisherhash.training.measuring import EncodedSplit, encode_heads, measure
from fisherhash.training.settings import Settings


def measure_rankings(
    trained: Trained, settings: Settings, bank: PixelBank | None = None
) -> dict[str, Any]:
    """Measure codes by Hamming distance and with real-valued queries, as JSON.

    A training with the class step is measured without it too. Average precision per query is
    packed into text.

    Args:
        trained: the training.
        settings: how it was trained.
        bank: the pixels of the split's images.

    Returns:
        ``evaluation`` (by Hamming distance) and ``real_queries``; with the class step, the same
        two under ``class_step``. Codes without a Hamming distance have ``evaluation`` alone, by
        their own distance: they are no signs that a step could change.
    """
    if trained.split is None:
        raise UsageError(f"'{trained.collection.name}' has no labels to measure with")
    heads = [trained.plain_head]
    if settings.step_weight > 0 and trained.step is not None:
        heads.append(trained.step.with_step(settings.step_weight, settings.step_sharpness))
    live = trained.finetuned
    rows = []
    for encoded in encode_heads(
        trained.hasher,
        trained.collection,
        trained.split,
        dict.fromkeys(heads, True),
        cached=not live,
        bank=bank if live else None,
    ):
        by_codes = measure(encoded, top=trained.split.top)
        found = by_codes.to_json()
        found["average_precision"] = pack_shares(by_codes.average_precision)
        row = {"evaluation": found}
        if encoded.head.hamming:
            device = trained.hasher.device
            row["real_queries"] = _real_queries(encoded, trained.split.top, device)
        rows.append(row)
    plain, *stepped = rows
    return plain | ({"class_step": stepped[0]} if stepped else {})


def _real_queries(encoded: EncodedSplit, top: int | None, device: torch.device) -> dict[str, Any]:
    if encoded.real_queries is None:
        raise UsageError("the split was encoded without real-valued queries")
    distinct, places = np.unique(encoded.database_codes, axis=0, return_inverse=True)
    queries = torch.from_numpy(encoded.real_queries)
    scores = precision_by_code(
        encoded.head.distances(queries, distinct),
        places.reshape(-1),
        encoded.query_labels,
        encoded.database_labels,
        top=None if top is None else min(top, len(encoded.database_codes)),
        device=device,
    )
    return {
        **scores.means,
        "top": scores.top,
        "ranking": f"distance of the {encoded.head.kind} head",
        "average_precision": pack_shares(scores.expected),
    }
