"""fisherhash: tiny binary codes for images, and exact search by Hamming distance."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from fisherhash import backbones, methods
    from fisherhash.evaluation import evaluate
    from fisherhash.index.base import Index
    from fisherhash.index.images.image_index import ImageIndex
    from fisherhash.model import builtin
    from fisherhash.model.hasher import Hasher
    from fisherhash.training.fitting import train
    from fisherhash.training.loop import Settings

__all__ = [
    "Hasher",
    "ImageIndex",
    "Index",
    "Settings",
    "__version__",
    "backbones",
    "builtin",
    "evaluate",
    "methods",
    "train",
]

# Loaded when first asked for, so that the command line answers without importing torch.
_PLACES = {
    "Hasher": "fisherhash.model.hasher",
    "ImageIndex": "fisherhash.index.images.image_index",
    "Index": "fisherhash.index.base",
    "Settings": "fisherhash.training.loop",
    "evaluate": "fisherhash.evaluation",
    "train": "fisherhash.training.fitting",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    if name in ("backbones", "methods"):
        return importlib.import_module(f"fisherhash.{name}")
    if name == "builtin":
        return importlib.import_module("fisherhash.model.builtin")
    raise AttributeError(f"module 'fisherhash' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
