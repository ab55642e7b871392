"""Vectors that are not images: .npy files, memory-mapped and read in blocks; labels and keys."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import UsageError, counted, printable
from fisherhash.system.progress import progress

VECTORS_AT_ONCE = 16_384
"""Rows that are read, checked or encoded at a time."""
NAMED = 5
"""Rows that an error names."""

Vectors = NDArray[np.floating[Any]]


def open_vectors(path: str | os.PathLike[str]) -> Vectors:
    """Memory-map the vectors (n, d) of an .npy file; nothing is read but its header.

    Raises:
        UsageError: there is no such file, or it does not hold vectors of floats.
    """
    found = _open(path, mapped=True)
    check_shape(found, str(path))
    return found


def check_shape(vectors: NDArray[Any], name: str, *, width: int | None = None) -> None:
    """Refuse an array that does not hold vectors.

    Args:
        vectors: what should be (n, d) floats.
        name: its name in the message.
        width: the dimensions that are expected.

    Raises:
        UsageError: the shape or the type is another one.
    """
    name = printable(name)
    if vectors.ndim != 2 or not vectors.shape[0] or not vectors.shape[1]:
        raise UsageError(
            f"{name} must hold vectors as an array (n, d), one row per vector; its shape is "
            f"{vectors.shape}"
        )
    if vectors.dtype.kind != "f" or vectors.dtype.itemsize not in (2, 4, 8):
        raise UsageError(
            f"{name} must hold float16, float32 or float64, not {vectors.dtype}; convert it with "
            "x.astype('float32')"
        )
    if width is not None and vectors.shape[1] != width:
        raise UsageError(
            f"{name} has vectors of {counted(vectors.shape[1], 'dimension')}; the model takes "
            f"vectors of {counted(width, 'dimension')}"
        )


def vector_blocks(
    vectors: Vectors, rows: int = VECTORS_AT_ONCE
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield the vectors (n, d) in blocks: the number of its first row, a float32 copy."""
    for start in range(0, len(vectors), rows):
        # A number too large for float32 becomes infinite, which check_finite_rows reports.
        with np.errstate(over="ignore"):
            yield start, np.array(vectors[start : start + rows], np.float32, order="C")


def check_finite_rows(vectors: Vectors, name: str) -> None:
    """Refuse vectors that hold NaN or values that are infinite as float32.

    Raises:
        UsageError: some do; the message counts them and names the first.
    """
    count, first = 0, []
    quick = len(vectors) <= VECTORS_AT_ONCE
    title = f"checking {os.path.basename(name)}"
    with nullcontext(lambda _: None) if quick else progress(title, len(vectors)) as advance:
        for start, block in vector_blocks(vectors):
            broken = np.flatnonzero(~np.isfinite(block).all(axis=1)) + start
            count += len(broken)
            first += broken[: NAMED - len(first)].tolist()
            advance(len(block))
    if count:
        rows = ", ".join(map(str, first)) + (", …" if count > len(first) else "")
        raise UsageError(
            f"{printable(name)} holds NaN or infinite values in {counted(count, 'row')}: {rows} "
            "(counted from 0); remove or replace them"
        )


def read_labels(
    path: str | os.PathLike[str], count: int
) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Read the labels of ``count`` vectors from an .npy file.

    Args:
        path: the file: one number or text per vector (n,), or 0 and 1 (n, classes).
        count: n.

    Returns:
        The labels (n, classes), 0 or 1, and the names of the classes.

    Raises:
        UsageError: the file holds something else, or labels of another number of vectors.
    """
    found, name = _open(path, mapped=False), printable(str(path))
    if found.ndim not in (1, 2) or found.dtype.kind not in ("biuUS" if found.ndim == 1 else "biuf"):
        raise UsageError(
            f"{name} must hold labels: one whole number or text per vector (n,), or 0 and 1 "
            f"(n, classes); it holds {found.dtype} of shape {found.shape}"
        )
    if len(found) != count:
        raise UsageError(
            f"{name} has {counted(len(found), 'label')} for {counted(count, 'vector')}"
        )
    if found.ndim == 2:
        if not np.isin(found, (0, 1)).all():
            raise UsageError(f"{name}: labels of shape (n, classes) must be 0 or 1")
        return found.astype(np.uint8), tuple(map(str, range(found.shape[1])))
    values, numbers = np.unique(found, return_inverse=True)
    labels = np.zeros((count, len(values)), dtype=np.uint8)
    labels[np.arange(count), numbers.reshape(-1)] = 1
    texts = (v.decode(errors="replace") if isinstance(v, bytes) else str(v) for v in values)
    return labels, tuple(texts)


def read_keys(path: str | os.PathLike[str], count: int) -> list[str]:
    """Read the keys of ``count`` vectors from a text file, one per line.

    Raises:
        UsageError: there is no such file, or its keys are not one distinct text per vector.
    """
    name = printable(str(path))
    try:
        keys = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not a text in UTF-8: {error.reason}") from None
    if len(keys) != count:
        raise UsageError(
            f"{name} has {counted(len(keys), 'key')} for {counted(count, 'vector')}; it needs one "
            "per line and vector"
        )
    empty = next((line for line, key in enumerate(keys, start=1) if not key.strip()), None)
    if empty is not None:
        raise UsageError(f"{name}: line {empty} is empty; every vector needs a key")
    if len(set(keys)) < count:
        twice = next(key for key, times in Counter(keys).items() if times > 1)
        raise UsageError(f"{name}: the key '{printable(twice)}' occurs more than once")
    return keys


def _open(path: str | os.PathLike[str], *, mapped: bool) -> NDArray[Any]:
    name, file = printable(str(path)), Path(path).expanduser()
    try:
        found = np.load(file, mmap_mode="r" if mapped else None, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        reason = " ".join(str(error).split())
        if "object" in reason.lower():
            reason = "it holds Python objects, which are never unpickled"
        raise UsageError(
            f"{name} is not an .npy file of numbers or texts ({reason}); write one with numpy.save"
        ) from None
    if not isinstance(found, np.ndarray):
        found.close()
        raise UsageError(f"{name} is an archive of arrays; write one array with numpy.save")
    return found
