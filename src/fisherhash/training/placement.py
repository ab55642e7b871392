"""Where training images and their features come from: memory or disk, torch or ONNX Runtime."""

from __future__ import annotations

import logging
from pathlib import Path

from fisherhash.errors import UsageError
from fisherhash.model.folder import is_unfinished
from fisherhash.system.memory import available_memory
from fisherhash.training.checkpoints import unfinished_identity

logger = logging.getLogger(__name__)

SHARE = 0.5
"""The share of the available memory that training images may take."""
NOTICED = 0.1
"""The share from which on it is said that they are held in memory."""
STREAM = "stream"
"""The entry of a run's identity if its images are streamed: their order is another one."""
FEATURES_BY = "features_by"
"""The entry of a run's identity if ONNX Runtime computed its features."""


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
    """What computed the features of the unfinished run in a folder; empty for torch.

    None if there is no such run. A run goes on with the features that it began with.
    """
    if folder is None or not is_unfinished(folder):
        return None
    return str(unfinished_identity(folder).get(FEATURES_BY, ""))
