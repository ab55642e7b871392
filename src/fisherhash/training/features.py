"""From vectors to a hasher: any method on a user's own features, without images and a backbone."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fisherhash import codes, methods
from fisherhash.backbones import VectorInput
from fisherhash.data.collection import Collection
from fisherhash.data.loading import Rows
from fisherhash.data.vectors import (
    as_float32,
    check_finite_rows,
    check_shape,
    open_vectors,
    read_labels,
)
from fisherhash.errors import FisherhashError, NotDefinedError, UsageError
from fisherhash.methods import HashMethod
from fisherhash.model.torch_hasher import TorchHasher
from fisherhash.training.checkpoints import check_resumable
from fisherhash.training.distributed import join
from fisherhash.training.finishing import Ending, Endings
from fisherhash.training.fitting import (
    Trained,
    check_settings,
    moved_options,
    train_rows,
    training_details,
    unmeasurable,
)
from fisherhash.training.recipes import RecipeName, apply_recipe, find_recipe
from fisherhash.training.second_code import MOST_IMAGES, fit_second_code
from fisherhash.training.settings import Settings

logger = logging.getLogger(__name__)


def fit_features(
    features: str | os.PathLike[str] | NDArray[np.floating[Any]],
    labels: str | os.PathLike[str] | None = None,
    *,
    method: str = "itq",
    bits: int = 64,
    options: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
    recipe: RecipeName | None = "best",
    device: str | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    fine_bits: int = 0,
) -> Trained:
    """Train a hasher on vectors, all of them.

    A shallow method reads a memory-mapped file in blocks, so that it may be larger than the memory.
    A method that is trained by gradient copies the vectors into memory.

    Args:
        features: an .npy file with vectors (n, d), or the array.
        labels: an .npy file with labels, see :func:`~fisherhash.data.vectors.read_labels`.
        method: one of ``methods.registry()``.
        bits: length of the codes.
        options: the method's hyper-parameters that differ from its defaults.
        settings: how to train.
        recipe: as for :func:`~fisherhash.training.fitting.fit`.
        device: ``cpu``, ``cuda``, …; by default CUDA where there is a GPU.
        out: the model folder; by default nothing is written. An unfinished run in it with the same
            settings is continued.
        overwrite: replace the model in ``out``.
        fine_bits: length of a second code, as for :func:`~fisherhash.training.fitting.fit`.

    Raises:
        UsageError: a name, a number or a file is wrong, or the method learns from labels and there
            are none.
        NotDefinedError: the method is not defined for these labels or this number of bits.
        FisherhashError: the model cannot be written.
    """
    began = time.perf_counter()
    ranks, place = join(device)
    codes.check_bits(bits)
    options, settings = moved_options(method, options or {}, settings or Settings())
    info = methods.find(method).info
    ranks.check_trainable(info)
    collection, vectors = _opened(features, labels)
    classes = len(collection.classes)
    if info.supervision != "none" and not classes:
        raise UsageError(f"{method} learns from labels; give them with --labels, or use itq")
    several = bool(collection.labels.sum(1).max(initial=0) > 1)
    if several and not info.multilabel:
        raise NotDefinedError(f"{method} is not defined for vectors with several labels")
    if not classes and settings.validation > 0:
        raise unmeasurable(collection.name)
    if recipe is not None and method == "dfh":
        chosen = find_recipe(recipe, finetune=False, classes=classes, several=several, bits=bits)
        options, settings = apply_recipe(chosen, options, settings)
        logger.info("%s", chosen)
    settings = dataclasses.replace(settings, fixed_layers=0)
    # As for images: a method's own weights come from the seed, but not the numbers of the head.
    torch.manual_seed(settings.seed + 1)
    learner = methods.create(
        method, bits=settings.outputs or bits, classes=classes, options=options
    )
    network = VectorInput(vectors.shape[1])
    identity = {
        "method": method,
        "bits": bits,
        "options": methods.resolved_options(learner),
        "dimensions": network.features,
        "finetune": False,
        "settings": settings.to_json(),
        "data": collection.name,
        "labels": hashlib.sha256(collection.labels.tobytes()).hexdigest()[:16],
        "features": collection.reader.fingerprint()[:16],
    }
    folder = None if out is None else Path(out)
    if folder is not None:
        ranks.on_first(partial(check_resumable, folder, identity, overwrite=overwrite))
    ranks.check_same("vectors or settings", repr(identity).encode())
    check_settings(learner, network.features, bits, settings)
    check_finite_rows(vectors, collection.name)
    checked = time.perf_counter()

    torch.manual_seed(settings.seed)
    history, step = [], None
    with as_float32(vectors) as values:
        if isinstance(learner, HashMethod):
            ending = Ending(learner, bits, settings, None)
            rows = Rows(values, np.arange(len(values)), [])
            endings = Endings([ending])
            history = train_rows(
                endings, network, collection, rows, False, None, place, folder, identity
            )
            head, step = ending.head, ending.step
        else:
            own = None
            if info.supervision != "none":
                own = torch.from_numpy(collection.labels).float().to(place)
            head = learner.fit(_tensor(values).to(place), own, seed=settings.seed)
        fine = None
        if fine_bits and head.hamming:
            some = np.linspace(0, len(values) - 1, min(len(values), MOST_IMAGES)).astype(np.int64)
            fine = fit_second_code(values[some], codes.check_bits(fine_bits), seed=settings.seed)
    seconds = {"features": checked - began, "training": time.perf_counter() - checked}
    hasher = TorchHasher(network, head, method, collection.classes, device=place, fine=fine)
    trained = Trained(hasher, learner, collection, None, history, [], seconds, step=step)
    hasher.details = training_details(trained, identity)
    hasher.details["data"] = {"name": collection.name, "vectors": len(collection)}
    if folder is not None:
        ranks.on_first(partial(trained.save, folder))
    return trained


class _VectorReader:
    """Stands for the vectors where a collection has the reader of its images."""

    def __init__(self, checksum: str) -> None:
        self._checksum = checksum

    def open(self, index: int, *, enough: int | None = None) -> Image.Image:
        raise UsageError("these are vectors; there is no image to open")

    def fingerprint(self) -> str:
        return self._checksum


def _opened(
    features: str | os.PathLike[str] | NDArray[np.floating[Any]],
    labels: str | os.PathLike[str] | None,
) -> tuple[Collection, NDArray[np.floating[Any]]]:
    """The names and labels of vectors as a collection, and the vectors."""
    if isinstance(features, np.ndarray):
        check_shape(features, "the array")
        vectors, name = features, "array"
        checksum = hashlib.sha256(np.ascontiguousarray(features).data).hexdigest()
    else:
        vectors, name = open_vectors(features), os.path.basename(features)
        state = os.stat(os.path.expanduser(features))
        text = f"{vectors.shape} {vectors.dtype} {state.st_size} {state.st_mtime_ns}"
        checksum = hashlib.sha256(text.encode()).hexdigest()
    if len(vectors) < 2:
        raise FisherhashError(f"{name} holds one vector; training needs at least 2")
    found, classes = np.zeros((len(vectors), 0), dtype=np.uint8), ()
    if labels is not None:
        found, classes = read_labels(labels, len(vectors))
    names = [str(row) for row in range(len(vectors))]
    return Collection(name, names, found, classes, _VectorReader(checksum), kind="vectors"), vectors


def _tensor(values: NDArray[np.float32]) -> Tensor:
    """The vectors as a tensor on the same memory."""
    with warnings.catch_warnings():
        # A file that is mapped for reading; no method writes to its features.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(values)
