"""Where the shards of a cluster come from: a folder that all nodes see, or a URL of fsspec.

What lies behind a URL is the folder of an index, uploaded as it is. Every node downloads it once
into its cache; another upload has other sizes, times or checksums, and is downloaded again.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import NamedTuple

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Uri
from fisherhash.index.uris import read_count, read_uri
from fisherhash.system.cache import cache_dir
from fisherhash.system.remote import file_system, is_url
from fisherhash.system.storage import draft_folder

_FOLDER = "downloaded-indexes"
_READERS = {
    "shards": read_count,
    "replicas": read_count,
    "timeout": read_count,
    "storage": lambda _, text: text,
}
_DEFAULTS = {"shards": 2, "replicas": 1, "timeout": 60, "storage": ""}


class ClusterPlace(NamedTuple):
    """An index on a Ray cluster, as its URI says.

    Attributes:
        uri: as given.
        address: HOST:PORT of the cluster; empty for the one that this machine belongs to.
        storage: the folder or the URL of the index.
        shards: parts of the index, each searched by one actor.
        replicas: actors that hold the same part.
        timeout: seconds to wait for a part that cannot be reached.
    """

    uri: str
    address: str
    storage: str
    shards: int
    replicas: int
    timeout: int

    @property
    def is_remote(self) -> bool:
        """Whether the storage is a URL."""
        return is_url(self.storage)


def read_cluster_place(uri: Uri) -> ClusterPlace:
    """Parse ``ray://[HOST:PORT]/FOLDER?shards=4`` or ``ray://[HOST:PORT]?storage=s3://…``."""
    shown, rest, options = read_uri(str(uri), _READERS, _DEFAULTS, strict=True)
    address, slash, path = rest.removeprefix("ray://").partition("/")
    storage = options.pop("storage") or slash + path
    if storage in ("", "/"):
        raise UsageError(
            f"{shown} does not say where the index is stored: give ray:///FOLDER, or "
            "ray://?storage=URL"
        )
    return ClusterPlace(shown, address, storage, **options)


def stored_version(url: str) -> str:
    """A text that changes with every file of the index behind a URL.

    Raises:
        UsageError: there is nothing.
    """
    fs, root = file_system(url)
    with _reading(url):
        fs.invalidate_cache()
        files = fs.find(root, detail=True) if fs.exists(root) else {}
    if not files:
        raise UsageError(f"{url} does not exist")
    marks = ("size", "ETag", "LastModified", "mtime", "created", "md5", "etag")
    known = [(name, *(str(about.get(mark)) for mark in marks)) for name, about in files.items()]
    return hashlib.sha256(repr(sorted(known)).encode()).hexdigest()


def downloaded(url: str, version: str) -> Path:
    """A local copy of the index behind a URL, which must still have that version."""
    folder = cache_dir() / _FOLDER / version
    if folder.is_dir():
        return folder
    fs, root = file_system(url)
    with contextlib.suppress(FileExistsError), draft_folder(folder) as draft, _reading(url):
        for name in fs.find(root):
            target = draft / name[len(root) :].lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(name, str(target))
        if stored_version(url) != version:
            raise FisherhashError(f"{url} was changed while it was read; open it again")
    return folder


@contextlib.contextmanager
def _reading(url: str):
    try:
        yield
    except FisherhashError:
        raise
    except Exception as error:  # every file system has errors of its own
        raise FisherhashError(f"{url} cannot be read: {error}") from error
