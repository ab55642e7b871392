"""An index of images: a folder kept in sync, searches by image or by key, duplicates.

    hasher = Hasher.load("general-64")
    with ImageIndex.create("photos.index", hasher) as images:
        images.sync("photos")
        for match in images.search("holiday.jpg", k=5)[0]:
            print(match.distance, match.path)

Open one once, keep it open, and use it from as many threads as you like.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from fisherhash.errors import FisherhashError, UsageError, counted
from fisherhash.index.base import Index, Problem, Uri
from fisherhash.index.filters import parse_filter
from fisherhash.index.images.copies import CODES, DuplicateCode, copy_codes, has_files
from fisherhash.index.images.duplicates import Duplicates, Keep
from fisherhash.index.images.labels import where_labels
from fisherhash.index.images.nearest import FINE_WEIGHT, Near, check_weight_of, nearest
from fisherhash.index.images.results import (
    Match,
    SearchResult,
    SkippedFile,
    SyncReport,
    image_path,
    joined_codes,
    synced_folder,
)
from fisherhash.index.images.syncing import RUNTIMES, Import, add_images, sync_images
from fisherhash.index.ranking import RANKINGS, Ranking

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisherhash.data.images import ImageLike
    from fisherhash.index.filters import Where
    from fisherhash.index.images.duplicate_search import DuplicateSearch
    from fisherhash.model.hasher import EncodedBlock, Hasher

DEFAULT_K = 10


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
            fine_bits=hasher.fine_bits if Index.may_hold_fine(uri) else 0,
            fingerprint=hasher.fingerprint(),
            model=model,
            save_model=None if "builtin" in model else hasher.save,
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
        refresh_fields: bool = False,
        workers: int | None = None,
    ) -> SyncReport:
        """Bring the index in sync with a folder of images: encode, update, remove.

        Args:
            folder: the images, in sub-folders of any depth.
            dry_run: only report what would be done.
            allow_empty: let an empty folder empty the index.
            moved: the index was in sync with another folder, and this one takes its place.
            refresh_fields: read the fields of photos that have not changed, too.
            workers: number of processes that encode images; 0 means this one, None lets the work
                decide.

        Raises:
            UsageError: there is no such folder, it is another one than before, or it is empty.
        """
        work = self._import(workers)
        report = sync_images(
            work,
            folder,
            dry_run=dry_run,
            allow_empty=allow_empty,
            moved=moved,
            refresh_fields=refresh_fields,
        )
        # Where an image was encoded, its hasher was loaded and is the right one.
        encoded = not dry_run and (report.added or report.updated)
        if not encoded and _is_outdated(self.index):
            name = self.index.model["builtin"]
            report.notes.append(_other_hasher(f"the built-in hasher '{name}'", self.index))
        return report

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
        several = [images] if isinstance(images, str | os.PathLike) else images
        return add_images(self._import(workers), several, labels=labels, metadata=metadata)

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

    def _import(self, workers: int | None) -> Import:
        return Import(self.index, lambda: self.hasher, workers=workers)

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
        ranking: Ranking | None = None,
        fine_weight: float | None = FINE_WEIGHT,
        count_ties: bool = False,
        skip_unreadable: bool = False,
    ) -> list[SearchResult]:
        """Search with images and with items of the index; one result per query, in this order.

        Args:
            images: one or several: paths, Pillow images, bytes of files, or arrays.
            keys: one or several items of the index; an item does not find itself.
            features: (n, d) vectors, encoded by the hasher; their queries are named "row 0", ….
            k: matches per query; by default 10, or all within a radius.
            radius: only items whose first codes differ in at most this many bits.
            where: only items that match this filter; a label may differ in case.
            ranking: ``hamming`` or ``real``; by default what the hasher's card says is better for
                images and vectors. An item of the index and a search within a radius have the
                Hamming distance.
            fine_weight: where the index has second codes, results are ordered by the distance plus
                this weight times the fine distance, then by distance and id; 0 leaves the second
                codes out. None orders by the distance, and by the fine distance inside ties only.
            count_ties: also count the items at each distance of a match.
            skip_unreadable: return a result with an ``error`` for an image that cannot be read,
                rather than raise it.

        Raises:
            UsageError: there is no such file, item or field, or a number is out of range.
            FisherhashError: an image cannot be read.
        """
        bits = self.index.bits
        queries = [] if isinstance(images, tuple | list) and not images else _listed(images)
        keys = [keys] if isinstance(keys, str) else keys
        if not queries and not keys and features is None:
            raise UsageError("nothing to search for: give an image, or --key KEY")
        if k is not None and k < 1:
            raise UsageError(f"k must be at least 1, got {k}")
        if radius is not None and not 0 <= radius <= bits:
            raise UsageError(f"radius must be between 0 and {bits} bits, got {radius}")
        weight = check_weight_of(self.index, fine_weight)
        where = None if where is None else where_labels(self.index, where)
        if ranking not in (None, *RANKINGS):
            raise UsageError(f"unknown ranking {ranking!r}. Known: {', '.join(RANKINGS)}")
        if ranking == "real" and (keys or radius is not None):
            raise UsageError(
                "the ranking 'real' needs images or vectors: an item of the index has its code "
                "only, and a radius is a number of bits"
            )
        if radius is None and ranking is None and (queries or features is not None):
            ranking = self.hasher.ranking
        logits: list[NDArray[np.float32]] = []
        results = []
        about: dict[str, Any] = {"ranking": ranking or "hamming", "fine_weight": weight}
        if queries:
            results, logits = self._encode(queries, about, skip_unreadable=skip_unreadable)
        if features is not None:
            rows, more = self._encode_features(features, about)
            results, logits = results + rows, logits + more
        own: list[int | None] = [None] * len(results)
        with self.index.reading():
            items = self.index.get(keys) if keys else []
            folder, unavailable = synced_folder(self.index), self.index.unavailable
            for item in items:
                place = image_path(item, folder)
                about = {"by_key": True, "unavailable": unavailable, "fine_weight": weight}
                about["fine"] = item.fine
                results.append(SearchResult(item.name, place, item.code, [], **about))
                own.append(item.id)
            readable = [pair for pair in zip(results, own, strict=True) if pair[0].error is None]
            if not readable:
                return results
            if radius is None:
                k = DEFAULT_K if k is None else k
            found = self._nearest(
                [one for one, _ in readable],
                logits if ranking == "real" else [],
                None if k is None else k + bool(keys),
                radius=radius,
                where=where,
                fine_weight=weight,
            )
            hits = [
                (result, near)
                for (result, self_id), row in zip(readable, found, strict=True)
                for near in [near for near in row if near.id != self_id][:k]
            ]
            # All items at once; None for one that another writer removed meanwhile.
            items = self.index.get_items(np.array([near.id for _, near in hits], dtype=np.int64))
            for (result, near), item in zip(hits, items, strict=True):
                if item is not None:
                    match = Match(item, near.distance, folder, None, near.fine, near.combined)
                    result.matches.append(match)
            if count_ties:
                for result, self_id in readable:
                    self._count_ties(result, self_id, where)
        return results

    def _nearest(
        self,
        queries: list[SearchResult],
        logits: list[NDArray[np.float32]],
        k: int | None,
        **how: Any,
    ) -> list[list[Near]]:
        """What each query finds: the first ones by their logits, the rest by codes."""
        second = None
        if self.index.fine_bits:
            second = joined_codes([query.fine or b"" for query in queries])
        found: list[list[Near]] = []
        for rows in (slice(0, len(logits)), slice(len(logits), len(queries))):
            if not queries[rows]:
                continue
            real = np.stack(logits) if rows.start == 0 and logits else None
            codes = joined_codes([query.code for query in queries[rows]])
            fine = None if second is None else second[rows]
            found += nearest(self.index, codes, k, fine=fine, logits=real, **how)
        return found

    def _count_ties(self, result: SearchResult, self_id: int | None, where: Where | None) -> None:
        """Count the items at each distance of a match, without the query itself.

        Real-valued distances are equal where codes are, so items with the codes of the matches are
        counted.
        """
        if not result.matches:
            return
        if result.ranking == "hamming":
            shown = [int(match.distance) for match in result.matches]
            found = self.index.within(joined_codes([result.code]), max(shown), where=where)
            others = found.distances[found.ids != (-1 if self_id is None else self_id)]
            counts = np.bincount(others, minlength=max(shown) + 1)
            result.ties.update({distance: int(counts[distance]) for distance in shown})
            return
        distinct = {match.item.code: match.distance for match in result.matches}
        found = self.index.within(joined_codes(list(distinct)), 0, where=where)
        for distance, count in zip(distinct.values(), np.diff(found.offsets), strict=True):
            result.ties[distance] = result.ties.get(distance, 0) + int(count)

    def _encode(
        self, images: list[ImageLike], about: dict[str, Any], *, skip_unreadable: bool
    ) -> tuple[list[SearchResult], list[NDArray[np.float32]]]:
        """Queries with their codes and without matches, in the order of the images.

        Returns:
            The queries, and the logits of those that could be read.
        """
        paths = [os.fspath(i) if isinstance(i, str | os.PathLike) else None for i in images]
        for path in paths:
            if path is not None and not os.path.lexists(path):
                raise UsageError(f"there is no file '{path}'")
        codes: dict[int, tuple[bytes, bytes | None]] = {}
        logits: dict[int, NDArray[np.float32]] = {}
        errors: dict[int, str] = {}
        for block in self.hasher.encode_blocks(images, queries=True):
            codes |= zip(block.indices.tolist(), _pairs(block), strict=True)
            logits |= zip(block.indices.tolist(), _logits(block), strict=True)
            errors |= {skip.index: f"{skip.name}: {skip.reason}" for skip in block.skipped}
        if errors and not skip_unreadable:
            raise FisherhashError("; ".join(errors.values()))
        about = {**about, "unavailable": self.index.unavailable}
        results = []
        for number, path in enumerate(paths):
            code, fine = codes.get(number, (b"", None))
            name, second = path or f"image {number}", self._second(fine)
            found = SearchResult(name, path, code, [], errors.get(number), fine=second, **about)
            results.append(found)
        return results, [logits[number] for number in sorted(logits)]

    def _encode_features(
        self, features: NDArray[Any], about: dict[str, Any]
    ) -> tuple[list[SearchResult], list[NDArray[np.float32]]]:
        """The same of vectors."""
        vectors = np.atleast_2d(np.asanyarray(features))
        self.hasher.check_vectors(vectors, "the array")
        results: list[SearchResult] = []
        logits: list[NDArray[np.float32]] = []
        about = {**about, "unavailable": self.index.unavailable}
        for block in self.hasher.encode_feature_blocks(vectors, queries=True):
            for code, fine in _pairs(block):
                name, second = f"row {len(results)}", self._second(fine)
                results.append(SearchResult(name, None, code, [], fine=second, **about))
            logits += _logits(block)
        return results, logits

    def _second(self, fine: bytes | None) -> bytes | None:
        """A query's second code, where the index has those."""
        return fine if self.index.fine_bits else None

    def duplicates(
        self,
        *,
        radius: int | None = 0,
        compare_files: bool = False,
        pairs: bool = False,
        keep: Keep = "first",
        confirm: bool = False,
        code: DuplicateCode = "own",
        workers: int | None = None,
    ) -> Duplicates:
        """Find groups of items with equal or nearly equal codes: candidates for duplicates.

        Any two items of a group are within the radius, so no chain of neighbours connects different
        images. ``groups`` holds the surest first: those confirmed, then by the largest distance in
        the group, then the smaller group. The first item of a group is the one to keep.

        Args:
            radius: bits in which any two items of a group may differ; None chooses one from the
                distances between random items, so that one false pair is expected per thousand
                items, and one in a million comparisons.
            compare_files: read the files of each group, and mark those with the same bytes.
            pairs: return pairs instead of groups; several pairs may share an item. Among items with
                equal codes, only the first is paired with all others.
            keep: the item of a group to keep: the ``first`` that was added, or the ``best``, which
                has the most pixels, then the oldest file.
            confirm: compare thumbnails of the files; a group of images that show the same is
                ``confirmed``, and the images that do not form groups that are not.
            code: compare the index's ``own`` codes, or ``copy`` codes, which are made for copies.
                They are computed from the image files once and stored in this user's cache.
                ``auto`` takes copy codes where the files are there.
            workers: number of processes that compute copy codes, as for :meth:`sync`.

        Raises:
            UsageError: the radius is out of range, or so wide that a code is near most others.
        """
        search = self.duplicate_search(code=code, workers=workers)
        return search.find(
            radius, compare_files=compare_files, pairs=pairs, keep=keep, confirm=confirm
        )

    def duplicate_search(
        self, *, code: DuplicateCode = "own", workers: int | None = None
    ) -> DuplicateSearch:
        """What :meth:`duplicates` does, for several radii: its ``find`` takes the other options.

        Args:
            code: the codes to compare, as there.
            workers: number of processes that compute copy codes, as for :meth:`sync`.
        """
        from fisherhash.index.images.duplicate_search import DuplicateSearch

        if code not in CODES:
            raise UsageError(f"code must be one of {', '.join(CODES)}, got '{code}'")
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
        notes = {"folder": synced_folder(self.index), "skipped": len(self.index.notes("skipped"))}
        runtimes = self.index.notes(RUNTIMES)
        by = "; ".join(
            f"{name}: {counted(made['codes'], 'code')}, of which another runtime may set "
            f"{counted(made['unsure_bits'], 'bit')} differently"
            for name, made in runtimes.items()
        )
        return self.index.info() | notes | {RUNTIMES: runtimes, "encoded_by": by or None}

    def verify(self) -> list[Problem]:
        """Check the index and its hasher; an empty list means that nothing is wrong."""
        return self.index.verify() + self._verify_hasher()

    @classmethod
    def examine(cls, uri: Uri) -> list[Problem]:
        """Check an index that may be too damaged to be opened, and its hasher."""
        problems = Index.examine(uri)
        with contextlib.suppress(FisherhashError), cls.open(uri) as images:
            problems += images._verify_hasher()
        return problems

    def _verify_hasher(self) -> list[Problem]:
        try:
            if self.index.model:
                hasher_of(self.index)
        except FisherhashError as error:
            return [Problem("model", f"cannot be used: {error}", "restore it from a copy")]
        return []

    def close(self) -> None:
        """Release the index."""
        self.index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ImageIndex({self.index!r})"


def hasher_of(index: Index, *, device: str = "cpu") -> Hasher:
    """Load the hasher that made the codes of an index.

    Raises:
        UsageError: the index does not say which.
        FisherhashError: the hasher is missing, damaged, or not the one that made the codes.
    """
    from fisherhash.model.hasher import Hasher

    if "builtin" in index.model:
        # By its name only: a folder of that name may exist here.
        hasher = Hasher.load_builtin(str(index.model["builtin"]), device=device)
        what = f"the built-in hasher '{index.model['builtin']}'"
    elif index.model:
        folder = index.model_folder()
        if folder is None and "path" in index.model:
            folder = Path(index.model["path"])
        if folder is None or not folder.is_dir():
            raise FisherhashError(f"the model of {index.uri} is missing; restore it from a copy")
        hasher = Hasher.load(folder, device=device)
        what = f"the model in {folder}"
    else:
        raise UsageError(
            f"{index.uri} does not say which model made its codes, so it cannot encode images; "
            "search by --key, or by codes from Python"
        )
    if index.fingerprint not in (None, hasher.fingerprint()):
        raise FisherhashError(_other_hasher(what, index))
    return hasher


def _other_hasher(what: str, index: Index) -> str:
    """The sentence about a hasher that is no longer the one that made the codes of an index."""
    version = " of this version" if "builtin" in index.model else ""
    return (
        f"{what}{version} is not the one that made the codes of {index.uri}; restore it, or create "
        "the index again"
    )


def _is_outdated(index: Index) -> bool:
    """Whether a built-in hasher made the codes of an index and has changed since."""
    from fisherhash.model import builtin

    name = index.model.get("builtin")
    known = name in builtin.NAMES and index.fingerprint is not None
    return known and index.fingerprint != builtin.fingerprint(str(name))


def _pairs(block: EncodedBlock) -> Iterator[tuple[bytes, bytes | None]]:
    """Codes and second codes of encoded images."""
    fines = [None] * len(block.codes) if block.fine is None else map(bytes, block.fine)
    return zip(map(bytes, block.codes), fines, strict=True)


def _logits(block: EncodedBlock) -> list[NDArray[np.float32]]:
    return [] if block.queries is None else list(block.queries)


def _listed(images: ImageLike | Sequence[ImageLike]) -> list[ImageLike]:
    from fisherhash.data.images import is_one_image

    if is_one_image(images) or (isinstance(images, np.ndarray) and images.ndim < 4):
        return [cast("ImageLike", images)]
    return list(cast("Sequence[ImageLike]", images))
