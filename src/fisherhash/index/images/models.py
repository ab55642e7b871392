"""The hasher of an index: loading it, checking another one against it, fitting a new one.

An index describes what made its codes. A built-in hasher is named; any other one is stored in the
index itself, so that the index can be moved and the model folder deleted. Nothing here imports
torch before a hasher has to be loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fisherhash.errors import FisherhashError, UsageError

if TYPE_CHECKING:
    from fisherhash.data.collection import Collection
    from fisherhash.data.folders import ImageFile
    from fisherhash.index.base import Codes, Index
    from fisherhash.model.hasher import Hasher

FIT_BITS = 64
FIT_IMAGES = 20_000


def hasher_of(index: Index, *, device: str = "cpu") -> Hasher:
    """Load the hasher that made the codes of an index.

    Raises:
        UsageError: the index does not say which.
        FisherhashError: the hasher is missing, damaged, or not the one that made the codes.
    """
    from fisherhash.model.hasher import Hasher

    if "builtin" in index.model:
        # By its name only: a folder of that name may exist here.
        hasher = Hasher.load_builtin(str(index.model["builtin"]), device=device)
        what = f"the built-in hasher '{index.model['builtin']}' of this version"
    elif index.model:
        folder = index.model_folder()
        if folder is None and "path" in index.model:
            folder = Path(index.model["path"])
        if folder is None or not folder.is_dir():
            raise FisherhashError(f"the model of {index.uri} is missing; restore it from a copy")
        hasher = Hasher.load(folder, device=device)
        what = f"the model in {folder}"
    else:
        raise UsageError(
            f"{index.uri} does not say which model made its codes, so it cannot encode images. "
            "Search it by --key, or by codes from Python; for images, create a new index"
        )
    if index.fingerprint not in (None, hasher.fingerprint()):
        raise FisherhashError(
            f"{what} is not the one that made the codes of {index.uri}; restore it, or create the "
            "index again"
        )
    return hasher


def check_model(
    index: Index,
    *,
    model: str | os.PathLike[str] | None = None,
    fit: str | None = None,
    bits: int | None = None,
) -> None:
    """Refuse a model that is not the one of the index; reads the model's config where possible."""
    if bits is not None and bits != index.bits:
        raise UsageError(
            f"{index.uri} has codes of {index.bits} bits, not {bits}; create another index"
        )
    if fit is not None and index.model.get("fitted") != fit:
        raise UsageError(
            f"{index.uri} has its model already ({describe_model(index.model)}); --fit is for a "
            "new index"
        )
    if model is None or index.fingerprint is None or str(model) == index.model.get("builtin"):
        return
    try:
        config = Path(model).expanduser() / "config.json"
        fingerprint = json.loads(config.read_text(encoding="utf-8"))["fingerprint"]
    except (ValueError, KeyError, TypeError, OSError):
        from fisherhash.model.hasher import Hasher

        fingerprint = Hasher.load(model).fingerprint()
    if fingerprint != index.fingerprint:
        raise UsageError(
            f"the codes of {index.uri} were made by another model "
            f"({describe_model(index.model)}) than {model}; codes of two models cannot be "
            "compared. Leave --model out, or create another index"
        )


def describe_model(model: Mapping[str, Any]) -> str:
    """The description of an index's model in words."""
    if "builtin" in model:
        return f"the built-in hasher {model['builtin']}"
    if "fitted" in model:
        return f"{model['fitted']}, fitted to {model.get('images', '?')} of its images"
    return str(model.get("path", "unknown"))


def fit_hasher(
    name: str, files: Sequence[ImageFile], method: str, *, bits: int | None, device: str
) -> tuple[Hasher, dict[str, Any], dict[str, Codes]]:
    """Fit a hasher to at most 20,000 of some image files, without labels.

    Returns:
        The hasher, its description for the index, and the codes that are known from fitting it,
        by key.
    """
    from fisherhash.data.splits import hash_order
    from fisherhash.methods import find, registry
    from fisherhash.training.fitting import fit

    if find(method).info.supervision != "none":
        free = sorted(n for n, m in registry().items() if m.info.supervision == "none")
        raise UsageError(
            f"{method} learns from labels, which --fit does without; take one of "
            f"{', '.join(free)}, or train a model and give it with --model"
        )
    order = hash_order([file.key for file in files], range(len(files)), seed=0)[:FIT_IMAGES]
    sample = collection_of(name, [files[i] for i in sorted(order)])
    hasher = fit(
        sample, method=method, bits=FIT_BITS if bits is None else bits, device=device
    ).hasher
    known: dict[str, Codes] = {}
    for block in hasher.encode_blocks(sample, cached=True):
        known |= {sample.names[int(i)]: c for i, c in zip(block.indices, block.codes, strict=True)}
    return hasher, {"fitted": method, "images": len(known)} | hasher.about, known


def collection_of(name: str, files: Sequence[ImageFile]) -> Collection:
    """Image files under their keys, without labels."""
    from fisherhash.data.collection import Collection
    from fisherhash.data.readers import FileReader

    return Collection(
        name=name,
        names=[file.key for file in files],
        labels=np.zeros((len(files), 0), dtype=np.uint8),
        classes=(),
        reader=FileReader(os.sep, [file.path for file in files]),
        kind="photos",
    )
