"""Image encoders of the library transformers as backbones: ``hf:NAME``, a folder or a hub name."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from fisherhash.backbones.adapters import Wrapped
from fisherhash.backbones.base import Backbone
from fisherhash.data.preprocessing import INTERPOLATIONS, Preprocessing
from fisherhash.errors import FisherhashError, UsageError, missing_extra

HF = "hf:"
# Pillow's numbers of its filters, which a preprocessor config stores.
_FILTER_NAMES = {int(value): name for name, value in INTERPOLATIONS.items()}


class ImageEncoder(nn.Module):
    """Takes the feature vector out of what a model of transformers returns.

    It is the pooled output where the model has one, otherwise the first token of the last layer,
    or the mean of its feature map.

    Args:
        network: the model.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images (n, 3, size, size) to features (n, d) or maps (n, d, h, w)."""
        found = self.network(pixel_values=images, return_dict=True)
        pooled = getattr(found, "pooler_output", None)
        if pooled is not None:
            return pooled
        last = found.last_hidden_state
        return last[:, 0] if last.ndim == 3 else last


def hf_backbone(name: str, *, pretrained: bool = True, image_size: int | None = None) -> Backbone:
    """Build the image encoder ``hf:NAME``; of a model of images and texts, its image part.

    Code that a repository brings along is never run.

    Args:
        name: ``hf:`` and a folder, or a name on the hub, which is downloaded once.
        pretrained: read the weights; False means random ones.
        image_size: instead of the size in the model's own configuration.

    Raises:
        UsageError: it is not a model that takes images.
        FisherhashError: it cannot be read or fetched, or transformers is not installed.
    """
    library, model = _transformers(), name.removeprefix(HF)
    with _reading(name):
        config = library.AutoConfig.from_pretrained(model)
        config = getattr(config, "vision_config", config)
        if pretrained:
            network, info = library.AutoModel.from_pretrained(
                model, config=config, output_loading_info=True
            )
            random = [str(key) for key in info["missing_keys"]]
        else:
            network, random = library.AutoModel.from_config(config), []
        preprocessing = _preprocessing(library, model, config, image_size)
    # A classifier's weights have no pooling layer; transformers would draw one at random.
    pooled = not any(key.startswith("pooler.") for key in random)
    random = [key for key in random if not key.startswith("pooler.")]
    if random:
        raise FisherhashError(
            f"{name} lacks {len(random)} of the encoder's tensors, the first is '{random[0]}'"
        )
    return _wrapped(name, network, preprocessing, config.to_dict(), pooled=pooled)


def restore_hf(
    name: str, preprocessing: Preprocessing, architecture: dict[str, Any] | None
) -> Backbone:
    """Build the architecture of a saved model again; needs neither its folder nor the hub.

    Args:
        name: the backbone's saved name.
        preprocessing: as saved.
        architecture: as saved.

    Raises:
        FisherhashError: the architecture is missing, or transformers does not know it.
    """
    library = _transformers()
    if architecture is None:
        raise FisherhashError(f"the config of this model does not describe {name}")
    described = dict(architecture["config"])
    with _reading(name):
        config = library.AutoConfig.for_model(described.pop("model_type"), **described)
        network = library.AutoModel.from_config(config)
    pooled = bool(architecture["pooled"])
    return _wrapped(name, network, preprocessing, architecture["config"], pooled=pooled)


def _wrapped(
    name: str,
    network: nn.Module,
    preprocessing: Preprocessing,
    config: dict[str, Any],
    *,
    pooled: bool,
) -> Backbone:
    if not pooled:
        network.pooler = None  # type: ignore[assignment]
    backbone = Wrapped(ImageEncoder(network.float()), preprocessing, name)
    # Through JSON, as a model folder stores it.
    described = json.loads(json.dumps(config, default=str))
    backbone.architecture = {"config": described, "pooled": pooled}
    return backbone


def _preprocessing(
    library: ModuleType, model: str, config: Any, image_size: int | None
) -> Preprocessing:
    """From the model's preprocessor config; without one, its image size and ImageNet's numbers."""
    utils = importlib.import_module("transformers.utils")
    path = utils.cached_file(
        model,
        "preprocessor_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    own = getattr(config, "image_size", None)
    own = own[0] if isinstance(own, list | tuple) else own
    if path is None:
        return Preprocessing(size=image_size or own or Preprocessing.size)
    with open(path, encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    resized = _side(found.get("size")) or own or Preprocessing.size
    cropped = _side(found.get("crop_size")) if found.get("do_center_crop") else None
    size = cropped or resized
    plain = found.get("do_normalize") is False
    mean, std = found.get("image_mean"), found.get("image_std")
    default = Preprocessing()
    return Preprocessing(
        size=image_size or size,
        crop=min(1.0, size / resized),
        interpolation=_FILTER_NAMES.get(found.get("resample", -1), "bilinear"),
        mean=(0.0, 0.0, 0.0) if plain else _scaled(mean) if mean else default.mean,
        std=(255.0, 255.0, 255.0) if plain else _scaled(std) if std else default.std,
    )


def _side(size: Any) -> int | None:
    """The side of a square, in the forms in which preprocessor configs have it."""
    if isinstance(size, dict):
        size = size.get("shortest_edge") or size.get("height")
    return int(size) if size else None


def _scaled(numbers: list[float] | float) -> tuple[float, float, float]:
    several = numbers if isinstance(numbers, list) else [numbers] * 3
    red, green, blue = (255.0 * float(number) for number in several)
    return red, green, blue


def _transformers() -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        package = error.name or "transformers"
        raise missing_extra(package, "hf", "a backbone of transformers") from error


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = " ".join(str(error).split())
        raise FisherhashError(
            f"{name} could not be read or fetched: {reason}. Without a network, give the folder of "
            "a downloaded model: hf:/path/to/folder"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{name} is not a model that AutoModel can build: {reason}") from error
