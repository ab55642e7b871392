"""Files that are either whole or not there: written beside their place, then moved into it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fisherhash.errors import FisherhashError

NEW = ".new"


def write_files(folder: Path, files: Mapping[str, Callable[[Path], object]]) -> None:
    """Write several files of a folder so that a failure leaves all the old ones in place.

    Every file is written and flushed under a temporary name first; only when all are on the disk
    are they moved, in the order given.
    """
    written: list[tuple[Path, Path]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, write in files.items():
            draft = folder / (name + NEW)
            written.append((draft, folder / name))
            write(draft)
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
    except OSError as error:
        for draft, _ in written:
            draft.unlink(missing_ok=True)
        raise FisherhashError(
            f"could not write {folder}: {error.strerror or error}. Nothing there was changed; "
            "make room or choose another folder, then run the command again"
        ) from error
    for draft, place in written:
        os.replace(draft, place)


def write_text(text: str) -> Callable[[Path], None]:
    """A writer of one text file, for :func:`write_files`."""
    return _write_bytes(text.encode(errors="surrogateescape"))


def write_tensors(tensors: Mapping[str, Tensor]) -> Callable[[Path], None]:
    """A writer of one safetensors file, for :func:`write_files`."""
    from safetensors.torch import save

    return _write_bytes(save({k: v.detach().cpu().contiguous() for k, v in tensors.items()}))


def _write_bytes(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or an error that names the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(path.read_bytes())
    except OSError as error:
        raise _unreadable(path, error) from None
    except (SafetensorError, ValueError, KeyError) as error:
        raise FisherhashError(
            f"{path} is damaged or truncated ({error}); restore it from a copy or train again"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or an error that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, error) from None
    except ValueError as error:
        raise FisherhashError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise FisherhashError(f"{path} is damaged: a JSON object is expected")
    return value


def _unreadable(path: Path, error: OSError) -> FisherhashError:
    if isinstance(error, FileNotFoundError):
        return FisherhashError(f"{path} is missing")
    return FisherhashError(f"{path} cannot be read: {error.strerror or error}")


def dump_json(value: Any) -> str:
    """JSON for people and programs, with a final newline."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError:
        # A folder's name that is not UTF-8: as escapes, which JSON reads back.
        text = json.dumps(value, indent=2) + "\n"
    return text


def file_checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensors_checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
