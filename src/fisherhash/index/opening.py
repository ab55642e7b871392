"""Indexes by name: a path is a folder on this machine."""

from __future__ import annotations

import os
import re
from typing import Any

from fisherhash.errors import UsageError
from fisherhash.index.local.index import LocalIndex

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")


class Index:
    """The door to every kind of index: :meth:`open` and :meth:`create`."""

    @staticmethod
    def open(uri: str | os.PathLike[str], *, write: bool = False) -> LocalIndex:
        """Open an index, to search it or (``write=True``) also to change it."""
        return LocalIndex.open(_place(uri), write=write)

    @staticmethod
    def create(
        uri: str | os.PathLike[str],
        *,
        bits: int,
        fingerprint: str | None = None,
        model: dict[str, Any] | None = None,
    ) -> LocalIndex:
        """Make an empty index for codes of ``bits`` bits, open for writing."""
        return LocalIndex.create(_place(uri), bits=bits, fingerprint=fingerprint, model=model)


def _place(uri: str | os.PathLike[str]) -> str | os.PathLike[str]:
    match = _SCHEME.match(uri) if isinstance(uri, str) else None
    if match is None:
        return uri
    raise UsageError(
        f"there is no index of the kind {match[1]}:// in this version; give the path of a folder"
    )
