"""From vectors to a hasher: any method on a user's own features, without images and a backbone."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fisherhash import codes, methods
from fisherhash.backbones import VectorInput
from fisherhash.data.collection import Collection
from fisherhash.data.computing import Rows
from fisherhash.data.vectors import (
    as_float32,
    check_finite_rows,
    check_shape,
    open_vectors,
    read_labels,
)
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.training.jobs import Job
from fisherhash.training.recipes import RecipeName
from fisherhash.training.settings import Settings
from fisherhash.training.steps import MOST_FITTED, add_fitted_bits, train_job
from fisherhash.training.trained import Trained

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
    fitted: bool = True,
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
        fitted: also fit bits without labels, as for :func:`~fisherhash.training.fitting.fit`.

    Raises:
        UsageError: a name, a number or a file is wrong, or the method learns from labels and there
            are none.
        NotDefinedError: the method is not defined for these labels or this number of bits.
        FisherhashError: the model cannot be written.
    """
    began = time.perf_counter()
    codes.check_bits(bits)
    info = methods.find(method).info
    collection, vectors = _opened(features, labels)
    if info.supervision != "none" and not collection.classes:
        raise UsageError(f"{method} learns from labels; give them with --labels, or use itq")
    job = Job(
        collection=collection,
        train=np.arange(len(vectors)),
        split=None,
        make_network=partial(VectorInput, vectors.shape[1]),
        method=method,
        bits=bits,
        options=options,
        settings=settings or Settings(),
        recipe=recipe,
        finetune=False,
        device=device,
        out=out,
        overwrite=overwrite,
    )
    job.identify(
        dimensions=vectors.shape[1],
        labels=hashlib.sha256(collection.labels.tobytes()).hexdigest()[:16],
        features=collection.reader.fingerprint()[:16],
    )
    job.ranks.check_same("vectors or settings", repr(job.identity).encode())
    check_finite_rows(vectors, collection.name)
    checked = time.perf_counter()

    torch.manual_seed(job.settings.seed)
    with as_float32(vectors) as values:
        trained = train_job(job, Rows(values, job.train, []))
        trained.seconds = {"features": checked - began, "training": time.perf_counter() - checked}
        if fitted:
            some = np.linspace(0, len(values) - 1, min(len(values), MOST_FITTED)).astype(np.int64)
            add_fitted_bits(job, trained, lambda: values[some])
    trained.describe(job.identity)
    if job.folder is not None:
        job.ranks.on_first(partial(trained.save, job.folder))
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
