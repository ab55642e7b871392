"""Download CIFAR-10 from its home page: resumed after a break, verified, complete or absent."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

from fisherhash.data.cifar import CIFAR_FOLDER
from fisherhash.errors import FisherhashError
from fisherhash.system.progress import progress
from fisherhash.system.storage import draft_folder

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_CHUNK = 1 << 20
_BROKEN_OFF = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)


def download_cifar10(
    dest: Path, *, url: str = CIFAR10_URL, md5: str = CIFAR10_MD5, timeout: float = 30.0
) -> Path:
    """Fetch, verify and unpack CIFAR-10 into ``dest``; return the folder of the batch files.

    The next call continues a download that broke off. The folder appears only when it is complete.
    """
    target = dest / CIFAR_FOLDER
    try:
        dest.mkdir(parents=True, exist_ok=True)
        archive = dest / "cifar-10-binary.tar.gz"
        part = dest / "cifar-10-binary.tar.gz.part"
        if not archive.is_file():
            _fetch(url, part, timeout)
            _verify(part, md5, url)
            os.replace(part, archive)
        _unpack(archive, target)
        archive.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise FisherhashError(f"CIFAR-10 could not be written to {dest}: {reason}") from None
    return target


def _fetch(url: str, part: Path, timeout: float) -> None:
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            # Status 200 means that the server ignored the range and sends everything: start again.
            resumed = answer.status == 206
            left = int(answer.headers.get("Content-Length") or 0)
            total = left + (have if resumed else 0)
            with (
                part.open("ab" if resumed else "wb") as file,
                progress("Downloading CIFAR-10", total) as advance,
            ):
                advance(have if resumed else 0)
                while block := answer.read(_CHUNK):
                    file.write(block)
                    advance(len(block))
            size = part.stat().st_size
            if size < total:
                raise ConnectionError(f"broken off after {size:,} of {total:,} bytes")
    except urllib.error.HTTPError as error:
        if error.code == 416:
            # Nothing is left to send: the file is complete or wrong, which the checksum decides.
            return
        raise FisherhashError(f"{url} answered {error.code} {error.reason}") from None
    except _BROKEN_OFF as error:
        reason = getattr(error, "reason", None) or error
        raise FisherhashError(
            f"{url} could not be fetched ({reason}); run the same command again to continue, or "
            "unpack the archive by hand and set FISHERHASH_DATA to its folder"
        ) from None


def _verify(part: Path, md5: str, url: str) -> None:
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
    if digest.hexdigest() != md5:
        size = part.stat().st_size
        part.unlink()
        raise FisherhashError(
            f"the download of {url} is not the expected file: {size:,} bytes with MD5 "
            f"{digest.hexdigest()} instead of {md5}. It was removed; run the command again"
        )


def _unpack(archive: Path, target: Path) -> None:
    with draft_folder(target) as draft:
        try:
            with tarfile.open(archive) as pack:
                pack.extractall(draft, filter="data")
        except tarfile.TarError as error:
            raise FisherhashError(f"{archive} cannot be unpacked: {error}") from None
        for file in (draft / CIFAR_FOLDER).iterdir():
            file.rename(draft / file.name)
        (draft / CIFAR_FOLDER).rmdir()
        if target.exists():
            shutil.rmtree(target)
