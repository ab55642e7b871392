"""Codes from features that are on disk already, because a model was trained on the same folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from fisherhash.data.row_cache import has_rows
from fisherhash.errors import FisherhashError
from fisherhash.index.base import Codes

if TYPE_CHECKING:
    from fisherhash.model.hasher import Hasher

logger = logging.getLogger(__name__)

FEWEST_REUSED = 32
"""Images to encode from which on it is worth looking for features on disk."""


def stored_codes(hasher: Hasher, root: Path) -> dict[str, Codes]:
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
    pairs = zip(stored.indices, stored.codes, strict=True)
    return {images.names[int(index)]: code for index, code in pairs}
