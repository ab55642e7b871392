"""A training before it begins: the method is made, every setting is checked, the folder is free."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
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
from fisherhash.methods import HashMethod, MethodInfo
from fisherhash.methods._nested import nested as nested_method
from fisherhash.methods.base import AnyMethod
from fisherhash.system.memory import available_memory
from fisherhash.training.checkpoints import check_resumable, unfinished_identity
from fisherhash.training.distributed import Ranks, join
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


@dataclass(kw_only=True)
class Job:
    """A training whose data is open: its method and its network are made, its settings are checked.

    Attributes:
        collection: the images, or the names and labels of vectors.
        train: (n,) the numbers of those that are trained on.
        split: how they are split; None without labels, and for vectors.
        make_network: makes the network.
        method: the name that the method was asked for by.
        bits: length of the codes.
        options: the method's hyper-parameters that were given.
        given: training settings, of which some were given.
        recipe: what fills up the options and settings that were not given, for DFH.
        nested: shorter lengths to train as well.
        finetune: train the network too; by default on CUDA.
        device: the name that the user chose; by default CUDA where there is a GPU.
        out: the model folder; None to write nothing.
        overwrite: replace what the folder holds.
        endings: bits and settings of other hashers that the same training ends in.
        ranks: the processes that train together.
        place: the device where this one trains.
        live: whether the network is trained too.
        settings: how the method is trained: as was given, then as a recipe says.
        learner: the method.
        network: images to features.
        folder: the model folder as a path.
        begun: the identity of the unfinished run in the folder that is continued; empty if none is.
        identity: what must match before an unfinished run in the folder is continued.
    """

    collection: Collection
    train: NDArray[np.int64]
    split: Split | None
    make_network: Callable[[], Backbone]
    method: str
    bits: int
    options: Mapping[str, Any] | None
    given: Settings
    recipe: RecipeName | None
    nested: Sequence[int] = ()
    finetune: bool | None
    device: str | None
    out: str | os.PathLike[str] | None
    overwrite: bool
    endings: Sequence[tuple[int, Settings]] = ()
    ranks: Ranks = field(init=False)
    place: torch.device = field(init=False)
    live: bool = field(init=False)
    settings: Settings = field(init=False)
    learner: AnyMethod = field(init=False)
    network: Backbone = field(init=False)
    folder: Path | None = field(init=False)
    begun: dict[str, Any] = field(init=False)
    identity: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks, self.place = join(self.device)
        kind = methods.find(self.method)
        self.ranks.check_trainable(kind)
        wanted = self.place.type == "cuda" if self.finetune is None else self.finetune
        self.live = wanted and issubclass(kind, HashMethod)
        self.learner = self._make_learner(kind.info)
        self.network = self.make_network()
        self._check_ends()
        if self.settings.fixed_layers < 0:
            fixed = self.network.early if self.live else 0
            self.settings = dataclasses.replace(self.settings, fixed_layers=fixed)
        if self.live:
            self.network.fix(self.settings.fixed_layers)
        self.folder = None if self.out is None else Path(self.out)
        self.begun = {}
        if self.folder is not None and not self.overwrite:
            self.begun = self.ranks.on_first(partial(unfinished_identity, self.folder))

    def _make_learner(self, info: MethodInfo) -> AnyMethod:
        settings, options = self.given, self.options or {}
        labels = self.collection.labels[self.train]
        classes, several = labels.shape[1], bool(labels.sum(1).max(initial=0) > 1)
        if several and not info.multilabel:
            raise NotDefinedError(f"{self.method} is not defined for images with several labels")
        if not classes and settings.validation > 0:
            raise UsageError(
                "the data has no labels, so a validation slice cannot be measured; leave "
                "validation at 0"
            )
        if self.recipe is not None and self.method == "dfh":
            if self.nested:  # the bits must be the outputs themselves
                settings = settings.but(outputs=settings.outputs)
            about = {"finetune": self.live, "classes": classes, "several": several}
            recipe = find_recipe(self.recipe, bits=self.bits, **about)
            options, settings = apply_recipe(recipe, options, settings)
            logger.info("%s", recipe)
        if self.nested and settings.outputs:
            raise UsageError(
                "bits that are cut from more outputs are not nested; leave outputs at 0"
            )
        self.settings = settings
        # A method may draw weights of its own: from the seed, but not the numbers the head draws.
        torch.manual_seed(settings.seed + 1)
        if self.nested:
            lengths = {"bits": self.bits, "classes": classes}
            return nested_method(self.method, self.nested, options=options, **lengths)
        outputs = settings.outputs or self.bits
        return methods.create(self.method, bits=outputs, classes=classes, options=options)

    def _check_ends(self) -> None:
        """Refuse settings that a method has no use for, and endings that it cannot have.

        What one method has no use for may suit another, so a comparison goes on: it is not defined.
        """
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

    def identify(self, **others: Any) -> None:
        """Note what decides the result, and refuse a folder in use by another training.

        Args:
            others: what is particular to the data.
        """
        self.identity = {
            "method": self.method,
            "bits": self.bits,
            "options": methods.resolved_options(self.learner),
            "finetune": self.live,
            "settings": self.settings.to_json(),
            "data": self.collection.name,
            **others,
        }
        if self.folder is not None:
            about = (self.folder, self.identity)
            self.ranks.on_first(partial(check_resumable, *about, overwrite=self.overwrite))


def choose_stream(job: Job, stream: bool | None, *, banked: bool) -> bool:
    """Decide whether training images are streamed, and say so.

    An unfinished run continues as it began, whatever memory is free now.

    Args:
        job: the training.
        stream: what the user chose; None to decide by the memory.
        banked: whether all pixels are in memory anyway.
    """
    if banked or not isinstance(job.learner, HashMethod):
        if stream:
            raise UsageError(
                "only methods that are trained by gradient can stream their images; leave out "
                "--stream"
            )
        return False
    size, images = job.network.preprocessing.size, len(job.train)
    total = images * (4 * job.network.features + (3 * size * size if job.live else 0))
    free = available_memory()
    if stream is None and job.begun:
        stream = bool(job.begun.get(STREAM, False))
    if stream is None:
        stream = free is not None and total > SHARE * free
    what = f"{images:,} training images ({total / 1e9:,.1f} GB decoded)"
    if stream:
        logger.info("%s are read from the disk in shuffled blocks; --no-stream loads them", what)
    elif free is not None and total > NOTICED * free:
        logger.info("%s are held in memory; --stream reads them from the disk", what)
    return stream
