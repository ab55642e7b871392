"""Protocols: which images are training images, queries and database, with a checksum.

A drawn split is ordered by a hash of the seed and the name of the image, so it is the same on every
machine and with every version of every library. A split from list files is used as it is, except
that queries are removed from the database and the training images, and that images without a label
are left out; ``Split.notes`` counts both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from fisherhash.data.collection import Collection
from fisherhash.data.protocol_table import PROTOCOLS, Protocol
from fisherhash.data.splits import SPLIT_PARTS, Split, hash_order, split_checksum
from fisherhash.errors import UsageError, unknown_name

__all__ = ["PROTOCOLS", "Protocol", "Split", "hash_order", "resolve", "suggest_protocol"]


def resolve(
    collection: Collection,
    protocol: str | None = None,
    seed: int = 0,
    *,
    max_train: int | None = None,
) -> Split:
    """Split a collection by a protocol, or by the one its source suggests.

    Args:
        collection: the images.
        protocol: a name in :data:`PROTOCOLS`. None means ``cifar10-small`` for CIFAR-10, the
            protocol that a list folder matches (else ``lists``), and ``custom`` for anything else.
        seed: of the draw, if the protocol draws.
        max_train: with ``custom``, the largest number of training images.

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
    if max_train is not None and (name != "custom" or max_train < 1):
        raise UsageError("max_train needs the protocol 'custom' and must be at least 1")
    if not collection.classes:
        raise UsageError(
            f"'{collection.name}' has no labels, so it cannot be split by '{name}'; put the "
            "images into one sub-folder per class, or give a CSV 'path,label'"
        )
    _check_fit(collection, chosen)
    if name == "custom":
        return _custom(collection, seed, max_train)
    if name.startswith("cifar10"):
        return _cifar10(collection, chosen, seed)
    if collection.splits:
        return _from_lists(collection, chosen, seed)
    return _drawn_nuswide(collection, chosen, seed)


def suggest_protocol(collection: Collection) -> str:
    """Return the name of the protocol that a collection is usually split by."""
    if collection.kind == "cifar10":
        return "cifar10-small"
    if not collection.splits:
        return "custom"
    sizes = tuple(len(collection.splits[part]) for part in SPLIT_PARTS)
    fitting = [
        protocol
        for protocol in PROTOCOLS.values()
        if protocol.sizes and protocol.classes == len(collection.classes)
    ]
    for protocol in fitting:
        if protocol.name == collection.name.lower():
            return protocol.name
    # Public databases differ in size: prefer a match of all three sizes over the first two.
    for compared in (3, 2):
        for protocol in fitting:
            if protocol.sizes and protocol.sizes[:compared] == sizes[:compared]:
                return protocol.name
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
    checksum = split_checksum(protocol.name, seed, collection.names, **arrays)
    notes = [*notes, *protocol.notes]
    agreed = None
    if protocol.checksum:
        agreed = checksum == protocol.checksum
        if not agreed:
            notes.insert(
                0,
                f"these are not the agreed lists of {protocol.name}: checksum {checksum[:16]}, "
                f"expected {protocol.checksum[:16]}",
            )
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
                f"'{collection.name}' has {len(collection):,} images ({collection.kind})"
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


def _cifar10(collection: Collection, protocol: Protocol, seed: int) -> Split:
    if protocol.name == "cifar10-large":
        test = np.array([name.startswith("test_batch/") for name in collection.names])
        rest = np.flatnonzero(~test)
        return _split(collection, protocol, None, (rest, np.flatnonzero(test), rest))
    query, train = _draw_per_class(collection, seed, (100, 500))
    outside = {*query, *train} if protocol.name.endswith("54k") else set(query)
    database = [item for item in range(len(collection)) if item not in outside]
    return _split(collection, protocol, seed, (sorted(train), sorted(query), database))


def _draw_per_class(
    collection: Collection, seed: int, counts: Sequence[int]
) -> tuple[list[int], ...]:
    """Draw, for each count, that many unused images per class, in hash order.

    An image with several labels counts for the first class that draws it; rare classes draw first.
    """
    order = hash_order(collection.names, range(len(collection)), seed)
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


def _drawn_nuswide(collection: Collection, protocol: Protocol, seed: int) -> Split:
    labelled = collection.labels.any(axis=1)
    query, train = _draw_per_class(collection, seed, (100, 500))
    queries = set(query)
    database = [int(item) for item in np.flatnonzero(labelled) if item not in queries]
    learned = database if protocol.name.endswith("large") else sorted(train)
    notes = _unlabelled_note(len(collection) - int(labelled.sum()), "images")
    return _split(collection, protocol, seed, (learned, sorted(query), database), notes)


def _from_lists(collection: Collection, protocol: Protocol, seed: int) -> Split:
    notes: list[str] = []
    labelled = collection.labels.sum(axis=1, dtype=np.int64) > 0
    parts: dict[str, list[int]] = {}
    for part in SPLIT_PARTS:
        items = collection.splits[part]
        parts[part] = items[labelled[items]].tolist()
        notes += _unlabelled_note(len(items) - len(parts[part]), f"{part} images")
        if not parts[part]:
            raise UsageError(f"no image of the {part} list of '{collection.name}' has a label")
    queries = set(parts["query"])
    for part in ("database", "train"):
        kept = [item for item in parts[part] if item not in queries]
        lost = len(parts[part]) - len(kept)
        if lost:
            notes.append(f"{lost:,} queries were taken out of the {part} list")
        if not kept:
            raise UsageError(f"every image of the {part} list of '{collection.name}' is a query")
        parts[part] = kept
    drawn = None
    if protocol.name == "coco80":
        inside = set(parts["database"])
        added = [item for item in parts["train"] if item not in inside]
        if added:
            parts["database"] += added
            notes.append(f"{len(added):,} training images were put into the database, as published")
    if protocol.name == "nuswide21-large":
        parts["train"] = parts["database"]
    if protocol.name == "imagenet100" and len(parts["train"]) > 10_000:
        parts["train"] = _cap_per_class(collection, parts["train"], seed, 100)
        drawn = seed
    notes += _size_notes(protocol, parts)
    return _split(collection, protocol, drawn, tuple(parts.values()), notes)


def _cap_per_class(collection: Collection, items: list[int], seed: int, count: int) -> list[int]:
    numbers = collection.labels.argmax(axis=1)
    left = dict.fromkeys(range(len(collection.classes)), count)
    kept = []
    for item in hash_order(collection.names, items, seed):
        number = int(numbers[item])
        if left[number] > 0:
            left[number] -= 1
            kept.append(item)
    return sorted(kept)


def _size_notes(protocol: Protocol, parts: dict[str, list[int]]) -> list[str]:
    if protocol.sizes is None:
        return []
    return [
        f"{len(parts[part]):,} {part} images, the protocol is known with {size:,}"
        for part, size in zip(SPLIT_PARTS, protocol.sizes, strict=True)
        if len(parts[part]) != size
    ]


def _unlabelled_note(count: int, what: str) -> list[str]:
    return [f"{what} without a label were left out: {count:,}"] if count else []


def _custom(collection: Collection, seed: int, max_train: int | None) -> Split:
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
            f"'{collection.name}' has classes of only one image: {shown}{more}. "
            "Add images, or remove these classes"
        )
    queries: set[int] = set()
    left = sizes.copy()
    order = hash_order(collection.names, labelled, seed)
    for column in used[np.argsort(sizes[used], kind="stable")]:
        wanted = min(max(1, round(int(sizes[column]) / 10)), 100)
        members = [item for item in order if labels[item, column]]
        have = sum(item in queries for item in members)
        for item in members:
            if have >= wanted:
                break
            own = labels[item] > 0
            # The last image of a class stays in the database, so that queries can find it.
            if item not in queries and (left[own] > 1).all():
                queries.add(item)
                left[own] -= 1
                have += 1
    query = sorted(queries)
    database = [int(item) for item in labelled if item not in queries]
    train = database
    if max_train is not None and max_train < len(database):
        train = sorted(hash_order(collection.names, database, seed)[:max_train])
    notes = _unlabelled_note(len(collection) - len(labelled), "images")
    return _split(collection, PROTOCOLS["custom"], seed, (train, query, database), notes)
