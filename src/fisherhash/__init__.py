"""fisherhash: tiny binary codes for images, and exact search by Hamming distance."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from fisherhash import backbones, builtin, methods
    from fisherhash.evaluation import evaluate
    from fisherhash.hasher import Hasher
    from fisherhash.index.opening import Index
    from fisherhash.loop import Settings
    from fisherhash.training import train

__all__ = [
    "Hasher",
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
    "Hasher": "fisherhash.hasher",
    "Index": "fisherhash.index.opening",
    "Settings": "fisherhash.loop",
    "evaluate": "fisherhash.evaluation",
    "train": "fisherhash.training",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    if name in ("backbones", "builtin", "methods"):
        return importlib.import_module(f"fisherhash.{name}")
    raise AttributeError(f"module 'fisherhash' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
