"""Checks of what callers pass to an index, the same for every back-end."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fisherhash.codes import check_codes, code_bytes
from fisherhash.errors import UsageError
from fisherhash.index.items import Codes, Entry, Ids

Notes = Mapping[str, Mapping[str, Any]] | None
"""Small JSON documents by kind and name; a value of None removes the document."""
NoteTexts = dict[tuple[str, str], str | None]
"""Checked notes: JSON text by (kind, name), None where the document is to be removed."""

_INT64 = range(-(2**63), 2**63)
_BLOCK_CODES = 1 << 22
# json.dumps would build an encoder per call.
_to_json = json.JSONEncoder(allow_nan=False).encode


class CheckedEntry(NamedTuple):
    """An entry whose every field is valid: the code as bytes, labels and metadata as JSON text."""

    key: str
    path: str | None
    size: int | None
    mtime_ns: int | None
    labels: str | None
    metadata: str | None
    code: bytes | None


def check_entries(entries: Iterable[Entry], bits: int) -> list[CheckedEntry]:
    """Entries in the form in which they can be stored.

    Args:
        entries: as a caller passes them.
        bits: length of a code.

    Raises:
        UsageError: a field of an entry is not what it has to be, or a key occurs twice.
    """
    if isinstance(entries, Entry | str | Mapping):
        raise UsageError(f"entries must be a list of Entry objects, got {entries!r}")
    given = list(entries)
    seen: set[str] = set()
    for entry in given:
        if not isinstance(entry, Entry):
            raise UsageError(f"entries must be Entry objects, got {entry!r}")
        key = entry.key
        if not isinstance(key, str) or not key:
            raise UsageError(f"a key must be a text that is not empty, got {key!r}")
        key = canonical_text(key)
        if key in seen:
            raise UsageError(f"the key {key!r} occurs twice in one call")
        seen.add(key)
    codes = _codes([entry.code for entry in given], bits)
    return [
        CheckedEntry._make([canonical_text(entry.key), *_fields(entry), code])
        for entry, code in zip(given, codes, strict=True)
    ]


def _codes(codes: list[bytes | ArrayLike | None], bits: int) -> Iterator[bytes | None]:
    given: list[Any] = [code for code in codes if code is not None]
    given = [np.frombuffer(c, np.uint8) if isinstance(c, bytes) else c for c in given]
    packed: Iterator[bytes] = iter(())
    if given:
        try:
            packed = iter(code_rows(check_codes(np.asarray(given), bits)))
        except ValueError:
            width = code_bytes(bits)
            raise UsageError(f"every code of {bits} bits must have {width} bytes") from None
    return (None if code is None else next(packed) for code in codes)


def code_rows(codes: Codes) -> list[bytes]:
    """The rows of an array of codes as bytes."""
    data, width = codes.tobytes(), codes.shape[1]
    return [data[i : i + width] for i in range(0, len(data), width)]


def canonical_text(text: str) -> str:
    """A text or the name of a file; one that escapes bytes of UTF-8 is the text of these bytes."""
    try:
        return text.encode(errors="surrogateescape").decode(errors="surrogateescape")
    except UnicodeEncodeError:
        raise UsageError(f"{text!r} is neither text nor the name of a file") from None


def _path(_name: str, key: str, value: Any) -> str:
    try:
        return canonical_text(os.fsdecode(value))
    except TypeError:
        raise UsageError(f"the path of {key!r} must be a path, got {value!r}") from None


def _number(name: str, key: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise UsageError(f"the {name} of {key!r} must be a whole number, got {value!r}") from None
    if number not in _INT64:
        raise UsageError(f"the {name} of {key!r} is too large: {value!r}")
    return number


def _labels(_name: str, key: str, value: Any) -> str:
    names = [value] if isinstance(value, str) else list(value)
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"a label of {key!r} must be a text, got {name!r}")
    return json.dumps(names)


def _metadata(_name: str, key: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        raise UsageError(f"the metadata of {key!r} must be a mapping, got {value!r}")
    return as_json(dict(value), f"the metadata of {key!r}")


_FIELDS = {
    "path": _path,
    "size": _number,
    "mtime_ns": _number,
    "labels": _labels,
    "metadata": _metadata,
}


def _fields(entry: Entry) -> Iterator[Any]:
    """The fields between key and code, each checked unless it is None."""
    for name, check in _FIELDS.items():
        value = getattr(entry, name)
        yield None if value is None else check(name, entry.key, value)


def as_json(value: Any, what: str) -> str:
    """A value as JSON text in ASCII, or a :class:`UsageError` that says what it is."""
    try:
        return _to_json(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} cannot be written as JSON: {error}") from None


def check_notes(notes: Notes) -> NoteTexts:
    """Notes as JSON texts by (kind, name)."""
    found: NoteTexts = {}
    for kind, documents in (notes or {}).items():
        for name, value in documents.items():
            for text in (kind, name):
                if not isinstance(text, str) or not text:
                    raise UsageError(f"a note's kind and name must be texts, got {kind!r} {name!r}")
                canonical_text(text)
            what = f"the note {name!r} of the kind {kind!r}"
            found[kind, name] = None if value is None else as_json(value, what)
    return found


def check_keys(keys: Iterable[str] | None) -> list[str]:
    """Keys without repetition; a single text is an error, as its letters are no keys."""
    if isinstance(keys, str):
        raise UsageError("keys must be a list of texts, got one text")
    names = list(dict.fromkeys(keys or ()))
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"a key must be a text, got {name!r}")
    return list(dict.fromkeys(map(canonical_text, names)))


def as_ids(ids: Iterable[int] | Ids) -> Ids:
    """Ids as an array, or a :class:`UsageError` if they are not whole numbers."""
    array = np.asarray(ids if isinstance(ids, np.ndarray | range) else list(ids))
    if array.size and (array.dtype.kind not in "iu" or array.ndim != 1):
        raise UsageError(f"ids must be a list of whole numbers, got {ids!r}")
    return array.reshape(-1).astype(np.int64)


def whole_number(name: str, value: Any, least: int) -> int:
    """A whole number of at least ``least``, or a :class:`UsageError` that names the argument."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number


def code_blocks(codes: ArrayLike | Iterable[ArrayLike], bits: int) -> Iterator[Codes]:
    """Checked blocks of codes from one array, perhaps a memory map, or from several."""
    if isinstance(codes, list | tuple):
        codes = np.asarray(codes)
    if isinstance(codes, np.ndarray):
        array = codes
        if array.ndim != 2:
            check_codes(array, bits)
        steps = range(0, len(array), _BLOCK_CODES)
        codes = (array[start : start + _BLOCK_CODES] for start in steps)
    for block in codes:  # type: ignore[union-attr]
        yield check_codes(block, bits)
