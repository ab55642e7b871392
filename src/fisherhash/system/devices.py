"""The device that computations run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fisherhash.errors import FisherhashError, UsageError, not_installed

if TYPE_CHECKING:
    import torch


AUTO = "auto"
"""The best device there is; None means the same."""


def is_processor(device: str | torch.device | None) -> bool:
    """Whether a device is the CPU, without importing torch; with no name, if there is no GPU."""
    if device in (None, AUTO):
        try:
            return choose_device(None).type == "cpu"
        except FisherhashError:
            return True
    return str(device).partition(":")[0] == "cpu"


def choose_device(name: str | torch.device | None) -> torch.device:
    """Return the named device if it works here; ``auto`` or None: CUDA if available, or the CPU."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise not_installed(error, f"the device '{name}'") from error

    if name in (None, AUTO):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"the device '{name}' cannot be used: {reason}") from None
    return device


def device_name(device: torch.device) -> str:
    """The name of a device in results: ``cpu``, or the model of the graphics card."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
