"""Unfinished runs: whether a model folder may be written to, and whether its run is continued."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.model.folder import CHECKPOINT, CONFIG, WEIGHTS, is_unfinished
from fisherhash.system import storage

if TYPE_CHECKING:
    from torch import Tensor


def checkpoint_files(
    epoch: int, state: dict[str, Tensor], identity: dict[str, Any]
) -> dict[str, storage.Content]:
    """The files of a checkpoint, in the order of their writing; both carry a checksum.

    Args:
        epoch: how many epochs are done.
        state: the tensors to continue from.
        identity: what must match before the checkpoint is continued.
    """
    name, tensors = f"checkpoint-{epoch}.safetensors", storage.write_tensors(state)
    entry = {
        "epoch": epoch,
        "file": name,
        "identity": identity,
        "tensors_sha256": storage.tensors_checksum(state),
    }
    # As it will be read: JSON has no tuples, and only texts as names.
    entry = json.loads(json.dumps(entry))
    return {name: tensors, CHECKPOINT: storage.dump_json({**entry, "sha256": _checksum(entry)})}


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The entry of the last checkpoint and its tensors.

    Raises:
        FisherhashError: a file is missing, or is not what was written.
    """
    entry = _read_entry(folder)
    path = folder / str(entry.get("file"))
    if path.parent != folder:
        raise FisherhashError(f"{folder / CHECKPOINT} is damaged: it names a file elsewhere")
    state = storage.read_tensors(path)
    if storage.tensors_checksum(state) != entry["tensors_sha256"]:
        raise FisherhashError(f"{path} is damaged: its checksum is not the one in {CHECKPOINT}")
    return entry, state


def unfinished_identity(folder: Path) -> dict[str, Any]:
    """The identity of the unfinished run in a folder; empty if there is none."""
    return _read_entry(folder).get("identity", {}) if is_unfinished(folder) else {}


def _read_entry(folder: Path) -> dict[str, Any]:
    entry = storage.read_json(folder / CHECKPOINT)
    noted = {name: value for name, value in entry.items() if name != "sha256"}
    if entry.get("sha256") != _checksum(noted):
        raise FisherhashError(
            f"{folder / CHECKPOINT} is damaged: it is not what was written; use --overwrite to "
            "start over"
        )
    return entry


def _checksum(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


def discard_checkpoint(folder: Path) -> None:
    """Remove the checkpoint of a run once its model is saved, or is not wanted."""
    for path in (folder / CHECKPOINT, *folder.glob("checkpoint-*.safetensors*")):
        path.unlink(missing_ok=True)


def check_resumable(folder: Path, identity: dict[str, Any], *, overwrite: bool) -> None:
    """Check that a folder is free for a run, or holds an unfinished one with these settings.

    With ``overwrite``, an unfinished run in it is dropped.

    Raises:
        UsageError: it holds a run with other settings, a finished model, or other files.
    """
    if folder.is_file():
        raise UsageError(f"{folder} is a file; a model is a folder. Choose another --out")
    if not _is_ours(folder):
        raise UsageError(
            f"{folder} holds files that are no model; nothing in it was changed. Choose another "
            "--out"
        )
    try:
        # Before the long part: can the folder be created?
        if not folder.is_dir():
            folder.mkdir(parents=True)
            folder.rmdir()
    except OSError as error:
        raise FisherhashError(
            f"{folder} cannot be created: {error.strerror or error}. Choose another --out"
        ) from None
    if overwrite:
        discard_checkpoint(folder)
    elif is_unfinished(folder):
        found, wanted = unfinished_identity(folder), json.loads(json.dumps(identity))
        if found != wanted:
            name, there, now = _first_difference(found, wanted)
            raise UsageError(
                f"{folder} holds an unfinished run with other settings ({name}: {there!r} there, "
                f"{now!r} now). Use the same settings to continue it, another --out, or "
                "--overwrite to start anew"
            )
    elif (folder / CONFIG).is_file():
        raise UsageError(
            f"{folder} already holds a model. Choose another --out, or --overwrite (in Python "
            "overwrite=True) to replace it; it stays until the new one is complete"
        )


def _first_difference(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[str, object, object]:
    """The name and both values of the first entry that differs, inside nested dicts too.

    >>> _first_difference({"bits": 8, "settings": {"epochs": 2}}, {"bits": 8, "settings": {}})
    ('epochs', 2, None)
    """
    name = min(k for k in {*found, *wanted} if found.get(k) != wanted.get(k))
    there, now = found.get(name), wanted.get(name)
    if isinstance(there, dict) and isinstance(now, dict):
        return _first_difference(there, now)
    return name, there, now


def _is_ours(folder: Path) -> bool:
    """Whether a folder is new, empty, a model, or left by a run: never somebody's documents."""
    if not folder.is_dir():
        return True
    names = {path.name for path in folder.iterdir()}
    if CHECKPOINT in names or all(name.endswith(storage.NEW) for name in names):
        return True
    if CONFIG not in names:
        return False
    try:
        return "files" in storage.read_json(folder / CONFIG)
    except FisherhashError:
        # A damaged config beside weights is a damaged model, which --overwrite may replace.
        return WEIGHTS in names
