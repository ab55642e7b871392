"""CIFAR-10 (Krizhevsky 2009): its six binary files, their download, and the built-in sample.

The sample is 2,000 images, 200 per class, chosen from the five training batches by a hash of their
names and stored without loss as one WebP mosaic; ``sample.json`` lists their names and labels in
the mosaic's order. ``benchmarks/build_sample.py`` builds both files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fisherhash.data.collection import ArrayReader, Collection, one_hot
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.system.progress import progress
from fisherhash.system.storage import draft_folder

CIFAR_FOLDER = "cifar-10-batches-bin"
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORD_BYTES = 1 + 3 * 32 * 32
CITATION = (
    "Alex Krizhevsky, Learning Multiple Layers of Features from Tiny Images, technical report, "
    "University of Toronto, 2009"
)
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_CHUNK = 1 << 20

SAMPLE = Path(__file__).parent
"""Where the files of the sample are."""
WIDE = 50
"""Images per row of the sample's mosaic."""
SIDE = 32


class CifarReader:
    """Reads records from the memory-mapped batch files: a label, then the R, G and B planes."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    @functools.cached_property
    def batches(self) -> list[NDArray[np.uint8]]:
        """The six files as (records, 3073) arrays, mapped on first use."""
        return [_map_batch(Path(self.folder) / f"{name}.bin") for name in BATCHES]

    def open(self, index: int, *, enough: int | None = None) -> Image.Image:
        """Return a 32 x 32 image."""
        for batch in self.batches:
            if index < len(batch):
                planes = batch[index, 1:].reshape(3, 32, 32)
                return Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0)))
            index -= len(batch)
        raise IndexError(index)

    def fingerprint(self) -> str:
        """Return a checksum over the content of the six files."""
        digest = hashlib.sha256()
        for batch in self.batches:
            digest.update(np.ascontiguousarray(batch).data)
        return digest.hexdigest()


def find_cifar10(folder: Path) -> Path | None:
    """Find the batch files in ``folder`` or in the folder of the archive inside it."""
    folders = (folder, folder / CIFAR_FOLDER)
    return next(
        (p for p in folders if any((p / f"{name}.bin").is_file() for name in BATCHES)), None
    )


def open_cifar10(folder: Path) -> Collection:
    """Open the 60,000 images of a folder that holds the six batch files."""
    missing = [f"{batch}.bin" for batch in BATCHES if not (folder / f"{batch}.bin").is_file()]
    if missing:
        raise UsageError(
            f"{folder} holds part of CIFAR-10 but not {', '.join(missing)}; unpack "
            "cifar-10-binary.tar.gz again"
        )
    reader = CifarReader(folder)
    numbers = np.concatenate([np.asarray(batch[:, 0]) for batch in reader.batches])
    if numbers.size and numbers.max() > 9:
        raise UsageError(
            f"{folder} holds labels up to {numbers.max()}, CIFAR-10 has 0 to 9; are these the "
            "files of CIFAR-100?"
        )
    names = [
        f"{batch}/{number:05d}"
        for batch, records in zip(BATCHES, reader.batches, strict=True)
        for number in range(len(records))
    ]
    return Collection(
        name="cifar10",
        names=names,
        labels=one_hot(numbers.astype(np.int64), 10),
        classes=CLASSES,
        reader=reader,
        kind="cifar10",
    )


def _map_batch(path: Path) -> NDArray[np.uint8]:
    size = path.stat().st_size
    if size == 0 or size % RECORD_BYTES:
        raise UsageError(
            f"{path} has {size:,} bytes, which is not a whole number of records of "
            f"{RECORD_BYTES:,} bytes; the file is truncated or not CIFAR-10. Unpack "
            "cifar-10-binary.tar.gz again"
        )
    return np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, RECORD_BYTES)


def open_sample() -> Collection:
    """Open the 2,000 images inside the package: (2000, 32, 32, 3) pixels, 10 classes."""
    try:
        index = json.loads((SAMPLE / "sample.json").read_text(encoding="utf-8"))
        with Image.open(SAMPLE / "sample.webp") as image:
            mosaic = np.asarray(image.convert("RGB"))
    except (OSError, ValueError) as error:
        raise FisherhashError(
            f"the built-in sample in {SAMPLE} cannot be read ({error}); reinstall fisherhash"
        ) from None
    rows = mosaic.shape[0] // SIDE
    tiles = mosaic.reshape(rows, SIDE, WIDE, SIDE, 3).transpose(0, 2, 1, 3, 4)
    pixels = np.ascontiguousarray(tiles.reshape(-1, SIDE, SIDE, 3)[: len(index["names"])])
    return Collection(
        name="sample",
        names=index["names"],
        labels=one_hot(index["labels"], len(index["classes"])),
        classes=tuple(index["classes"]),
        reader=ArrayReader(pixels),
        kind="sample",
    )


def download_cifar10(dest: Path, *, url: str = URL, md5: str = MD5, timeout: float = 30.0) -> Path:
    """Fetch, verify and unpack CIFAR-10 into ``dest``; return the folder of the batch files.

    The folder appears only when it is complete.
    """
    target = dest / CIFAR_FOLDER
    try:
        dest.mkdir(parents=True, exist_ok=True)
        with draft_folder(target) as draft:
            archive = draft / "archive"
            found = _fetch(url, archive, timeout)
            if found != md5:
                raise FisherhashError(
                    f"the download of {url} is not the expected file: "
                    f"{archive.stat().st_size:,} bytes with MD5 {found} instead of {md5}"
                )
            with tarfile.open(archive) as pack:
                pack.extractall(draft, filter="data")
            archive.unlink()
            for file in (draft / CIFAR_FOLDER).iterdir():
                file.rename(draft / file.name)
            (draft / CIFAR_FOLDER).rmdir()
    except (OSError, tarfile.TarError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FisherhashError(f"CIFAR-10 could not be written to {dest}: {reason}") from None
    return target


def _fetch(url: str, archive: Path, timeout: float) -> str:
    """Download a file; return its MD5."""
    import http.client
    import urllib.error
    import urllib.request

    digest = hashlib.md5(usedforsecurity=False)
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer, archive.open("wb") as file:
            total = int(answer.headers.get("Content-Length") or 0)
            with progress("Downloading CIFAR-10", total) as advance:
                while block := answer.read(_CHUNK):
                    file.write(block)
                    digest.update(block)
                    advance(len(block))
            if file.tell() < total:
                raise ConnectionError(f"broken off after {file.tell():,} of {total:,} bytes")
    except urllib.error.HTTPError as error:
        raise FisherhashError(f"{url} answered {error.code} {error.reason}") from None
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as e:
        raise FisherhashError(
            f"{url} could not be fetched ({getattr(e, 'reason', None) or e}); run the same command "
            "again, or unpack the archive by hand and set FISHERHASH_DATA to its folder"
        ) from None
    return digest.hexdigest()
