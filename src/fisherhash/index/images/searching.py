"""Searches of an index of images: queries to codes to hits, and filters by label."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Index
from fisherhash.index.filters import All, Condition, Where, parse_filter
from fisherhash.index.images.options import DEFAULT_K, SearchOptions
from fisherhash.index.images.results import (
    Hit,
    SearchResult,
    image_path,
    joined_codes,
    synced_folder,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fisherhash.data.images import ImageLike
    from fisherhash.model.hasher import EncodedBlock, Hasher

MOST_COMPARED = 5_000
"""Labels that a mistyped one is compared with; more would take longer than people wait."""


def search_images(
    index: Index,
    hasher: Callable[[], Hasher],
    images: ImageLike | Sequence[ImageLike],
    keys: Sequence[str],
    features: NDArray[Any] | None,
    options: SearchOptions,
    where: Where | None,
    *,
    skip_unreadable: bool,
) -> list[SearchResult]:
    """Search with images, items of the index and vectors: see :meth:`ImageIndex.search`.

    Args:
        index: the index.
        hasher: returns its hasher; not called for a search by key.
        images: one or several images.
        keys: items of the index.
        features: (n, d) vectors.
        options: what is returned, and in which order; but for its ``where``.
        where: only items that match this filter.
        skip_unreadable: return a result with an ``error`` for an image that cannot be read.
    """
    k, radius, ranking = options.k, options.radius, options.ranking
    if radius is not None and radius > index.bits:
        raise UsageError(f"radius must be between 0 and {index.bits} bits, got {radius}")
    if ranking == "real" and (keys or radius is not None):
        raise UsageError(
            "the ranking 'real' needs images or vectors: an item of the index has its code "
            "only, and a radius is a number of bits"
        )
    filters = parse_filter(()) if where is None else where_labels(index, where)
    results, logits = _encoded(hasher, images, features, skip_unreadable=skip_unreadable)
    if not results and not keys:
        raise UsageError("nothing to search for: give an image, or --key KEY")
    items, folder = index.get(keys) if keys else [], synced_folder(index)
    own_ids = [-1] * len(results) + [item.id for item in items]
    for item in items:
        path = image_path(item, folder)
        results.append(SearchResult(item.name, path, item.code, by_key=True))
    most = DEFAULT_K if k is None and radius is None else k
    found: dict[int, list[tuple[int, float]]] = {}
    if ranking == "real" and logits:
        real = np.stack(list(logits.values()))
        matches = index.search(k=most or DEFAULT_K, where=filters, logits=real)
        found |= zip(logits, matches.to_list(), strict=True)
        for number in logits:
            results[number] = replace(results[number], ranking="real")
    by_code = [n for n, one in enumerate(results) if one.error is None and n not in found]
    if by_code:
        codes = joined_codes([results[number].code for number in by_code])
        if radius is None:
            # One more, as an item of the index finds itself.
            matches = index.search(codes, (most or DEFAULT_K) + 1, where=filters)
        else:
            matches = index.within(codes, radius, where=filters)
        found |= zip(by_code, matches.to_list(), strict=True)
    rows = {
        number: [pair for pair in row if pair[0] != own_ids[number]][:most]
        for number, row in sorted(found.items())
    }
    # All items at once; None for one that another writer removed meanwhile.
    ids = np.array([number for row in rows.values() for number, _ in row], dtype=np.int64)
    there = iter(index.get_items(ids))
    for number, row in rows.items():
        pairs = [(next(there), distance) for _, distance in row]
        hits = [Hit.of(item, apart, folder=folder) for item, apart in pairs if item is not None]
        results[number] = replace(results[number], hits=hits)
        if options.count_ties and hits:
            ties = _ties(index, results[number], own_ids[number], filters)
            results[number] = replace(results[number], ties=ties)
    return [replace(one, unavailable=index.unavailable) for one in results]


def _encoded(
    hasher: Callable[[], Hasher],
    images: ImageLike | Sequence[ImageLike],
    features: NDArray[Any] | None,
    *,
    skip_unreadable: bool,
) -> tuple[list[SearchResult], dict[int, NDArray[np.float32]]]:
    """Queries with their codes and without hits, and the logits of each by its number."""
    results: list[SearchResult] = []
    blocks: Iterable[EncodedBlock] = ()
    if not isinstance(images, tuple | list) or images:
        from fisherhash.model.encoder import one_by_one

        queries = list(one_by_one(images))
        paths = [os.fspath(one) if isinstance(one, str | os.PathLike) else None for one in queries]
        for number, path in enumerate(paths):
            if path is not None and not os.path.lexists(path):
                raise UsageError(f"there is no file '{path}'")
            results.append(SearchResult(path or f"image {number}", path))
        blocks = hasher().encode_blocks(queries, queries=True)
    if features is not None:
        vectors, first = np.atleast_2d(np.asanyarray(features)), len(results)
        hasher().check_vectors(vectors, "the array")
        results += [SearchResult(f"row {number}") for number in range(len(vectors))]
        of_vectors = hasher().encode_feature_blocks(vectors, queries=True)
        moved = (replace(block, indices=block.indices + first) for block in of_vectors)
        blocks = itertools.chain(blocks, moved)
    logits: dict[int, NDArray[np.float32]] = {}
    for block in blocks:
        numbers = block.indices.tolist()
        logits |= zip(numbers, cast("NDArray[np.float32]", block.queries), strict=True)
        for number, code in zip(numbers, block.codes, strict=True):
            results[number] = replace(results[number], code=code.tobytes())
        for skip in block.skipped:
            error = f"{skip.name}: {skip.reason}"
            results[skip.index] = replace(results[skip.index], error=error)
    errors = [result.error for result in results if result.error is not None]
    if errors and not skip_unreadable:
        raise FisherhashError("; ".join(errors))
    return results, logits


def _ties(index: Index, result: SearchResult, own_id: int, where: All) -> dict[float, int]:
    """The number of items at each distance of a hit, but for the query itself.

    Real-valued distances are equal where codes are, so items with the codes of the hits are
    counted.
    """
    if result.ranking == "hamming":
        shown = {int(hit.distance or 0) for hit in result.hits}
        found = index.within(joined_codes([result.code]), max(shown), where=where)
        counts = Counter(found.distances[found.ids != own_id].tolist())
        return {distance: counts[distance] for distance in shown}
    ties: Counter[float] = Counter()
    distinct = {hit.code: hit.distance or 0.0 for hit in result.hits}
    found = index.within(joined_codes(list(distinct)), 0, where=where)
    for distance, count in zip(distinct.values(), np.diff(found.offsets).tolist(), strict=True):
        ties[distance] += count
    return dict(ties)


# Labels


def count_labels(index: Index, where: Where | None = None) -> Counter[str]:
    """How many items have each label; the empty text counts items without one.

    Args:
        index: the index.
        where: count only items that match this filter.
    """
    counts: Counter[str] = Counter()
    for item in index.items(where_labels(index, where)):
        counts.update(item.labels or ("",))
    return counts


def where_labels(index: Index, where: Where | None) -> All:
    """A filter whose labels are spelled as in the index: ``label=cat`` finds ``Cat``.

    A label that some item has exactly as written means that one. Any other means the one label
    that differs in case only; a label that no item has stays as it is.

    Raises:
        UsageError: several labels differ from the one given in case only.
    """
    return All(
        tuple(
            dataclasses.replace(one, values=tuple(_spelled(index, value) for value in one.values))
            if one.field == "label"
            else one
            for one in parse_filter(where).conditions
        )
    )


def _spelled(index: Index, label: Any) -> Any:
    if not label or index.count(All((Condition("label", "=", (label,)),))):
        return label
    name = str(label).casefold()
    same = sorted(other for other in count_labels(index) if other.casefold() == name)
    if len(same) > 1:
        names = " or ".join(f"label={other}" for other in same)
        raise UsageError(f"no item has the label '{label}', but there are several: {names}?")
    return same[0] if same else label


def near_label(index: Index, where: Where | None) -> str:
    """A hint at the label that is most like the first one of a filter that no item has, or none.

    Args:
        index: the index.
        where: a filter that no item matches.
    """
    conditions = parse_filter(where).conditions
    wanted = [one.values for one in conditions if (one.field, one.operator) == ("label", "=")]
    known = {label.casefold(): label for label in count_labels(index)} if wanted else {}
    for value in itertools.chain(*wanted):
        name = str(value).casefold()
        if name not in known and len(known) <= MOST_COMPARED:
            near = [known[one] for one in difflib.get_close_matches(name, known, n=1) if one]
            return f". Did you mean label={near[0]}?" if near else ""
    return ""
