"""An index of images: a folder kept in sync, searches by image or by key, duplicates.

    hasher = Hasher.load("general-64")
    with ImageIndex.create("photos.index", hasher) as images:
        images.sync("photos")
        for hit in images.search("holiday.jpg", k=5)[0]:
            print(hit.distance, hit.path)

Open one once, keep it open, and use it from as many threads as you like.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Index, Uri
from fisherhash.index.filters import Where, parse_filter
from fisherhash.index.images.choosing import hasher_of
from fisherhash.index.images.encoding import FileEncoder, files_of
from fisherhash.index.images.folders import check_folder
from fisherhash.index.images.options import (
    DuplicateCode,
    DuplicateOptions,
    Keep,
    Ranking,
    SearchOptions,
    SyncOptions,
)
from fisherhash.index.images.results import (
    SearchResult,
    SkippedFile,
    SyncReport,
    synced_folder,
)
from fisherhash.index.images.searching import search_images, where_labels
from fisherhash.index.images.syncing import add_images, sync_images
from fisherhash.index.items import Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisherhash.data.images import ImageLike
    from fisherhash.index.images.duplicate_search import DuplicateSearch
    from fisherhash.index.images.duplicates import Duplicates
    from fisherhash.model.hasher import Hasher


class ImageIndex:
    """An index together with the hasher that makes its codes. A context manager.

    Args:
        index: an open index; closed together with this object.
        hasher: the hasher of its codes; without one, the index's own is loaded when an image has
            to be encoded. A search by key and :meth:`duplicates` never load it.
        device: where to encode images: ``cpu``, ``cuda``, …

    Raises:
        UsageError: the index holds codes of another hasher.

    Attributes:
        index: the index.
    """

    def __init__(self, index: Index, hasher: Hasher | None = None, *, device: str = "cpu") -> None:
        if hasher is not None and index.fingerprint not in (None, hasher.fingerprint()):
            raise UsageError(f"the codes of {index.uri} were made by another model than {hasher}")
        self.index = index
        self._hasher, self._device = hasher, device
        self._loading = threading.Lock()

    @classmethod
    def open(
        cls, uri: Uri, *, write: bool = False, device: str = "cpu", skip_damaged: bool = False
    ) -> Self:
        """Open an index of images.

        Args:
            uri: the path or the URI of the index.
            write: allow changes.
            device: where to encode images.
            skip_damaged: leave out items whose codes are damaged, instead of raising an error; each
                result counts them.
        """
        return cls(Index.open(uri, write=write, skip_damaged=skip_damaged), device=device)

    @classmethod
    def create(cls, uri: Uri, hasher: Hasher, *, model: Mapping[str, Any] | None = None) -> Self:
        """Create an empty index and open it for writing.

        Args:
            uri: where; there must be nothing yet.
            hasher: makes its codes. The index remembers a built-in one by its name and carries any
                other one with it.
            model: a description of the hasher in place of its own.
        """
        if not hasher.head.hamming:
            raise UsageError(
                f"codes of {hasher.method} are not compared by Hamming distance, so an index "
                "cannot search them; take a model of another method"
            )
        model = hasher.about if model is None else model
        index = Index.create(
            uri,
            bits=hasher.bits,
            fingerprint=hasher.fingerprint(),
            model=model,
            files={} if "builtin" in model else files_of(hasher),
        )
        return cls(index, hasher)

    @property
    def hasher(self) -> Hasher:
        """The hasher of the index, loaded at first use."""
        with self._loading:
            if self._hasher is None:
                self._hasher = hasher_of(self.index, device=self._device)
            return self._hasher

    # Changes

    def sync(
        self,
        folder: str | os.PathLike[str],
        *,
        dry_run: bool = False,
        allow_empty: bool = False,
        moved: bool = False,
        workers: int | None = None,
    ) -> SyncReport:
        """Bring the index in sync with a folder of images: encode, update, remove.

        Args:
            folder: the images, in sub-folders of any depth.
            dry_run: only report what would be done.
            allow_empty: let an empty folder empty the index.
            moved: the index was in sync with another folder, and this one takes its place.
            workers: number of processes that encode images; 0 means this one, None lets the work
                decide.

        Raises:
            UsageError: there is no such folder, it is another one than before, or it is empty.
        """
        options = SyncOptions(dry_run=dry_run, allow_empty=allow_empty, moved=moved)
        root = check_folder(folder, self.index.uri)
        return sync_images(
            self.index, FileEncoder(lambda: self.hasher, workers=workers), root, options
        )

    def add(
        self,
        images: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        labels: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        workers: int | None = None,
    ) -> SyncReport:
        """Add image files, and all images in folders; encode them only if they changed.

        Args:
            images: files and folders.
            labels: of all these images; they replace those that an image had.
            metadata: of all these images, likewise.
            workers: number of processes, as for :meth:`sync`.
        """
        several = [images] if isinstance(images, str | os.PathLike) else list(images)
        encoder = FileEncoder(lambda: self.hasher, workers=workers)
        return add_images(self.index, encoder, several, labels=labels, metadata=metadata)

    def remove(self, keys: Iterable[str] = (), *, where: Where | None = None) -> int:
        """Remove items by key, or those that match a filter; returns how many.

        No image file is touched.

        Raises:
            UsageError: there is no item with one of the keys, or the filter is empty; nothing is
                removed.
        """
        if where is not None and not parse_filter(where).conditions:
            raise UsageError("an empty filter matches every item")
        ids = None if where is None else self.index.ids(where_labels(self.index, where))
        return self.index.remove(keys, ids=ids)

    # Search

    def search(
        self,
        images: ImageLike | Sequence[ImageLike] = (),
        *,
        keys: str | Sequence[str] = (),
        features: NDArray[Any] | None = None,
        k: int | None = None,
        radius: int | None = None,
        where: Where | None = None,
        ranking: Ranking = "hamming",
        count_ties: bool = False,
        skip_unreadable: bool = False,
    ) -> list[SearchResult]:
        """Search with images and with items of the index; one result per query, in this order.

        Args:
            images: one or several: paths, Pillow images, bytes of files, or arrays.
            keys: one or several items of the index; an item does not find itself.
            features: (n, d) vectors, encoded by the hasher; their queries are named "row 0", ….
            k: hits per query; by default 10, or all within a radius.
            radius: only items whose codes differ in at most this many bits.
            where: only items that match this filter; a label may differ in case.
            ranking: ``hamming``, or ``real`` for images and vectors without a radius: the bits that
                differ then weigh as much as the hasher is sure of the query's.
            count_ties: also count the items at each distance of a hit.
            skip_unreadable: return a result with an ``error`` for an image that cannot be read,
                rather than raise it.

        Raises:
            UsageError: there is no such file, item or field, or a number is out of range.
            FisherhashError: an image cannot be read.
        """
        options = SearchOptions(k=k, radius=radius, ranking=ranking, count_ties=count_ties)
        return search_images(
            self.index,
            lambda: self.hasher,
            images,
            [keys] if isinstance(keys, str) else keys,
            features,
            options,
            where,
            skip_unreadable=skip_unreadable,
        )

    # Duplicates

    def duplicates(
        self,
        *,
        radius: int | None = None,
        code: DuplicateCode = "auto",
        keep: Keep = "best",
        confirm: bool = True,
        compare_files: bool = False,
        workers: int | None = None,
    ) -> Duplicates:
        """Find groups of items with equal or nearly equal codes: candidates for duplicates.

        Any two items of a group are within the radius, so no chain of neighbours connects different
        images. The groups come with the surest first: those confirmed, then by the largest distance
        in the group, then the smaller group. The first item of a group is the one to keep.

        Args:
            radius: this and the next four are the fields of :class:`DuplicateOptions`.
            code: which codes are compared.
            keep: which item of a group comes first.
            confirm: compare thumbnails of the files.
            compare_files: mark files with the same bytes.
            workers: number of processes that compute copy codes, as for :meth:`sync`.

        Raises:
            UsageError: the radius is out of range, or so wide that a code is near most others.
        """
        options = DuplicateOptions(
            radius=radius,
            code=code,
            keep=keep,
            confirm=confirm,
            compare_files=compare_files,
        )
        return self.duplicate_search(code=code, workers=workers).find(options)

    def duplicate_search(
        self, *, code: DuplicateCode = "auto", workers: int | None = None
    ) -> DuplicateSearch:
        """What :meth:`duplicates` does, for several radii: its ``find`` takes the options.

        Args:
            code: the codes to compare.
            workers: number of processes that compute copy codes, as for :meth:`sync`.
        """
        from fisherhash.index.images.duplicate_search import (
            DuplicateSearch,
            copy_codes,
            has_files,
        )

        if code == "own" or (code == "auto" and not has_files(self.index)):
            return DuplicateSearch(self.index)
        with copy_codes(self.index, device=self._device, workers=workers) as copies:
            return DuplicateSearch(self.index, copies=copies)

    # Health

    def skipped(self) -> list[SkippedFile]:
        """The files that a sync or an add could not read, by name."""
        notes = sorted(self.index.notes("skipped").items())
        return [SkippedFile(name, note["reason"]) for name, note in notes]

    def info(self) -> dict[str, Any]:
        """Facts about the index that JSON can hold."""
        skipped = len(self.index.notes("skipped"))
        return self.index.info() | {"folder": synced_folder(self.index), "skipped": skipped}

    @classmethod
    def examine(cls, uri: Uri) -> list[Problem]:
        """Check an index, which may be too damaged to be opened, and its hasher.

        Returns:
            What is wrong; empty if nothing is.
        """
        problems = Index.examine(uri)
        with contextlib.suppress(FisherhashError), Index.open(uri) as index:
            try:
                if index.model:
                    hasher_of(index)
            except FisherhashError as error:
                what = f"cannot be used: {error}"
                problems.append(Problem("model", what, "restore it from a copy"))
        return problems

    def close(self) -> None:
        """Release the index."""
        self.index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ImageIndex({self.index!r})"
