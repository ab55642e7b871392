"""Tie groups and nearest rows from packed codes: the fast case of the distance layer.

Three backends give the same counts. ``numpy`` starts at once and suits small inputs, ``numba`` is
the fast one on a CPU, ``torch`` runs on a GPU or where numba is not installed.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import hamming, unpack
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.evaluation.inputs import Labels, as_words, check_choice
from fisherhash.system.cores import available_cores

BACKENDS = ("auto", "numpy", "numba", "torch")

# below this many pairs plain numpy ends before numba has loaded
_SMALL = 20_000_000
# bounds the counts of one block of queries, and the pairs of one block in numpy and torch
_BLOCK_COUNTS = 1 << 22
BLOCK_PAIRS = 1 << 21
_BLOCK_PAIRS_CUDA = 1 << 25


@dataclass(frozen=True)
class GroupBlock:
    """Tie groups of the queries ``rows`` and what the stable order makes of them.

    Attributes:
        rows: (b,) query numbers.
        items: (b, groups) items of each group.
        grades: (b, groups, most) items of each group that share 1, 2, … labels.
        stable: (b,) sum of the precisions at relevant ranks up to top, ties in database order.
        stable_found: (b,) number of those ranks.
    """

    rows: NDArray[np.int64]
    items: NDArray[np.int64]
    grades: NDArray[np.int64]
    stable: NDArray[np.float64]
    stable_found: NDArray[np.int64]


@dataclass(frozen=True)
class Scan:
    """What is to be scanned: codes (n, bytes), labels, own rows (n_queries,) and the cut."""

    query: NDArray[np.uint8]
    database: NDArray[np.uint8]
    bits: int
    labels: Labels
    self_rows: NDArray[np.int64]
    top: int
    most: int
    device: str | None = None

    @property
    def levels(self) -> int:
        """Distances 0 to bits."""
        return self.bits + 1


def choose_backend(backend: str, pairs: int) -> str:
    """Return the backend to use for this many query-database pairs.

    >>> choose_backend("auto", 1000)
    'numpy'
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "numba" and not _installed("numba"):
        raise FisherhashError("backend 'numba' needs the package numba; use 'torch' or 'numpy'")
    if backend == "torch" and not _installed("torch"):
        raise FisherhashError("backend 'torch' needs the package torch; use 'numba' or 'numpy'")
    if backend != "auto":
        return backend
    if pairs < _SMALL:
        return "numpy"
    return next((name for name in ("numba", "torch") if _installed(name)), "numpy")


def _installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def scan_blocks(scan: Scan, backend: str) -> Iterator[GroupBlock]:
    """Yield the tie groups of all queries, block by block."""
    if scan.device is not None and backend != "torch":
        raise UsageError(f"device '{scan.device}' needs backend 'torch', not '{backend}'")
    if backend == "numba":
        yield from _numba_blocks(scan)
    elif backend == "torch":
        yield from _torch_blocks(scan)
    else:
        yield from _numpy_blocks(scan)


def rank_block(
    distances: NDArray[Any],
    grades: NDArray[Any],
    self_rows: NDArray[np.int64],
    rows: NDArray[np.int64],
    top: int,
    most: int,
    levels: int | None = None,
) -> GroupBlock:
    """Rank a block by sorting: any distances, any number of tie groups.

    Args:
        distances: (b, n) of integers or reals.
        grades: (b, n) labels shared, at most ``most``.
        self_rows: (b,) database row of the query itself, or -1.
        rows: (b,) query numbers, passed on.
        top: Ranks that count for the stable order.
        most: Largest grade.
        levels: Number of groups when the distance itself (0, 1, …) is the group.
    """
    b, n = distances.shape
    order = np.argsort(distances, axis=1, kind="stable")
    own = self_rows >= 0
    if own.any():
        # the query itself goes to the end of its row, where it counts as irrelevant
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
    width = most + 1
    place = (group + np.arange(b)[:, None] * levels) * width + shared
    joint = np.bincount(place.ravel(), minlength=b * levels * width)
    np.subtract.at(joint, place[own, -1], 1)
    joint = joint.reshape(b, levels, width)
    at_row, at_rank = np.nonzero(shared[:, :top])
    found = np.bincount(at_row, minlength=b)
    nth = np.arange(len(at_row)) - np.repeat(np.cumsum(found) - found, found)
    sums = np.bincount(at_row, weights=(nth + 1) / (at_rank + 1), minlength=b)
    return GroupBlock(
        rows=rows,
        items=joint.sum(axis=2),
        grades=np.ascontiguousarray(joint[:, :, 1:]),
        stable=np.asarray(sums, dtype=np.float64),
        stable_found=found,
    )


def shared_labels(
    query: NDArray[np.uint8], database: NDArray[np.uint8], most: int
) -> NDArray[np.unsignedinteger]:
    """Labels shared by each pair of a block, (b, n_database), cut off at ``most``.

    >>> shared_labels(np.array([[1, 1]], np.uint8), np.array([[1, 1], [0, 0]], np.uint8), 1)
    array([[1, 0]], dtype=uint8)
    """
    products = query.astype(np.float32) @ database.astype(np.float32).T
    return np.minimum(products, most).astype(np.uint8 if most < 256 else np.uint16)


def _numpy_blocks(scan: Scan) -> Iterator[GroupBlock]:
    step = max(1, BLOCK_PAIRS // len(scan.database))
    for start in range(0, len(scan.query), step):
        part = slice(start, start + step)
        distances = hamming(scan.query[part], scan.database)
        if scan.bits < 256:
            distances = distances.astype(np.uint8)
        yield rank_block(
            distances,
            shared_labels(scan.labels.query[part], scan.labels.database, scan.most),
            scan.self_rows[part],
            np.arange(start, start + len(distances)),
            scan.top,
            scan.most,
            scan.levels,
        )


def kernels() -> ModuleType:
    """The numba kernels, imported when first needed."""
    from fisherhash.evaluation import kernels

    return kernels


def _numba_blocks(scan: Scan) -> Iterator[GroupBlock]:
    jit = kernels()
    query, database = as_words(scan.query), np.ascontiguousarray(as_words(scan.database).T)
    query_masks, database_masks = scan.labels.masks
    masks = np.ascontiguousarray(database_masks.T)
    # queries with the same labels side by side share their list of relevant rows
    order = np.lexsort(query_masks.T)
    workers = available_cores()
    step = max(2 * workers, _BLOCK_COUNTS // (scan.levels * (scan.most + 1)))
    tops = np.full(len(query), scan.top, dtype=np.int64)
    scratch = np.uint8 if scan.levels < 256 else np.uint16
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(query), step):
            rows = order[start : start + step]
            b = len(rows)
            block = GroupBlock(
                rows=rows,
                items=np.zeros((b, scan.levels), dtype=np.int64),
                grades=np.zeros((b, scan.levels, scan.most), dtype=np.int64),
                stable=np.zeros(b),
                stable_found=np.zeros(b, dtype=np.int64),
            )
            q, m = query[rows], query_masks[rows]
            own, cut = scan.self_rows[rows], tops[rows]
            # more pieces than threads, for a core that is busy with something else
            pieces = np.linspace(0, b, min(4 * workers, (b + 1) // 2) + 1).astype(int)
            jobs = [
                pool.submit(
                    jit.scan,
                    *(q, database, m, masks, own, cut, int(first), int(last)),
                    np.zeros(jit.TILE, dtype=scratch),
                    *(block.items, block.grades, block.stable, block.stable_found),
                )
                for first, last in itertools.pairwise(pieces)
            ]
            for job in jobs:
                job.result()
            yield block


def _torch_blocks(scan: Scan) -> Iterator[GroupBlock]:
    import torch

    device = torch.device(scan.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # sums of at most 1024 terms of size 1 are exact in every one of these types
    real = torch.float16 if device.type == "cuda" else torch.float32
    small = torch.uint8 if scan.bits < 255 else torch.int16

    def signs(codes: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(unpack(codes, scan.bits)).to(device, real) * 2 - 1

    database, masks = signs(scan.database), _to(scan.labels.database, device, real)
    n = len(scan.database)
    ranks = torch.arange(1, n + 1, device=device, dtype=torch.float64)
    pairs = _BLOCK_PAIRS_CUDA if device.type == "cuda" else BLOCK_PAIRS
    step = max(1, pairs // n)
    width = scan.most + 1
    for start in range(0, len(scan.query), step):
        part = slice(start, start + step)
        distances = ((scan.bits - signs(scan.query[part]) @ database.T) / 2).to(small)
        b = len(distances)
        grades = (_to(scan.labels.query[part], device, real) @ masks.T).clamp_(max=scan.most)
        own = torch.from_numpy(scan.self_rows[part]).to(device)
        here = torch.nonzero(own >= 0).squeeze(1)
        distances[here, own[here]] = scan.bits + 1
        grades[here, own[here]] = 0
        # one level more than a distance can be, for the query itself
        place = torch.arange(b, device=device)[:, None] * (scan.levels + 1) + distances.long()
        joint = torch.bincount(
            (place * width + grades.long()).flatten(), minlength=b * (scan.levels + 1) * width
        ).reshape(b, scan.levels + 1, width)[:, :-1]
        del place
        order = torch.sort(distances, dim=1, stable=True).indices
        relevant = torch.gather(grades, 1, order) > 0
        del order
        precision = torch.cumsum(relevant, dim=1, dtype=torch.int32) / ranks
        relevant[:, scan.top :] = False
        yield GroupBlock(
            rows=np.arange(start, start + b),
            items=joint.sum(dim=2).cpu().numpy(),
            grades=joint[:, :, 1:].contiguous().cpu().numpy(),
            stable=torch.where(relevant, precision, 0.0).sum(dim=1).cpu().numpy(),
            stable_found=relevant.sum(dim=1).cpu().numpy(),
        )


def _to(labels: NDArray[np.uint8], device: Any, real: Any) -> Any:
    import torch

    return torch.from_numpy(labels).to(device, real)
