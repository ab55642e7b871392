"""What a model folder holds, and how it is read: weights, a config, a card, an unfinished run."""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.model.card import model_card
from fisherhash.system import storage
from fisherhash.system.version import __version__

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fisherhash import backbones

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
ONNX = "model.onnx"
ONNX_SUM = "onnx_sha256"
"""Where the config has the checksum of the exported network; absent where there is none."""
FITTED_NETWORK, FITTED_MATRIX = "features.onnx", "head.safetensors"
"""A hasher that was fitted without torch: the network of its features, and its head."""
CHECKPOINT = "checkpoint.json"
MODEL_FORMAT = 1

_T = TypeVar("_T")


def is_unfinished(folder: Path | None) -> bool:
    """Whether a folder holds a checkpoint of a run that can be continued."""
    return folder is not None and (folder / CHECKPOINT).is_file()


def is_fitted(folder: Path) -> bool:
    """Whether a model folder holds a hasher that was fitted without torch."""
    return (folder / FITTED_MATRIX).is_file() and (folder / FITTED_NETWORK).is_file()


def versions() -> dict[str, str]:
    """The versions of the software that a result depends on."""
    import importlib.metadata

    found = {"fisherhash": __version__, "python": platform.python_version()}
    for package in ("torch", "onnxruntime"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found | {"numpy": np.__version__}


def model_files(
    modules: Mapping[str, nn.Module], config: dict[str, Any], *, onnx: bytes | None = None
) -> dict[str, storage.Content]:
    """The files of a model folder and what goes into them, in the order of their writing.

    Args:
        modules: the backbone and the head, perhaps that of a second code.
        config: what describes them.
        onnx: the exported network.
    """
    state = joined_state(modules)
    checksum = storage.tensors_checksum(state)
    files = {WEIGHTS: storage.write_tensors(state)}
    return files | described_files(config | {"weights_sha256": checksum}, onnx)


def described_files(config: dict[str, Any], onnx: bytes | None) -> dict[str, storage.Content]:
    """The files of a model folder apart from the weights, in the order of their writing.

    Args:
        config: what describes the model.
        onnx: the exported network.
    """
    config = {"format": MODEL_FORMAT, **config}
    config.pop(ONNX_SUM, None)
    files: dict[str, storage.Content] = {}
    if onnx is not None:
        files[ONNX] = onnx
        config[ONNX_SUM] = hashlib.sha256(onnx).hexdigest()
    return files | {CARD: model_card(config), CONFIG: storage.dump_json(config)}


def usable_onnx(folder: Path) -> dict[str, Any] | None:
    """The config of a model folder whose exported network belongs to it; otherwise None.

    A version that knows no exported networks may have replaced the model; its config then has no
    checksum of the network, which is not used.
    """
    if not (folder / ONNX).is_file() or not (folder / CONFIG).is_file():
        return None
    configs = [read_config(folder / CONFIG)]
    draft = folder / (CONFIG + storage.NEW)
    if draft.is_file():
        # A save was killed after it moved the network and before it moved the config.
        with contextlib.suppress(FisherhashError):
            configs.append(read_config(draft))
    configs = [config for config in configs if ONNX_SUM in config]
    if not configs:
        return None
    checksum = hashlib.sha256(storage.read_bytes(folder / ONNX)).hexdigest()
    for config in configs:
        if config[ONNX_SUM] == checksum:
            return config
    raise FisherhashError(
        f"{folder / ONNX} is damaged: its checksum is not the one in {CONFIG}; restore it from a "
        f"copy, or write it again with: fisherhash export onnx {folder}"
    )


def read_model(
    folder: Path, backbone: nn.Module | None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """Read a model folder: the parts of a hasher, the config, and the weights as they are stored.

    The caller compares the checksum of the weights with the one in the config.

    Args:
        folder: the model folder.
        backbone: the network, if the model was built on one of the user's own.

    Raises:
        UsageError: there is no model in the folder.
        FisherhashError: a file is damaged, or does not belong to the others.
    """
    from fisherhash.model.heads import restore_head

    config = read_config(folder / CONFIG)
    if not (folder / WEIGHTS).is_file() and (folder / ONNX).is_file():
        raise UsageError(
            f"{folder} holds an exported model without {WEIGHTS}, which torch needs; use "
            "ONNX Runtime, or the model that it was exported from"
        )
    shapes = storage.read_shapes(folder / WEIGHTS)
    draft = folder / (CONFIG + storage.NEW)
    if draft.is_file() and not _fits_weights(config, folder):
        # A save was killed after it moved the weights and before it moved the config.
        config = read_config(draft)
    try:
        kinds = ["head", "fine"] if "fine" in config else ["head"]
        for part in kinds:
            _check_head(config[part], part, shapes, folder)
        parts = {
            "backbone": _restored(config, backbone),
            **{part: restore_head(config[part]) for part in kinds},
            "method": str(config["method"]),
            "classes": tuple(config["classes"]),
            "details": dict(config["details"]),
        }
        config |= {name: str(config[name]) for name in ("fingerprint", "weights_sha256")}
    except FisherhashError:
        raise
    # Values of a wrong type or size fail wherever a constructor first uses them.
    except Exception as error:
        raise FisherhashError(f"{folder / CONFIG} is damaged: {error}") from None
    for part in ("backbone", *kinds):
        _check_shapes(parts[part], part, shapes, folder)
    state = storage.read_tensors(folder / WEIGHTS)
    for part in ("backbone", *kinds):
        parts[part].load_state_dict(part_state(state, part))
    return parts, config, state


def _restored(config: dict[str, Any], module: nn.Module | None) -> backbones.Backbone:
    """The backbone that a config describes; a model of vectors has none."""
    from fisherhash import backbones

    if config["backbone"] is not None:
        return backbones.restore(
            config["backbone"],
            Preprocessing.from_config(config["preprocessing"]),
            module=module,
            architecture=config.get("architecture"),
        )
    if module is not None:
        raise UsageError("this model takes vectors and has no backbone; pass no network with it")
    if config["dimensions"] != config["head"]["in_features"]:
        raise ValueError("dimensions are not those of the head")
    return backbones.VectorInput(int(config["dimensions"]))


def _fits_weights(config: dict[str, Any], folder: Path) -> bool:
    state = storage.read_tensors(folder / WEIGHTS)
    return config.get("weights_sha256") == storage.tensors_checksum(state)


def _check_head(
    config: dict[str, Any], part: str, shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    """Compare a head with the stored tensors before any memory is taken for it."""
    import torch

    from fisherhash.model.heads import restore_head

    with torch.device("meta"):
        head = restore_head(config)
    _check_shapes(head, part, shapes, folder)


def read_config(path: Path) -> dict[str, Any]:
    """Read the config of a model folder.

    Raises:
        UsageError: there is no model in the folder.
        FisherhashError: it is damaged, or has another format.
    """
    folder = path.parent
    if not path.is_file():
        if is_unfinished(folder):
            raise UsageError(
                f"{folder} holds an unfinished run; finish it with the command that started it"
            )
        if folder.is_file():
            what = "is a file, not a model folder"
        elif folder.is_dir():
            what = f"is not a model folder: it has no {CONFIG}"
        else:
            what = "does not exist"
        raise UsageError(f"{folder} {what}. Make a model with: fisherhash train DATA --out MODEL")
    config = storage.read_json(path)
    if config.get("format") != MODEL_FORMAT:
        raise FisherhashError(
            f"{path} has format {config.get('format')!r}, this version reads {MODEL_FORMAT}; "
            "update fisherhash or train again"
        )
    if not isinstance(config.setdefault("details", {}), dict):
        raise FisherhashError(f"{path} is damaged: 'details' is no table; restore it from a copy")
    return config


def joined_state(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The tensors of several modules, each under the name of its module: ``head.linear.bias``."""
    states = {part: module.state_dict() for part, module in modules.items()}
    return {f"{part}.{k}": tensor for part, own in states.items() for k, tensor in own.items()}


def part_state(state: Mapping[str, _T], part: str) -> dict[str, _T]:
    """The tensors of one of those modules, under the names it knows them by."""
    prefix = part + "."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _check_shapes(
    module: nn.Module, part: str, shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    found = part_state(shapes, part)
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    wrong = sorted(k for k in {*found, *wanted} if found.get(k) != wanted.get(k))
    if wrong:
        raise FisherhashError(
            f"{folder / WEIGHTS} holds the weights of another architecture than {CONFIG} says: "
            f"{len(wrong)} tensors of the {part} do not fit, the first is '{wrong[0]}'"
        )
