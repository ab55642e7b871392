"""fisherhash: tiny binary codes for images, and exact search by Hamming distance."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fisherhash.errors import not_installed
from fisherhash.system.version import __version__

if TYPE_CHECKING:
    from fisherhash import backbones, losses, methods
    from fisherhash.evaluation import evaluate
    from fisherhash.index.base import Index
    from fisherhash.index.images.image_index import ImageIndex
    from fisherhash.model import builtin
    from fisherhash.model.hasher import Hasher
    from fisherhash.training.fitting import train
    from fisherhash.training.settings import Settings
    from fisherhash.web.client import Client

__all__ = [
    "Client",
    "Hasher",
    "ImageIndex",
    "Index",
    "Settings",
    "__version__",
    "backbones",
    "builtin",
    "evaluate",
    "losses",
    "methods",
    "train",
]

# Loaded on first use: the command line answers at once, and the core has no torch.
_PLACES = {
    "Client": "fisherhash.web.client",
    "Hasher": "fisherhash.model.hasher",
    "ImageIndex": "fisherhash.index.images.image_index",
    "Index": "fisherhash.index.base",
    "Settings": "fisherhash.training.settings",
    "backbones": "fisherhash.backbones",
    "builtin": "fisherhash.model.builtin",
    "evaluate": "fisherhash.evaluation",
    "losses": "fisherhash.losses",
    "methods": "fisherhash.methods",
    "train": "fisherhash.training.fitting",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'fisherhash' has no attribute '{name}'")
    try:
        module = importlib.import_module(_PLACES[name])
    except ModuleNotFoundError as error:
        raise not_installed(error, f"fisherhash.{name}") from error
    return module if module.__name__.endswith(f".{name}") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
