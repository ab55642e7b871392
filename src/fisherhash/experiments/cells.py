"""One run of a grid: what decides its result, and how it is trained and measured."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
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
from fisherhash.data.splits import UNSEEN, Split, hold_out_classes, split_checksum
from fisherhash.errors import UsageError
from fisherhash.evaluation.by_code import precision_by_code
from fisherhash.evaluation.looking import neighbour_agreement
from fisherhash.experiments.significance import pack_shares
from fisherhash.model.networks import feature_rows
from fisherhash.model.torch_network import TorchNetwork
from fisherhash.system import storage
from fisherhash.system.cache import data_dirs
from fisherhash.training.fitting import fit
from fisherhash.training.measuring import EncodedSplit, encode_heads, measure
from fisherhash.training.settings import Settings
from fisherhash.training.trained import Trained

Features = NDArray[np.float32]


@dataclass(frozen=True)
class Setup:
    """What the runs of one column share: images, split and initial network.

    In JSON files it is called ``bench``.

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
        """The name of the setup in folders and tuning files."""
        parts = [self.protocol or self.name, f"seed{self.split_seed}" if self.split_seed else ""]
        parts += [self.backbone, str(self.image_size or "")]
        parts += ["finetuned" if self.finetune else "frozen", "rehearsal" if self.thin else ""]
        return "-".join(part.replace("/", "_").replace(":", "_") for part in parts if part)

    @property
    def with_all_classes(self) -> Setup:
        """The setup that trains on all classes, whose hyper-parameters this one takes."""
        protocol = None if self.protocol is None else self.protocol.removesuffix(UNSEEN)
        return dataclasses.replace(self, protocol=protocol)

    def to_json(self) -> dict[str, Any]:
        """Return it without the path of the weights: results store the checksum of the values.

        The split seed 0 is left out, too: names of runs depend on what is returned.
        """
        left_out = {"weights"} if self.split_seed else {"weights", "split_seed"}
        values = dataclasses.asdict(self)
        return {key: value for key, value in values.items() if key not in left_out}


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Attributes:
        setup: the images and the network.
        method: name of the method, or ``module:Class``.
        bits: length of the codes.
        settings: how it is trained, seed included.
        options: the method's hyper-parameters that differ from its defaults.
        measured: whether it is measured on the queries, by Hamming distance and with real-valued
            queries; a trial of a search has a validation score instead.
        title: what people read.
    """

    setup: Setup
    method: str
    bits: int
    settings: Settings
    options: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = True
    title: str = ""

    @functools.cached_property
    def file(self) -> str:
        """The path of its result inside the folder, named after all that decides the result."""
        folder, mark = "runs" if self.measured else "trials", _checksum(self.config)[:10]
        method = self.method.replace("/", "_").replace(":", "_")
        return f"{folder}/{self.setup.slug}/{method}-{self.bits}-{self.seed}-{mark}.json"

    @functools.cached_property
    def training(self) -> str:
        """A name that all runs share whose networks and heads are trained alike.

        What is made of the outputs afterwards may differ: the cut, the class step and, where there
        are more outputs than bits, the bits.
        """
        settings = self.settings.of_training
        bits = 0 if settings.outputs else self.bits
        return _checksum({**self.config, "bits": bits, "settings": settings.to_json()})

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
        known = methods.hyper_parameters(methods.find(self.method))
        defaults = {name: parameter.default for name, parameter in known.items()}
        return {
            **self.setup.to_json(),
            "data": self.setup.name,
            "method": self.method,
            "bits": self.bits,
            "options": defaults | dict(self.options),
            "settings": self.settings.to_json(),
            # Part of the names of published runs: the wording is fixed.
            "measured": "queries, and real-valued queries"
            if self.measured
            else "held-out images among themselves",
        }


class OpenSetup:
    """An opened setup: images, split and network, opened once per process.

    Args:
        setup: what to open.
        device: where the runs compute.
        trials_only: whether only the training images are needed.
    """

    def __init__(self, setup: Setup, device: torch.device, *, trials_only: bool = False) -> None:
        self.finetune = setup.finetune
        self.trials_only = trials_only
        self.device = device
        self.collection = open_data(locate(setup.data) or setup.data)
        self.split = resolve(self.collection, setup.with_all_classes.protocol, setup.split_seed)
        # What the runs are measured on, if not on the classes that they are trained on.
        self.unseen: Collection | None = None
        if setup.with_all_classes != setup:
            parts = hold_out_classes(self.collection, self.split, seed=setup.split_seed)
            self.collection, self.unseen, self.split = parts.seen, parts.unseen, parts.split
        if setup.thin:
            self.split = thinned(self.split, setup.thin)
        self.network = backbones.create(
            setup.backbone, weights=setup.weights, image_size=setup.image_size
        )
        # What the names stand for: the pixels and the initial weights.
        self.identity = {
            "protocol": self.split.to_json(),
            "images": self.collection.reader.fingerprint()[:16],
            "weights": storage.tensors_checksum(self.network.state_dict())[:16],
        }

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The indices of all images that any run of the setup may need."""
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
    def reference(self) -> tuple[Features, Features] | None:
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


def run_cells(cells: Sequence[Cell], opened: OpenSetup) -> list[dict[str, Any]]:
    """Train once and measure all cells; returns what only a run can tell of each.

    Args:
        cells: cells of one training, see :attr:`Cell.training`.
        opened: the images and the network.
    """
    cell = cells[0]
    # Before training, because it is about the network as it was.
    reference = opened.reference if cell.measured else None
    endings = [
        (one.bits, dataclasses.replace(one.settings, validation_every=one.settings.epochs))
        for one in cells
    ]
    trained = fit(
        opened.collection,
        method=cell.method,
        bits=cell.bits,
        options=cell.options,
        backbone=opened.network,
        finetune=opened.finetune,
        protocol=opened.split,
        settings=endings[0][1],
        device=str(opened.device),
        bank=opened.bank,
        fitted=False,
        endings=endings[1:],
    )
    every = [trained, *trained.others]
    rows: list[dict[str, Any]] = [
        {"options": methods.resolved_options(one.method), "features_by": one.features_by}
        for one in every
    ]
    began = time.perf_counter()
    if cell.measured:
        if opened.unseen is not None:
            every = [dataclasses.replace(one, collection=opened.unseen) for one in every]
        ended = [(one, own.settings) for one, own in zip(every, cells, strict=True)]
        measured = measure_rankings(ended, opened.bank, reference=reference)
        rows = [row | found for row, found in zip(rows, measured, strict=True)]
    seconds = trained.seconds | {"measuring": time.perf_counter() - began}
    for row, one in zip(rows, every, strict=True):
        last = one.history[-1] if one.history else None
        if not cell.measured and last is not None:
            row["validation"] = last.pop("validation", None) or {"plain": last["validation_map"]}
        row["seconds"] = {name: round(value, 3) for name, value in seconds.items()}
        row["history"] = last
    return rows


def measure_rankings(
    trainings: Sequence[tuple[Trained, Settings]],
    bank: PixelBank | None = None,
    *,
    reference: tuple[Features, Features] | None = None,
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
    heads = []
    for trained, settings in trainings:
        step = trained.step if settings.step_weight > 0 else None
        if step is not None:
            step = step.with_step(settings.step_weight, settings.step_sharpness).finished()
        heads.append((trained.plain_head, step))
    wanted = {head: True for pair in heads for head in pair if head is not None}
    live, bank = first.finetuned, bank if first.finetuned else None
    encoded = encode_heads(
        first.hasher, first.collection, first.split, wanted, cached=not live, bank=bank
    )
    rows = {one.head: _measured(one, first.split.top, reference) for one in encoded}
    return [
        rows[plain] | ({} if step is None else {"class_step": rows[step]}) for plain, step in heads
    ]


def _measured(
    encoded: EncodedSplit, top: int | None, reference: tuple[Features, Features] | None
) -> dict[str, Any]:
    """Measure one head in both rankings."""
    head, labels = encoded.head, (encoded.query_labels, encoded.database_labels)
    by_codes = measure(encoded, top=top)
    found = by_codes.to_json()
    if reference is not None and head.hamming:
        codes = encoded.query_codes, encoded.database_codes
        agreement = neighbour_agreement(*codes, *reference, *labels, bits=head.bits)
        found["agreement"] = agreement.to_json()
    found["average_precision"] = pack_shares(by_codes.average_precision)
    if not head.hamming:
        return {"evaluation": found}
    if encoded.real_queries is None:
        raise UsageError("the split was encoded without real-valued queries")
    distinct, code_of = np.unique(encoded.database_codes, axis=0, return_inverse=True)
    scores = precision_by_code(
        map(torch.from_numpy, head.as_trained().distances(encoded.real_queries, distinct)),
        code_of.reshape(-1),
        *labels,
        top=None if top is None else min(top, len(encoded.database_codes)),
        device=torch.device(encoded.device),
    )
    real = {
        **scores.means,
        "top": scores.top,
        "ranking": f"distance of the {head.kind} head",
        "average_precision": pack_shares(scores.expected),
    }
    return {"evaluation": found, "real_queries": real}


def locate(name: str) -> str | Path | None:
    """Find a data set: return its name, its path, a folder of that name with lists, or None."""
    if name in NAMED:
        with contextlib.suppress(UsageError):
            open_data(name)
            return name
        return None
    paths = [Path(name), *(folder / name for folder in [*data_dirs(), Path.cwd()])]
    return next((path for path in paths if path.is_file() or is_list_folder(path)), None)


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


def _checksum(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
