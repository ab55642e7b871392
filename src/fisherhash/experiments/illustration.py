"""The paper's 2-D illustration of centre learning, actually trained: 2 bits, two classes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash.data.splits import hash_order
from fisherhash.errors import FisherhashError
from fisherhash.experiments.benches import OpenBench
from fisherhash.methods.dfh import DFH
from fisherhash.model.heads import Head
from fisherhash.model.runtime import TorchRuntime, feature_rows, on_device
from fisherhash.training.loop import FrozenImages, Loop
from fisherhash.training.settings import Settings

_CLASSES = (3, 5)
_IMAGES = 100
_PANELS = {"input": "", "intra": "intra", "intra + inter": "intra,inter"}
_SETTINGS = Settings(epochs=30, batch_size=50, learning_rate=0.003)
_SEEDS = 100


def illustration_points(stage: OpenBench) -> dict[str, Any]:
    """Compute outputs (200, 2) of a 2-bit head: untrained, with L_intra, and with L_inter added.

    The head starts at random, at unit scale over all training images. As in the paper's figure,
    the two classes start in neighbouring quadrants: the first seed that does so is used.
    """
    collection, train = stage.collection, stage.split.train
    network = on_device(stage.network, stage.device)
    rows = feature_rows(TorchRuntime(network, stage.device), collection, train)
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
    seed = _first_seed(everything, features, kinds)
    panels = {
        name: _train(everything, features, labels, parts, seed) for name, parts in _PANELS.items()
    }
    return {
        "classes": [collection.classes[column] for column in _CLASSES],
        "labels": kinds.tolist(),
        "seed": seed,
        "panels": {name: values.round(4).tolist() for name, values in panels.items()},
    }


def _first_seed(everything: Tensor, features: Tensor, kinds: NDArray[np.int64]) -> int:
    for seed in range(_SEEDS):
        outputs = _outputs(_head(everything, seed), features)
        signs = [outputs[kinds == kind].mean(axis=0) > 0 for kind in (0, 1)]
        if (signs[0] != signs[1]).sum() == 1:
            return seed
    raise FisherhashError("no seed puts the two classes into neighbouring quadrants")


def _train(
    everything: Tensor, features: Tensor, labels: Tensor, parts: str, seed: int
) -> NDArray[np.float32]:
    head = _head(everything, seed)
    if parts:
        method = DFH(bits=2, classes=len(_CLASSES), parts=parts).to(features.device)
        settings = dataclasses.replace(_SETTINGS, seed=seed)
        Loop(method, FrozenImages(features, labels, head), settings).run()
    return _outputs(head, features)


def _head(everything: Tensor, seed: int) -> Head:
    torch.manual_seed(seed)
    head = DFH(bits=2, classes=len(_CLASSES)).head(everything.shape[1]).to(everything.device)
    head.start(everything)
    return head


@torch.no_grad()
def _outputs(head: Head, features: Tensor) -> NDArray[np.float32]:
    return head.eval()(features).cpu().numpy()
