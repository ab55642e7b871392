"""Splits by class: train on some classes, query and search among others.

A method that stores the class of an image in its code is perfect as long as all classes were known
in training, and useless for images of any other kind. Sablayrolles et al. ("How should we evaluate
supervised hashing?", ICASSP 2017) therefore hold out a quarter of the classes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.collection import Collection
from fisherhash.data.splits import SPLIT_PARTS, Split, hash_order, split_checksum
from fisherhash.errors import UsageError

UNSEEN = "+unseen"
"""Ends the name of a protocol whose classes are split too."""
UNSEEN_SHARE = 0.25
LEAST_TOP_UNSEEN = 10


@dataclass(frozen=True)
class UnseenClasses:
    """A collection whose classes are split.

    Attributes:
        seen: the collection with the labels to train with.
        unseen: the same images with the labels of the classes that were held out.
        split: training images of no held-out class; queries and a database of held-out classes.
    """

    seen: Collection
    unseen: Collection
    split: Split


def hold_out_classes(
    collection: Collection, split: Split, *, share: float = UNSEEN_SHARE, seed: int = 0
) -> UnseenClasses:
    """Hold out some classes of a split from its training.

    An image that has a label of a held-out class is never trained on; the other labels that it may
    have do not count as similar in the measurement. The K of the metric is the same share of the
    database as before.

    Args:
        collection: the images.
        split: how they are split with all classes.
        share: of the classes that are held out; at least two are, and two are trained on.
        seed: of the draw, which depends on the names of the classes only.

    Raises:
        UsageError: there are fewer than four classes, or a part of the split becomes empty.
    """
    count = len(collection.classes)
    if count < 4:
        raise UsageError(
            f"'{collection.name}' has {count} classes; four are needed to hold out two of them"
        )
    held = min(max(2, int(share * count + 0.5)), count - 2)
    order = hash_order(collection.classes, range(count), seed)
    unseen, seen = np.array(sorted(order[:held])), np.array(sorted(order[held:]))
    new: NDArray[np.bool_] = collection.labels[:, unseen].sum(axis=1) > 0
    known: NDArray[np.bool_] = (collection.labels[:, seen].sum(axis=1) > 0) & ~new
    wanted = {"train": known, "query": new, "database": new}
    parts: dict[str, NDArray[np.int64]] = {}
    for name in SPLIT_PARTS:
        part = getattr(split, name)
        parts[name] = part[wanted[name][part]]
        if not len(parts[name]):
            raise UsageError(f"no {name} image of '{collection.name}' is left without some classes")
    top = split.top
    if top is not None:
        kept = len(parts["database"]) / len(split.database)
        top = max(min(LEAST_TOP_UNSEEN, len(parts["database"])), round(top * kept))
    protocol = split.protocol + UNSEEN
    names = ", ".join(collection.classes[i] for i in unseen)
    reduced = dataclasses.replace(
        split,
        protocol=protocol,
        top=top,
        checksum=split_checksum(protocol, split.seed, collection.names, parts),
        notes=(*split.notes, f"{held} of {count} classes are held out (seed {seed}): {names}"),
        agreed=None,
        **parts,
    )
    return UnseenClasses(_only(collection, seen), _only(collection, unseen), reduced)


def _only(collection: Collection, classes: NDArray[np.int64]) -> Collection:
    """The same images with the labels of some classes."""
    described = collection.descriptions
    return dataclasses.replace(
        collection,
        labels=np.ascontiguousarray(collection.labels[:, classes]),
        classes=tuple(collection.classes[i] for i in classes),
        descriptions=tuple(described[i] for i in classes) if described else (),
    )
