"""An index whose searches run on a Ray cluster.

The index itself is one file of the default back-end: what is written, and every read but a search,
goes there. Its codes are cut into shards by ascending id, which this process sends to actors on the
nodes when they are first searched, and again after a commit. A search goes to all shards, and their
results are merged by (distance, id).

The file may lie behind a URL of fsspec, uploaded when nobody had it open for writing. It is
downloaded once into the cache; another upload has another size, time or checksum, and is
downloaded again.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Files, Uri
from fisherhash.index.cluster.actors import Searched, Shards
from fisherhash.index.filters import All
from fisherhash.index.items import Codes, Ids, Matches, Problem, Within
from fisherhash.index.local import LocalIndex
from fisherhash.index.uris import Option, ServerUri, read_uri
from fisherhash.system.cache import cache_dir
from fisherhash.system.remote import file_system, is_url
from fisherhash.system.storage import draft_folder

_OPTIONS: dict[str, Option] = {"shards": 2, "replicas": 1, "timeout": 60, "storage": ""}
_MARKS = ("size", "ETag", "LastModified", "mtime", "created", "md5", "etag")


def read_ray_uri(uri: Uri) -> ServerUri:
    """Parse ``ray://[HOST:PORT]/FILE?shards=4`` or ``ray://[HOST:PORT]?storage=s3://…``.

    Its ``rest`` is HOST:PORT, which is empty for the cluster that this machine belongs to.
    """
    shown, rest, options = read_uri(str(uri), _OPTIONS)
    cluster, slash, path = rest.removeprefix("ray://").partition("/")
    options["storage"] = options["storage"] or slash + path
    if options["storage"] in ("", "/"):
        raise UsageError(
            f"{shown} does not say where the index is stored: give ray:///FILE, or "
            "ray://?storage=URL"
        )
    return ServerUri(shown, cluster, options)


def _storage(uri: Uri) -> str:
    """The path or the URL of the index."""
    return read_ray_uri(uri).options["storage"]


class ClusterIndex(LocalIndex):
    """An index in one file whose searches run on a Ray cluster."""

    def __init__(self, uri: Uri, *, write: bool) -> None:
        self._address = read_ray_uri(uri)
        shown, storage = self._address.shown, _storage(uri)
        if write and is_url(storage):
            raise UsageError(
                f"{shown} can only be read: change the index where it was made, then upload it to "
                f"{storage} again"
            )
        super().__init__(local_path(storage), write=write)
        self.uri = shown
        self._connecting = threading.Lock()
        self._shards: Shards | None = None

    # Opening

    @classmethod
    def open_at(cls, uri: Uri, *, write: bool, skip_damaged: bool = False) -> Self:
        """Open the index; items that are damaged are not left out on a cluster."""
        return cls(uri, write=write)

    @classmethod
    def create_at(cls, uri: Uri, facts: dict[str, Any], files: Files) -> Self:
        """Create the file of an empty index."""
        storage = _storage(uri)
        if is_url(storage):
            raise UsageError(f"{storage}: create the index in a file, then upload that")
        LocalIndex.create_at(storage, facts, files).close()
        return cls(uri, write=True)

    @classmethod
    def exists_at(cls, uri: Uri) -> bool:
        """Whether there is anything at the path or behind the URL."""
        storage = _storage(uri)
        if is_url(storage):
            fs, path = file_system(storage)
            return bool(fs.exists(path))
        return LocalIndex.exists_at(storage)

    @classmethod
    def examine_at(cls, uri: Uri) -> list[Problem]:
        """Check the file, or a copy of what lies behind the URL."""
        return LocalIndex.examine_at(local_path(_storage(uri)))

    def close(self) -> None:
        """Release the file, and the shards on the cluster."""
        with self._connecting:
            if self._shards is not None:
                self._shards.close()
            self._shards = None
        super().close()

    def info(self) -> dict[str, Any]:
        """Facts that JSON can hold."""
        return super().info() | {"cluster": self._address.options}

    # Search

    def _search(
        self, queries: Codes, weights: NDArray[np.int64] | None, k: int, where: All
    ) -> Matches:
        ids, answers = self._answers(
            "search", where, {"queries": queries, "k": k, "weights": weights}
        )
        positions = np.concatenate([first + found for first, (found, _) in answers], axis=1)
        distances = np.concatenate([near for _, (_, near) in answers], axis=1)
        order = np.lexsort((positions, distances), axis=1)[:, :k]
        nearest = np.take_along_axis(positions, order, axis=1)
        return Matches(ids[nearest], np.take_along_axis(distances, order, axis=1))

    def _within(self, queries: Codes, radius: int, where: All) -> Within:
        ids, answers = self._answers("within", where, {"queries": queries, "radius": radius})
        numbers = np.arange(len(queries))
        query = np.concatenate([np.repeat(numbers, np.diff(part[0])) for _, part in answers])
        positions = np.concatenate([first + part[1] for first, part in answers])
        distances = np.concatenate([part[2] for _, part in answers])
        order = np.lexsort((positions, distances, query))
        offsets = np.sum([part[0] for _, part in answers], axis=0)
        return Within(offsets, ids[positions[order]], distances[order])

    def _answers(
        self, method: str, where: All, args: dict[str, Any]
    ) -> tuple[Ids, list[tuple[int, Any]]]:
        """The ids of all codes, and what a method of the engine returned for every shard."""
        snapshot, among = self._among(where)
        with self._connecting:
            if self._shards is None:
                self._shards = Shards(self._address)
            shards = self._shards
        searched = Searched(snapshot.state.commit, self.bits, snapshot.whole.codes, among)
        return snapshot.whole.ids, shards.call(searched, method, args)


def local_path(storage: str) -> str:
    """Return a path as it is, and for a URL that of a copy in the cache.

    Raises:
        UsageError: there is nothing behind the URL.
    """
    if not is_url(storage):
        return storage
    version = _version(storage)
    folder = cache_dir() / "downloaded-indexes" / version
    if not folder.is_dir():
        fs, path = file_system(storage)
        with contextlib.suppress(FileExistsError), draft_folder(folder) as draft, _reading(storage):
            fs.get_file(path, str(draft / "index"))
            if _version(storage) != version:
                raise FisherhashError(f"{storage} was changed while it was read; open it again")
    return str(folder / "index")


def _version(url: str) -> str:
    """A text that changes with the file behind a URL."""
    fs, path = file_system(url)
    with _reading(url):
        fs.invalidate_cache()
        if not fs.exists(path):
            raise UsageError(f"{url} does not exist")
        about = fs.info(path)
    known = [url, *(str(about.get(mark)) for mark in _MARKS)]
    return hashlib.sha256(repr(known).encode()).hexdigest()


@contextlib.contextmanager
def _reading(url: str) -> Iterator[None]:
    try:
        yield
    except FisherhashError:
        raise
    except Exception as error:  # every file system has errors of its own
        raise FisherhashError(f"{url} cannot be read: {error}") from error
