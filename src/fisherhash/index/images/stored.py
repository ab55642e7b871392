"""Codes from features that are on disk already, because a model was trained on the same folder."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fisherhash.data.row_cache import has_rows
from fisherhash.errors import FisherhashError
from fisherhash.index.base import Codes

if TYPE_CHECKING:
    from fisherhash.model.hasher import EncodedBlock, Hasher

logger = logging.getLogger(__name__)

FEWEST_REUSED = 32
"""Images to encode from which on it is worth looking for features on disk."""


CodePair = tuple[Codes, Codes | None]
"""The code of an image and its second code, where its hasher makes those."""
KnownCodes = Mapping[str, CodePair]
"""Codes of images by key."""


def codes_by_name(names: Sequence[str], block: EncodedBlock) -> dict[str, CodePair]:
    """The codes of a block of images by name."""
    fines = [None] * len(block.codes) if block.fine is None else list(block.fine)
    pairs = zip(block.codes, fines, strict=True)
    return {names[int(i)]: pair for i, pair in zip(block.indices, pairs, strict=True)}


def in_order(
    known: Mapping[int, CodePair], new: Iterable[EncodedBlock], size: int
) -> Iterator[EncodedBlock]:
    """Yield known codes and new ones as blocks of up to ``size`` images, ordered by their numbers.

    Args:
        known: codes by the number of the image, ordered.
        new: blocks of other images, ordered; as they are where nothing is known.
        size: the largest number of images in a block.
    """
    if not known:
        yield from new
        return
    left = deque(known)
    for block in new:
        fines = [None] * len(block.codes) if block.fine is None else list(block.fine)
        pairs = zip(block.codes, fines, strict=True)
        found: dict[int, CodePair] = dict(zip(block.indices.tolist(), pairs, strict=True))
        last = max([*found, *(skip.index for skip in block.skipped)], default=-1)
        while left and left[0] < last:
            found[left[0]] = known[left[0]]
            left.popleft()
        pieces = list(_blocks(dict(sorted(found.items())), size))
        yield from pieces[:-1]
        # With the last of them, so that a block of skipped images alone is not lost.
        rest = {"skipped": block.skipped, "unsure": block.unsure}
        yield dataclasses.replace(pieces[-1] if pieces else block, **rest)
    yield from _blocks({i: known[i] for i in left}, size)


def _blocks(known: Mapping[int, CodePair], size: int) -> Iterator[EncodedBlock]:
    """Codes that are known, as if they had just been computed."""
    from fisherhash.model.hasher import EncodedBlock

    places = list(known)
    for start in range(0, len(places), size):
        some = places[start : start + size]
        fines = [fine for _, fine in (known[i] for i in some) if fine is not None]
        codes = np.stack([known[i][0] for i in some])
        fine = np.stack(fines) if fines else None
        yield EncodedBlock(np.array(some), codes, None, [], fine=fine)


def stored_codes(hasher: Hasher, root: Path) -> dict[str, CodePair]:
    """Codes of a folder's images whose features are on disk since a model was trained on it."""
    if not (has_rows("features") or has_rows("logits")):
        return {}
    from fisherhash.data.sources import open_data

    try:
        images = open_data(root)
        stored = hasher.encode_stored(images)
    except FisherhashError:
        # A folder that can be synced need not be a data set.
        return {}
    if stored is None or not len(stored.indices):
        return {}
    logger.info("%s images: features are on disk already", f"{len(stored.indices):,}")
    return codes_by_name(images.names, stored)
