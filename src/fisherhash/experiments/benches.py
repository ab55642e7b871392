"""The parts of a grid: benches (images, split and network) and cells (one run each)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fisherhash import backbones, methods
from fisherhash.data.collection import Collection
from fisherhash.data.computing import Rows
from fisherhash.data.lists import is_list_folder
from fisherhash.data.pixels import PixelBank, pixel_rows
from fisherhash.data.protocols import resolve
from fisherhash.data.sources import NAMED, open_data
from fisherhash.data.splits import Split, split_checksum
from fisherhash.data.unseen import UNSEEN, hold_out_classes
from fisherhash.errors import UsageError
from fisherhash.model.networks import feature_rows
from fisherhash.model.torch_network import TorchNetwork
from fisherhash.system import storage
from fisherhash.system.cache import data_dirs
from fisherhash.training.settings import Settings


@dataclass(frozen=True)
class Bench:
    """What the runs of one column share: images, split and initial network.

    Attributes:
        data: name or path of the data set.
        protocol: name of the split; None for the one the data suggests. Ends in ``+unseen`` where
            classes are held out from the training.
        backbone: name of the network.
        weights: the network's weights file.
        image_size: side of the images in pixels; None for the backbone's own.
        finetune: whether the whole network is trained, or only the head on frozen features.
        thin: the largest number of images per part, for a rehearsal; 0 for all.
        split_seed: seed of the split, where the protocol draws one.
    """

    data: str
    protocol: str | None = None
    backbone: str = backbones.DEFAULT
    weights: str | None = None
    image_size: int | None = None
    finetune: bool = False
    thin: int = 0
    split_seed: int = 0

    @property
    def name(self) -> str:
        """The name of the data set, without its folder."""
        return Path(self.data).name

    @property
    def slug(self) -> str:
        """The name of the bench in folders and tuning files."""
        parts = [self.protocol or self.name, f"seed{self.split_seed}" if self.split_seed else ""]
        parts += [self.backbone, str(self.image_size or "")]
        parts += ["finetuned" if self.finetune else "frozen", "rehearsal" if self.thin else ""]
        return "-".join(part.replace("/", "_").replace(":", "_") for part in parts if part)

    @property
    def with_all_classes(self) -> Bench:
        """The bench that trains on all classes, whose hyper-parameters this one takes."""
        protocol = None if self.protocol is None else self.protocol.removesuffix(UNSEEN)
        return dataclasses.replace(self, protocol=protocol)

    def to_json(self) -> dict[str, Any]:
        """Return it without the path of the weights: results store the checksum of the values.

        Results from before there were other seeds do not name the first one.
        """
        left_out = {"weights"} if self.split_seed else {"weights", "split_seed"}
        return {
            key: value for key, value in dataclasses.asdict(self).items() if key not in left_out
        }


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Attributes:
        bench: the images and the network.
        method: name of the method.
        bits: length of the codes.
        settings: how it is trained, seed included.
        options: the method's hyper-parameters that differ from its defaults.
        measured: whether it is measured on the queries, by Hamming distance and with real-valued
            queries; a trial of a search has a validation score instead.
        title: what people read.
    """

    bench: Bench
    method: str
    bits: int
    settings: Settings
    options: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = True
    title: str = ""

    @functools.cached_property
    def file(self) -> str:
        """The path of its result inside the folder, named after all that decides the result."""
        text = json.dumps(self.config, sort_keys=True)
        mark = hashlib.sha256(text.encode()).hexdigest()[:10]
        folder = "runs" if self.measured else "trials"
        return f"{folder}/{self.bench.slug}/{self.method}-{self.bits}-{self.seed}-{mark}.json"

    @functools.cached_property
    def training(self) -> str:
        """A name that all runs share whose networks and heads are trained alike.

        What is made of the outputs afterwards may differ: the cut, the class step and, where there
        are more outputs than bits, the bits.
        """
        settings = self.settings.of_training
        bits = 0 if settings.outputs else self.bits
        config = {**self.config, "bits": bits, "settings": settings.to_json()}
        return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()

    @property
    def seed(self) -> int:
        """The seed of its settings."""
        return self.settings.seed

    @property
    def full_title(self) -> str:
        """Its title with the code length and the seed."""
        return f"{self.title} {self.bits} bits, seed {self.seed}"

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """All that decides its result, as JSON."""
        method = methods.find(self.method)
        known = methods.hyper_parameters(method)
        defaults = {name: parameter.default for name, parameter in known.items()}
        return {
            **self.bench.to_json(),
            "data": self.bench.name,
            "method": self.method,
            "bits": self.bits,
            "options": defaults | dict(self.options),
            "settings": self.settings.to_json(),
            # Part of the names of published runs: the wording is fixed.
            "measured": "queries, and real-valued queries"
            if self.measured
            else "held-out images among themselves",
        }


class OpenBench:
    """An opened bench: images, split and network, opened once per process.

    Args:
        bench: what to open.
        device: where the runs compute.
        trials_only: whether only the training images are needed.
    """

    def __init__(self, bench: Bench, device: torch.device, *, trials_only: bool = False) -> None:
        self.finetune = bench.finetune
        self.trials_only = trials_only
        self.device = device
        self.collection = open_data(locate(bench.data) or bench.data)
        self.split = resolve(self.collection, bench.with_all_classes.protocol, bench.split_seed)
        # What the runs are measured on, if not on the classes that they are trained on.
        self.unseen: Collection | None = None
        if bench.with_all_classes != bench:
            parts = hold_out_classes(self.collection, self.split, seed=bench.split_seed)
            self.collection, self.unseen, self.split = parts.seen, parts.unseen, parts.split
        if bench.thin:
            self.split = thinned(self.split, bench.thin)
        self.network = backbones.create(
            bench.backbone, weights=bench.weights, image_size=bench.image_size
        )
        # What the names stand for: the pixels and the initial weights.
        self.identity = {
            "protocol": self.split.to_json(),
            "images": self.collection.reader.fingerprint()[:16],
            "weights": storage.tensors_checksum(self.network.state_dict())[:16],
        }

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The indices of all images that any run of the bench may need."""
        if self.trials_only:
            return self.split.train
        return np.unique(np.concatenate([self.split.train, self.split.query, self.split.database]))

    @functools.cached_property
    def bank(self) -> PixelBank | None:
        """The pixels of those images, when the whole network is trained."""
        if not self.finetune:
            return None
        return PixelBank(self.collection, self.numbers, self.network.preprocessing, self.device)

    @functools.cached_property
    def reference(self) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """Features of queries and database by the initial network, where classes are held out."""
        if self.unseen is None or self.trials_only:
            return None
        parts = (self.split.query, self.split.database)
        query, database = (self.features(part).values for part in parts)
        # Images that cannot be read are left out of both, and the rows no longer correspond.
        whole = len(query) == len(self.split.query) and len(database) == len(self.split.database)
        return (query, database) if whole else None

    def features(self, wanted: NDArray[np.int64]) -> Rows:
        """Features of images by the initial network, computed once and stored on disk."""
        network = TorchNetwork(self.network, self.device, via_onnx=True)
        return feature_rows(network, self.collection, wanted)

    def prepare(self) -> None:
        """Fill the caches that every run reads, so that processes do not fill them twice."""
        self.features(self.split.train if self.finetune else self.numbers)
        _ = self.reference
        if self.finetune:
            pixel_rows(self.collection, self.numbers, self.network.preprocessing)


def locate(name: str) -> str | Path | None:
    """Find a data set: return its name, its path, a folder of that name with lists, or None."""
    if name in NAMED:
        with contextlib.suppress(UsageError):
            open_data(name)
            return name
        return None
    places = [Path(name), *(place / name for place in [*data_dirs(), Path.cwd()])]
    return next((place for place in places if place.is_file() or is_list_folder(place)), None)


def thinned(split: Split, most: int) -> Split:
    """Return a split of at most ``most`` images per part, evenly spaced, with its own checksum."""
    parts = {
        name: part[:: max(1, -(-len(part) // most))]
        for name in ("train", "query", "database")
        for part in [getattr(split, name)]
    }
    checksum = split_checksum(split.protocol, split.seed, split.names, parts)
    notes = (*split.notes, f"a rehearsal on at most {most} images per part")
    return dataclasses.replace(split, **parts, checksum=checksum, notes=notes, agreed=False)
