"""URIs of indexes on a server: what to connect to, and the options that are ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

from fisherhash.errors import UsageError, unknown_name

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,47}")

Option = int | str | tuple[str, ...]
"""The default of an option, which also says what it may be: a whole number of at least 1, any
text, or one of some words, of which the first is the default."""


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


def read_uri(uri: str, known: Mapping[str, Option], *, strict: bool = True) -> ServerUri:
    """Split a URI; ``strict`` refuses options that are not in ``known``.

    The option ``index`` is the name of an index; where it is known, it must be given.

    >>> read_uri("milvus://host/db?index=a&nlist=8", {"index": "", "nlist": 1024}).options
    {'index': 'a', 'nlist': 8}
    """
    shown = without_password(uri)
    try:
        parts = urlsplit(uri)
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise UsageError(f"the URI {shown!r} cannot be parsed: {error}") from None
    options: dict[str, Any] = {
        name: default[0] if isinstance(default, tuple) else default
        for name, default in known.items()
    }
    others = []
    for name, text in given:
        if name in known:
            options[name] = _value(name, text, known[name])
        elif strict:
            raise unknown_name("option of the URI", name, known)
        else:
            others.append((name, text))
    if options.get("index") == "":
        raise UsageError(f"{shown} does not say which index: end it with ?index=NAME")
    # By hand: urlunsplit drops the // before an empty host.
    query = "?" + urlencode(others, safe="/") if others else ""
    rest = f"{parts.scheme}://{parts.netloc}{parts.path}{query}"
    return ServerUri(shown, rest, options)


def _value(name: str, text: str, default: Option) -> int | str:
    if isinstance(default, tuple) and text not in default:
        raise unknown_name(f"value of the option {name}", text, default)
    if isinstance(default, int):
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"the option {name} of the URI must be a whole number, got {text!r}")
        return int(text)
    if name == "index" and not _NAME.fullmatch(text):
        raise UsageError(
            f"{name}={text}: the name of an index begins with a letter or _, and has at most 48 "
            "letters, digits, _ and -"
        )
    return text


def without_password(uri: str) -> str:
    """A URI for messages.

    >>> without_password("postgresql://me:secret@host/db?index=a")
    'postgresql://me:***@host/db?index=a'
    """
    uri = re.sub(r"(://[^/?#:@]*):[^/?#]+@", r"\1:***@", uri, count=1)
    return re.sub(r"([?&](?:[a-z]*password|token)=)[^&#]+", r"\1***", uri)
