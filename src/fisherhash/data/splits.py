"""A split of a collection: three lists of images, with a checksum over their names.

A split can also be by class: train on some classes, query and search among others. A method that
stores the class of an image in its code is perfect as long as all classes were known in training,
and useless for images of any other kind. Sablayrolles et al. ("How should we evaluate supervised
hashing?", ICASSP 2017) therefore hold out a quarter of the classes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.data.collection import Collection
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.system.storage import write_file

Indices = NDArray[np.int64]
SPLIT_PARTS = ("train", "query", "database")
UNSEEN = "+unseen"
"""Ends the name of a protocol whose classes are split too."""
UNSEEN_SHARE = 0.25
LEAST_TOP_UNSEEN = 10


@dataclass(frozen=True)
class Split:
    """The three parts of a collection under a protocol.

    Attributes:
        protocol: name of the protocol.
        seed: of the draw; None if nothing is drawn.
        train: numbers of the training images.
        query: numbers of the query images.
        database: numbers of the images to search; no query is among them.
        top: the K of mean average precision; None for the whole database.
        checksum: SHA-256 over the protocol, the seed and the names in their order.
        notes: what was left out, and how the lists differ from the agreed ones.
        agreed: whether these are the agreed lists of the protocol; None if the package has no
            checksum to compare with.
        names: names of all images of the collection.
    """

    protocol: str
    seed: int | None
    train: Indices
    query: Indices
    database: Indices
    top: int | None
    checksum: str
    notes: tuple[str, ...] = ()
    agreed: bool | None = None
    names: Sequence[str] = field(default=(), repr=False)

    def __str__(self) -> str:
        sizes = ", ".join(f"{len(getattr(self, part)):,} {part}" for part in SPLIT_PARTS)
        seed = "" if self.seed is None else f", seed {self.seed}"
        return f"{self.protocol}{seed}: {sizes}, checksum {self.checksum[:16]}"

    def to_json(self) -> dict[str, Any]:
        """Describe the split without its lists: name, seed, sizes, metric, checksum and notes."""
        return {
            "protocol": self.protocol,
            "seed": self.seed,
            **{part: len(getattr(self, part)) for part in SPLIT_PARTS},
            "top": self.top,
            "checksum": self.checksum,
            "agreed": self.agreed,
            "notes": list(self.notes),
        }

    def dump(self) -> str:
        """The split with the names of its images as JSON."""
        content = self.to_json()
        for part in SPLIT_PARTS:
            content[part] = [self.names[i] for i in getattr(self, part)]
        if np.array_equal(self.train, self.database):
            content["train"] = "database"
        return json.dumps(content, ensure_ascii=True, indent=0) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the split to a file."""
        write_file(path, self.dump())

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], collection: Collection, *, drop_missing: bool = False
    ) -> Split:
        """Read a split back for ``collection``, which may hold more images than it names.

        Args:
            path: where it was saved.
            collection: the images, found by their names.
            drop_missing: leave out, with a note, images that the collection no longer holds.

        Raises:
            UsageError: the file cannot be read, or names images that are missing.
            FisherhashError: the file is damaged or was changed.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            lists = {part: content[part] for part in SPLIT_PARTS}
            protocol, seed, checksum = content["protocol"], content["seed"], content["checksum"]
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            reason = f"is damaged or not a split of fisherhash ({error})"
            raise FisherhashError(f"{path} {reason}") from None
        if lists["train"] == "database":
            lists["train"] = lists["database"]
        number = {name: index for index, name in enumerate(collection.names)}
        parts: dict[str, Indices] = {}
        notes: list[str] = []
        for part, names in lists.items():
            missing = [name for name in names if name not in number]
            if missing and drop_missing:
                notes.append(f"{len(missing)} of the split's {len(names)} {part} images are gone")
                names = [name for name in names if name in number]
            elif missing:
                raise UsageError(
                    f"{len(missing)} of the {len(names)} {part} images that {path} names are not "
                    f"in '{collection.name}', the first is '{missing[0]}'; use the data that the "
                    "split was made for"
                )
            parts[part] = np.array([number[name] for name in names], dtype=np.int64)
        split = cls(
            protocol=protocol,
            seed=seed,
            top=content.get("top"),
            checksum=split_checksum(protocol, seed, collection.names, parts),
            notes=(*content.get("notes", ()), *notes),
            agreed=content.get("agreed"),
            names=collection.names,
            **parts,
        )
        if not notes and split.checksum != checksum:
            raise FisherhashError(f"{path} was changed after it was written: its checksum is wrong")
        return split


def hash_order(names: Sequence[str], items: Iterable[int], seed: int) -> list[int]:
    """Sort items by the SHA-256 of the seed and their names.

    >>> hash_order(["a", "b", "c"], [0, 1, 2], seed=0)
    [2, 0, 1]
    """
    prefix = f"{seed}\0".encode()

    def key(item: int) -> bytes:
        return hashlib.sha256(prefix + _name_bytes(names[item])).digest()

    return sorted((int(item) for item in items), key=key)


def split_checksum(
    protocol: str, seed: int | None, names: Sequence[str], parts: Mapping[str, Iterable[int]]
) -> str:
    """SHA-256 over the name of the protocol, the seed and the names in the three lists."""
    digest = hashlib.sha256(f"{protocol}\0{'' if seed is None else seed}\n".encode())
    for part in SPLIT_PARTS:
        digest.update(f"{part}\n".encode())
        for item in parts[part]:
            digest.update(_name_bytes(names[item]) + b"\n")
    return digest.hexdigest()


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
    parts: dict[str, Indices] = {}
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


def _only(collection: Collection, classes: Indices) -> Collection:
    """The same images with the labels of some classes."""
    return dataclasses.replace(
        collection,
        labels=np.ascontiguousarray(collection.labels[:, classes]),
        classes=tuple(collection.classes[i] for i in classes),
    )


def _name_bytes(name: str) -> bytes:
    # NFC, because macOS spells the accents of the same file name differently.
    return unicodedata.normalize("NFC", name).encode("utf-8", "surrogateescape")
