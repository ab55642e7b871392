"""Measures a training in both rankings, without and with the class step, from one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fisherhash.data.pixels import PixelBank
from fisherhash.errors import UsageError
from fisherhash.evaluation.by_code import precision_by_code
from fisherhash.evaluation.looking import neighbour_agreement
from fisherhash.experiments.significance import pack_shares
from fisherhash.model.head import FinishedHead
from fisherhash.training.measuring import EncodedSplit, encode_heads, measure
from fisherhash.training.settings import Settings
from fisherhash.training.trained import Trained

Reference = tuple[NDArray[np.float32], NDArray[np.float32]]


def measure_rankings(
    trainings: Sequence[tuple[Trained, Settings]],
    bank: PixelBank | None = None,
    *,
    reference: Reference | None = None,
) -> list[dict[str, Any]]:
    """Measure codes by Hamming distance and with real-valued queries, as JSON.

    A training with the class step is measured without it too. Average precision per query is
    packed into text.

    Args:
        trainings: endings of one training, each with its settings; the images are encoded once.
        bank: the pixels of the split's images.
        reference: float features of the queries and the database; the agreement with them inside
            the classes is added to ``evaluation`` as ``agreement``.

    Returns:
        For each ending ``evaluation`` (by Hamming distance) and ``real_queries``; with the class
        step, the same two under ``class_step``. Codes without a Hamming distance have
        ``evaluation`` alone, by their own distance: they are no signs that a step could change.
    """
    first = trainings[0][0]
    if first.split is None:
        raise UsageError(f"'{first.collection.name}' has no labels to measure with")
    heads: list[list[FinishedHead]] = []
    for trained, settings in trainings:
        own = [trained.plain_head]
        if settings.step_weight > 0 and trained.step is not None:
            step = trained.step.with_step(settings.step_weight, settings.step_sharpness)
            own.append(step.finished())
        heads.append(own)
    live = first.finetuned
    encoded = encode_heads(
        first.hasher,
        first.collection,
        first.split,
        dict.fromkeys((head for own in heads for head in own), True),
        cached=not live,
        bank=bank if live else None,
    )
    top = first.split.top
    rows = {one.head: _measured(one, top, torch.device(one.device), reference) for one in encoded}
    found = []
    for plain, *stepped in heads:
        step = {"class_step": rows[stepped[0]]} if stepped else {}
        found.append(rows[plain] | step)
    return found


def _measured(
    encoded: EncodedSplit, top: int | None, device: torch.device, reference: Reference | None
) -> dict[str, Any]:
    """Measure one head in both rankings."""
    by_codes = measure(encoded, top=top)
    found = by_codes.to_json()
    if reference is not None and encoded.head.hamming:
        codes = encoded.query_codes, encoded.database_codes
        labels = encoded.query_labels, encoded.database_labels
        agreement = neighbour_agreement(*codes, *reference, *labels, bits=encoded.head.bits)
        found["agreement"] = agreement.to_json()
    found["average_precision"] = pack_shares(by_codes.average_precision)
    row = {"evaluation": found}
    if encoded.head.hamming:
        row["real_queries"] = _real_queries(encoded, top, device)
    return row


def _real_queries(encoded: EncodedSplit, top: int | None, device: torch.device) -> dict[str, Any]:
    if encoded.real_queries is None:
        raise UsageError("the split was encoded without real-valued queries")
    distinct, places = np.unique(encoded.database_codes, axis=0, return_inverse=True)
    scores = precision_by_code(
        map(torch.from_numpy, encoded.head.distances(encoded.real_queries, distinct)),
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
