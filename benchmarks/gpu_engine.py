"""Measures exact search on a GPU: bandwidth for one query, distances per second for batches.

    python benchmarks/gpu_engine.py [--quick] [--device cuda] [--json FILE]

Before anything is timed, results are compared with numpy's on small collections, and the ways of
the engine with each other on the large ones. Times include the copy of the queries to the device
and of the results back. The bandwidth is that of the stored codes, each read once, beside that of a
plain copy on the same device. Needs torch and numpy; Triton for the fast ways.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fisherhash.index.engine import Engine
from fisherhash.index.engine.gpu import GPU_WAYS, GpuEngine
from fisherhash.system.devices import choose_device, device_name

Codes = NDArray[np.uint8]
DISTINCT = 4096
"""Distinct codes of a collection with ties: learned codes of millions of images are so few."""
FULL = [(100_000_000, 64), (1_000_000_000, 64), (100_000_000, 48), (10_000_000, 128)]
QUICK = [(20_000, 64), (20_000, 48)]


def make(kind: str, n: int, bits: int, seed: int) -> Codes:
    """Codes (n, bytes); whole bytes only."""
    rng = np.random.default_rng(seed)
    if kind == "uniform":
        return np.frombuffer(rng.bytes(n * bits // 8), dtype=np.uint8).reshape(n, bits // 8)
    distinct = np.random.default_rng(99).integers(0, 256, (DISTINCT, bits // 8), dtype=np.uint8)
    return distinct[rng.integers(0, DISTINCT, n)]


def check(device: torch.device, ways: list[str]) -> None:
    """Compare every way with numpy, ties and order included."""
    for kind in ("uniform", "ties"):
        for bits in (8, 48, 64, 128):
            codes, queries = make(kind, 50_001, bits, 0), make(kind, 70, bits, 1)
            other = Engine(codes, bits, path="numpy")
            for way in ways:
                engine = GpuEngine(codes, bits, device=device, way=way)
                for some in (queries[:1], queries):
                    found = [*engine.search(some, 100), *engine.within(some, bits // 4)]
                    expected = [*other.search(some, 100), *other.within(some, bits // 4)]
                    for one, two in zip(found, expected, strict=True):
                        if not np.array_equal(one, two):
                            raise SystemExit(f"wrong: {kind}, {bits} bits, way {way}")
    print(f"results equal numpy's: ways {', '.join(ways)}", flush=True)


def median_seconds(job: Callable[[], object], rounds: int) -> float:
    job()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        job()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def scan_seconds(engine: GpuEngine, queries: Codes, size: int, rounds: int) -> float:
    """The scan alone, on the device."""
    asked, groups = engine._queries(queries), -(-len(engine) // size)

    def job() -> None:
        engine._minima(asked, size, groups)
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)

    return median_seconds(job, rounds)


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second of a copy on the device, read and written."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def job() -> None:
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2 * size / median_seconds(job, 9)


def measure(
    kind: str, n: int, bits: int, device: torch.device, ways: list[str], rounds: int, batch: int
) -> list[dict[str, Any]]:
    """One row per way and number of queries."""
    codes, queries = make(kind, n, bits, 0), make(kind, batch, bits, 1)
    began = time.perf_counter()
    engine = GpuEngine(codes, bits, device=device)
    upload = time.perf_counter() - began
    stored, rows, first = engine.describe()["bytes"], [], {}
    for way in ways:
        engine.way = way
        for count in sorted({1, min(32, batch), batch}):
            if way == "matmul" and count * n > 4e10:
                continue
            some = queries[:count]
            for k in (10, 100):
                found = engine.search(some, k)
                before = first.setdefault((count, k), found)
                if not all(np.array_equal(a, b) for a, b in zip(found, before, strict=True)):
                    raise SystemExit(f"the ways differ: {kind}, {n} codes, {bits} bits, way {way}")
            job = lambda some=some: engine.search(some, 100)  # noqa: E731
            seconds = median_seconds(job, rounds if count < batch else 3)
            scan = scan_seconds(engine, some, 1024, rounds if count < batch else 3)
            rows.append(
                {
                    "codes": kind,
                    "n": n,
                    "bits": bits,
                    "way": way,
                    "queries": count,
                    "k": 100,
                    "ms": round(1e3 * seconds, 3),
                    "scan_ms": round(1e3 * scan, 3),
                    "queries_per_second": round(count / seconds, 1),
                    "distances_per_second": round(count * n / seconds),
                    "scan_distances_per_second": round(count * n / scan),
                    "scan_gigabytes_per_second": round(stored / scan / 1e9, 1),
                    "search_gigabytes_per_second": round(stored / seconds / 1e9, 1),
                    "upload_seconds": round(upload, 2),
                }
            )
            print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    return (
        f"| {row['codes']} | {row['n']:,} | {row['bits']} | {row['way']} | {row['queries']} | "
        f"{row['ms']:,.2f} | {row['scan_ms']:,.2f} | {row['queries_per_second']:,.0f} | "
        f"{row['distances_per_second'] / 1e9:,.0f} | {row['search_gigabytes_per_second']:,.0f} | "
        f"{row['scan_gigabytes_per_second']:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures exact search on a GPU.")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--device", default=None)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--most", type=int, default=10**10, help="leave larger collections out")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    device = choose_device(given.device)
    ways = [w for w in GPU_WAYS if device.type == "cuda" or w in ("auto", "matmul")]
    check(device, ways)
    bandwidth = copy_bandwidth(device, 1 << 24 if given.quick else 1 << 32)
    print(f"{device_name(device)}: a copy moves {bandwidth / 1e9:,.0f} GB/s\n")
    print("| codes | n | bits | way | queries | ms | scan ms | queries/s | 1e9 distances/s | "
          "GB/s | scan GB/s |\n|---|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    rows = []
    for n, bits in QUICK if given.quick else FULL:
        for kind in ("uniform", "ties") if n <= 100_000_000 else ("uniform",):
            if n <= given.most:
                batch = 64 if given.quick else given.batch
                rows += measure(kind, n, bits, device, ways, 3 if given.quick else 9, batch)
    single = [row for row in rows if row["queries"] == 1 and row["way"] == "auto"]
    for row in single:
        share = 1e9 * row["search_gigabytes_per_second"] / bandwidth
        print(f"one query of {row['n']:,} {row['codes']} codes of {row['bits']} bits: "
              f"{100 * share:.0f} % of the bandwidth of a copy")  # fmt: skip
    if given.json is not None:
        about = {"device": device_name(device), "torch": torch.__version__}
        about |= {"copy_gigabytes_per_second": round(bandwidth / 1e9, 1), "rows": rows}
        given.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
