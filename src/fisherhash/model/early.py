"""What a worker process does before it knows its work, so that its first image need not wait."""

from __future__ import annotations

from fisherhash.data import readers
from fisherhash.model import builtin, onnx_runtime

__all__ = ["prepare", "readers"]


def prepare(model: str, images: int) -> None:
    """Import what encodes image files, and load the network of a built-in hasher.

    Args:
        model: its name; empty for the one that so many images get. Others are loaded with their
            first image.
        images: how many there are.
    """
    fitted = images >= builtin.FEWEST_FITTED
    name = model or (builtin.DEFAULT_HASHER if fitted else builtin.FIRST["general2-128"][0])
    if name in builtin.NAMES:
        onnx_runtime.load_early(builtin.folder(name) / builtin.HEAD_ONNX)
