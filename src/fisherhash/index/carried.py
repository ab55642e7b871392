"""The model that an index on a server carries: a folder packed into bytes, and back."""

from __future__ import annotations

import hashlib
import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fisherhash.index.base import DamagedError, SaveModel
from fisherhash.system.cache import cache_dir
from fisherhash.system.storage import draft_folder

_FOLDER = "carried-models"


class CarriedModel(NamedTuple):
    """A packed folder and its SHA-256."""

    digest: str
    data: bytes

    def parts(self, size: int) -> Iterator[bytes]:
        """The bytes in parts of at most ``size``."""
        return (self.data[start : start + size] for start in range(0, len(self.data), size))


def pack_model(save_model: SaveModel | None) -> CarriedModel | None:
    """What a server stores of a model; None without one."""
    if save_model is None:
        return None
    with tempfile.TemporaryDirectory(prefix="fisherhash-") as place:
        folder = Path(place) / "model"
        save_model(folder)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
            archive.add(folder, "model")
    data = packed.getvalue()
    return CarriedModel(hashlib.sha256(data).hexdigest(), data)


def unpacked(digest: str) -> Path | None:
    """The folder in the cache where a model was unpacked before."""
    folder = cache_dir() / _FOLDER / digest
    return folder if folder.is_dir() else None


def unpack_model(uri: str, digest: str, data: bytes) -> Path:
    """Unpack a model into the cache, complete or not at all.

    Raises:
        DamagedError: the bytes are not those that were stored.
    """
    check_model(uri, digest, data)
    folder = cache_dir() / _FOLDER / digest
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            draft_folder(folder) as draft,
            tarfile.open(fileobj=io.BytesIO(data), mode="r") as archive,
        ):
            for member in archive.getmembers():
                if member.name == "model":
                    continue
                member.name = member.name.removeprefix("model/")
                archive.extract(member, draft, filter="data")
    except FileExistsError:
        pass  # another process was faster
    return folder


def check_model(uri: str, digest: str, data: bytes) -> None:
    """Raise a :class:`DamagedError` if the bytes are not those of the digest."""
    if hashlib.sha256(data).hexdigest() != digest:
        raise DamagedError(f"the model that {uri} carries is damaged; copy the index again")
