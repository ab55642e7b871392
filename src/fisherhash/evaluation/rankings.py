"""Who was retrieved: the nearest database rows of each query."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fisherhash.codes import hamming
from fisherhash.errors import UsageError
from fisherhash.evaluation import inputs
from fisherhash.evaluation.hamming import BLOCK_PAIRS, choose_backend, kernels
from fisherhash.evaluation.results import Matches
from fisherhash.system.cores import available_cores


def retrieve(
    query_codes: ArrayLike,
    database_codes: ArrayLike,
    k: int,
    bits: int | None = None,
    *,
    self_index: ArrayLike | None = None,
    backend: Literal["auto", "numpy", "numba"] = "auto",
) -> Matches:
    """Who is retrieved: the k nearest database rows of each query by (distance, row).

    Args:
        query_codes: (n_queries, bytes) packed codes.
        database_codes: (n_database, bytes) packed codes.
        k: Rows a query, at most the database size.
        bits: Bits of a code; by default all bits of its bytes.
        self_index: (n_queries,) database row that is the query itself, or -1.
        backend: ``"numpy"``, ``"numba"``, or ``"auto"`` by size; the result is the same.

    >>> retrieve([[0]], [[3], [0], [1], [128]], k=3).ids.tolist()
    [[1, 2, 3]]
    """
    query, database, bits = inputs.check_code_pair(query_codes, database_codes, bits)
    inputs.check_choice("backend", backend, ("auto", "numpy", "numba"))
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or not 1 <= k <= len(database):
        raise UsageError(f"k must be between 1 and the database size {len(database)}, got {k!r}")
    own = inputs.check_self(self_index, len(query), len(database))
    chosen = choose_backend(backend, len(query) * len(database))
    return Matches(*_nearest(query, database, int(k), bits, own, chosen))


def _nearest(
    query: NDArray[np.uint8],
    database: NDArray[np.uint8],
    k: int,
    bits: int,
    self_rows: NDArray[np.int64],
    backend: str,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The k nearest rows of each query by (distance, row): ids and distances (n_queries, k).

    Places that stay empty, because the query itself was left out, hold -1.
    """
    ids = np.full((len(query), k), -1, dtype=np.int64)
    distances = np.full((len(query), k), -1, dtype=np.int64)
    if backend == "numba":
        jit = kernels()
        left, right = inputs.as_words(query), np.ascontiguousarray(inputs.as_words(database).T)
        workers = available_cores()
        pieces = np.linspace(0, len(query), min(4 * workers, len(query)) + 1).astype(int)
        with ThreadPoolExecutor(workers) as pool:
            jobs = [
                pool.submit(
                    jit.nearest,
                    *(left, right, self_rows, int(a), int(b), bits, ids, distances),
                )
                for a, b in itertools.pairwise(pieces)
            ]
            for job in jobs:
                job.result()
        return ids, distances
    n = len(database)
    step = max(1, BLOCK_PAIRS // n)
    for start in range(0, len(query), step):
        part = slice(start, start + step)
        block = hamming(query[part], database).astype(np.int64)
        own = self_rows[part]
        here = np.flatnonzero(own >= 0)
        block[here, own[here]] = bits + 1
        # one number that sorts like the pair (distance, row)
        keys = block * n + np.arange(n)
        if k < n:
            keys = np.partition(keys, k - 1, axis=1)[:, :k]
        keys.sort(axis=1)
        found = keys // n <= bits
        ids[part] = np.where(found, keys % n, -1)
        distances[part] = np.where(found, keys // n, -1)
    return ids, distances
