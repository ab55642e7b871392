"""Where a model is: in a folder or a file, in this package, or on the hub."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from fisherhash.errors import UsageError
from fisherhash.model import builtin, hub
from fisherhash.model.folder import CONFIG, read_config


def locate_model(model: str | os.PathLike[str] | None) -> Path | str:
    """Find a model by its name or path.

    Args:
        model: a path, which comes first where both exist, ``hf:user/name`` on the hub, or the
            name of a built-in hasher; None for the default one.

    Returns:
        The path of the folder or the file, or the name of the built-in hasher.

    Raises:
        UsageError: there is no such model; a typo is answered with the nearest name.
        FisherhashError: the hub cannot be reached, or the extra ``hub`` is not installed.
    """
    place = Path("" if model is None else model).expanduser()
    if model is not None and place.exists():
        return place
    if hub.is_address(model):
        return hub.download_model(str(model))
    name = builtin.DEFAULT_HASHER if model is None else os.fspath(model)
    if name in builtin.NAMES:
        return name
    if near := difflib.get_close_matches(name, builtin.NAMES, n=1):
        raise UsageError(f"there is no model '{name}'. Did you mean '{near[0]}'?")
    read_config(place / CONFIG)  # raises, and says how to make a model
    return place
