"""Which hasher made the codes of an index, and an index that is made together with its hasher.

An index names what made its codes: a built-in hasher by name; any other one lies in the index
itself, in the folder ``model``, so that the index can be moved and the model folder deleted.
Nothing here imports torch before a hasher has to be loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import FisherhashError, UsageError

if TYPE_CHECKING:
    from fisherhash.data.collection import Collection
    from fisherhash.index.local.index import LocalIndex
    from fisherhash.index.local.verify import Problem
    from fisherhash.model.hasher import Hasher

COPY = "model"
FIT_BITS = 64
FIT_IMAGES = 20_000
_DRAFT, _OLD_SECONDS = ".new", 3600.0


@dataclass(frozen=True)
class Chosen:
    """A hasher for a new index.

    Attributes:
        hasher: the hasher.
        about: what the index writes down about it.
        codes: codes that are known already, by the names of the images, from fitting it.
    """

    hasher: Hasher
    about: dict[str, Any]
    codes: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)


def is_index(path: str | os.PathLike[str]) -> bool:
    """Whether there is anything at the path of an index that an index could be opened from."""
    place = Path(path)
    return place.exists() and not (place.is_dir() and not any(place.iterdir()))


def load_model(model: str | os.PathLike[str] | None, *, device: str = "cpu") -> Chosen:
    """A hasher by the folder of a model or by the name of a built-in one; without, the default.

    Raises:
        UsageError: there is no such model.
    """
    from fisherhash.model.hasher import Hasher

    hasher = Hasher.load(model, device=device)
    return Chosen(hasher, hasher.about)


def fit_model(
    images: Collection, method: str, *, bits: int | None = None, device: str = "cpu"
) -> Chosen:
    """A hasher fitted to image files themselves, without labels, on at most 20,000 of them."""
    from fisherhash.data.splits import hash_order
    from fisherhash.methods import find, registry
    from fisherhash.training.fitting import fit

    if find(method).info.supervision != "none":
        free = sorted(n for n, m in registry().items() if m.info.supervision == "none")
        raise UsageError(
            f"{method} learns from labels, which --fit does without; take one of "
            f"{', '.join(free)}, or train a model and give it with --model"
        )
    order = sorted(hash_order(images.names, range(len(images)), seed=0)[:FIT_IMAGES])
    sample = image_files(
        images.name, [images.names[i] for i in order], [_path(images, i) for i in order]
    )
    trained = fit(sample, method=method, bits=FIT_BITS if bits is None else bits, device=device)
    encoded = trained.hasher.encode_collection(sample, cached=True)
    known = {
        sample.names[int(i)]: code for i, code in zip(encoded.indices, encoded.codes, strict=True)
    }
    about = {"fitted": method, "images": len(known)} | trained.hasher.about
    return Chosen(trained.hasher, about, known)


def image_files(name: str, names: Sequence[str], paths: Sequence[str]) -> Collection:
    """Image files (absolute paths) under names of their own, without labels."""
    from fisherhash.data.collection import Collection, one_hot
    from fisherhash.data.readers import FileReader

    labels = one_hot([-1] * len(names), 0)
    return Collection(name, names, labels, (), FileReader(os.sep, paths), kind="photos")


def _path(images: Collection, number: int) -> str:
    from fisherhash.data.readers import FileReader

    if not isinstance(images.reader, FileReader):
        raise UsageError(f"'{images.name}' is not made of files")
    return images.reader.path(number)


def create_index(path: str | os.PathLike[str], chosen: Chosen) -> LocalIndex:
    """A new, empty index with its hasher, open for writing: wholly there, or not at all."""
    from fisherhash.index.local.index import LocalIndex

    # A link stays one: the index is made where it leads.
    place = Path(os.path.realpath(path))
    if is_index(place):
        raise UsageError(f"{place} exists already and is not empty; nothing in it was changed")
    hasher = chosen.hasher
    if not hasher.head.hamming:
        raise UsageError(
            f"codes of {hasher.method} are not compared by Hamming distance, so an index cannot "
            "search them; take a model of another method"
        )
    # Its own name: another process may be making the same index.
    draft = place.with_name(f".{place.name}.{os.getpid()}-{time.time_ns():x}{_DRAFT}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        drop_old_drafts(place)
        made = LocalIndex.create(
            draft, bits=hasher.bits, fingerprint=hasher.fingerprint(), model=chosen.about
        )
        made.close()
        if "builtin" not in chosen.about:
            hasher.save(draft / COPY)
        if place.is_dir():
            place.rmdir()
        os.replace(draft, place)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise FisherhashError(f"the index {path} cannot be made: {reason}") from error
        if isinstance(error, FisherhashError) and str(draft) in str(error):
            raise FisherhashError(str(error).replace(str(draft), os.fspath(path))) from error
        raise
    return LocalIndex.open(place, write=True)


def drop_old_drafts(path: str | os.PathLike[str]) -> None:
    """Take away what a process that was killed while it made this index left."""
    place = Path(os.path.realpath(path))
    form = re.compile(rf"\.{re.escape(place.name)}\.(\d+)-[0-9a-f]+{re.escape(_DRAFT)}")
    with contextlib.suppress(OSError), os.scandir(place.parent) as entries:
        for beside in entries:
            if match := form.fullmatch(beside.name):
                old = time.time() - beside.stat().st_mtime > _OLD_SECONDS
                if old or not _is_running(int(match[1])):
                    shutil.rmtree(beside.path, ignore_errors=True)


def _is_running(process: int) -> bool:
    """Whether there is such a process; where that cannot be asked, there may be."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def hasher_of(index: LocalIndex, path: str | os.PathLike[str], *, device: str = "cpu") -> Hasher:
    """The hasher that made the codes of an index.

    Raises:
        UsageError: the index does not say which, or holds codes only.
        FisherhashError: the hasher is gone, damaged, or another one than the codes were made with.
    """
    about, copy = index.model or {}, Path(path) / COPY
    if "builtin" in about:
        from fisherhash.model.hasher import Hasher

        # By its name only: a folder of that name may happen to lie here.
        hasher = Hasher.load_builtin(str(about["builtin"]), device=device)
        what = f"the built-in hasher '{about['builtin']}' of this version"
    elif about:
        place = copy if copy.is_dir() else Path(str(about.get("path", copy)))
        if not place.is_dir():
            raise FisherhashError(
                f"the model of {path} is gone: there is no folder {copy}; restore it from a copy"
            )
        from fisherhash.model.hasher import Hasher

        hasher = Hasher.load(place, device=device)
        what = f"the model in {place}"
    else:
        raise UsageError(
            f"{path} does not say which model made its codes, so that no image can be encoded for "
            "it; search by --key, or by codes from Python"
        )
    if index.fingerprint is not None and hasher.fingerprint() != index.fingerprint:
        raise FisherhashError(
            f"{what} is not the one that made the codes of {path}; restore it, or make the index "
            "anew"
        )
    return hasher


def check_same_model(
    index: LocalIndex,
    path: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    fit: str | None = None,
    bits: int | None = None,
) -> None:
    """Refuse a model that is not the one of the index; reads a model's config, loads no model."""
    about = index.model or {}
    if bits is not None and bits != index.bits:
        raise UsageError(f"{path} has codes of {index.bits} bits, not {bits}; make another index")
    if fit is not None and about.get("fitted") != fit:
        raise UsageError(
            f"{path} has its model already ({describe_model(about)}); --fit is for a new index"
        )
    if model is None or index.fingerprint is None or str(model) == about.get("builtin"):
        return
    config = Path(model).expanduser() / "config.json"
    fingerprint = None
    if config.is_file():
        try:
            fingerprint = json.loads(config.read_text(encoding="utf-8"))["fingerprint"]
        except (ValueError, KeyError, TypeError, OSError):
            fingerprint = None
    if fingerprint is None:
        fingerprint = load_model(model).hasher.fingerprint()
    if fingerprint != index.fingerprint:
        raise UsageError(
            f"the codes of {path} were made by another model ({describe_model(about)}) than "
            f"{model}; codes of two models cannot be compared. Leave --model out, or make another "
            "index"
        )


def describe_model(about: Mapping[str, Any]) -> str:
    """The model of an index in words."""
    if "builtin" in about:
        return f"the built-in hasher {about['builtin']}"
    if "fitted" in about:
        return f"{about['fitted']}, fitted to {about.get('images', '?')} of its images"
    return str(about.get("path", "unknown"))


def verify_model(path: str | os.PathLike[str]) -> list[Problem]:
    """What is wrong with the hasher of an index that can be opened."""
    from fisherhash.index.local.index import LocalIndex
    from fisherhash.index.local.verify import Problem

    try:
        index = LocalIndex.open(path)
    except FisherhashError:
        return []
    with index:
        try:
            if index.model:
                hasher_of(index, path)
        except FisherhashError as error:
            return [Problem(COPY, f"cannot be used: {error}", "restore it from a copy")]
    return []
