"""Codes in bulk, by COPY in PostgreSQL's binary format: rows of one width, made by numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from psycopg import Copy

from fisherhash.codes import code_bytes
from fisherhash.index.items import Codes, Ids

_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"


def _row_type(bits: int) -> np.dtype:
    """A row of (id, code): every field has its length before it, all numbers big-endian."""
    width = code_bytes(bits)
    return np.dtype(
        [
            ("fields", ">i2"),
            ("id_length", ">i4"),
            ("id", ">i8"),
            ("code_length", ">i4"),
            ("bits", ">i4"),
            ("code", np.uint8, (width,)),
        ]
    )


class CodeWriter:
    """Writes rows of (id, code) into a COPY."""

    def __init__(self, copy: Copy, bits: int) -> None:
        self._copy, self._bits, self._type = copy, bits, _row_type(bits)
        copy.write(_SIGNATURE)

    def write(self, ids: NDArray[np.int64], codes: Codes) -> None:
        """Write some rows."""
        rows = np.zeros(len(ids), self._type)
        rows["fields"], rows["id_length"], rows["id"] = 2, 8, ids
        rows["code_length"], rows["bits"] = 4 + codes.shape[1], self._bits
        rows["code"] = codes
        self._copy.write(rows.tobytes())

    def finish(self) -> None:
        """Write the end."""
        self._copy.write(_TRAILER)


def read_codes(copy: Copy, bits: int, block: int) -> Iterator[tuple[Ids, Codes]]:
    """Ids and codes from a COPY of (id, code), ``block`` rows at a time."""
    kind = _row_type(bits)
    pending = bytearray()
    skip = len(_SIGNATURE)
    size = block * kind.itemsize
    for data in copy:
        pending += data
        if skip and len(pending) >= skip:
            del pending[:skip]
            skip = 0
        while not skip and len(pending) >= size + len(_TRAILER):
            yield _rows(bytes(pending[:size]), kind)
            del pending[:size]
    rest = bytes(pending[: len(pending) - len(_TRAILER)])
    if rest:
        yield _rows(rest, kind)


def _rows(data: bytes, kind: np.dtype) -> tuple[Ids, Codes]:
    rows = np.frombuffer(data, kind)
    return rows["id"].astype(np.int64), np.ascontiguousarray(rows["code"])


def bit_texts(codes: Codes, bits: int) -> list[str]:
    """Codes as PostgreSQL writes bit strings.

    >>> bit_texts(np.array([[160]], np.uint8), 3)
    ['101']
    """
    digits = (np.unpackbits(codes, axis=1, count=bits) + ord("0")).tobytes().decode()
    return [digits[start : start + bits] for start in range(0, len(digits), bits)]
