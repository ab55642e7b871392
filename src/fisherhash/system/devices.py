"""Where computation runs."""

from __future__ import annotations

import torch

from fisherhash.errors import UsageError


def choose_device(name: str | torch.device | None) -> torch.device:
    """The device of that name if it works here; without a name CUDA where there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"the device '{name}' cannot be used: {reason}") from None
    return device


def device_name(device: torch.device) -> str:
    """What a device is called, for results: ``cpu``, or the name of the card."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
