"""Searches as many bare codes as one machine can hold: a .npy file in memory, and the engine.

    python benchmarks/billion.py [--count 100000000] [--bits 64] [--folder DIR] [--json FILE]

The codes are clustered (100 centres), of low rank (the signs of sums of 12 numbers) or uniform. A
billion codes of 64 bits are 8 GB, and as much again as the scan reads them; buckets are built only
where their memory is there, so single queries show which of the two answers.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import code_bytes
from fisherhash.index.engine import Engine
from search import make  # type: ignore[import-not-found]

Codes = NDArray[np.uint8]
KINDS = ("clustered", "low-rank", "uniform")
RANK, SINGLE, K = 12, 200, 100
_BLOCK = 1 << 20


def drawn(kind: str, n: int, bits: int, seed: int) -> Codes:
    """Codes of a kind."""
    if kind != "low-rank":
        return make(kind, n, bits, seed)
    mixed = np.random.default_rng(bits).standard_normal((RANK, bits), dtype=np.float32)
    values = np.random.default_rng([seed, bits]).standard_normal((n, RANK), dtype=np.float32)
    return np.packbits(values @ mixed > 0, axis=1)


def measure(kind: str, count: int, bits: int, folder: Path) -> dict[str, Any]:
    """Write codes to a file, read them back and search them."""
    row: dict[str, Any] = {"codes": kind, "n": count, "bits": bits, "k": K}
    path, shape = folder / f"{kind}.npy", (count, code_bytes(bits))
    file = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
    for i, start in enumerate(range(0, count, _BLOCK)):
        file[start : start + _BLOCK] = drawn(kind, min(_BLOCK, count - start), bits, 3 + i)
    file.flush()
    del file
    queries = drawn(kind, SINGLE, bits, 1)
    start = time.perf_counter()
    engine = Engine(np.load(path), bits)
    row["read_seconds"] = time.perf_counter() - start
    for name in ("first_batch_seconds", "second_batch_seconds", "batch_seconds"):
        start = time.perf_counter()
        engine.search(np.repeat(queries, 5, axis=0), K)
        row[name] = time.perf_counter() - start
    times = []
    for query in queries:
        start = time.perf_counter()
        engine.search(query[None], K)
        times.append(1000 * (time.perf_counter() - start))
    row["median_query_ms"], row["p99_query_ms"] = np.percentile(times, [50, 99]).tolist()
    row["peak_gigabytes"] = 1024e-9 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row["load_average"] = os.getloadavg()[0]
    path.unlink()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000_000)
    parser.add_argument("--bits", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where the codes are written for a while")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for kind in KINDS:
            rows.append(measure(kind, options.count, options.bits, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
