"""Tie groups from packed codes: the fast path for Hamming distances.

Three backends return the same counts. ``numpy`` has no start-up cost and suits small inputs,
``numba`` is the fastest on a CPU, ``torch`` runs on a GPU or where numba is not installed.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import hamming, unpack
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.evaluation.groups import Counts, Floats, TieGroups
from fisherhash.evaluation.inputs import EvaluationTask, check_choice, padded_words
from fisherhash.evaluation.metric import RankedQueries
from fisherhash.system.cores import available_cores

Codes = NDArray[np.uint8]
Backend = Literal["auto", "numpy", "numba", "torch"]

Scan = tuple[Counts, Counts, Floats, Counts]
"""Of b queries: items (b, groups), grades (b, groups, most), and the sum of precisions and the
number of relevant items up to the cut with ties in database order, (b,) each."""

# below this many pairs numpy finishes before numba has loaded
_SMALL = 20_000_000
_BLOCK_COUNTS = 1 << 22
"""Most counts of one block of queries. Every backend has the same blocks, hence the same sums."""
_BLOCK_PAIRS = 1 << 21
_BLOCK_PAIRS_CUDA = 1 << 25
"""Most pairs that numpy and torch hold at once."""


def choose_backend(backend: str, pairs: int) -> str:
    """Return the backend to use for this many query-database pairs.

    >>> choose_backend("auto", 1000)
    'numpy'
    """
    check_choice("backend", backend, get_args(Backend))
    if backend == "auto":
        fast = [name for name in ("numba", "torch") if pairs >= _SMALL and _installed(name)]
        return fast[0] if fast else "numpy"
    if backend != "numpy" and not _installed(backend):
        other = "torch" if backend == "numba" else "numba"
        raise FisherhashError(
            f"backend '{backend}' needs the package {backend}; use '{other}' or 'numpy'"
        )
    return backend


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def query_slices(queries: int, database: int, pairs: int = 1 << 20) -> Iterator[slice]:
    """Yield slices of the queries; each forms about ``pairs`` pairs with the database, or fewer.

    >>> list(query_slices(3, 10, pairs=20))
    [slice(0, 2, None), slice(2, 3, None)]
    """
    step = max(1, pairs // database)
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))


def scan_blocks(
    query: Codes,
    database: Codes,
    task: EvaluationTask,
    *,
    backend: str,
    device: str | None = None,
) -> Iterator[RankedQueries]:
    """Yield all queries with their tie groups, block by block.

    Args:
        query: (n_queries, bytes) packed codes.
        database: (n_database, bytes) packed codes.
        task: Labels, the queries' own rows, and the cut.
        backend: What :func:`choose_backend` returned.
        device: Torch device, for the torch backend.
    """
    pairs = _BLOCK_PAIRS
    if backend == "torch":
        scan, pairs = _torch_scan(query, database, task, device)
    elif device is not None:
        raise UsageError(f"device '{device}' needs backend 'torch', not '{backend}'")
    else:
        scan = (_numba_scan if backend == "numba" else _numpy_scan)(query, database, task)
    step = max(1, _BLOCK_COUNTS // (task.levels * (task.most + 1)))
    for start in range(0, len(query), step):
        stop = min(start + step, len(query))
        if backend == "numba":
            found = scan(slice(start, stop))
        else:
            parts = query_slices(stop - start, len(database), pairs)
            several = [scan(slice(start + part.start, start + part.stop)) for part in parts]
            items, grades, sums, counts = map(np.concatenate, zip(*several, strict=True))
            found = items, grades, sums, counts
        yield _ranked(task, np.arange(start, stop), found)


def _ranked(task: EvaluationTask, rows: NDArray[np.int64], found: Scan) -> RankedQueries:
    items, grades, stable_sum, stable_found = found
    groups = TieGroups.from_counts(items, grades)
    return RankedQueries(task, rows, groups, stable_sum, stable_found)


def rank_block(
    distances: NDArray[Any], rows: NDArray[np.int64], task: EvaluationTask
) -> RankedQueries:
    """Rank a block by sorting: any distances, any number of tie groups.

    Args:
        distances: (b, n) integers or reals.
        rows: (b,) query numbers.
        task: Labels, the queries' own rows, and the cut.
    """
    return _ranked(task, rows, _sort(distances, rows, task))


def _sort(
    distances: NDArray[Any],
    rows: NDArray[np.int64],
    task: EvaluationTask,
    levels: int | None = None,
) -> Scan:
    """Scan distances (b, n); with ``levels`` the distance itself (0, 1, …) is the group."""
    grades = shared_labels(task.labels.query[rows], task.labels.database, task.most)
    self_rows = task.self_rows[rows]
    b, n = distances.shape
    order = np.argsort(distances, axis=1, kind="stable")
    own = self_rows >= 0
    if own.any():
        # the query itself moves to the end of its row, where it counts as irrelevant
        last = np.argsort(order == self_rows[:, None], axis=1, kind="stable")
        order = np.take_along_axis(order, last, axis=1)
    shared = np.take_along_axis(grades, order, axis=1)
    shared[own, -1] = 0
    ranked = np.take_along_axis(distances, order, axis=1)
    if levels is None:
        group = np.zeros((b, n), dtype=np.int64)
        np.cumsum(ranked[:, 1:] != ranked[:, :-1], axis=1, out=group[:, 1:])
        levels = int(group[:, -1].max()) + 1
    else:
        group = ranked.astype(np.int64)
    width = task.most + 1
    slot = (group + np.arange(b)[:, None] * levels) * width + shared
    joint = np.bincount(slot.ravel(), minlength=b * levels * width)
    np.subtract.at(joint, slot[own, -1], 1)
    joint = joint.reshape(b, levels, width)
    at_row, at_rank = np.nonzero(shared[:, : task.top])
    found = np.bincount(at_row, minlength=b)
    nth = np.arange(len(at_row)) - np.repeat(np.cumsum(found) - found, found)
    sums = np.bincount(at_row, weights=(nth + 1) / (at_rank + 1), minlength=b)
    grades = np.ascontiguousarray(joint[:, :, 1:])
    return joint.sum(axis=2), grades, np.asarray(sums, dtype=np.float64), found


def shared_labels(
    query: NDArray[np.uint8], database: NDArray[np.uint8], most: int
) -> NDArray[np.unsignedinteger]:
    """Return the labels shared by each pair, (b, n_database), clipped to ``most``.

    >>> shared_labels(np.array([[1, 1]], np.uint8), np.array([[1, 1], [0, 0]], np.uint8), 1)
    array([[1, 0]], dtype=uint8)
    """
    products = query.astype(np.float32) @ database.astype(np.float32).T
    return np.minimum(products, most).astype(np.uint8 if most < 256 else np.uint16)


def _numpy_scan(query: Codes, database: Codes, task: EvaluationTask) -> Callable[[slice], Scan]:
    small = np.uint8 if task.levels <= 256 else np.uint16

    def scan(part: slice) -> Scan:
        distances = hamming(query[part], database).astype(small, copy=False)
        return _sort(distances, np.arange(part.start, part.stop), task, task.levels)

    return scan


def _numba_scan(query: Codes, database: Codes, task: EvaluationTask) -> Callable[[slice], Scan]:
    kernel, workers = _compiled(), available_cores()
    query_words, words = padded_words(query), padded_words(database)
    query_masks, masks = task.labels.masks

    def scan(part: slice) -> Scan:
        b = part.stop - part.start
        items = np.zeros((b, task.levels), dtype=np.int64)
        grades = np.zeros((b, task.levels, task.most), dtype=np.int64)
        found = items, grades, np.zeros(b), np.zeros(b, dtype=np.int64)
        given = query_words[part], words, query_masks[part], masks, task.self_rows[part], task.top
        # more pieces than threads, in case a core is busy with something else
        edges = np.linspace(0, b, min(4 * workers, b) + 1).astype(int).tolist()
        with ThreadPoolExecutor(workers) as pool:
            jobs = [
                pool.submit(kernel, *given, *piece, *found) for piece in itertools.pairwise(edges)
            ]
            for job in jobs:
                job.result()
        return found

    return scan


@functools.cache
def _compiled() -> Callable[..., None]:
    """The kernel of the numba backend: :func:`_scan_queries`, compiled.

    It releases the GIL and runs in plain threads. Numba's own parallel layer would make a later
    ``fork`` of the process unsafe and would take much longer to compile.
    """
    import numba

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(_scan_queries)
    except RuntimeError:
        # numba found no writable folder for its cache, so compile in memory
        return numba.njit(**options)(_scan_queries)


def _scan_queries(
    queries: Any,
    words: Any,
    query_masks: Any,
    masks: Any,
    self_rows: Any,
    top: int,
    first: int,
    last: int,
    items: Any,
    grades: Any,
    stable: Any,
    stable_found: Any,
) -> None:
    """Scan the queries ``first`` to ``last``; plain loops, to be compiled.

    Args:
        queries: (n_queries, words) uint64 codes.
        words: (n_database, words) uint64 codes.
        query_masks: (n_queries, v) uint64 label masks.
        masks: (n_database, v) uint64 label masks.
        self_rows: (n_queries,) database row of the query itself, or -1.
        top: Ranks that count in ``stable``.
        first: First query.
        last: One past the last query.
        items: (n_queries, levels) zeros, filled with counts.
        grades: (n_queries, levels, most) zeros, filled with counts.
        stable: (n_queries,) filled with the sum of precisions at relevant ranks up to ``top``.
        stable_found: (n_queries,) filled with the number of those ranks.
    """
    total, width = words.shape
    most = grades.shape[2]
    pairs, nibbles = np.uint64(0x5555555555555555), np.uint64(0x0F0F0F0F0F0F0F0F)
    quads, ones = np.uint64(0x3333333333333333), np.uint64(0x0101010101010101)
    one, two, four, high = np.uint64(1), np.uint64(2), np.uint64(4), np.uint64(56)
    # of each relevant item: its distance, and how many came before it at this distance
    level = np.zeros(total, dtype=np.int64)
    inside = np.zeros(total, dtype=np.int64)
    hit = np.zeros(total, dtype=np.bool_)
    for q in range(first, last):
        relevant = 0
        for i in range(total):
            if i == self_rows[q]:
                continue
            distance = 0
            for w in range(width):
                # the compiler knows this way of counting bits, and takes one instruction for it
                x = words[i, w] ^ queries[q, w]
                x -= (x >> one) & pairs
                x = (x & quads) + ((x >> two) & quads)
                distance += np.int64((((x + (x >> four)) & nibbles) * ones) >> high)
            shared = 0
            for w in range(masks.shape[1]):
                x = masks[i, w] & query_masks[q, w]
                x -= (x >> one) & pairs
                x = (x & quads) + ((x >> two) & quads)
                shared += np.int64((((x + (x >> four)) & nibbles) * ones) >> high)
            if shared:
                level[relevant] = distance
                inside[relevant] = items[q, distance]
                relevant += 1
                grades[q, distance, min(shared, most) - 1] += 1
            items[q, distance] += 1
        hit[:] = False
        before = np.cumsum(items[q]) - items[q]
        for k in range(relevant):
            hit[before[level[k]] + inside[k]] = True
        value = 0.0
        found = 0
        for rank in range(top):
            if hit[rank]:
                found += 1
                value += found / (rank + 1)
        stable[q] = value
        stable_found[q] = found


def _torch_scan(
    query: Codes, database: Codes, task: EvaluationTask, device_name: str | None
) -> tuple[Callable[[slice], Scan], int]:
    """The scan of queries on a device, and the pairs that it may hold at once."""
    import torch

    bits = task.levels - 1
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    # sums of at most 1024 terms of size 1 are exact in both types
    real = torch.float16 if device.type == "cuda" else torch.float32
    small = torch.uint8 if bits < 255 else torch.int16

    def signs(codes: Codes) -> torch.Tensor:
        return torch.from_numpy(unpack(codes, bits)).to(device, real) * 2 - 1

    def labels_of(rows: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(rows).to(device, real)

    signs_of_all, masks = signs(database), labels_of(task.labels.database)
    ranks = torch.arange(1, task.database + 1, device=device, dtype=torch.float64)
    width = task.most + 1

    def scan(part: slice) -> Scan:
        distances = ((bits - signs(query[part]) @ signs_of_all.T) / 2).to(small)
        b = len(distances)
        grades = (labels_of(task.labels.query[part]) @ masks.T).clamp_(max=task.most)
        own = torch.from_numpy(task.self_rows[part]).to(device)
        here = torch.nonzero(own >= 0).squeeze(1)
        distances[here, own[here]] = bits + 1
        grades[here, own[here]] = 0
        # one extra level for the query itself
        slot = torch.arange(b, device=device)[:, None] * (task.levels + 1) + distances.long()
        joint = torch.bincount(
            (slot * width + grades.long()).flatten(), minlength=b * (task.levels + 1) * width
        ).reshape(b, task.levels + 1, width)[:, :-1]
        del slot
        order = torch.sort(distances, dim=1, stable=True).indices
        relevant = torch.gather(grades, 1, order) > 0
        del order
        precision = torch.cumsum(relevant, dim=1, dtype=torch.int32) / ranks
        relevant[:, task.top :] = False
        sums = torch.where(relevant, precision, 0.0).sum(dim=1)
        found = joint.sum(dim=2), joint[:, :, 1:].contiguous(), sums, relevant.sum(dim=1)
        items, graded, stable, count = (values.cpu().numpy() for values in found)
        return items, graded, stable, count

    return scan, _BLOCK_PAIRS_CUDA if device.type == "cuda" else _BLOCK_PAIRS
