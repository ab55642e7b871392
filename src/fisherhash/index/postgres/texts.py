r"""Texts and JSON documents as PostgreSQL can store them.

PostgreSQL refuses the character 0 and lone surrogates, which Python uses for file names that are
not UTF-8. They are escaped so that texts sort as :mod:`fisherhash.index.filters` says: by code
point, and names that are not UTF-8 after all others. Almost every text is stored unchanged.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

_LAST = "\U0010ffff"
_ODD = re.compile("[\0\x01\ud7ff\ud800-\udfff]|\\A\U0010ffff")
_ESCAPE = re.compile("\x01([\x01\x02])|\ud7ff(?:\x01|\x02([0-9a-f]{4}))|\\A\U0010ffff\x01")
_ESCAPED_JSON = re.compile("\\\\u0001|\\\\ud7ff|\\\\udbff|\ud7ff|\U0010ffff")
_ODD_JSON = re.compile(r"\\u000[01]|\\ud[7-9a-f]|\d[eE]")


def stored_text(text: str) -> str:
    r"""A text, or the name of a file, as it is stored.

    >>> stored_text("cat"), stored_text("a\0b")
    ('cat', 'a\x01\x01b')
    """
    if not _ODD.search(text):
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return 2 * _LAST + text.encode(errors="surrogateescape").hex()
    return escaped_text(text)


def loaded_text(stored: str) -> str:
    """The inverse of :func:`stored_text`."""
    if stored.startswith(2 * _LAST):
        return bytes.fromhex(stored[2:]).decode(errors="surrogateescape")
    return _ESCAPE.sub(_unescape, stored)


def escaped_text(text: str) -> str:
    """A text inside of a JSON document as it is stored."""
    return _ODD.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    one = match[0]
    if one in "\0\x01":
        return "\x01" + chr(ord(one) + 1)
    return one + "\x01" if one in ("\ud7ff", _LAST) else f"\ud7ff\x02{ord(one):04x}"


def _unescape(match: re.Match[str]) -> str:
    if match[1]:
        return chr(ord(match[1]) - 1)
    return chr(int(match[2], 16)) if match[2] else match[0][0]


def stored_json(text: str) -> str:
    """A document of JSON in ASCII as a column of the type jsonb takes it.

    That type has decimal numbers only. A number with a point stays one with a point, so that a
    float is a float again when it is read.
    """
    return _dump(json.loads(text)) if _ODD_JSON.search(text) else text


def _dump(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(escaped_text(value))
    if isinstance(value, float):
        digits = format(Decimal(repr(value)), "f")
        return digits if "." in digits else digits + ".0"
    if isinstance(value, list):
        return f"[{', '.join(map(_dump, value))}]"
    if isinstance(value, dict):
        parts = (f"{_dump(name)}: {_dump(part)}" for name, part in value.items())
        return f"{{{', '.join(parts)}}}"
    return json.dumps(value)


def loaded_json(stored: str) -> Any:
    """The value of a document that :func:`stored_json` wrote."""
    value = json.loads(stored)
    return _load(value) if _ESCAPED_JSON.search(stored) else value


def _load(value: Any) -> Any:
    if isinstance(value, str):
        return _ESCAPE.sub(_unescape, value)
    if isinstance(value, list):
        return [_load(part) for part in value]
    if isinstance(value, dict):
        return {_load(name): _load(part) for name, part in value.items()}
    return value
