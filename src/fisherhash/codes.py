"""Binary codes: the one place that defines how bits are packed into bytes.

A code of ``bits`` bits is a row of ``ceil(bits / 8)`` bytes in ``numpy.packbits`` order (bit 0 is
the highest bit of byte 0); the pad bits at the end are zero. A bit is 1 exactly when its logit is
greater than zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.errors import FisherhashError, UsageError, counted

MAX_BITS = 1024
# pairs of codes that are compared at once
_BLOCK_PAIRS = 1 << 15


def check_bits(bits: int) -> int:
    """Return ``bits`` if a code can have that length, else raise a :class:`UsageError`."""
    if isinstance(bits, bool) or not isinstance(bits, int | np.integer):
        raise UsageError(f"bits must be a whole number, got {bits!r}")
    if not 1 <= bits <= MAX_BITS:
        raise UsageError(f"bits must be between 1 and {MAX_BITS}, got {bits}")
    return int(bits)


def code_bytes(bits: int) -> int:
    """Return the bytes per packed code.

    >>> code_bytes(12)
    2
    """
    return (check_bits(bits) + 7) // 8


def pack(logits: ArrayLike) -> NDArray[np.uint8]:
    """Pack logits (n, bits) into codes (n, bytes); bit = logit > 0.

    Bits as 0/1 or as booleans are packed unchanged.

    >>> pack([[0.5, -1.0, 2.0]]).tolist()
    [[160]]
    """
    array = np.asarray(logits)
    if array.ndim != 2:
        raise UsageError(f"logits must have shape (n, bits), got {array.shape}")
    check_bits(array.shape[1])
    if array.dtype.kind == "f" and np.isnan(array).any():
        rows = np.flatnonzero(np.isnan(array).any(axis=1))
        found = counted(len(rows), "row")
        raise FisherhashError(f"logits hold NaN in {found}, the first is row {rows[0]}")
    return np.packbits(array > 0, axis=1)


def unpack(codes: ArrayLike, bits: int) -> NDArray[np.uint8]:
    """Unpack codes (n, bytes) into 0/1 bits (n, bits).

    >>> unpack([[160]], bits=3).tolist()
    [[1, 0, 1]]
    """
    return np.unpackbits(check_codes(codes, bits), axis=1, count=bits)


def check_codes(codes: ArrayLike, bits: int) -> NDArray[np.uint8]:
    """Return ``codes`` as a contiguous array (n, bytes), or raise a :class:`UsageError`."""
    array = np.asarray(codes)
    if array.dtype != np.uint8:
        if array.dtype.kind not in "iu" or (
            array.size and not (0 <= array.min() <= array.max() <= 255)
        ):
            raise UsageError(f"codes must be uint8, got {array.dtype}")
        array = array.astype(np.uint8)
    width = code_bytes(bits)
    if array.ndim != 2 or array.shape[1] != width:
        raise UsageError(f"codes of {bits} bits must have shape (n, {width}), got {array.shape}")
    pad = width * 8 - bits
    if pad and np.any(array[:, -1] & ((1 << pad) - 1)):
        raise UsageError(f"the last {pad} bits of every {bits}-bit code must be zero")
    return np.ascontiguousarray(array)


def hamming(queries: NDArray[np.uint8], database: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Hamming distances (n_queries, n_database) between packed codes of the same width.

    Use it on blocks: the whole result is held in memory.

    >>> hamming(pack([[1, 0, 1]]), pack([[1, 1, 1], [0, 1, 0]])).tolist()
    [[1, 3]]
    """
    if queries.ndim != 2 or database.ndim != 2 or queries.shape[1] != database.shape[1]:
        raise UsageError(f"codes of different shape: {queries.shape} against {database.shape}")
    for codes in (queries, database):
        if codes.dtype != np.uint8:
            raise UsageError(f"codes must be packed as uint8, got {codes.dtype}; see pack")
    distances = np.zeros((len(queries), len(database)), dtype=np.uint16)
    add_distances(as_words(queries), as_words(database), distances)
    return distances


def as_words(codes: NDArray[np.uint8]) -> NDArray[np.unsignedinteger]:
    """View codes (n, bytes) as few wide words (n, words), for :func:`add_distances`.

    Rows are copied and padded with zero bytes if that saves words.
    """
    width = codes.shape[1]
    size = next((s for s in (1, 2, 4) if width <= s), 8)
    padded = -width % size
    if padded:
        codes = np.pad(codes, ((0, 0), (0, padded)))
    return np.ascontiguousarray(codes).view(f"u{size}")


def add_distances(
    queries: NDArray[np.unsignedinteger],
    database: NDArray[np.unsignedinteger],
    distances: NDArray[np.unsignedinteger],
) -> None:
    """Add the Hamming distances between codes as words to ``distances`` (n_queries, n_database).

    It works on blocks that stay in the processor's cache.
    """
    step = max(1024, _BLOCK_PAIRS // max(1, len(queries)))
    for start in range(0, len(database), step):
        block = database[start : start + step]
        into = distances[:, start : start + step]
        for word in range(queries.shape[1]):
            into += np.bitwise_count(queries[:, word, None] ^ block[None, :, word])


def to_hex(codes: NDArray[np.uint8]) -> list[str]:
    """Write each code as lower-case hexadecimal, two characters per byte.

    >>> to_hex(pack([[1, 0, 1]]))
    ['a0']
    """
    return [row.tobytes().hex() for row in np.asarray(codes, dtype=np.uint8)]


def from_hex(texts: Sequence[str], bits: int) -> NDArray[np.uint8]:
    """Read codes that :func:`to_hex` wrote.

    >>> from_hex(["a0"], bits=3).tolist()
    [[160]]
    """
    width = code_bytes(bits)
    rows = np.zeros((len(texts), width), dtype=np.uint8)
    for i, text in enumerate(texts):
        try:
            row = bytes.fromhex(text)
        except ValueError:
            raise UsageError(f"code {i} is not hexadecimal: {text!r}") from None
        if len(row) != width:
            raise UsageError(f"code {i} has {len(row)} bytes, {bits} bits need {width}: {text!r}")
        rows[i] = np.frombuffer(row, dtype=np.uint8)
    return check_codes(rows, bits)
