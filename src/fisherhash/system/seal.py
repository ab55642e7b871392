"""Seals: a list of a folder's files with their checksums, signed with a secret key.

Checksums inside an index or a model tell accidents. They cannot tell a forger, who computes them
again. A seal can: who has the key knows that no file was changed, added or removed since.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.system.storage import dump_json, read_json, write_file

SEAL = "seal.json"
SEAL_FORMAT = 1
LEAST_KEY = 16
"""Bytes of the shortest key."""
_MOST_KEY = 1 << 20
_LEFT_OUT = {SEAL, "lock"}
"""Files that change without meaning anything."""


@dataclass(frozen=True)
class SealReport:
    """How a folder differs from its seal.

    Attributes:
        forged: the seal itself is not signed with this key; nothing else can be said then.
        changed: files whose bytes changed, or that are no regular files any more.
        missing: files that are gone.
        added: files that the seal does not name.
    """

    forged: bool
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    @property
    def intact(self) -> bool:
        """Whether everything is as it was sealed."""
        return not (self.forged or self.changed or self.missing or self.added)


def read_key(path: str | os.PathLike[str]) -> bytes:
    """Read a key from a file.

    Raises:
        UsageError: there is no such file, or it is too short to be secret.
    """
    try:
        with open(path, "rb") as file:
            key = file.read(_MOST_KEY)
    except OSError as error:
        raise UsageError(
            f"the key {os.fspath(path)} cannot be read: {error.strerror or error}. Make one with: "
            f"head -c 32 /dev/urandom > {os.fspath(path)}"
        ) from None
    if len(key) < LEAST_KEY:
        raise UsageError(f"the key {os.fspath(path)} is too short: at least {LEAST_KEY} bytes")
    return key


def seal_folder(folder: str | os.PathLike[str], key: bytes) -> int:
    """Write ``seal.json`` into a folder; returns the number of files that it names."""
    root = _folder(folder)
    files, odd = _files(root)
    if odd:
        raise FisherhashError(f"{root / odd[0]} is not a regular file; it cannot be sealed")
    seal: dict[str, Any] = {"format": SEAL_FORMAT, "files": files}
    write_file(root / SEAL, dump_json({**seal, "hmac_sha256": _signature(seal, key)}))
    return len(files)


def check_seal(folder: str | os.PathLike[str], key: bytes) -> SealReport:
    """Compare a folder with its seal.

    Raises:
        FisherhashError: it has no seal, or one that cannot be read.
    """
    root = _folder(folder)
    stored = read_json(root / SEAL)
    given = stored.pop("hmac_sha256", "")
    files = stored.get("files")
    signature = _signature(stored, key)
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(), signature.encode()):
        return SealReport(forged=True)
    if stored.get("format") != SEAL_FORMAT or not isinstance(files, dict):
        raise FisherhashError(f"{root / SEAL} has a format that this version does not know")
    found, odd = _files(root)
    return SealReport(
        forged=False,
        changed=tuple(n for n in files if n in odd or found.get(n, files[n]) != files[n]),
        missing=tuple(name for name in files if name not in found and name not in odd),
        added=tuple(name for name in [*found, *odd] if name not in files),
    )


def _folder(folder: str | os.PathLike[str]) -> Path:
    root = Path(folder)
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder")
    return root


def _signature(seal: dict[str, Any], key: bytes) -> str:
    text = json.dumps(seal, sort_keys=True).encode()
    return hmac.new(key, text, hashlib.sha256).hexdigest()


def _files(root: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Size and checksum of every regular file, and the names of everything else but folders."""
    found: dict[str, dict[str, Any]] = {}
    odd: list[str] = []
    for place, folders, names in os.walk(root):
        folders.sort()
        inside = Path(place)
        links = [name for name in folders if (inside / name).is_symlink()]
        for name in sorted([*names, *links]):
            path = inside / name
            relative = path.relative_to(root).as_posix()
            if relative in _LEFT_OUT:
                continue
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                odd.append(relative)
                continue
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[relative] = {"size": status.st_size, "sha256": digest}
    return found, odd
