"""Measures exact search on a GPU: bandwidth for one query, distances per second for batches.

    python benchmarks/gpu_engine.py [--quick] [--device cuda] [--most N] [--seconds N] [--json FILE]

Every part is a process of its own, so that one that fails is recorded and the others go on, and
FILE is written after every row. Every way of the engine is first compared with numpy on small
collections; one that differs is not measured. On the large collections the ways are compared with
each other, and two queries with numpy. Times include the copy of the queries to the device and of
the results back. The bandwidth is that of the stored codes, each read once, beside that of a plain
copy on the same device. Needs torch and numpy; Triton for the fast ways.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fisherhash.codes import hamming
from fisherhash.index.engine import Engine
from fisherhash.index.engine.gpu import GPU_WAYS, GpuEngine
from fisherhash.system.devices import choose_device, device_name

Codes = NDArray[np.uint8]
Row = dict[str, Any]
DISTINCT = 4096
"""Distinct codes of a collection with ties: learned codes of millions of images are so few."""
FULL = [(100_000_000, 64), (100_000_000, 48), (10_000_000, 128), (1_000_000_000, 64)]
QUICK = [(20_000, 64), (20_000, 48)]
COUNTS = (1, 8, 32, 256, 1024)
"""Queries in a batch."""
SLOW = 4e10
"""Distances that the matrix product of torch is measured with at most."""


def make(kind: str, n: int, bits: int, seed: int) -> Codes:
    """Codes (n, bytes); whole bytes only."""
    rng = np.random.default_rng(seed)
    if kind == "uniform":
        return np.frombuffer(rng.bytes(n * bits // 8), dtype=np.uint8).reshape(n, bits // 8)
    distinct = np.random.default_rng(99).integers(0, 256, (DISTINCT, bits // 8), dtype=np.uint8)
    return distinct[rng.integers(0, DISTINCT, n)]


def check(device: torch.device, way: str) -> Iterator[Row]:
    """Compare a way with numpy, ties and order included."""
    for kind in ("uniform", "ties"):
        for bits in (8, 48, 64, 128):
            codes, queries = make(kind, 50_001, bits, 0), make(kind, 70, bits, 1)
            other = Engine(codes, bits, path="numpy")
            engine = GpuEngine(codes, bits, device=device, way=way)
            for some in (queries[:1], queries):
                found = [*engine.search(some, 100), *engine.within(some, bits // 4)]
                expected = [*other.search(some, 100), *other.within(some, bits // 4)]
                if not all(map(np.array_equal, found, expected)):
                    raise SystemExit(f"the results differ from numpy's: {kind}, {bits} bits")
    yield {"checked": way}


def nearest(query: Codes, codes: Codes, k: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Positions and distances of the k nearest codes, by numpy, a piece at a time."""
    positions, distances = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for start in range(0, len(codes), 1 << 22):
        near = hamming(query[None], codes[start : start + (1 << 22)])[0]
        if len(distances) >= k:
            place = np.flatnonzero(near < distances[k - 1])
        else:
            place = np.arange(len(near))
        positions = np.concatenate([positions, start + place])
        distances = np.concatenate([distances, near[place]])
        first = np.argsort(distances, kind="stable")[:k]
        positions, distances = positions[first], distances[first]
    return positions, distances


def median_seconds(job: Callable[[], object], rounds: int) -> float:
    job()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        job()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def scan_seconds(engine: GpuEngine, queries: Codes, size: int, rounds: int) -> float:
    """The scan alone, on the device."""
    asked, groups = engine._queries(queries), -(-len(engine) // size)

    def job() -> None:
        engine._minima(asked, size, groups)
        wait(engine.device)

    return median_seconds(job, rounds)


def copy(device: torch.device, size: int) -> Iterator[Row]:
    """Bytes per second of a copy on the device, read and written."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def job() -> None:
        target.copy_(source)
        wait(device)

    yield {"copy_gigabytes_per_second": round(2e-9 * size / median_seconds(job, 9), 1)}


def measure(
    kind: str, n: int, bits: int, device: torch.device, ways: list[str], batch: int
) -> Iterator[Row]:
    """One row per way and number of queries."""
    codes, queries = make(kind, n, bits, 0), make(kind, batch, bits, 1)
    began = time.perf_counter()
    engine = GpuEngine(codes, bits, device=device)
    wait(engine.device)
    about = {"codes": kind, "n": n, "bits": bits, "device": device_name(engine.device)}
    about |= {"upload_seconds": round(time.perf_counter() - began, 2)}
    stored, first = engine.describe()["bytes"], {}
    for i in range(2):
        found, expected = engine.search(queries[i : i + 1], 100), nearest(queries[i], codes, 100)
        if not all(map(np.array_equal, (some[0] for some in found), expected)):
            raise SystemExit(f"query {i} has other results than with numpy")
    del codes
    for way in ways:
        engine.way = way
        for count in sorted({min(count, batch) for count in COUNTS}):
            if way == "matmul" and (count * n > SLOW or n > 100_000_000):
                continue
            some, rounds = queries[:count], 9 if count <= 32 else 3
            for k in (10, 100):
                found = engine.search(some, k)
                before = first.setdefault((count, k), found)
                if not all(map(np.array_equal, found, before)):
                    raise SystemExit(f"the way {way} has other results, {count} queries, k = {k}")
            seconds = median_seconds(lambda some=some: engine.search(some, 100), rounds)
            scan = scan_seconds(engine, some, 1024, rounds)
            yield about | {
                "way": way,
                "queries": count,
                "search": "k = 100",
                "ms": round(1e3 * seconds, 3),
                "scan_ms": round(1e3 * scan, 3),
                "queries_per_second": round(count / seconds, 1),
                "distances_per_second": round(count * n / seconds),
                "scan_distances_per_second": round(count * n / scan),
                "scan_gigabytes_per_second": round(stored / scan / 1e9, 1),
                "search_gigabytes_per_second": round(stored / seconds / 1e9, 1),
            }
    engine.way = "auto"
    for count in sorted({1, min(32, batch)}):
        job = lambda some=queries[:count]: engine.within(some, bits // 8)  # noqa: E731
        seconds, found = median_seconds(job, 5), len(job()[1])
        yield about | {
            "way": "auto",
            "queries": count,
            "search": f"radius {bits // 8}",
            "found": found,
            "ms": round(1e3 * seconds, 3),
            "queries_per_second": round(count / seconds, 1),
            "distances_per_second": round(count * n / seconds),
            "search_gigabytes_per_second": round(stored / seconds / 1e9, 1),
        }


def run_part(part: Row) -> None:
    """One part, in this process; a row per line."""
    device = choose_device(part["device"])
    if "check" in part:
        rows = check(device, part["check"])
    elif "copy" in part:
        rows = copy(device, part["copy"])
    else:
        given = (part["kind"], part["n"], part["bits"], device, part["ways"], part["batch"])
        rows = measure(*given)
    for row in rows:
        print(json.dumps(row), flush=True)


def rows_of(part: Row, seconds: float) -> Iterator[Row]:
    """The rows of a part in a new process; the last one may say why there are no more."""
    if seconds <= 0:
        yield {"failed": part, "why": "the time is over"}
        return
    words = [sys.executable, __file__, "--part", json.dumps(part)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        late = threading.Timer(seconds, process.kill)
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
        late.start()
        reader.start()
        for text in process.stdout or ():
            yield json.loads(text)
        code = process.wait()
        reader.join()
        over = not late.is_alive()
        late.cancel()
    if code:
        why = "the time is over" if over else "".join(errors[-12:]).strip() or f"exit code {code}"
        yield {"failed": part, "why": why}
    elif errors:
        print("".join(errors), file=sys.stderr, flush=True)


def line(row: Row) -> str:
    return (
        f"| {row['codes']} | {row['n']:,} | {row['bits']} | {row['way']} | {row['queries']} | "
        f"{row['search']} | {row['ms']:,.2f} | {row.get('scan_ms', float('nan')):,.2f} | "
        f"{row['queries_per_second']:,.0f} | {row['distances_per_second'] / 1e9:,.0f} | "
        f"{row['search_gigabytes_per_second']:,.0f} | "
        f"{row.get('scan_gigabytes_per_second', float('nan')):,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures exact search on a GPU.")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--device", default=None)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--most", type=int, default=10**10, help="leave larger collections out")
    parser.add_argument("--seconds", type=float, default=540, help="start nothing after this time")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        run_part(given.part)
        return
    until = time.monotonic() + given.seconds
    device = choose_device(given.device)
    report: Row = {"device": device_name(device), "torch": torch.__version__}
    report |= {"python": platform.python_version(), "checked": [], "rows": [], "failed": []}

    def take(part: Row) -> None:
        for row in rows_of(part | {"device": str(device)}, until - time.monotonic()):
            if "failed" in row:
                report["failed"].append(row)
                print(f"failed: {part}: {row['why']}", file=sys.stderr, flush=True)
            elif "checked" in row:
                report["checked"].append(row["checked"])
                print(f"results equal numpy's: {row['checked']}", flush=True)
            elif "way" in row:
                report["rows"].append(row)
                print(line(row), flush=True)
            else:
                report.update(row)
                print(row, flush=True)
            if given.json is not None:
                given.json.write_text(json.dumps(report, indent=1) + "\n")

    for way in GPU_WAYS if device.type == "cuda" else ("auto", "matmul"):
        take({"check": way})
    take({"copy": 1 << 24 if given.quick else 1 << 32})
    print("\n| codes | n | bits | way | queries | search | ms | scan ms | queries/s | "
          "1e9 distances/s | GB/s | scan GB/s |\n|---|---|---|---|---|---|---|---|---|---|---|---|",
          flush=True)  # fmt: skip
    ways, batch = list(report["checked"]), 64 if given.quick else given.batch
    for n, bits in QUICK if given.quick else FULL:
        for kind in ("uniform", "ties") if n <= 100_000_000 else ("uniform",):
            if n <= given.most:
                take({"kind": kind, "n": n, "bits": bits, "ways": ways, "batch": batch})
    for row in report["rows"]:
        if row["queries"] == 1 and row["way"] == "auto" and "copy_gigabytes_per_second" in report:
            share = row["search_gigabytes_per_second"] / report["copy_gigabytes_per_second"]
            print(f"one query ({row['search']}) of {row['n']:,} {row['codes']} codes of "
                  f"{row['bits']} bits: {100 * share:.0f} % of a copy's bandwidth")  # fmt: skip
    raise SystemExit(1 if report["failed"] else 0)


if __name__ == "__main__":
    main()
