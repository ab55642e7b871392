"""A training before it begins: data is opened, the method is made, every setting is checked."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fisherhash import methods
from fisherhash.backbones import Backbone
from fisherhash.data.protocols import Split
from fisherhash.data.sources import Collection
from fisherhash.errors import NotDefinedError, UsageError
from fisherhash.methods import HashMethod
from fisherhash.methods._nested import nested as nested_method
from fisherhash.methods.base import AnyMethod
from fisherhash.model.folder import is_unfinished
from fisherhash.system.memory import available_memory
from fisherhash.training.checkpoints import check_resumable, unfinished_identity
from fisherhash.training.distributed import Ranks
from fisherhash.training.finishing import check_cut
from fisherhash.training.recipes import RecipeName, apply_recipe, find_recipe
from fisherhash.training.settings import Settings

logger = logging.getLogger(__name__)

SHARE = 0.5
"""The share of the available memory that training images may take."""
NOTICED = 0.1
"""The share from which on it is said that they are held in memory."""
STREAM = "stream"
"""The entry of a run's identity if its images are streamed: statistics may be of some of them."""
FEATURES_BY = "features_by"
"""The entry of a run's identity if ONNX Runtime computed its features."""

Endings = Sequence[tuple[int, Settings]]


@dataclass
class Job:
    """A training whose data is open and whose settings are checked.

    Attributes:
        method: the name that the method was asked for by.
        bits: length of the codes.
        learner: the method.
        settings: how it is trained.
        collection: the images, or the names and labels of vectors.
        split: how they are split; None without labels, and for vectors.
        network: images to features.
        live: whether the network is trained too.
        ranks: the processes that train together.
        device: where this one trains.
        folder: the model folder; None to write nothing.
        endings: bits and settings of other hashers that the same training ends in.
        identity: what must match before an unfinished run in the folder is continued.
    """

    method: str
    bits: int
    learner: AnyMethod
    settings: Settings
    collection: Collection
    split: Split | None
    network: Backbone
    live: bool
    ranks: Ranks
    device: torch.device
    folder: Path | None
    endings: Endings = ()
    identity: dict[str, Any] = field(default_factory=dict)

    def identify(self, **others: Any) -> None:
        """Note what decides the result of this training, beside what is particular to its data."""
        self.identity = {
            "method": self.method,
            "bits": self.bits,
            "options": methods.resolved_options(self.learner),
            "finetune": self.live,
            "settings": self.settings.to_json(),
            "data": self.collection.name,
            **others,
        }

    def check(self, *, overwrite: bool) -> None:
        """Refuse a folder that is in use, and settings that a method has no use for.

        What one method has no use for may suit another, so a comparison goes on: it is not defined.
        """
        if (folder := self.folder) is not None:
            same = partial(check_resumable, folder, self.identity, overwrite=overwrite)
            self.ranks.on_first(same)
        name, settings = self.learner.info.name, self.settings
        if settings.classifier_weight and not self.live:
            raise UsageError(
                "classifier_weight is for a network that is trained; use --finetune, or leave it "
                "at 0"
            )
        if not isinstance(self.learner, HashMethod):
            if settings.outputs or settings.step_weight or self.endings:
                raise NotDefinedError(
                    f"{name} is not trained by gradient; it takes neither outputs nor a class step"
                )
            return
        for bits, other in [(self.bits, settings), *self.endings]:
            if other.of_training != settings.of_training:
                raise UsageError(
                    "another ending of a training may differ in its bits, its cut and its class "
                    "step"
                )
            if bits != self.bits and not settings.outputs:
                raise UsageError(
                    f"{self.bits} outputs cannot end as {bits} bits; set outputs, and the bits "
                    "are cut"
                )
            if other.outputs:
                check_cut(name, self.learner.head(self.network.features), bits, other)


def make_learner(
    method: str,
    *,
    bits: int,
    options: Mapping[str, Any],
    settings: Settings,
    recipe: RecipeName | None,
    nested: Sequence[int],
    labels: NDArray[np.uint8],
    live: bool,
) -> tuple[AnyMethod, Settings]:
    """Return a method, and how it is trained: as was given, then as a recipe says.

    Args:
        method: its name.
        bits: length of the codes.
        options: hyper-parameters that were given.
        settings: training settings, of which some were given.
        recipe: what fills up the others for DFH; None for their defaults.
        nested: shorter lengths to train as well.
        labels: (n, classes) of what it is trained on.
        live: whether the network is trained too.
    """
    classes, several = labels.shape[1], has_several(labels)
    if several and not methods.find(method).info.multilabel:
        raise NotDefinedError(f"{method} is not defined for images with several labels")
    if not classes and settings.validation > 0:
        raise UsageError(
            "the data has no labels, so a validation slice cannot be measured; leave validation "
            "at 0"
        )
    if recipe is not None and method == "dfh":
        if nested:  # the bits must be the outputs themselves
            settings = settings.but(outputs=settings.outputs)
        chosen = find_recipe(recipe, finetune=live, classes=classes, several=several, bits=bits)
        options, settings = apply_recipe(chosen, options, settings)
        logger.info("%s", chosen)
    if nested and settings.outputs:
        raise UsageError("bits that are cut from more outputs are not nested; leave outputs at 0")
    # A method may draw weights of its own: from the seed, but not the numbers the head draws.
    torch.manual_seed(settings.seed + 1)
    if nested:
        return nested_method(method, nested, bits=bits, classes=classes, options=options), settings
    outputs = settings.outputs or bits
    return methods.create(method, bits=outputs, classes=classes, options=options), settings


def has_several(labels: NDArray[np.uint8]) -> bool:
    """Return whether an image with these labels (n, classes) has several."""
    return bool(labels.sum(1).max(initial=0) > 1)


def choose_stream(
    stream: bool | None, *, images: int, row_bytes: int, folder: Path | None, possible: bool
) -> bool:
    """Decide whether training images are streamed, and say so.

    An unfinished run continues as it began, whatever memory is free now.

    Args:
        stream: what the user chose; None to decide by the memory.
        images: how many there are.
        row_bytes: bytes of one image's pixels and features.
        folder: the model folder.
        possible: whether the method can be trained on images that are not in memory.
    """
    if not possible:
        if stream:
            raise UsageError(
                "only methods that are trained by gradient can stream their images; leave out "
                "--stream"
            )
        return False
    total, free = images * row_bytes, available_memory()
    if stream is None and folder is not None and is_unfinished(folder):
        stream = bool(unfinished_identity(folder).get(STREAM, False))
    if stream is None:
        stream = free is not None and total > SHARE * free
    size = f"{images:,} training images ({total / 1e9:,.1f} GB decoded)"
    if stream:
        logger.info("%s are read from the disk in shuffled blocks; --no-stream loads them", size)
    elif free is not None and total > NOTICED * free:
        logger.info("%s are held in memory; --stream reads them from the disk", size)
    return stream


def begun_features(folder: Path | None) -> str | None:
    """Return what computed the features of the unfinished run in a folder; empty for torch.

    None if there is no such run. A run goes on with the features that it began with.
    """
    if folder is None or not is_unfinished(folder):
        return None
    return str(unfinished_identity(folder).get(FEATURES_BY, ""))
