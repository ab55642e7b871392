"""From data to a hasher in six steps: open, compute features, train, finish, measure, save.

:func:`fit` does it with images, :func:`fit_features` with a user's own vectors.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from fisherhash import backbones, codes, methods
from fisherhash.backbones import Backbone, VectorInput
from fisherhash.data.computing import Rows
from fisherhash.data.pixels import PixelBank
from fisherhash.data.protocols import Split, resolve
from fisherhash.data.sources import Collection, open_data
from fisherhash.data.splits import hash_order, hold_out_classes
from fisherhash.data.vectors import (
    check_finite_rows,
    check_shape,
    open_vectors,
    read_labels,
)
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.methods._nested import Nested
from fisherhash.model.hasher import Hasher
from fisherhash.model.networks import feature_rows
from fisherhash.model.torch_network import TorchNetwork
from fisherhash.training.jobs import STREAM, Job, choose_stream
from fisherhash.training.measuring import measure_agreement
from fisherhash.training.recipes import RecipeName
from fisherhash.training.settings import Settings
from fisherhash.training.steps import MOST_FITTED, add_fitted_bits, train_job
from fisherhash.training.trained import Trained

logger = logging.getLogger(__name__)
P = ParamSpec("P")


def fit(
    data: str | os.PathLike[str] | Collection,
    *,
    method: str = "dfh",
    bits: int = 48,
    options: Mapping[str, Any] | None = None,
    backbone: str | nn.Module = backbones.DEFAULT,
    weights: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
    finetune: bool | None = None,
    protocol: str | Split | None = None,
    settings: Settings | None = None,
    recipe: RecipeName | None = None,
    device: str | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    measured: bool = False,
    bank: PixelBank | None = None,
    nested: Sequence[int] = (),
    stream: bool | None = None,
    unseen: bool = False,
    fitted: bool = True,
    endings: Sequence[tuple[int, Settings]] = (),
) -> Trained:
    """Train a hasher on a data set.

    Args:
        data: a folder of class sub-folders, a CSV, a folder with list files, a named data set, or
            a collection.
        method: a name in ``methods.registry()``, or ``module:Class``.
        bits: length of the codes.
        options: the method's hyper-parameters that differ from its defaults.
        backbone: a name or a network; a network is copied, not changed.
        weights: file with the backbone's weights, if it has no packaged weights.
        image_size: side of the images in pixels; by default the backbone's own.
        finetune: train the network with the head; by default True on CUDA and False elsewhere.
        protocol: how to split the data: a name, or the split itself; by default what the data
            suggests.
        settings: how to train.
        recipe: ``best`` or ``paper``: what DFH is trained with where neither ``options`` nor
            ``settings`` were given; :func:`train` uses ``best`` by default, and ``fit`` none.
        device: ``cpu``, ``cuda``, …; by default CUDA where there is a GPU.
        out: the model folder; by default nothing is written. An unfinished run in it with the same
            settings is continued.
        overwrite: replace the model in ``out``.
        measured: also measure the hasher on the split's queries and database, before it is saved,
            so that an interrupted measurement is continued like an interrupted training.
        bank: the decoded pixels of all images of the split, for a grid of trainings.
        nested: shorter lengths to train as well: the first 12 bits are then a 12-bit code, see
            :meth:`Hasher.truncated`.
        stream: read the decoded training images from the cache on disk while they are used, with
            bounded memory; by default only if they would take more than half of the free memory.
        unseen: also train once more without a quarter of the classes, and measure that hasher among
            images of these; the hasher that is returned is not changed by it.
        fitted: also fit bits without labels to the features of the training images. An index of too
            few images to fit some to them appends these to the learned bits.
        endings: bits and settings of other hashers that the same training can end in, for a grid
            of trainings: other bits or another cut of its outputs, another class step. They are
            returned as :attr:`Trained.others`, and not together with ``recipe``, ``out``,
            ``measured`` or ``unseen``, which are about one hasher.

    Raises:
        UsageError: a name, a number or a folder is wrong, or the data has no labels to learn from.
        NotDefinedError: the method is not defined for this data or this number of bits.
        FisherhashError: too few images can be read, or the model cannot be written.
    """
    began = time.perf_counter()
    if endings and (recipe or out is not None or measured or unseen):
        raise UsageError("endings do not go together with recipe, out, measured or unseen")
    codes.check_bits(bits)
    collection, split = _open(data, methods.find(method).info, protocol)

    def network() -> Backbone:
        own = copy.deepcopy(backbone) if isinstance(backbone, nn.Module) else backbone
        return backbones.create(own, weights=weights, image_size=image_size)

    job = Job(
        collection=collection,
        train=np.arange(len(collection)) if split is None else split.train,
        split=split,
        make_network=network,
        method=method,
        bits=bits,
        options=options,
        given=settings or Settings(),
        recipe=recipe,
        nested=nested,
        finetune=finetune,
        device=device,
        out=out,
        overwrite=overwrite,
        endings=endings,
    )
    rows = _features(job, stream=stream, banked=bank is not None)
    extracted = time.perf_counter()
    trained = train_job(job, rows, bank=bank)
    trained.seconds = {"features": extracted - began, "training": time.perf_counter() - extracted}
    on_first, cached = job.ranks.on_first, not job.live
    if fitted:
        chosen = hash_order(collection.names, rows.indices.tolist(), job.settings.seed)
        blocks = trained.hasher.row_blocks(collection, np.sort(chosen[:MOST_FITTED]), 256, cached)
        add_fitted_bits(job, trained, lambda: np.concatenate([part.values for part in blocks]))
    if measured and split is not None:
        logger.info("trained in %.1f s; measuring", trained.seconds["training"])
        trained.evaluation = on_first(partial(trained.evaluate, bank=bank))
        agreement = partial(measure_agreement, trained.hasher, collection, split, cached=cached)
        trained.agreement = on_first(agreement)
    if unseen and split is not None:
        logger.info("training again without some classes, to measure on these")
        parts = hold_out_classes(collection, split)
        seen = {"collection": parts.seen, "split": parts.split, "train": parts.split.train}
        other = dataclasses.replace(job, **seen, finetune=job.live, out=None, overwrite=False)
        again = train_job(other, _features(other, stream=stream, banked=False))
        trained.unseen = on_first(dataclasses.replace(again, collection=parts.unseen).evaluate)
    return _finished(job, trained)


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
        given=settings or Settings(),
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
    values = np.asarray(vectors, np.float32)
    trained = train_job(job, Rows(values, job.train, []))
    trained.seconds = {"features": checked - began, "training": time.perf_counter() - checked}
    if fitted:
        some = np.linspace(0, len(values) - 1, min(len(values), MOST_FITTED)).astype(np.int64)
        add_fitted_bits(job, trained, lambda: values[some])
    return _finished(job, trained)


def _finished(job: Job, trained: Trained) -> Trained:
    """Note how a hasher was made, and save it."""
    # After measuring, which may find more images that cannot be read.
    trained.describe(job.identity)
    if job.folder is not None:
        job.ranks.on_first(partial(trained.save, job.folder))
    return trained


def _hasher_of(function: Callable[P, Trained]) -> Callable[P, Hasher]:
    @functools.wraps(function)
    def train(*arguments: P.args, **options: P.kwargs) -> Hasher:
        options.setdefault("recipe", "best")
        return function(*arguments, **options).hasher

    train.__name__ = train.__qualname__ = "train"
    return train


train = _hasher_of(fit)
"""Train a hasher: :func:`fit` with the best recipe by default."""


def _open(
    data: str | os.PathLike[str] | Collection,
    info: methods.MethodInfo,
    protocol: str | Split | None,
) -> tuple[Collection, Split | None]:
    """Open a data set and split it; without labels there is nothing to split."""
    collection = data if isinstance(data, Collection) else open_data(data)
    if collection.classes:
        known = isinstance(protocol, Split)
        return collection, protocol if known else resolve(collection, protocol)
    if info.needs_labels:
        raise UsageError(
            f"'{collection.name}' has no labels and {info.name} learns from them. Put the images "
            "into one sub-folder per class, provide a CSV (path,label), or use --method itq"
        )
    return collection, None


def _features(job: Job, *, stream: bool | None, banked: bool) -> Rows:
    """Compute the features of the training images, or read those that are stored.

    An interrupted run goes on reading its images as it began.

    Args:
        job: the training; its identity becomes known.
        stream: whether the user wants them to be read from the disk.
        banked: whether all pixels are in memory anyway.
    """
    ranks, collection, network = job.ranks, job.collection, job.network
    runtime = TorchNetwork(network, job.place, via_onnx=True)
    about: dict[str, Any] = {
        "backbone": network.name,
        "image_size": network.preprocessing.size,
        "split": job.split.checksum if job.split else None,
        # What the names above stand for: the pixels and the first weights.
        "images": collection.reader.fingerprint()[:16],
        "weights": runtime.checksum[:16],
    }
    if isinstance(job.learner, Nested):
        about["nested"] = [part.bits for part in job.learner.parts]
    on_disk = ranks.on_first(partial(choose_stream, job, stream, banked=banked))
    about |= {STREAM: True} if on_disk else {}
    job.identify(**about)
    torch.manual_seed(job.settings.seed)
    with ranks.in_turn():
        rows = feature_rows(runtime, collection, job.train, on_disk=on_disk)
    same = rows.indices.tolist(), len(collection), job.identity["settings"], job.identity["options"]
    ranks.check_same("training images or settings", repr(same).encode())
    if len(rows.indices) < 2:
        raise FisherhashError(
            f"only {len(rows.indices)} of {len(job.train)} training images can be read"
        )
    return rows


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
