"""Backbones: networks that turn images into features."""

from fisherhash.backbones.adapters import wrap
from fisherhash.backbones.base import Backbone, VectorInput, fold_batch_norm
from fisherhash.backbones.registry import DEFAULT_BACKBONE as DEFAULT
from fisherhash.backbones.registry import create_backbone as create
from fisherhash.backbones.registry import early_layers, info, names
from fisherhash.backbones.registry import restore_backbone as restore

__all__ = [
    "DEFAULT",
    "Backbone",
    "VectorInput",
    "create",
    "early_layers",
    "fold_batch_norm",
    "info",
    "names",
    "restore",
    "wrap",
]
