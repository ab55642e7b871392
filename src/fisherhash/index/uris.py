"""URIs of indexes on a server: what to connect to, and the options that are ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

from fisherhash.errors import UsageError, unknown_name

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,47}")
_SECRET = "***"

Reader = Callable[[str, str], Any]
"""Reads the value of an option: its name and its text."""


class ServerUri(NamedTuple):
    """A URI in its parts.

    Attributes:
        shown: as messages show it, without the password.
        rest: the URI without the options that are ours.
        options: the values of these.
    """

    shown: str
    rest: str
    options: dict[str, Any]


def read_uri(
    uri: str, readers: Mapping[str, Reader], defaults: Mapping[str, Any], *, strict: bool
) -> ServerUri:
    """Split a URI; ``strict`` refuses options that are not in ``readers``."""
    try:
        parts = urlsplit(uri)
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise UsageError(f"the URI {without_password(uri)!r} cannot be parsed: {error}") from None
    options, others = dict(defaults), []
    for name, text in given:
        if name in readers:
            options[name] = readers[name](name, text)
        elif strict:
            raise unknown_name("option of the URI", name, readers)
        else:
            others.append((name, text))
    # By hand: urlunsplit drops the // before an empty host.
    query = "?" + urlencode(others, safe="/") if others else ""
    rest = f"{parts.scheme}://{parts.netloc}{parts.path}{query}"
    return ServerUri(without_password(uri), rest, options)


def without_password(uri: str) -> str:
    """A URI for messages.

    >>> without_password("postgresql://me:secret@host/db?index=a")
    'postgresql://me:***@host/db?index=a'
    """
    uri = re.sub(r"(://[^/?#:@]*):[^/?#]+@", rf"\1:{_SECRET}@", uri, count=1)
    return re.sub(r"([?&](?:password|token)=)[^&#]+", rf"\1{_SECRET}", uri)


def read_index_name(name: str, text: str) -> str:
    """The name of an index as a server may hold it."""
    if not _NAME.fullmatch(text):
        raise UsageError(
            f"{name}={text}: the name of an index begins with a letter or _, and has at most 48 "
            "letters, digits, _ and -"
        )
    return text


def read_count(name: str, text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"the option {name} of the URI must be a whole number, got {text!r}")
    return int(text)


def read_choice(*choices: str) -> Reader:
    """A reader of one of some words."""

    def read(name: str, text: str) -> str:
        if text not in choices:
            raise unknown_name(f"value of the option {name}", text, choices)
        return text

    return read
