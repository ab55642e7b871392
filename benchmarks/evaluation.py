"""Time and memory of ``evaluate``, compared with the usual loop of one argsort per query.

    python benchmarks/evaluation.py [--quick] [--json FILE]

Every case runs in its own process, so that its peak memory can be measured. Both sides of a ratio
are timed in that process, one after the other, best of a few runs each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import unpack
from fisherhash.evaluation import evaluate
from fisherhash.system.cores import available_cores


@dataclass(frozen=True)
class Case:
    """One size: single-label with ``labels`` = 1, else that many labels per item on average."""

    queries: int
    database: int
    bits: int
    classes: int
    labels: float = 1
    top: int | None = None
    loop_queries: int = 1000
    repeats: int = 5


CASES = {
    "cifar10": Case(1_000, 59_000, 48, 10),
    "cifar10-12bits": Case(1_000, 59_000, 12, 10),
    "multi-label": Case(2_100, 193_734, 48, 21, labels=2, top=5_000, loop_queries=50, repeats=2),
    "million": Case(5_000, 1_000_000, 64, 100, loop_queries=5, repeats=1),
}
QUICK = {
    "quick": Case(200, 20_000, 48, 10, loop_queries=200),
    "quick-multi-label": Case(200, 20_000, 48, 21, labels=2, top=1_000, loop_queries=50),
}


def make(case: Case) -> tuple[NDArray[np.uint8], ...]:
    """Return codes that cluster around one centre per class, as learned codes do."""
    rng = np.random.default_rng(0)
    centres = rng.random((case.classes, case.bits)) < 0.5
    sides = []
    for n in (case.queries, case.database):
        codes, labels = [], []
        for start in range(0, n, 100_000):
            b = min(100_000, n - start)
            classes = rng.integers(0, case.classes, b)
            flips = rng.random((b, case.bits), dtype=np.float32) < 0.15
            codes.append(np.packbits(centres[classes] ^ flips, axis=1))
            rows = np.zeros((b, case.classes), dtype=np.uint8)
            rows[np.arange(b), classes] = 1
            if case.labels > 1:
                chance = (case.labels - 1) / (case.classes - 1)
                rows |= rng.random(rows.shape, dtype=np.float32) < chance
            labels.append(rows)
        sides.append((np.concatenate(codes), np.concatenate(labels)))
    (query, query_labels), (database, database_labels) = sides
    return query, database, query_labels, database_labels


def argsort_loop(
    query: NDArray[np.float32],
    database: NDArray[np.float32],
    query_labels: NDArray[np.float32],
    database_labels: NDArray[np.float32],
    top: int,
) -> float:
    """Return mAP as the usual evaluator computes it: ties stay as the unstable sort leaves them."""
    total = 0.0
    for code, label in zip(query, query_labels, strict=True):
        relevant = (database_labels @ label > 0).astype(np.float32)
        distances = 0.5 * (database.shape[1] - database @ code)
        ranked = relevant[np.argsort(distances)][:top]
        found = int(ranked.sum())
        if found:
            ranks = np.where(ranked == 1)[0] + 1.0
            total += float(np.mean(np.linspace(1, found, found) / ranks))
    return total / len(query)


def best(run: Callable[[], Any], repeats: int) -> tuple[float, float, Any]:
    """Return the least wall time, its processor time, and the result."""
    times = []
    result = None
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        result = run()
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return *min(times), result


def peak_mib() -> float:
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def measure(name: str, case: Case) -> dict[str, Any]:
    query, database, query_labels, database_labels = arguments = make(case)
    # compiles the kernels that the timed runs use, or loads them from the cache
    warm = time.perf_counter()
    evaluate(
        query[:2], database, query_labels[:2], database_labels, bits=case.bits, backend="numba"
    )
    warm = time.perf_counter() - warm
    made = peak_mib()

    def ours() -> Any:
        return evaluate(
            *arguments, bits=case.bits, top=case.top, backend="numba", bit_statistics=False
        )

    wall, cpu, result = best(ours, case.repeats)
    peak = peak_mib()
    part = slice(0, case.loop_queries)
    left, right = (unpack(c, case.bits).astype(np.float32) * 2 - 1 for c in (query[part], database))
    marks, others = (x.astype(np.float32) for x in (query_labels[part], database_labels))

    def loop() -> float:
        return argsort_loop(left, right, marks, others, case.top or case.database)

    loop_wall, loop_cpu, loop_map = best(loop, 2)
    again_wall, again_cpu, _ = best(ours, case.repeats)
    wall, cpu = min((wall, cpu), (again_wall, again_cpu))
    scale = case.queries / len(query[part])
    return {
        "case": name,
        **asdict(case),
        "seconds": wall,
        "cpu_seconds": cpu,
        "loop_seconds": loop_wall * scale,
        "loop_cpu_seconds": loop_cpu * scale,
        "loop_extrapolated": scale > 1,
        "ratio": loop_wall * scale / wall,
        "cpu_ratio": loop_cpu * scale / cpu,
        "peak_mib": peak,
        "peak_before_mib": made,
        "first_call_seconds": warm,
        "map_expected": result.map_expected,
        "map_stable": result.map_stable,
        "map_lower": result.map_lower,
        "map_upper": result.map_upper,
        "loop_map": loop_map,
        "load_average": list(os.getloadavg()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--case", choices=[*CASES, *QUICK], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, {**CASES, **QUICK}[options.case])))
        return
    cores = available_cores()
    print(f"{platform.processor() or platform.machine()}, {cores} cores, NumPy {np.__version__}")
    print("evaluate: expected + stable + bounds, P@N, R@N, radius metrics; loop: one mAP\n")
    print(f"{'case':<18}{'evaluate':>10}{'loop':>12}{'ratio':>9}{'cpu ratio':>11}{'peak MiB':>10}"
          f"{'load':>7}")  # fmt: skip
    rows = []
    # this is fastest for the loop: on a busy machine the BLAS threads of its small products spin
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for name in QUICK if options.quick else CASES:
        command = [sys.executable, __file__, "--case", name]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
        row = json.loads(done.stdout)
        rows.append(row)
        mark = "*" if row["loop_extrapolated"] else " "
        print(
            f"{name:<18}{row['seconds']:>9.3f}s{row['loop_seconds']:>10.2f}s{mark}"
            f"{row['ratio']:>8.0f}x{row['cpu_ratio']:>10.0f}x{row['peak_mib']:>10.0f}"
            f"{row['load_average'][0]:>7.2f}"
        )
    print("\n* extrapolated from some of the queries. The load shows a busy machine; the cpu ratio")
    print("  compares processor time, summed over all threads.")
    if options.json:
        report = {
            "cores": cores,
            "machine": f"{platform.system()} {platform.machine()}",
            "numpy": np.__version__,
            "cases": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
