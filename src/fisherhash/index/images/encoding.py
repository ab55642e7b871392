"""Adapter for what the hasher itself is to offer; delete this module once it does.

``load_hasher(name, device=)`` stands for ``Hasher.load(name, device=)``, ``load_builtin`` for
``Hasher.load_builtin``, ``about(hasher)`` for ``hasher.about`` and ``encode_blocks(hasher, …)`` for
``hasher.encode_blocks(…)``.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.data import loading
from fisherhash.data.collection import Collection
from fisherhash.errors import FisherhashError, UsageError

if TYPE_CHECKING:
    from fisherhash.model.hasher import Hasher

ALONE_SECONDS = 30.0


@dataclass(frozen=True)
class Skipped:
    """An image that could not be read; ``passing`` if another try may succeed."""

    index: int
    name: str
    reason: str
    passing: bool = False


@dataclass(frozen=True)
class EncodedBlock:
    """Codes (n, bytes) of the images ``indices`` (n,) of a source, and those that were skipped."""

    indices: NDArray[np.int64]
    codes: NDArray[np.uint8]
    queries: NDArray[np.float32] | None
    skipped: list[Skipped]


def load_hasher(name: str | os.PathLike[str] | None, *, device: str = "cpu") -> Hasher:
    """``Hasher.load(name, device=)``: a model folder or a built-in name; None is the default."""
    from fisherhash.model import builtin
    from fisherhash.model.hasher import Hasher

    text = builtin.DEFAULT if name is None else os.fspath(name)
    place = Path(text).expanduser()
    if not place.exists():
        if text in builtin.NAMES:
            return load_builtin(text, device=device)
        if near := difflib.get_close_matches(text, builtin.NAMES, n=1):
            raise UsageError(f"there is no model '{text}'. Did you mean '{near[0]}'?")
    hasher = Hasher.load(place, device=device)
    setattr(hasher, "about", {"path": os.path.abspath(place)} | _summary(hasher))  # noqa: B010
    return hasher


def load_builtin(name: str, *, device: str = "cpu") -> Hasher:
    """``Hasher.load_builtin(name, device=)``: by name only, whatever folders exist."""
    from fisherhash.model import builtin

    hasher = builtin.load(name, device=device)
    setattr(hasher, "about", {"builtin": name})  # noqa: B010
    return hasher


def about(hasher: Hasher) -> dict[str, Any]:
    """``hasher.about``: a description that JSON can hold."""
    return getattr(hasher, "about", None) or _summary(hasher)


def _summary(hasher: Hasher) -> dict[str, Any]:
    return {"method": hasher.method, "backbone": hasher.backbone.name, "bits": hasher.bits}


def encode_blocks(
    hasher: Hasher,
    source: Collection | Sequence[Any],
    indices: Sequence[int] | NDArray[np.int64] | None = None,
    *,
    block: int = 256,
    cached: bool = False,
) -> Iterator[EncodedBlock]:
    """``hasher.encode_blocks(source, indices, block=, cached=)``: codes and skipped images."""
    from fisherhash.codes import pack

    if cached and isinstance(source, Collection):
        done = hasher.encode_collection(source, cached=True)
        yield EncodedBlock(done.indices, done.codes, None, [])
        return
    if not isinstance(source, Collection):
        yield from _encode_images(hasher, source)
        return
    number = {name: i for i, name in enumerate(source.names)}
    for part in _decoded(source, indices, hasher.preprocessing, block):
        features = hasher._extractor.of_pixels(part.pixels)
        skipped = [Skipped(number[s.name], s.name, s.reason, s.passing) for s in part.skipped]
        yield EncodedBlock(part.indices, pack(hasher.logits_of_features(features)), None, skipped)


def _encode_images(hasher: Hasher, images: Sequence[Any]) -> Iterator[EncodedBlock]:
    for index, image in enumerate(images):
        named = isinstance(image, str | os.PathLike)
        name = os.fspath(image) if named else f"image {index}"
        try:
            yield EncodedBlock(np.array([index]), hasher.encode([image]), None, [])
        except FisherhashError as error:
            reason = str(error).removeprefix(f"{name}: ")
            none = np.empty(0, np.int64), np.empty((0, 0), np.uint8)
            yield EncodedBlock(*none, None, [Skipped(index, name, reason)])


def _decoded(
    source: Collection, indices: Any, preprocessing: Any, block: int
) -> Iterator[loading.Block]:
    wanted = np.arange(len(source)) if indices is None else np.asarray(indices, dtype=np.int64)
    start = 0
    while start < len(wanted):
        try:
            for part in loading.decode(source, wanted[start:], preprocessing, block=block):
                start += len(part.indices) + len(part.skipped)
                yield part
        except UsageError:
            raise
        except FisherhashError:
            end = min(start + block, len(wanted))
            for number in wanted[start:end].tolist():
                yield _alone(source, number, preprocessing)
            start = end


def _alone(source: Collection, number: int, preprocessing: Any) -> loading.Block:
    try:
        return next(
            loading.decode(source, [number], preprocessing, workers=1, timeout=ALONE_SECONDS)
        )
    except FisherhashError as error:
        size = preprocessing.size
        skipped = loading.Skipped(source.names[number], str(error), passing=True)
        none = np.empty(0, dtype=np.int64)
        return loading.Block(none, np.empty((0, 3, size, size), dtype=np.uint8), [skipped])
