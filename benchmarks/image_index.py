"""Latency of single searches by key in an index that stays open, alone and from eight threads.

    python benchmarks/image_index.py [--items 20000 1000000] [--queries 1000] [--out FILE]

Every search fetches the query's code, searches, and fetches the matching items with their paths.
``engine`` is the search of the codes alone. Times are milliseconds; prints JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash import ImageIndex, Index
from fisherhash.codes import code_bytes
from fisherhash.index import Entry

THREADS = 8
ENTRIES_AT_ONCE = 50_000


def fill(path: Path, items: int, bits: int) -> None:
    """An index of random codes under keys, as a sync of a folder would leave it."""
    codes = np.random.default_rng(0).integers(0, 256, (items, code_bytes(bits)), dtype=np.uint8)
    with Index.create(path, bits=bits) as index:
        for start in range(0, items, ENTRIES_AT_ONCE):
            rows = enumerate(codes[start : start + ENTRIES_AT_ONCE], start)
            index.add([Entry(_key(i), row, f"/images/{_key(i)}", 1000, i) for i, row in rows])
        index.write_notes({"sync": {"folder": {"folder": "/images"}}})


def _key(number: int) -> str:
    return f"{number % 100:02d}/{number:08d}.jpg"


def timed(*calls: tuple[Callable[[Any], object], Sequence[Any]]) -> NDArray[np.float64]:
    """Milliseconds of each call, one row per function; their calls take turns."""
    times = np.zeros((len(calls), len(calls[0][1])))
    for column in range(times.shape[1]):
        for row, (function, arguments) in enumerate(calls):
            start = time.perf_counter()
            function(arguments[column])
            times[row, column] = 1000 * (time.perf_counter() - start)
    return times


def summary(times: NDArray[np.float64]) -> dict[str, float]:
    """Median and 99th percentile."""
    middle, slow = np.percentile(times, [50, 99]).tolist()
    return {"median_ms": round(middle, 4), "p99_ms": round(slow, 4)}


def measure(path: Path, items: int, queries: int, k: int) -> dict[str, Any]:
    """Single searches by key: the codes alone, one thread, eight threads."""
    chosen = np.random.default_rng(1).integers(0, items, queries).tolist()
    keys = [_key(number) for number in chosen]
    with ImageIndex.open(path) as images:
        start = time.perf_counter()
        images.search(keys=keys[0], k=k)
        first = time.perf_counter() - start
        codes = [np.frombuffer(item.code, np.uint8)[None] for item in images.index.get(keys)]

        def search(key: str) -> list[tuple[str, float | None]]:
            return [(match.name, match.distance) for match in images.search(keys=key, k=k)[0]]

        # Search tables are built once they pay; measured is what a server would see.
        timed((search, keys[: queries // 4]))
        # In turns, so that whatever else runs on the machine slows both; no turn searches for what
        # the other just found.
        both = [(lambda code: images.index.search(code, k + 1), codes[::-1]), (search, keys)]
        engine, alone = timed(*both)
        _, again = timed(*both)
        start = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            parts = list(pool.map(lambda own: timed((search, own)), [keys] * THREADS))
        seconds = time.perf_counter() - start
        with ThreadPoolExecutor(THREADS) as pool:
            same = list(pool.map(search, keys[:200])) == [search(key) for key in keys[:200]]
    return {
        "items": items,
        "queries": queries,
        "k": k,
        "first_search_s": round(first, 3),
        "engine": summary(engine),
        "alone": summary(alone),
        "alone, items read before": summary(again),
        f"{THREADS}_threads": {
            **summary(np.concatenate(parts, axis=1)),
            "per_second": round(THREADS * queries / seconds, 1),
        },
        "same_results": same,
    }


def main() -> None:
    """Measure indexes of several sizes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", type=int, nargs="+", default=[20_000, 1_000_000])
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--bits", type=int, default=64)
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = []
    for items in arguments.items:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "images.index"
            start = time.perf_counter()
            fill(path, items, arguments.bits)
            print(f"{items:,} items: {time.perf_counter() - start:.1f} s", file=sys.stderr)
            found.append(measure(path, items, arguments.queries, arguments.k))
    text = json.dumps({"bits": arguments.bits, "runs": found}, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
