"""Codes from features that are on disk already, because a model was trained on the same folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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


def known_block(indices: Sequence[int], pairs: Sequence[CodePair]) -> EncodedBlock:
    """Codes that are known already, as if they had just been computed."""
    from fisherhash.model.hasher import EncodedBlock

    fines = [fine for _, fine in pairs if fine is not None]
    codes, fine = np.stack([code for code, _ in pairs]), np.stack(fines) if fines else None
    return EncodedBlock(np.array(indices), codes, None, [], fine=fine)


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
