"""Weights that others wrote: reading a file, and copying its tensors into a network."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fisherhash.errors import FisherhashError, UsageError

_NAMED = 3


def existing_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a weights file that exists.

    Raises:
        UsageError: there is no such file, or it is a folder.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise UsageError(f"'{file}' is a folder; give a weights file")
    if not file.is_file():
        raise UsageError(f"the weights file '{file}' does not exist")
    return file


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a ``.safetensors`` file or a PyTorch state dict: tensors by name, on the CPU.

    A PyTorch file is opened with ``weights_only=True``, so that no code stored in it can run. A
    state dict nested under ``state_dict`` or ``model`` is found, and the prefix ``module.`` of
    parallel training is dropped.

    Raises:
        UsageError: there is no such file, or it holds anything but tensors by name.
        FisherhashError: the file is damaged, or it is a pickle that is not safe to open.
    """
    file = existing_file(path)
    with file.open("rb") as stream:
        start = stream.read(9)
    if file.suffix == ".safetensors" or start[8:9] == b"{":
        try:
            return load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise damaged_weights(file, error) from error
    return _state_dict(_unpickle(file), file)


def copy_weights(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    path: str | os.PathLike[str],
    what: str,
    ignore: Iterable[str] = (),
) -> None:
    """Copy tensors into a network; every tensor of the network must be there, and no other.

    Args:
        network: changed in place; nothing is copied if anything is wrong.
        tensors: by the network's own names.
        path: where they come from, for the error.
        what: what was expected, for the error: "SqueezeNet 1.0 with torchvision's names".
        ignore: prefixes of names that are allowed but not used, such as a classifier's.

    Raises:
        UsageError: tensors are missing, unexpected or of another shape.
        FisherhashError: a tensor holds values that are not finite.
    """
    expected = network.state_dict()
    # Inference needs no batch counters, and some writers omit them.
    needed = {name for name in expected if not name.endswith("num_batches_tracked")}
    others = tensors.keys() - expected.keys()
    kinds = {
        "missing": sorted(needed - tensors.keys()),
        "unexpected": sorted(name for name in others if not name.startswith(tuple(ignore))),
        "of another shape": sorted(
            f"{name} is {tuple(tensors[name].shape)}, expected {tuple(expected[name].shape)}"
            for name in needed & tensors.keys()
            if tensors[name].shape != expected[name].shape
        ),
    }
    faults = [
        f"{len(found)} {kind} ({', '.join(found[:_NAMED])}{', …' if len(found) > _NAMED else ''})"
        for kind, found in kinds.items()
        if found
    ]
    if faults:
        raise UsageError(
            f"'{path}' does not hold the weights of this network. Tensors: {'; '.join(faults)}. "
            f"Expected: {what}"
        )
    bad = [name for name in needed if not bool(torch.isfinite(tensors[name]).all())]
    if bad:
        raise FisherhashError(
            f"'{path}' is damaged: {min(bad)} holds values that are not finite. "
            "Fetch the file again"
        )
    network.load_state_dict({**expected, **{k: v for k, v in tensors.items() if k in expected}})


def _unpickle(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "global" not in str(error).lower():
            # torch's own message advises opening it unsafely.
            raise damaged_weights(file, ValueError("it holds no tensors")) from error
        raise FisherhashError(
            f"'{file}' holds Python objects besides tensors, and opening it could run code, so it "
            "was not opened. Save the tensors alone: torch.save(model.state_dict(), file)"
        ) from error
    # A cut archive or pickle fails in as many ways as there are places to cut it.
    except Exception as error:
        raise damaged_weights(file, error) from error


def _state_dict(content: Any, file: Path) -> dict[str, Tensor]:
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise UsageError(f"'{file}' is not a state dict: it does not hold tensors by name")
    return {name.removeprefix("module."): value for name, value in content.items()}


def damaged_weights(file: Path, error: Exception) -> FisherhashError:
    """Return the error for a file that cannot be read to its end."""
    reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
    return FisherhashError(
        f"'{file}' is damaged, cut short, or not a weights file ({reason}). Fetch the file again"
    )
