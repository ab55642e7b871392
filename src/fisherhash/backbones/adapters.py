"""Other networks as backbones: ``torchvision:NAME``, ``timm:NAME`` and any ``nn.Module``."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fisherhash.backbones.base import Backbone
from fisherhash.data.preprocessing import INTERPOLATIONS, Preprocessing
from fisherhash.errors import FisherhashError, UsageError, missing_extra

LIBRARIES = ("torchvision:", "timm:")
MODULE = "module:"
# The names that torchvision uses for the classifier.
_CLASSIFIERS = ("fc", "classifier", "head", "heads")
# Outputs of GoogLeNet and Inception that only their training used.
_AUXILIARY = ("aux1", "aux2", "AuxLogits")
# A network; its size, crop, interpolation, mean and deviation; the tensors it does not use.
_Built = tuple[nn.Module, tuple[int, float, str, Iterable[float], Iterable[float]], tuple[str, ...]]


class Wrapped(Backbone):
    """A network as a backbone: its output is the feature vector.

    Feature maps (n, d, height, width) are averaged over the image.
    """

    def __init__(
        self,
        module: nn.Module,
        preprocessing: Preprocessing,
        name: str,
        unwanted: Iterable[str] = (),
    ) -> None:
        super().__init__(preprocessing)
        self.name = name
        self.features = _width(module, preprocessing, name)
        self.module = module
        self.unwanted = tuple(unwanted)

    def extract(self, images: Tensor) -> Tensor:
        """Turn normalised images (n, 3, size, size) into features (n, features)."""
        return _pooled(self.module(images))

    def weights_module(self) -> nn.Module:
        """The network inside; its state dict may come with or without the classifier."""
        return self.module


def wrap(
    module: nn.Module, *, preprocessing: Preprocessing | None = None, name: str | None = None
) -> Backbone:
    """Use any network as a backbone.

    One forward pass finds the width of its features. A model built on it can be saved, but the
    saved model stores only the name: to load it, pass the same module again.

    Args:
        module: takes normalised images (n, 3, size, size), returns (n, d) or (n, d, h, w). It is
            not copied.
        preprocessing: image size and normalisation; 224 pixels and ImageNet's by default.
        name: its name in the model folder, after "module:"; by default the name of the class.

    Raises:
        UsageError: the module does not run on such images, or returns something else.
    """
    title = (name or type(module).__name__).removeprefix(MODULE)
    return Wrapped(module, preprocessing or Preprocessing(), MODULE + title)


def adapted(
    name: str,
    *,
    pretrained: bool,
    image_size: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> Backbone:
    """Build the network ``torchvision:NAME`` or ``timm:NAME`` without its classifier.

    Args:
        name: with the library's prefix.
        pretrained: fetch the library's default weights (from its cache, or from the network).
        image_size: instead of the size in the library's own configuration.
        preprocessing: instead of the library's own configuration, for a saved model.
    """
    if preprocessing is not None:
        image_size = preprocessing.size
    library, _, model = name.partition(":")
    build = _torchvision if library == "torchvision" else _timm
    module, own, unwanted = build(model, pretrained, image_size)
    if preprocessing is None:
        size, crop, interpolation, mean, std = own
        preprocessing = Preprocessing(
            size=image_size or size,
            crop=min(crop, 1.0),
            interpolation=interpolation if interpolation in INTERPOLATIONS else "bilinear",
            mean=_bytes(mean),
            std=_bytes(std),
        )
    return Wrapped(module, preprocessing, name, unwanted)


def _torchvision(model: str, pretrained: bool, image_size: int | None) -> _Built:
    models = _library("torchvision").models
    _known(model, "torchvision", models.list_models())
    # torchvision describes the preprocessing beside the weights; they need not be loaded.
    weights = models.get_model_weights(model).DEFAULT
    with _fetching(f"torchvision:{model}", pretrained):
        module: nn.Module = models.get_model(model, weights=weights if pretrained else None)
    config: Any = weights.transforms()
    try:
        size, crop = config.crop_size[0], config.crop_size[0] / config.resize_size[0]
        own = (size, crop, config.interpolation.value, config.mean, config.std)
        return module, own, _cut_classifier(module)
    except (AttributeError, TypeError, LookupError) as error:
        raise UsageError(
            f"torchvision:{model} does not classify images, so it has no features to use"
        ) from error


def _timm(model: str, pretrained: bool, image_size: int | None) -> _Built:
    timm = _library("timm")
    _known(model.partition(".")[0], "timm", timm.list_models())
    with _fetching(f"timm:{model}", pretrained):
        build = functools.partial(timm.create_model, model, pretrained=pretrained, num_classes=0)
        module: nn.Module = build()
        config: dict[str, Any] = timm.data.resolve_data_config({}, model=module)
        size = int(config["input_size"][-1])
        known: dict[str, Any] = getattr(module, "pretrained_cfg", {})
        if known.get("fixed_input_size") and image_size not in (None, size):
            # A transformer's position embedding belongs to one size; timm resamples it.
            module = build(img_size=image_size)
    crop = float(config.get("crop_pct", 1.0))
    own = (size, crop, str(config["interpolation"]), config["mean"], config["std"])
    classifier = known.get("classifier", ())
    parts = (classifier,) if isinstance(classifier, str) else tuple(classifier or ())
    return module, own, tuple(f"{part}." for part in parts)


def _library(name: str) -> ModuleType:
    try:
        library = importlib.import_module(name)
        importlib.import_module("torchvision.models" if name == "torchvision" else "timm.data")
    except ImportError as error:
        raise missing_extra(error.name or name, "timm", f"a backbone of {name}") from error
    except RuntimeError as error:  # torchvision's operators, built for another torch
        raise FisherhashError(
            f"{name} is installed but does not work with torch {torch.__version__}: {error}"
        ) from error
    return library


def _known(model: str, library: str, known: Iterable[str]) -> None:
    """Raise an error with the nearest names (of hundreds) if the library lacks the model."""
    names = list(known)
    if model in names:
        return
    near = difflib.get_close_matches(model, names, n=3, cutoff=0.5)
    hint = f" Near: {', '.join(f'{library}:{name}' for name in near)}" if near else ""
    raise UsageError(f"{library} has no model '{model}'.{hint}")


@contextlib.contextmanager
def _fetching(name: str, pretrained: bool) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise UsageError(f"{name} could not be built: {error}") from error
        raise FisherhashError(
            f"the pretrained weights of {name} could not be fetched: {error}. Without a network, "
            "give a file (weights=FILE, or --weights FILE)"
        ) from error


def _cut_classifier(module: nn.Module) -> tuple[str, ...]:
    """Replace the last layer of the classifier by the identity; return the prefixes it had."""
    # GoogLeNet and Inception remember how they were built; a saved model must not depend on it.
    built = {**dict.fromkeys(_AUXILIARY), "aux_logits": False, "transform_input": True}
    for name, value in built.items():
        if hasattr(module, name):
            setattr(module, name, value)
    part = next((n for n in _CLASSIFIERS if isinstance(getattr(module, n, None), nn.Module)), None)
    if part is None:
        raise LookupError("no classifier")
    layers = [
        f"{part}.{name}".removesuffix(".")
        for name, layer in getattr(module, part).named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    last = layers[-1]
    parent, _, child = last.rpartition(".")
    setattr(module.get_submodule(parent), child, nn.Identity())
    return (f"{last}.", *(f"{name}." for name in _AUXILIARY))


def _bytes(numbers: Iterable[float]) -> tuple[float, float, float]:
    red, green, blue = (255.0 * float(number) for number in numbers)
    return red, green, blue


def _pooled(output: Tensor) -> Tensor:
    return output.mean((2, 3)) if output.ndim == 4 else output


def _width(module: nn.Module, preprocessing: Preprocessing, name: str) -> int:
    """Find the width of the features by one forward pass that leaves the module unchanged."""
    modes = [(part, part.training) for part in module.modules()]
    tensor = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    size = preprocessing.size
    images = torch.zeros(2, 3, size, size, dtype=tensor.dtype, device=tensor.device)
    module.eval()
    try:
        with torch.no_grad():
            output = module(images)
    # Whatever the network raises, the user must learn which network failed, and on what.
    except Exception as error:
        raise UsageError(
            f"{name} does not run on images of shape (n, 3, {size}, {size}): {error}"
        ) from error
    finally:
        for part, training in modes:
            part.training = training
    if not isinstance(output, Tensor) or output.ndim not in (2, 4) or len(output) != len(images):
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise UsageError(
            f"{name} must return features (n, d) or feature maps (n, d, height, width) for "
            f"{len(images)} images; it returned {found}"
        )
    return int(_pooled(output).shape[1])
