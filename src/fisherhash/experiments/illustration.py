"""Small trainings behind two figures: the paper's centre learning in 2-D, and how centres move."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fisherhash.data.splits import hash_order
from fisherhash.errors import FisherhashError
from fisherhash.experiments.benches import OpenBench
from fisherhash.experiments.specs import PRINTED, Options
from fisherhash.methods.dfh import DFH
from fisherhash.training.images import FrozenImages
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings

_CLASSES = (3, 5)
_IMAGES = 100
_PANELS = {"input": "", "intra": "intra", "intra + inter": "intra,inter"}
_SETTINGS = Settings(epochs=30, batch_size=50, learning_rate=0.003)
_SEEDS = 100
_MOVE_BITS = 48
_MOVE_SETTINGS = Settings(epochs=20)
_STEPS: dict[str, Options] = {"as printed": PRINTED}
_METRICS = ("flips", "center_distance", "center_distance_min")
"""What DFH logs in every epoch: bits of centres flipped, the centres' mean and least distance."""


def illustration_points(stage: OpenBench) -> dict[str, Any]:
    """Compute outputs (200, 2) of a 2-bit head: untrained, with L_intra, and with L_inter added.

    The head starts at random, at unit scale over all training images. As in the paper's figure,
    the two classes start in neighbouring quadrants: the first seed that does so is used.
    """
    collection, rows = stage.collection, stage.features(stage.split.train)
    everything = torch.from_numpy(rows.values).to(stage.device)
    where = {int(number): row for row, number in enumerate(rows.indices)}
    drawn: list[int] = []
    for column in _CLASSES:
        own = rows.indices[collection.labels[rows.indices, column] > 0]
        drawn += hash_order(collection.names, own, 0)[:_IMAGES]
    numbers = np.array(sorted(drawn), dtype=np.int64)
    features = everything[[where[int(number)] for number in numbers]]
    labels = torch.from_numpy(collection.labels[numbers][:, list(_CLASSES)]).float()
    labels = labels.to(stage.device)
    kinds = labels.argmax(dim=1).cpu().numpy()

    def outputs(parts: str, seed: int) -> NDArray[np.float32]:
        """Outputs of a head, trained with some parts of the loss, or untrained without any."""
        torch.manual_seed(seed)
        head = DFH(bits=2, classes=len(_CLASSES)).head(everything.shape[1]).to(stage.device)
        head.start(everything)
        if parts:
            method = DFH(bits=2, classes=len(_CLASSES), parts=parts).to(stage.device)
            settings = dataclasses.replace(_SETTINGS, seed=seed)
            Loop(method, FrozenImages(features, labels, head), settings).run()
        with torch.no_grad():
            return head.eval()(features).cpu().numpy()

    def neighbours(seed: int) -> bool:
        """Whether the classes start in neighbouring quadrants: one sign differs."""
        start = outputs("", seed)
        first, second = (start[kinds == kind].mean(axis=0) > 0 for kind in (0, 1))
        return int((first != second).sum()) == 1

    seed = next(filter(neighbours, range(_SEEDS)), None)
    if seed is None:
        raise FisherhashError("no seed puts the two classes into neighbouring quadrants")
    return {
        "classes": [collection.classes[column] for column in _CLASSES],
        "labels": kinds.tolist(),
        "seed": seed,
        "panels": {name: outputs(parts, seed).round(4).tolist() for name, parts in _PANELS.items()},
    }


def center_moves(stage: OpenBench) -> dict[str, Any]:
    """Train DFH with the printed centre step, on frozen features.

    Returns:
        The number of bits, and by step one list per metric with a number for every epoch.
    """
    rows = stage.features(stage.split.train)
    features = torch.from_numpy(rows.values).to(stage.device)
    labels = torch.from_numpy(stage.collection.labels[rows.indices]).float().to(stage.device)
    found: dict[str, Any] = {"bits": _MOVE_BITS, "classes": labels.shape[1], "steps": {}}
    for name, options in _STEPS.items():
        torch.manual_seed(_MOVE_SETTINGS.seed)
        method = DFH(bits=_MOVE_BITS, classes=labels.shape[1], **options).to(stage.device)
        head = method.head(features.shape[1]).to(stage.device)
        head.start(features)
        history = Loop(method, FrozenImages(features, labels, head), _MOVE_SETTINGS).run()
        found["steps"][name] = {key: [row[key] for row in history] for key in _METRICS}
    return found
