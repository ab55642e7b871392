"""What a grid is made of: benches (images, split, network), and cells (one run each)."""

from __future__ import annotations

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
from fisherhash.backbones import Backbone
from fisherhash.data.lists import is_list_folder
from fisherhash.data.pixels import PixelBank, pixel_rows
from fisherhash.data.protocols import resolve
from fisherhash.data.sources import NAMED, Collection, open_data
from fisherhash.data.splits import Split, split_checksum
from fisherhash.errors import UsageError
from fisherhash.model.runtime import TorchRuntime, feature_rows, on_device
from fisherhash.system import storage
from fisherhash.system.cache import data_dirs
from fisherhash.training.loop import Settings


@dataclass(frozen=True)
class Bench:
    """What the runs of one column share: the images, the split and the network they start from.

    Attributes:
        data: name or path of the data set.
        protocol: how it is split; None for what the data suggests.
        backbone: name of the network.
        weights: its weights file.
        image_size: side of the images; None for the backbone's own.
        finetune: train the whole network, not only the head on frozen features.
        thin: at most so many images in each part, for a rehearsal; 0 for all.
    """

    data: str
    protocol: str | None = None
    backbone: str = backbones.DEFAULT
    weights: str | None = None
    image_size: int | None = None
    finetune: bool = False
    thin: int = 0

    @property
    def slug(self) -> str:
        """Its name in folders and tuning files."""
        parts = [self.protocol or Path(self.data).name, self.backbone, str(self.image_size or "")]
        parts += ["finetuned" if self.finetune else "frozen", "rehearsal" if self.thin else ""]
        return "-".join(part.replace("/", "_").replace(":", "_") for part in parts if part)


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Attributes:
        bench: where it runs.
        method: what is trained.
        bits: length of the codes.
        settings: how, with the seed.
        options: the method's hyper-parameters that differ from its defaults.
        measured: measure it on the queries; a trial of a tuning is not, it has its validation mAP.
        real_queries: measure it with real-valued queries too.
        title: what people read.
        file: where its result is kept, inside the folder; by default named after its content.
    """

    bench: Bench
    method: str
    bits: int
    settings: Settings
    options: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = True
    real_queries: bool = False
    title: str = ""
    file: str = ""

    def __post_init__(self) -> None:
        if not self.title:
            object.__setattr__(self, "title", self.method)
        if not self.file:
            text = json.dumps(self.config(), sort_keys=True)
            mark = hashlib.sha256(text.encode()).hexdigest()[:10]
            folder = "runs" if self.measured else "trials"
            name = f"{self.method}-{self.bits}-{self.seed}-{mark}.json"
            object.__setattr__(self, "file", f"{folder}/{self.bench.slug}/{name}")

    @property
    def seed(self) -> int:
        """The seed of its settings."""
        return self.settings.seed

    def config(self) -> dict[str, Any]:
        """All that decides its result, as JSON."""
        bench = dataclasses.asdict(self.bench)
        del bench["weights"]  # a path; the row holds the checksum of the values
        known = methods.hyper_parameters(methods.find(self.method))
        defaults = {name: parameter.default for name, parameter in known.items()}
        measured = "queries" if self.measured else "held-out images among themselves"
        if self.measured and self.real_queries:
            measured = "queries, and real-valued queries"
        return bench | {
            "method": self.method,
            "bits": self.bits,
            "options": defaults | dict(self.options),
            "settings": dataclasses.asdict(self.settings),
            "measured": measured,
        }


class Stage:
    """An opened bench: images, split and network, once a process."""

    def __init__(
        self,
        collection: Collection,
        split: Split,
        network: Backbone,
        *,
        finetune: bool,
        device: torch.device,
    ) -> None:
        self.collection = collection
        self.split = split
        self.network = network
        self.finetune = finetune
        self.device = device
        # What the names stand for: the pixels and the first weights.
        self.identity = {
            "protocol": split.to_json(),
            "images": collection.reader.fingerprint()[:16],
            "weights": storage.tensors_checksum(network.state_dict())[:16],
        }

    @classmethod
    def open(cls, bench: Bench, device: torch.device) -> Stage:
        """Open what a bench names."""
        collection = open_data(locate(bench.data) or bench.data)
        split = resolve(collection, bench.protocol)
        network = backbones.create(
            bench.backbone, weights=bench.weights, image_size=bench.image_size
        )
        if bench.thin:
            split = thinned(split, bench.thin)
        return cls(collection, split, network, finetune=bench.finetune, device=device)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The images any run of the bench may ask for."""
        return np.unique(np.concatenate([self.split.train, self.split.query, self.split.database]))

    @functools.cached_property
    def bank(self) -> PixelBank | None:
        """Their pixels, when the network that reads them is trained."""
        if not self.finetune:
            return None
        return PixelBank(self.collection, self.numbers, self.network.preprocessing, self.device)

    def prepare(self) -> None:
        """Fill the caches on disk that every run reads, so that processes do not do it twice."""
        wanted = self.split.train if self.finetune else self.numbers
        network = on_device(self.network, self.device)
        feature_rows(TorchRuntime(network, self.device), self.collection, wanted)
        if self.finetune:
            pixel_rows(self.collection, self.numbers, self.network.preprocessing)


def locate(name: str) -> str | Path | None:
    """Where a data set is: its name, a path, or a folder of that name with list files; or None."""
    if name in NAMED:
        try:
            open_data(name)
        except UsageError:
            return None
        return name
    places = [Path(name), *(place / name for place in [*data_dirs(), Path.cwd()])]
    return next((place for place in places if place.is_file() or is_list_folder(place)), None)


def thinned(split: Split, most: int) -> Split:
    """A split with at most so many images in each part, evenly taken, under its own checksum."""
    parts = {
        name: part[:: max(1, -(-len(part) // most))]
        for name, part in (
            ("train", split.train),
            ("query", split.query),
            ("database", split.database),
        )
    }
    checksum = split_checksum(split.protocol, split.seed, split.names, **parts)
    notes = (*split.notes, f"a rehearsal on at most {most} images a part")
    return dataclasses.replace(split, **parts, checksum=checksum, notes=notes, agreed=False)
