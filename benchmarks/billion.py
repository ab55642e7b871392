"""The part ``--billion`` of scale.py: as many codes as one machine can hold in a local index."""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.index import Entry, Index
from fisherhash.index.engine import Engine
from search import make  # type: ignore[import-not-found]

Codes = NDArray[np.uint8]
KINDS = ("clustered", "low-rank", "uniform")
RANK = 12
KEYED = 10_000
"""Items with a key and a label, for searches with a filter."""
SINGLE = 200
DISK_BYTES = 64
"""On disk per code of 64 bits: the code, its place in the planes, and three tables."""
_BLOCK = 1 << 20


def load_kernels() -> None:
    """Compile or load what searches need: an index does so when it has enough to do."""
    codes = make("uniform", 20_000, 64, 0)
    engine = Engine(codes, 64)
    engine.build()
    for count in (1000, 1):
        engine.search(codes[:count], 10)


def drawn(kind: str, n: int, bits: int, seed: int) -> Codes:
    """Codes of a kind; those of low rank are the signs of sums of a few numbers."""
    if kind != "low-rank":
        return make(kind, n, bits, seed)
    mixed = np.random.default_rng(bits).standard_normal((RANK, bits), dtype=np.float32)
    rng = np.random.default_rng([seed, bits])
    parts = [
        np.packbits(
            rng.standard_normal((min(1 << 18, n - i), RANK), dtype=np.float32) @ mixed > 0, axis=1
        )
        for i in range(0, n, 1 << 18)
    ]
    return np.concatenate(parts)


class _Watch:
    """The most memory that this process had to itself; files that are mapped do not count."""

    def __init__(self) -> None:
        self.most, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(0.1):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    self.most = max(self.most, 1024 * int(line.split()[1]))

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def must_fit(place: Path, count: int, bits: int) -> None:
    """Refuse what the disk cannot hold."""
    needed, free = count * DISK_BYTES * bits // 64, shutil.disk_usage(place).free
    if needed > free:
        raise SystemExit(
            f"{count:,} codes of {bits} bits need about {needed / 1e9:.0f} GB of disk, {place} has "
            f"{free / 1e9:.0f} GB free; choose another place with --place, or fewer codes with "
            "--count"
        )


def measure(kind: str, count: int, bits: int, place: Path, k: int = 100) -> dict[str, Any]:
    """Build an index of codes of one kind, and search it; for a process of its own."""
    load_kernels()
    queries = drawn(kind, SINGLE, bits, 1)
    row: dict[str, Any] = {"codes": kind, "n": count, "bits": bits, "k": k}
    path = place / f"{kind}.index"

    def timed(name: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        row[name] = round(time.perf_counter() - start, 3)

    def blocks() -> Iterator[Codes]:
        for i, start in enumerate(range(KEYED, count, _BLOCK)):
            yield drawn(kind, min(_BLOCK, count - start), bits, 3 + i)

    def entries() -> Iterator[Entry]:
        for i, code in enumerate(drawn(kind, KEYED, bits, 2)):
            yield Entry(f"k{i}", code, labels=f"l{i % 10}")

    with _Watch() as watch:
        with Index.create(path, bits=bits) as index:
            index.add(entries())
            timed("add_seconds", lambda: index.add_codes(blocks()))
            timed("build_seconds", index.build)
        with Index.open(path) as index:
            timed("first_query_seconds", lambda: index.search(queries[:1], k))
            row["query_ms"] = _times(lambda query: index.search(query, k), queries)
            row["filtered_query_ms"] = _times(
                lambda query: index.search(query, k, where="label=l3"), queries
            )
            timed("batch_seconds", lambda: index.search(queries, k))
            row["found"] = int(index.count())
    row["own_gigabytes"] = round(watch.most / 1e9, 2)
    row["resident_gigabytes"] = round(
        1024e-9 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 2
    )
    row["disk_gigabytes"] = round(1e-9 * sum(f.stat().st_size for f in path.rglob("*")), 2)
    row["merge_ms"] = {str(shards): merge_ms(shards, k) for shards in (1, 10, 100)}
    row["load_average"] = round(os.getloadavg()[0], 1)
    shutil.rmtree(path)
    for name in ("query_ms", "filtered_query_ms"):
        row[f"median_{name}"] = float(np.median(row[name]))
        row[f"p99_{name}"] = float(np.percentile(row[name], 99))
    return row


def merge_ms(shards: int, k: int) -> float:
    """Milliseconds to merge the results of shards for one query by (distance, id)."""
    rng = np.random.default_rng(0)
    ids, distances = (rng.integers(0, 10**6, (1, shards * k)) for _ in range(2))
    times = []
    for _ in range(100):
        start = time.perf_counter()
        order = np.lexsort((ids, distances), axis=1)[:, :k]
        np.take_along_axis(ids, order, axis=1)
        times.append(1000 * (time.perf_counter() - start))
    return round(float(np.median(times)), 4)


def _times(search: Callable[[Codes], object], queries: Codes) -> list[float]:
    times = []
    for query in queries:
        start = time.perf_counter()
        search(query[None])
        times.append(round(1000 * (time.perf_counter() - start), 4))
    return times
