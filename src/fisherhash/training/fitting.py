"""From data to a hasher: open, split, extract, train, save."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fisherhash import backbones, codes, methods
from fisherhash.backbones import Backbone
from fisherhash.data.loading import Skipped, write_skipped
from fisherhash.data.protocols import Split, resolve
from fisherhash.data.sources import Collection, open_data
from fisherhash.data.splits import hash_order
from fisherhash.errors import FisherhashError, NotDefinedError, UsageError
from fisherhash.evaluation import Evaluation
from fisherhash.methods import HashMethod
from fisherhash.model.features import Extractor, Rows, on_device
from fisherhash.model.hasher import Hasher
from fisherhash.model.heads import Head
from fisherhash.system import storage
from fisherhash.system.devices import choose_device
from fisherhash.training.checkpoints import check_resumable, discard_checkpoint, is_unfinished
from fisherhash.training.loop import (
    METRICS,
    FrozenImages,
    LiveImages,
    Loop,
    Settings,
)
from fisherhash.training.measuring import EncodedSplit, encode_split, measure
from fisherhash.training.pixels import PixelBank, pixel_rows, placed

logger = logging.getLogger(__name__)
P = ParamSpec("P")

SKIPPED_FILE, SPLIT_FILE = "skipped.csv", "split.json"


@dataclass
class Trained:
    """What training gives besides the hasher."""

    hasher: Hasher
    method: methods.HashMethod | methods.FeatureMethod
    collection: Collection
    split: Split | None
    history: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    finetuned: bool = False
    evaluation: Evaluation | None = None

    def evaluate(self, *, bank: PixelBank | None = None) -> Evaluation:
        """mAP of the split's queries against its database; ``bank`` holds their pixels."""
        return self.evaluations(bank=bank)[0]

    def evaluations(
        self, *, bank: PixelBank | None = None, real_queries: bool = False
    ) -> list[Evaluation]:
        """What ``evaluate`` gives; then, if asked for, the same with real-valued queries."""
        if self.split is None:
            raise UsageError(
                f"'{self.collection.name}' has no labels, so there is nothing to measure"
            )
        # Features of frozen weights are on disk or worth keeping; those of new ones are not.
        encoded = encode_split(
            self.hasher,
            self.collection,
            self.split,
            cached=not self.finetuned,
            bank=bank if self.finetuned else None,
            real_queries=real_queries,
        )
        known = {item.name for item in self.skipped}
        self.skipped += [item for item in encoded.skipped if item.name not in known]
        ways = (False, True) if real_queries else (False,)
        return [measure(encoded, top=self.split.top, real_queries=way) for way in ways]


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
    device: str | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    measured: bool = False,
    bank: PixelBank | None = None,
) -> Trained:
    """Train a hasher on a data set.

    Args:
        data: a folder of class sub-folders, a CSV, a folder with list files, a named data set, or
            a collection.
        method: one of ``methods.registry()``.
        bits: length of the codes.
        options: the method's hyper-parameters that differ from its defaults.
        backbone: a name or a network; a network is copied, not changed.
        weights: the backbone's weights file, where it has no packaged weights.
        image_size: side of the images in pixels; the backbone's own by default.
        finetune: train the network with the head; by default on CUDA, and the head alone elsewhere.
        protocol: how the data is split: a name, or the split itself; by default what the data
            suggests.
        settings: how it is trained.
        device: ``cpu``, ``cuda``, …; by default CUDA where there is one.
        out: the model folder; without one nothing is written. An unfinished run in it with the same
            settings is continued.
        overwrite: replace the model that ``out`` holds.
        measured: also measure it on the split's queries and database, before it is saved, so that
            an interrupted measurement is continued like an interrupted training.
        bank: the pixels of all images of the split, decoded before, for a grid of trainings.
    """
    began = time.perf_counter()
    place = choose_device(device)
    codes.check_bits(bits)
    methods.find(method)
    collection = data if isinstance(data, Collection) else open_data(data)
    split = _split(collection, method, protocol)
    # A method may draw weights of its own: from the seed, and not the numbers the head draws.
    torch.manual_seed((settings.seed if settings else 0) + 1)
    learner = methods.create(method, bits=bits, classes=len(collection.classes), options=options)
    gradient = isinstance(learner, HashMethod)
    live = gradient and (place.type == "cuda" if finetune is None else finetune)
    settings = settings or Settings()
    if split is None and settings.validation > 0:
        raise UsageError(
            f"'{collection.name}' has no labels, so a validation slice cannot be measured; "
            "leave validation at 0"
        )
    folder = None if out is None else Path(out)
    given = copy.deepcopy(backbone) if isinstance(backbone, nn.Module) else backbone
    network = backbones.create(given, weights=weights, image_size=image_size)
    if settings.fixed_layers < 0:
        settings = dataclasses.replace(settings, fixed_layers=network.early if live else 0)
    if live:
        network.fix(settings.fixed_layers)
    identity = {
        "method": method,
        "bits": bits,
        "options": methods.resolved_options(learner),
        "backbone": network.name,
        "image_size": network.preprocessing.size,
        "finetune": live,
        "settings": dataclasses.asdict(settings),
        "data": collection.name,
        "split": split.checksum if split else None,
        # What the names above stand for: the pixels and the first weights.
        "images": collection.reader.fingerprint()[:16],
        "weights": storage.tensors_checksum(network.state_dict())[:16],
    }
    if folder is not None:
        check_resumable(folder, identity, overwrite=overwrite)

    torch.manual_seed(settings.seed)
    train_rows = split.train if split else np.arange(len(collection))
    on_device(network, place)
    rows = Extractor(network, place).of_collection(collection, train_rows)
    if len(rows.indices) < 2:
        raise FisherhashError(
            f"only {len(rows.indices)} of {len(train_rows)} training images can be read"
        )
    extracted = time.perf_counter()

    history: list[dict[str, Any]] = []
    if isinstance(learner, HashMethod):
        images = _Images(collection, rows, settings, bank)
        head, history = _train(learner, network, images, settings, place, live, folder, identity)
    else:
        labels = torch.from_numpy(collection.labels[rows.indices]).float().to(place)
        head = learner.fit(torch.from_numpy(rows.values).to(place), labels, seed=settings.seed)
    seconds = {"features": extracted - began, "training": time.perf_counter() - extracted}
    hasher = Hasher(network, head, method, collection.classes, device=place)
    trained = Trained(
        hasher, learner, collection, split, history, rows.skipped, seconds, finetuned=live
    )
    if measured and split is not None:
        logger.info("trained in %.1f s; measuring", seconds["training"])
        trained.evaluation = trained.evaluate(bank=bank)
    # After the measuring, which may meet images that cannot be read.
    hasher.details = _details(trained, identity)
    if folder is not None:
        save(trained, folder)
    return trained


def _hasher_of(function: Callable[P, Trained]) -> Callable[P, Hasher]:
    @functools.wraps(function)
    def train(*arguments: P.args, **options: P.kwargs) -> Hasher:
        return function(*arguments, **options).hasher

    train.__name__ = train.__qualname__ = "train"
    return train


train = _hasher_of(fit)
"""Train a hasher: :func:`fit`, without what training gives besides."""


def save(trained: Trained, folder: Path) -> None:
    """Write the model, the split it was trained on, and the images that were skipped."""
    files: dict[str, Callable[[Path], object]] = {**trained.hasher.files()}
    if trained.split is not None:
        files[SPLIT_FILE] = trained.split.save
    if trained.skipped:
        files[SKIPPED_FILE] = partial(write_skipped, skipped=trained.skipped)
    storage.write_files(folder, files)
    stale = {SPLIT_FILE, SKIPPED_FILE} - set(files)
    if not trained.history:
        stale.add(METRICS)
    for name in stale:
        (folder / name).unlink(missing_ok=True)
    discard_checkpoint(folder)


class _Images:
    """The training images, cut into those trained on and the validation slice."""

    def __init__(
        self,
        collection: Collection,
        rows: Rows,
        settings: Settings,
        bank: PixelBank | None,
    ) -> None:
        numbers, features = rows.indices, rows.values
        cut = round(len(numbers) * settings.validation)
        if len(numbers) - cut < 2:
            raise UsageError(
                f"a validation share of {settings.validation:g} leaves {len(numbers) - cut} of "
                f"{len(numbers)} images to train on; lower it"
            )
        order = np.array(hash_order(collection.names, numbers.tolist(), settings.seed))
        held = np.isin(numbers, order[:cut])
        self.collection = collection
        self.bank = bank
        self.numbers = numbers[~held]
        self.features = torch.from_numpy(features[~held])
        self.labels = torch.from_numpy(collection.labels[self.numbers]).float()
        self.held_numbers = numbers[held]
        self.held_features = torch.from_numpy(features[held])

    def pixels(self, network: Backbone, numbers: NDArray[np.int64]) -> Tensor:
        """Bytes (n, 3, size, size), from the bank, or decoded once and kept on disk."""
        if self.bank is not None:
            return self.bank.of(numbers)
        values, kept, skipped = pixel_rows(self.collection, numbers, network.preprocessing)
        if len(kept) < len(numbers):
            first = skipped[0]
            raise FisherhashError(
                f"{len(skipped)} images could be read before and cannot now, the first is "
                f"{first.name} ({first.reason}); run the command again when the files are back"
            )
        return torch.from_numpy(values)


def _train(
    learner: HashMethod,
    network: Backbone,
    images: _Images,
    settings: Settings,
    device: torch.device,
    live: bool,
    folder: Path | None,
    identity: dict[str, Any],
) -> tuple[Head, list[dict[str, Any]]]:
    """Train the head on frozen features and, when fine-tuning, then the whole network."""
    head = learner.head(network.features).to(device)
    labels = images.labels.to(device)
    features = images.features.to(device)
    head.start(features)
    learner.to(device)
    frozen = FrozenImages(features, labels, head)
    held = len(images.held_numbers) > 0
    if not live:
        held_features = images.held_features.to(device)
        loop = Loop(
            learner,
            frozen,
            settings,
            validate=(lambda: _validation(head, held_features, images)) if held else None,
            folder=folder,
            identity=identity,
        )
        return head, loop.run()
    if settings.head_epochs and not is_unfinished(folder):
        first = dataclasses.replace(settings, epochs=settings.head_epochs, validation=0.0)
        Loop(learner, frozen, first, title="training the head").run()
    pixels = placed(images.pixels(network, images.numbers), device)
    whole = LiveImages(pixels, labels, network, head)
    held_out = LiveImages(images.pixels(network, images.held_numbers), labels, network, head)
    loop = Loop(
        learner,
        whole,
        settings,
        validate=(lambda: _validation(head, held_out.features(), images)) if held else None,
        folder=folder,
        identity=identity,
    )
    return head, loop.run()


@torch.no_grad()
def _validation(head: Head, features: Tensor, images: _Images) -> float:
    """mAP of the held-out images, each a query against the others.

    Not against the images trained on: in a protocol's database most were never seen, and a method
    that remembers its training images would look better than it is.
    """
    was_training = head.training
    head.eval()
    packed = codes.pack(head.logits(features).cpu().numpy())
    real, ranker = (None, None) if head.hamming else (head.query(features).cpu().numpy(), head)
    labels = images.collection.labels[images.held_numbers]
    encoded = EncodedSplit(packed, packed, labels, labels, head.bits, [], real, ranker)
    value = float(measure(encoded, top=None, self_index=np.arange(len(packed))).map)
    head.train(was_training)
    return value


def _split(collection: Collection, method: str, protocol: str | Split | None) -> Split | None:
    info = methods.find(method).info
    if collection.classes:
        split = protocol if isinstance(protocol, Split) else resolve(collection, protocol)
        several = collection.labels[split.train].sum(1).max(initial=0) > 1
        if several and not info.multilabel:
            raise NotDefinedError(f"{method} is not defined for images with several labels")
        return split
    if info.supervision != "none":
        raise UsageError(
            f"'{collection.name}' has no labels and {method} learns from them. Put the images into "
            "one sub-folder a class, give a CSV (path,label), or use --method itq"
        )
    return None


def _details(trained: Trained, identity: dict[str, Any]) -> dict[str, Any]:
    split = trained.split
    data: dict[str, Any] = {"name": trained.collection.name, "images": len(trained.collection)}
    if split is not None:
        data |= {
            "protocol": split.protocol,
            "checksum": split.checksum,
            "train": len(split.train),
            "query": len(split.query),
            "database": len(split.database),
        }
    data["skipped"] = len(trained.skipped)
    settings = {"finetune": identity["finetune"], **identity["settings"]}
    return {
        "data": data,
        "options": identity["options"],
        "settings": settings if trained.history else {"seed": identity["settings"]["seed"]},
        "results": {f"seconds for {k}": round(v, 1) for k, v in trained.seconds.items()}
        | (trained.evaluation.summary() if trained.evaluation else {}),
    }
