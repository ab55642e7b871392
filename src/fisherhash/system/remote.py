"""Files behind URLs, read through fsspec: ``s3://``, ``gs://``, ``http://`` and many more."""

from __future__ import annotations

import importlib
from typing import Any

from fisherhash.errors import UsageError
from fisherhash.system.extras import require_package


def is_url(place: str) -> bool:
    """Whether a place is a URL and not a path."""
    return "://" in place


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it.

    Raises:
        UsageError: fsspec does not know such URLs, or a package for them is missing.
    """
    require_package("fsspec", "remote", f"reading {url}")
    try:
        return importlib.import_module("fsspec").core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UsageError(f"{url} cannot be read: {error}") from None
