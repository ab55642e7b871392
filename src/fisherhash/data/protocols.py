"""Protocols: which images are training images, queries and database, with a checksum.

A drawn split is ordered by a hash of the seed and the name of the image, so it is the same on every
machine and with every version of every library. A split from list files is used as it is, except
that queries are removed from the database and the training images, and that images without a label
are left out; ``Split.notes`` counts both.

The lists of tiny100 and coco21 have one set of queries. For a seed other than 0, others are drawn
from the database images that are not training images, as many per class; the listed queries are
put into the database instead. The training images and all sizes stay.

docs/data.md describes each protocol and where its images come from.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fisherhash.data.collection import Collection
from fisherhash.data.splits import SPLIT_PARTS, Split, hash_order, split_checksum
from fisherhash.errors import UsageError, counted, unknown_name


@dataclass(frozen=True)
class Protocol:
    """A named way to split a data set, with the metric that goes with it.

    Attributes:
        name: what the user writes.
        top: the K of mean average precision; None for the whole database.
        sizes: the usual numbers of (train, query, database) images; None if they vary.
        classes: number of classes the data must have; 0 if it varies.
        lists: whether the images come with list files that are used as they are.
        checksum: of the agreed lists; empty if there are none.
        fresh: queries per class that a seed other than 0 draws instead of the listed ones; 0 if
            only the listed ones exist.
        notes: what a reader of a number should know. Runs store these sentences and compare them
            when they resume, so an edit here ends old runs.
    """

    name: str
    top: int | None = None
    sizes: tuple[int, int, int] | None = None
    classes: int = 0
    lists: bool = False
    checksum: str = ""
    fresh: int = 0
    notes: tuple[str, ...] = ()


_SEEN = "the 100 classes are among those an ImageNet backbone was trained on, database included"
_KNOWN = (
    Protocol(
        "cifar10-small",
        sizes=(5_000, 1_000, 59_000),
        classes=10,
        notes=("the training images are in the database, as in DPSH, DSDH and DFH",),
    ),
    Protocol(
        "cifar10-small-54k",
        sizes=(5_000, 1_000, 54_000),
        classes=10,
        notes=("the split of the code that thulab publishes for DHN, DCH and others",),
    ),
    Protocol(
        "cifar10-large",
        sizes=(50_000, 10_000, 50_000),
        classes=10,
        notes=("not drawn: the same for every seed",),
    ),
    Protocol(
        "nuswide21-small",
        top=5_000,
        sizes=(10_500, 2_100, 193_734),
        classes=21,
        notes=("there is no canonical list: numbers of different papers differ by their draw",),
    ),
    Protocol("nuswide21-large", top=50_000, sizes=(193_734, 2_100, 193_734), classes=21),
    Protocol(
        "imagenet100",
        top=1_000,
        sizes=(10_000, 5_000, 128_503),
        classes=100,
        lists=True,
        notes=(_SEEN, "the public list has 130 a class to train; 100 of them are drawn"),
    ),
    Protocol(
        "imagenet100-13k",
        top=1_000,
        sizes=(13_000, 5_000, 128_503),
        classes=100,
        lists=True,
        notes=(_SEEN,),
    ),
    Protocol(
        "coco80",
        top=5_000,
        sizes=(10_000, 5_000, 117_218),
        classes=80,
        lists=True,
        notes=(
            "the public database holds the queries and lacks the training images; we mend both",
        ),
    ),
    Protocol(
        "tiny100",
        top=1_000,
        sizes=(10_000, 5_000, 30_000),
        classes=100,
        lists=True,
        checksum="41385440043b2df121e1b161627d7e4d27d51613b142bd3ad41ab8b7638fc25e",
        fresh=50,
        notes=(_SEEN,),
    ),
    Protocol(
        "coco21",
        top=5_000,
        sizes=(5_250, 1_050, 13_950),
        classes=21,
        lists=True,
        checksum="b9fc34bfe10d743c874190101f2dbf98f016eee3cbff4d3f233581347d74f7c4",
        fresh=50,
    ),
    Protocol("lists", lists=True),
    Protocol("custom"),
)
PROTOCOLS = {protocol.name: protocol for protocol in _KNOWN}


def resolve(collection: Collection, protocol: str | None = None, seed: int = 0) -> Split:
    """Split a collection by a protocol, or by the one its source suggests.

    Args:
        collection: the images.
        protocol: a name in :data:`PROTOCOLS`. None means ``cifar10-small`` for CIFAR-10, the
            protocol that a list folder matches (else ``lists``), and ``custom`` for anything else.
        seed: of the draw, if the protocol draws; the lists of tiny100 and coco21 are those of
            seed 0, and other seeds draw other queries.

    Raises:
        UsageError: an unknown name, data that do not fit the protocol, or too few images.

    >>> from fisherhash.data.sources import open_data
    >>> print(resolve(open_data("sample")))
    custom, seed 0: 1,800 train, 200 query, 1,800 database, checksum 135e7cd93190f663
    """
    name = suggest_protocol(collection) if protocol is None else protocol
    if name not in PROTOCOLS:
        raise unknown_name("protocol", name, PROTOCOLS)
    chosen = PROTOCOLS[name]
    if not collection.classes:
        raise UsageError(
            f"'{collection.name}' has no labels, so it cannot be split by '{name}'; put the "
            "images into one sub-folder per class, or give a CSV 'path,label'"
        )
    _check_fit(collection, chosen)
    if name == "custom":
        return _custom(collection, seed)
    if name == "cifar10-large":
        test = np.array([image.startswith("test_batch/") for image in collection.names])
        rest = np.flatnonzero(~test)
        return _split(collection, chosen, None, (rest, np.flatnonzero(test), rest))
    return (_from_lists if collection.splits else _drawn)(collection, chosen, seed)


def suggest_protocol(collection: Collection) -> str:
    """Return the name of the protocol that a collection is usually split by."""
    if collection.kind == "cifar10":
        return "cifar10-small"
    if not collection.splits:
        return "custom"
    sizes = tuple(len(collection.splits[part]) for part in SPLIT_PARTS)
    number = len(collection.classes)
    fitting = {p.name: p.sizes for p in PROTOCOLS.values() if p.sizes and p.classes == number}
    if collection.name.lower() in fitting:
        return collection.name.lower()
    # Public databases differ in size: prefer a match of all three sizes over the first two.
    for compared in (3, 2):
        for name, known in fitting.items():
            if known[:compared] == sizes[:compared]:
                return name
    return "lists"


def _split(
    collection: Collection,
    protocol: Protocol,
    seed: int | None,
    parts: Sequence[Iterable[int]],
    notes: Iterable[str] = (),
) -> Split:
    arrays = {
        name: np.fromiter(part, dtype=np.int64)
        for name, part in zip(SPLIT_PARTS, parts, strict=True)
    }
    checksum = split_checksum(protocol.name, seed, collection.names, arrays)
    notes = [*notes, *protocol.notes]
    # The agreed lists are not drawn.
    agreed = checksum == protocol.checksum if protocol.checksum and seed is None else None
    if agreed is False:
        difference = f"checksum {checksum[:16]}, expected {protocol.checksum[:16]}"
        notes.insert(0, f"these are not the agreed lists of {protocol.name}: {difference}")
    return Split(
        protocol=protocol.name,
        seed=seed,
        **arrays,
        top=protocol.top,
        checksum=checksum,
        notes=tuple(notes),
        agreed=agreed,
        names=collection.names,
    )


def _check_fit(collection: Collection, protocol: Protocol) -> None:
    found = len(collection.classes)
    if protocol.name.startswith("cifar10"):
        if collection.kind != "cifar10" or len(collection) != 60_000:
            raise UsageError(
                f"{protocol.name} is for CIFAR-10's 60,000 images in their official binary layout; "
                f"'{collection.name}' has {counted(len(collection), 'image')} ({collection.kind})"
            )
    elif protocol.classes and found != protocol.classes:
        raise UsageError(
            f"{protocol.name} has {protocol.classes} classes, '{collection.name}' has {found}"
        )
    if protocol.lists and not collection.splits:
        raise UsageError(
            f"{protocol.name} reads train.txt, query.txt and database.txt; '{collection.name}' has "
            "none. Give the folder that holds them, or use the protocol 'custom'"
        )


def _drawn(collection: Collection, protocol: Protocol, seed: int) -> Split:
    """Draw 100 queries and 500 training images per class; the others are the database."""
    labelled = np.flatnonzero(collection.labels.any(axis=1)).tolist()
    query, train = _draw_per_class(collection, seed, (100, 500))
    outside = {*query, *train} if protocol.name.endswith("54k") else set(query)
    database = [item for item in labelled if item not in outside]
    learned = database if protocol.name.endswith("large") else sorted(train)
    notes = _unlabelled_note(len(collection) - len(labelled), "image")
    return _split(collection, protocol, seed, (learned, sorted(query), database), notes)


def _draw_per_class(
    collection: Collection,
    seed: int,
    counts: Sequence[int],
    among: Iterable[int] | None = None,
) -> tuple[list[int], ...]:
    """Draw, for each count, that many unused images per class, in hash order.

    An image with several labels counts for the first class that draws it; rare classes draw first.

    Args:
        collection: the images.
        seed: of the order.
        counts: images per class, one draw each.
        among: the images to draw from; by default all.
    """
    order = hash_order(collection.names, range(len(collection)) if among is None else among, seed)
    sizes = collection.labels.sum(axis=0, dtype=np.int64)
    taken: set[int] = set()
    draws: list[list[int]] = []
    for count in counts:
        drawn: list[int] = []
        for column in np.argsort(sizes, kind="stable"):
            column_labels = collection.labels[:, column]
            free = (item for item in order if column_labels[item] and item not in taken)
            own = list(itertools.islice(free, count))
            taken.update(own)
            drawn += own
            if len(own) < count:
                raise UsageError(
                    f"the class '{collection.classes[column]}' has too few images: {count} are "
                    f"needed, {len(own)} are left"
                )
        draws.append(drawn)
    return tuple(draws)


def _from_lists(collection: Collection, protocol: Protocol, seed: int) -> Split:
    notes: list[str] = []
    labelled = collection.labels.sum(axis=1, dtype=np.int64) > 0
    parts: dict[str, list[int]] = {}
    for part in SPLIT_PARTS:
        items = collection.splits[part]
        parts[part] = items[labelled[items]].tolist()
        notes += _unlabelled_note(len(items) - len(parts[part]), f"{part} image")
        if not parts[part]:
            raise UsageError(f"no image of the {part} list of '{collection.name}' has a label")
    queries = set(parts["query"])
    for part in ("database", "train"):
        kept = [item for item in parts[part] if item not in queries]
        if lost := len(parts[part]) - len(kept):
            notes.append(
                f"{counted(lost, 'query was', 'queries were')} taken out of the {part} list"
            )
        if not kept:
            raise UsageError(f"every image of the {part} list of '{collection.name}' is a query")
        parts[part] = kept
    drawn = None
    if seed and protocol.fresh:
        drawn = seed
        notes.append(_renew_queries(collection, parts, protocol.fresh, seed))
    if protocol.name == "coco80":
        inside = set(parts["database"])
        if added := [item for item in parts["train"] if item not in inside]:
            parts["database"] += added
            notes.append(
                f"{counted(len(added), 'training image was', 'training images were')} put into the "
                "database, as published"
            )
    if protocol.name == "nuswide21-large":
        parts["train"] = parts["database"]
    if protocol.name == "imagenet100" and len(parts["train"]) > 10_000:
        order = np.array(hash_order(collection.names, parts["train"], seed))
        number = collection.labels[order].argmax(axis=1)
        first = [order[number == own][:100] for own in range(len(collection.classes))]
        parts["train"] = sorted(np.concatenate(first).tolist())
        drawn = seed
    notes += [
        f"{counted(len(items), f'{part} image')}, the protocol is known with {size:,}"
        for (part, items), size in zip(parts.items(), protocol.sizes or (), strict=False)
        if len(items) != size
    ]
    return _split(collection, protocol, drawn, tuple(parts.values()), notes)


def _renew_queries(
    collection: Collection, parts: dict[str, list[int]], count: int, seed: int
) -> str:
    """Exchange the queries for database images that nobody has trained on; returns a note."""
    listed, known = parts["query"], {*parts["train"], *parts["query"]}
    free = [item for item in parts["database"] if item not in known]
    try:
        (drawn,) = _draw_per_class(collection, seed, (count,), free)
    except UsageError as error:
        reason = f"no fresh queries can be drawn from '{collection.name}': {error}"
        raise UsageError(f"{reason}. Seed 0 has the listed queries") from None
    fresh = set(drawn)
    kept = [item for item in parts["database"] if item not in fresh]
    parts["query"], parts["database"] = sorted(drawn), sorted([*kept, *listed])
    return (
        f"{len(drawn):,} fresh queries were drawn with seed {seed}, {count} per class, from the "
        "database images outside the training list; the listed queries are in the database"
    )


def _unlabelled_note(count: int, what: str) -> list[str]:
    return [f"{counted(count, what)} without a label left out"] if count else []


def _custom(collection: Collection, seed: int) -> Split:
    labels = collection.labels
    labelled = np.flatnonzero(labels.any(axis=1))
    sizes = labels.sum(axis=0, dtype=np.int64)
    used = np.flatnonzero(sizes)
    if len(used) < 2:
        only = f"only one class, '{collection.classes[used[0]]}'" if len(used) else "no class"
        raise UsageError(
            f"'{collection.name}' has {only}; at least two classes are needed. Put the images into "
            "one sub-folder per class, or list several labels"
        )
    # A query needs a second image of its class to find; one of several labels may be alone.
    alone = labels[:, sizes == 1].any(axis=1) & (labels.sum(axis=1, dtype=np.int64) == 1)
    if alone.any():
        single = [collection.classes[int(labels[item].argmax())] for item in np.flatnonzero(alone)]
        shown = ", ".join(f"'{name}'" for name in single[:5])
        more = f" and {len(single) - 5} more" if len(single) > 5 else ""
        raise UsageError(
            f"{counted(len(single), 'class', 'classes')} of '{collection.name}' with one image "
            f"only: {shown}{more}. Add images, or remove these classes"
        )
    queries: set[int] = set()
    left = sizes.copy()
    order = hash_order(collection.names, labelled, seed)
    for column in used[np.argsort(sizes[used], kind="stable")]:
        wanted = min(max(1, round(int(sizes[column]) / 10)), 100)
        for item in (item for item in order if labels[item, column]):
            if sizes[column] - left[column] >= wanted:
                break
            own = labels[item] > 0
            # The last image of a class stays in the database, so that queries can find it.
            if item not in queries and (left[own] > 1).all():
                queries.add(item)
                left[own] -= 1
    rest = [int(item) for item in labelled if item not in queries]
    notes = _unlabelled_note(len(collection) - len(labelled), "image")
    parts = (rest, sorted(queries), rest)
    return _split(collection, PROTOCOLS["custom"], seed, parts, notes)
