"""What a model folder holds, and how it is read: weights, a config, a card, an unfinished run."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fisherhash import backbones
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.model.card import model_card
from fisherhash.model.heads import restore_head
from fisherhash.system import storage
from fisherhash.system.version import __version__

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
CHECKPOINT = "checkpoint.json"
MODEL_FORMAT = 1

_T = TypeVar("_T")


def is_unfinished(folder: Path | None) -> bool:
    """Whether a folder holds a checkpoint of a run that can be continued."""
    return folder is not None and (folder / CHECKPOINT).is_file()


def versions() -> dict[str, str]:
    """The versions of the software that a result depends on."""
    return {
        "fisherhash": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def model_files(
    modules: Mapping[str, nn.Module], config: dict[str, Any]
) -> dict[str, storage.Content]:
    """The files of a model folder and what goes into them, in the order of their writing.

    Args:
        modules: the backbone and the head.
        config: what describes them.
    """
    state = joined_state(modules)
    checksum = storage.tensors_checksum(state)
    config = {"format": MODEL_FORMAT, **config, "weights_sha256": checksum}
    return {
        WEIGHTS: storage.write_tensors(state),
        CARD: model_card(config),
        CONFIG: storage.dump_json(config),
    }


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
    config = _read_config(folder / CONFIG)
    shapes = storage.read_shapes(folder / WEIGHTS)
    draft = folder / (CONFIG + storage.NEW)
    if draft.is_file() and not _fits_weights(config, folder):
        # A save was killed after it moved the weights and before it moved the config.
        config = _read_config(draft)
    try:
        _check_head(config["head"], shapes, folder)
        preprocessing = Preprocessing.from_config(config["preprocessing"])
        parts = {
            "backbone": backbones.restore(config["backbone"], preprocessing, module=backbone),
            "head": restore_head(config["head"]),
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
    for part in ("backbone", "head"):
        _check_shapes(parts[part], part, shapes, folder)
    state = storage.read_tensors(folder / WEIGHTS)
    for part in ("backbone", "head"):
        parts[part].load_state_dict(part_state(state, part))
    return parts, config, state


def _fits_weights(config: dict[str, Any], folder: Path) -> bool:
    state = storage.read_tensors(folder / WEIGHTS)
    return config.get("weights_sha256") == storage.tensors_checksum(state)


def _check_head(
    config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    """Compare a head with the stored tensors before any memory is taken for it."""
    with torch.device("meta"):
        head = restore_head(config)
    _check_shapes(head, "head", shapes, folder)


def _read_config(path: Path) -> dict[str, Any]:
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
