"""The device that computations run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fisherhash.errors import UsageError

if TYPE_CHECKING:
    import torch


def choose_device(name: str | torch.device | None) -> torch.device:
    """Return the named device if it works here; ``auto`` or None: CUDA if available, or the CPU."""
    import torch

    if name in (None, "auto"):
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
