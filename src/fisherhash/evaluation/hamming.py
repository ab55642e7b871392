"""Tie groups from packed codes: the fast path for Hamming distances.

Three backends return the same counts. ``numpy`` has no start-up cost and suits small inputs,
``numba`` is the fastest on a CPU, ``torch`` runs on a GPU or where numba is not installed.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import hamming, unpack
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.evaluation.groups import TieGroups
from fisherhash.evaluation.inputs import EvaluationTask, as_words, check_choice
from fisherhash.evaluation.ranked import RankedQueries
from fisherhash.system.cores import available_cores

Codes = NDArray[np.uint8]
Backend = Literal["auto", "numpy", "numba", "torch"]

# below this many pairs numpy finishes before numba has loaded
_SMALL = 20_000_000
# limits of one block of queries: counts with numba, pairs with numpy and torch
_BLOCK_COUNTS = 1 << 22
_BLOCK_PAIRS = 1 << 21
_BLOCK_PAIRS_CUDA = 1 << 25


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
    if backend == "torch":
        return _torch_blocks(query, database, task, device)
    if device is not None:
        raise UsageError(f"device '{device}' needs backend 'torch', not '{backend}'")
    return (_numba_blocks if backend == "numba" else _numpy_blocks)(query, database, task)


def rank_block(
    distances: NDArray[Any],
    rows: NDArray[np.int64],
    task: EvaluationTask,
    levels: int | None = None,
) -> RankedQueries:
    """Rank a block by sorting: any distances, any number of tie groups.

    Args:
        distances: (b, n) integers or reals.
        rows: (b,) query numbers.
        task: Labels, the queries' own rows, and the cut.
        levels: Number of groups where the distance itself (0, 1, …) is the group.
    """
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
    place = (group + np.arange(b)[:, None] * levels) * width + shared
    joint = np.bincount(place.ravel(), minlength=b * levels * width)
    np.subtract.at(joint, place[own, -1], 1)
    joint = joint.reshape(b, levels, width)
    at_row, at_rank = np.nonzero(shared[:, : task.top])
    found = np.bincount(at_row, minlength=b)
    nth = np.arange(len(at_row)) - np.repeat(np.cumsum(found) - found, found)
    sums = np.bincount(at_row, weights=(nth + 1) / (at_rank + 1), minlength=b)
    groups = TieGroups.from_counts(joint.sum(axis=2), np.ascontiguousarray(joint[:, :, 1:]))
    return RankedQueries(task, rows, groups, np.asarray(sums, dtype=np.float64), found)


def shared_labels(
    query: NDArray[np.uint8], database: NDArray[np.uint8], most: int
) -> NDArray[np.unsignedinteger]:
    """Return the labels shared by each pair, (b, n_database), clipped to ``most``.

    >>> shared_labels(np.array([[1, 1]], np.uint8), np.array([[1, 1], [0, 0]], np.uint8), 1)
    array([[1, 0]], dtype=uint8)
    """
    products = query.astype(np.float32) @ database.astype(np.float32).T
    return np.minimum(products, most).astype(np.uint8 if most < 256 else np.uint16)


def _numpy_blocks(query: Codes, database: Codes, task: EvaluationTask) -> Iterator[RankedQueries]:
    small = np.uint8 if task.levels <= 256 else np.uint16
    for part in query_slices(len(query), len(database), _BLOCK_PAIRS):
        distances = hamming(query[part], database).astype(small, copy=False)
        yield rank_block(distances, np.arange(part.start, part.stop), task, task.levels)


def _numba_blocks(query: Codes, database: Codes, task: EvaluationTask) -> Iterator[RankedQueries]:
    from fisherhash.evaluation import kernels

    query_words, words = as_words(query), np.ascontiguousarray(as_words(database).T)
    query_masks, database_masks = task.labels.masks
    masks = np.ascontiguousarray(database_masks.T)
    # neighbouring queries with the same labels share their list of relevant rows
    order = np.lexsort(query_masks.T)
    workers = available_cores()
    step = max(2 * workers, _BLOCK_COUNTS // (task.levels * (task.most + 1)))
    scratch = np.uint8 if task.levels < 256 else np.uint16
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(query), step):
            rows = order[start : start + step]
            b = len(rows)
            items = np.zeros((b, task.levels), dtype=np.int64)
            grades = np.zeros((b, task.levels, task.most), dtype=np.int64)
            stable, found = np.zeros(b), np.zeros(b, dtype=np.int64)
            q, m, own = query_words[rows], query_masks[rows], task.self_rows[rows]
            # more pieces than threads, in case a core is busy with something else
            pieces = np.linspace(0, b, min(4 * workers, (b + 1) // 2) + 1).astype(int)
            jobs = [
                pool.submit(
                    kernels.scan_queries,
                    *(q, words, m, masks, own, task.top, int(first), int(last)),
                    np.zeros(kernels.SCAN_TILE, dtype=scratch),
                    *(items, grades, stable, found),
                )
                for first, last in itertools.pairwise(pieces)
            ]
            for job in jobs:
                job.result()
            groups = TieGroups.from_counts(items, grades)
            yield RankedQueries(task, rows, groups, stable, found)


def _torch_blocks(
    query: Codes, database: Codes, task: EvaluationTask, device_name: str | None
) -> Iterator[RankedQueries]:
    import torch

    bits = task.levels - 1
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else "cpu"))
    # sums of at most 1024 terms of size 1 are exact in both types
    real = torch.float16 if device.type == "cuda" else torch.float32
    small = torch.uint8 if bits < 255 else torch.int16

    def signs(codes: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(unpack(codes, bits)).to(device, real) * 2 - 1

    def labels_of(rows: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(rows).to(device, real)

    signs_of_all, masks = signs(database), labels_of(task.labels.database)
    ranks = torch.arange(1, task.database + 1, device=device, dtype=torch.float64)
    pairs = _BLOCK_PAIRS_CUDA if device.type == "cuda" else _BLOCK_PAIRS
    width = task.most + 1
    for part in query_slices(task.queries, task.database, pairs):
        distances = ((bits - signs(query[part]) @ signs_of_all.T) / 2).to(small)
        b = len(distances)
        grades = (labels_of(task.labels.query[part]) @ masks.T).clamp_(max=task.most)
        own = torch.from_numpy(task.self_rows[part]).to(device)
        here = torch.nonzero(own >= 0).squeeze(1)
        distances[here, own[here]] = bits + 1
        grades[here, own[here]] = 0
        # one extra level for the query itself
        place = torch.arange(b, device=device)[:, None] * (task.levels + 1) + distances.long()
        joint = torch.bincount(
            (place * width + grades.long()).flatten(), minlength=b * (task.levels + 1) * width
        ).reshape(b, task.levels + 1, width)[:, :-1]
        del place
        order = torch.sort(distances, dim=1, stable=True).indices
        relevant = torch.gather(grades, 1, order) > 0
        del order
        precision = torch.cumsum(relevant, dim=1, dtype=torch.int32) / ranks
        relevant[:, task.top :] = False
        yield RankedQueries(
            task=task,
            rows=np.arange(part.start, part.stop),
            groups=TieGroups.from_counts(
                joint.sum(dim=2).cpu().numpy(), joint[:, :, 1:].contiguous().cpu().numpy()
            ),
            stable_sum=torch.where(relevant, precision, 0.0).sum(dim=1).cpu().numpy(),
            stable_found=relevant.sum(dim=1).cpu().numpy(),
        )
