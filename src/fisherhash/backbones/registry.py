"""Backbones by name: which exist, how they are built, where their weights come from."""

from __future__ import annotations

import dataclasses
import difflib
import os
from typing import Any

from torch import nn

from fisherhash.backbones.adapters import LIBRARIES, MODULE, adapted, wrap
from fisherhash.backbones.alexnet import AlexNet
from fisherhash.backbones.base import Backbone
from fisherhash.backbones.efficientnet_lite import EfficientNetLite0
from fisherhash.backbones.squeezenet import SqueezeNet
from fisherhash.backbones.tiny import Tiny
from fisherhash.backbones.transformers import HF, hf_backbone, restore_hf
from fisherhash.backbones.vgg_f import VGGF
from fisherhash.backbones.weights import existing_file
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import UsageError, unknown_name

DEFAULT_BACKBONE = EfficientNetLite0.name

_REGISTRY: dict[str, type[Backbone]] = {
    network.name: network for network in (EfficientNetLite0, SqueezeNet, AlexNet, VGGF, Tiny)
}


def early_layers(name: str) -> int:
    """How many of a backbone's first layers should stay fixed when it is fine-tuned.

    >>> early_layers("efficientnet-lite0"), early_layers("timm:resnet18")
    (4, 0)
    """
    return _REGISTRY.get(name, Backbone).early


def names() -> list[str]:
    """The names of the built-in backbones, the default first.

    >>> names()[0]
    'efficientnet-lite0'
    """
    return list(_REGISTRY)


def info(name: str) -> type[Backbone]:
    """The class of a built-in backbone, which describes it.

    >>> info("squeezenet1.0").features
    512
    """
    if name in _REGISTRY:
        return _REGISTRY[name]
    if difflib.get_close_matches(name, _REGISTRY):
        raise unknown_name("backbone", name, _REGISTRY)
    raise UsageError(
        f"unknown backbone '{name}'. Networks of other libraries are named with the library: "
        f"'torchvision:{name}', 'timm:{name}', or hf: and a name on the hub. Known here: "
        f"{', '.join(_REGISTRY)}"
    )


def create_backbone(
    name: str | nn.Module = DEFAULT_BACKBONE,
    *,
    weights: str | os.PathLike[str] | None = None,
    pretrained: bool = True,
    image_size: int | None = None,
) -> Backbone:
    """Build a backbone with its weights, in evaluation mode.

    Args:
        name: one of ``names()``, ``torchvision:NAME``, ``timm:NAME``, ``hf:NAME``, or a network
            (see ``wrap``).
        weights: a file with its weights; by default the installed weights.
        pretrained: False means random weights, and excludes a file. A network passed as an object
            keeps its weights.
        image_size: side of the square image in pixels; by default the backbone's own size.

    Raises:
        UsageError: the name is unknown, the size too small, or the weights file is missing or
            belongs to another network.
        FisherhashError: the weights file is damaged or not safe to open, or an optional package is
            not installed.
    """
    file = None if weights is None else existing_file(weights)
    if file is not None and not pretrained:
        raise UsageError("a weights file and pretrained=False exclude each other")
    if isinstance(name, nn.Module):
        backbone = _given(name, image_size)
    elif name.startswith(HF):
        fetch = pretrained and file is None
        backbone = hf_backbone(name, pretrained=fetch, image_size=image_size)
    elif name.startswith(LIBRARIES):
        fetch = pretrained and file is None
        backbone = adapted(name, pretrained=fetch, image_size=image_size)
    else:
        network = info(name)
        if file is None and pretrained:
            file = network.installed_weights()
        preprocessing = network.preprocessing
        if image_size is not None:
            preprocessing = dataclasses.replace(preprocessing, size=image_size)
        backbone = restore_backbone(name, preprocessing)
    if file is not None:
        backbone.load(file)
    return backbone.eval()


def restore_backbone(
    name: str,
    preprocessing: Preprocessing,
    *,
    module: nn.Module | None = None,
    architecture: dict[str, Any] | None = None,
) -> Backbone:
    """Build the architecture of a saved model, in evaluation mode, for ``load_state_dict``.

    Args:
        name: the backbone's saved ``name``.
        preprocessing: as saved.
        module: the network itself, if the model was built on a network that was passed as an
            object.
        architecture: the backbone's saved ``architecture``.

    Raises:
        UsageError: the name is unknown, or the network must be passed and was not.
    """
    if name.startswith(MODULE):
        if module is None:
            raise UsageError(
                f"this model was built on a network of your own ('{name.removeprefix(MODULE)}'), "
                "which its name cannot rebuild: pass the network again, as when it was trained"
            )
        return wrap(module, preprocessing=preprocessing, name=name).eval()
    if module is not None:
        raise UsageError(f"this model was built on {name}; pass no network with it")
    if name.startswith(HF):
        return restore_hf(name, preprocessing, architecture).eval()
    if name.startswith(LIBRARIES):
        return adapted(name, pretrained=False, preprocessing=preprocessing).eval()
    network = info(name)
    if preprocessing.size < network.smallest:
        raise UsageError(
            f"{name} needs images of at least {network.smallest} pixels, got {preprocessing.size}"
        )
    return network(preprocessing).eval()


def _given(module: nn.Module, image_size: int | None) -> Backbone:
    """Turn a network that was passed as an object into a backbone, unless it is one."""
    if not isinstance(module, Backbone):
        return wrap(module, preprocessing=Preprocessing(size=image_size or Preprocessing.size))
    if image_size not in (None, module.preprocessing.size):
        raise UsageError(
            f"this backbone takes images of {module.preprocessing.size} pixels; build it with "
            f"image_size={image_size} instead of passing both"
        )
    return module
