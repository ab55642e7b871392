"""Unfinished runs: whether a folder holds one, and whether it may be continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.system import storage

CHECKPOINT = "checkpoint.json"


def is_unfinished(folder: Path | None) -> bool:
    """Whether a folder holds a checkpoint to continue from."""
    return folder is not None and (folder / CHECKPOINT).is_file()


def discard_checkpoint(folder: Path) -> None:
    """Remove what an unfinished run left, once its model is saved or is not wanted."""
    (folder / CHECKPOINT).unlink(missing_ok=True)
    for path in folder.glob("checkpoint-*.safetensors*"):
        path.unlink(missing_ok=True)


def check_resumable(folder: Path, identity: dict[str, Any], *, overwrite: bool) -> bool:
    """Whether ``folder`` holds an unfinished run with these settings.

    Raises:
        UsageError: it holds a run with other settings, or a finished model.
    """
    path = folder / CHECKPOINT
    if folder.is_file():
        raise UsageError(f"{folder} is a file; a model is a folder. Choose another --out")
    if not _is_ours(folder):
        raise UsageError(
            f"{folder} holds something else than a model; nothing in it was changed. Choose "
            "another --out"
        )
    try:
        # Before the long part: can the folder be made?
        if not folder.is_dir():
            folder.mkdir(parents=True)
            folder.rmdir()
    except OSError as error:
        raise FisherhashError(
            f"{folder} cannot be made: {error.strerror or error}. Choose another --out"
        ) from None
    if overwrite:
        discard_checkpoint(folder)
        return False
    if path.is_file():
        found = storage.read_json(path).get("identity", {})
        wanted = json.loads(json.dumps(identity))
        differ = sorted(k for k in {*found, *wanted} if found.get(k) != wanted.get(k))
        if differ:
            name = differ[0]
            raise UsageError(
                f"{folder} holds an unfinished run with other settings ({name}: "
                f"{found.get(name)!r} there, {wanted.get(name)!r} now). Give the same settings to "
                "continue it, another --out, or --overwrite to start anew"
            )
        return True
    if (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} already holds a model. Choose another --out, or --overwrite (in Python "
            "overwrite=True) to replace it; it stays until the new one is complete"
        )
    return False


def _is_ours(folder: Path) -> bool:
    """Whether a folder is new, empty, a model, or what a run left: never somebody's documents."""
    if not folder.is_dir():
        return True
    names = {path.name for path in folder.iterdir()}
    if CHECKPOINT in names or all(name.endswith(storage.NEW) for name in names):
        return True
    if "config.json" not in names:
        return False
    try:
        return "weights_sha256" in storage.read_json(folder / "config.json")
    except FisherhashError:
        # A damaged config beside weights is a damaged model, which --overwrite may replace.
        return "model.safetensors" in names
