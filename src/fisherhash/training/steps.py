"""What every training does once its features are known: train, end, and add the fitted bits."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash.backbones import VectorInput
from fisherhash.data.computing import Rows
from fisherhash.data.pixels import PixelBank, check_readable, pixel_rows, placed
from fisherhash.data.row_cache import StoredRows
from fisherhash.data.sources import Collection
from fisherhash.data.splits import hash_order
from fisherhash.data.streaming import StreamedRows
from fisherhash.errors import UsageError, counted
from fisherhash.methods import HashMethod
from fisherhash.model.folder import is_unfinished
from fisherhash.model.hasher import Hasher
from fisherhash.model.itq_fit import fit_itq
from fisherhash.model.torch_network import TorchNetwork
from fisherhash.training.finishing import (
    Ending,
    finish_endings,
    held_out_top,
    validate_endings,
)
from fisherhash.training.images import FrozenImages, LiveImages
from fisherhash.training.jobs import Job
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings
from fisherhash.training.trained import Trained

FITTED_BITS = 128
"""Bits that are fitted to the features of the training images without labels."""
FEWEST_FITTED = 8
"""Of features or images too few for more bits than these, none are fitted."""
MOST_FITTED = 20_000
"""Training images that they are fitted to."""


def train_job(job: Job, rows: Rows, *, bank: PixelBank | None = None) -> Trained:
    """Train a method, or fit it, on features; what was trained is a hasher then.

    Args:
        job: what is trained.
        rows: the features of the training images, or the vectors.
        bank: the pixels of the training images, where they are in memory.
    """
    learner, collection, place = job.learner, job.collection, job.place
    history: list[dict[str, Any]] = []
    every: list[Ending] = []
    if isinstance(learner, HashMethod):
        head = learner.head(job.network.features).to(place)
        ends = [(job.bits, job.settings), *job.endings]
        every = [Ending(learner, *one, head) for one in ends]
        history = _train_rows(job, every, rows, bank)
        head = every[0].head
    else:
        labels = torch.from_numpy(collection.labels[rows.indices]).float().to(place)
        with warnings.catch_warnings():
            # A file that is mapped for reading; no method writes to its features.
            warnings.filterwarnings("ignore", message=".*not writable.*")
            values = torch.from_numpy(rows.values).to(place)
        head = learner.fit(values, labels, seed=job.settings.seed)
    network = None
    if not isinstance(job.network, VectorInput):
        network = TorchNetwork(job.network, place, via_onnx=True)
    hasher = Hasher(network, head.finished(), method=job.method, classes=collection.classes)
    trained = Trained(
        hasher,
        learner,
        collection,
        job.split,
        history,
        rows.skipped,
        finetuned=job.live,
        features_by=rows.kind,
        step=every[0].step if every else None,
    )
    trained.others = [_other(trained, ending) for ending in every[1:]]
    return trained


def _other(trained: Trained, ending: Ending) -> Trained:
    """Return a training with another of its endings."""
    hasher = trained.hasher.with_head(ending.head.finished())
    # The last row of the history has what held-out images say about this ending.
    history = [*trained.history[:-1], *({**row, **ending.row} for row in trained.history[-1:])]
    return dataclasses.replace(trained, hasher=hasher, history=history, step=ending.step, others=[])


def _train_rows(
    job: Job, endings: Sequence[Ending], rows: Rows, bank: PixelBank | None
) -> list[dict[str, Any]]:
    """Train the head on frozen features and, when fine-tuning, then the whole network."""
    learner, head = endings[0].learner, endings[0].head
    settings, network, device = job.settings, job.network, job.place
    collection, ranks = job.collection, job.ranks
    held = _held_out(collection, rows.indices, settings)
    numbers = [rows.indices[part] for part in (~held, held)]
    labels = [torch.from_numpy(collection.labels[some]).float().to(device) for some in numbers]
    features = [_placed_rows(rows.values[part], device) for part in (~held, held)]
    images, held_out = (FrozenImages(f, own, head) for f, own in zip(features, labels, strict=True))
    head.start(images.sample()[0])
    learner.to(device)
    if job.live:
        if settings.head_epochs and not ranks.on_first(partial(is_unfinished, job.folder)):
            first = dataclasses.replace(settings, epochs=settings.head_epochs, validation=0.0)
            Loop(learner, images, first, title="training the head").run()
        pixels: list[Tensor | StreamedRows]
        with ranks.in_turn():
            if isinstance(rows.values, StoredRows):
                stored = pixel_rows(collection, rows.indices, network.preprocessing, on_disk=True)
                check_readable(np.setdiff1d(rows.indices, stored.indices), stored.skipped)
                pixels = [_placed_rows(stored.values[part], device) for part in (~held, held)]
            else:
                if bank is None:
                    bank = PixelBank(collection, rows.indices, network.preprocessing, device)
                pixels = [placed(bank.of(numbers[0]), device), bank.of(numbers[1])]
        images, held_out = (
            LiveImages(p, own, network, head) for p, own in zip(pixels, labels, strict=True)
        )
        # A bank of our own is not needed twice.
        del bank, pixels
    top = None if job.split is None else held_out_top(job.split)
    loop = Loop(
        learner,
        images,
        settings,
        finish=partial(finish_endings, endings, images),
        validate=partial(validate_endings, endings, held_out, top) if held.any() else None,
        folder=job.folder,
        identity=job.identity,
    )
    return loop.run()


def _placed_rows(values: NDArray | StoredRows, device: torch.device) -> Tensor | StreamedRows:
    """Rows on the device, or a stream of those that are on the disk."""
    if isinstance(values, StoredRows):
        return StreamedRows(values)
    return torch.from_numpy(values).to(device)


def _held_out(
    collection: Collection, numbers: NDArray[np.int64], settings: Settings
) -> NDArray[np.bool_]:
    """(n,) which training images are the validation slice."""
    cut = round(len(numbers) * settings.validation)
    if len(numbers) - cut < 2:
        raise UsageError(
            f"a validation share of {settings.validation:g} leaves {len(numbers) - cut} of "
            f"{counted(len(numbers), 'image')} to train on; lower it"
        )
    order = hash_order(collection.names, numbers.tolist(), settings.seed)
    return np.isin(numbers, order[:cut])


def add_fitted_bits(
    job: Job, trained: Trained, features: Callable[[], NDArray[np.float32]]
) -> None:
    """Give a hasher bits that know no labels, for an index of few images.

    Codes that were learned from labels put many images of a class on one code, and say little about
    images of other classes. Codes that were learned without labels, or that have no Hamming
    distance, get none: an index stores them as they are.

    Args:
        job: what was trained.
        trained: has the hasher.
        features: returns the features (n, d) of some training images.
    """
    from_labels = job.learner.info.supervision != "none" and bool(job.collection.classes)
    if not from_labels or not trained.hasher.head.hamming:
        return
    began = time.perf_counter()

    def find() -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        rows = features()
        bits = min(FITTED_BITS, rows.shape[1], len(rows) - 1)
        return None if bits < FEWEST_FITTED else fit_itq(rows, bits, seed=job.settings.seed)

    trained.hasher.fitted = job.ranks.on_first(find)
    trained.seconds["fitted bits"] = time.perf_counter() - began
