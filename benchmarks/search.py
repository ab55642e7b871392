"""Compares exact Hamming search with faiss, usearch and numpy: queries per second, in one run.

    python benchmarks/search.py [--quick] [--only uniform-64] [--codes FILE] [--json FILE]

Every round times all engines one after the other on the same codes and queries; the result is the
median over the rounds. A slow engine gets fewer queries. faiss runs at its best: both modes, one
thread and all threads, with OpenMP waiting passively. Before anything is timed, our distances and
positions are compared with those of faiss. On a busy machine, look at the ratios only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# spinning threads made faiss a hundred times slower on a busy machine
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.engine import Engine
from fisherhash.system.cores import available_cores

Codes = NDArray[np.uint8]
Search = Callable[[Codes, int], tuple[Any, Any]]
Row = dict[str, Any]

CENTRES, FLIPS = 100, 0.05
QUERIES = 2000
# slow engines are left out beyond this
_MOST_SLOW = 2_000_000
# of so many queries our results are compared with those of faiss
_CHECKED = 32


@dataclass(frozen=True)
class Case:
    """One collection: ``data`` is uniform, clustered or the name of a file of codes."""

    data: str
    n: int
    bits: int
    ks: tuple[int, ...] = (100,)


FULL = [
    *(Case("uniform", 1_000_000, bits) for bits in (16, 24, 32, 48, 64, 128)),
    *(Case("clustered", 10_000_000, bits, (10, 100)) for bits in (32, 48, 64)),
    Case("uniform", 10_000_000, 64, (10, 100)),
    *(Case(d, n, 64) for d in ("uniform", "clustered") for n in (10_000, 100_000)),
    Case("clustered", 1_000_000, 64),
]
QUICK = [
    *(Case("clustered", 1_000_000, bits, (10, 100)) for bits in (32, 64)),
    *(Case("uniform", 1_000_000, bits) for bits in (16, 32, 64)),
]


def make(data: str, n: int, bits: int, seed: int) -> Codes:
    """Uniform codes, or codes around 100 centres with 5 % of the bits flipped."""
    rng = np.random.default_rng([seed, bits])
    if data == "uniform":
        return rng.integers(0, 256, (n, bits // 8), dtype=np.uint8)
    centres = np.random.default_rng(bits).integers(0, 256, (CENTRES, bits // 8), dtype=np.uint8)
    codes = np.empty((n, bits // 8), dtype=np.uint8)
    for start in range(0, n, 1 << 18):
        part = codes[start : start + (1 << 18)]
        flips = rng.integers(0, 65536, (len(part), bits), dtype=np.uint16) < FLIPS * 65536
        part[:] = centres[rng.integers(0, CENTRES, len(part))] ^ np.packbits(flips, axis=1)
    return codes


def read_codes(path: Path) -> tuple[Case, Codes, Codes]:
    """The case, database and queries of an .npy (codes) or an .npz (database, query, bits)."""
    held = np.load(path)
    if isinstance(held, np.ndarray):
        rows = np.random.default_rng(0).permutation(len(held))
        count = max(1, min(1000, len(held) // 10))
        database, query, bits = held[np.sort(rows[count:])], held[rows[:count]], 8 * held.shape[1]
    else:
        names = {name.rsplit("_codes")[0]: name for name in held.files}
        database, query, bits = held[names["database"]], held[names["query"]], int(held["bits"])
    case = Case(path.stem, len(database), bits, (10, 100))
    return case, np.ascontiguousarray(database), np.ascontiguousarray(query)


@dataclass
class Contender:
    """One engine in one mode, with at most so many threads."""

    name: str
    threads: int
    search: Search


def _ours(codes: Codes, bits: int, threads: int) -> Iterator[Contender]:
    for count in sorted({1, threads}):
        yield Contender("fisherhash", count, Engine(codes, bits, threads=count).search)
    scan = Engine(codes, bits, threads=threads, path="scan")
    yield Contender("fisherhash scan", threads, scan.search)
    if len(codes) <= _MOST_SLOW:
        plain = Engine(codes, bits, threads=threads, path="numpy")
        yield Contender("fisherhash without numba", threads, plain.search)


def _faiss(codes: Codes, bits: int, threads: int) -> Iterator[Contender]:
    import faiss  # pyright: ignore[reportMissingImports]

    index: Any = faiss.IndexBinaryFlat(bits)
    index.add(codes)

    def search(queries: Codes, k: int, heap: bool, count: int) -> tuple[Any, Any]:
        faiss.omp_set_num_threads(count)
        index.use_heap = heap
        distances, ids = index.search(queries, k)
        return ids, distances

    for heap, count in itertools.product((False, True), sorted({1, threads})):
        yield Contender(
            f"faiss Flat {'heap' if heap else 'count'}",
            count,
            lambda q, k, heap=heap, count=count: search(q, k, heap, count),
        )


def _usearch(codes: Codes, bits: int, threads: int) -> Iterator[Contender]:
    from usearch.compiled import MetricKind  # pyright: ignore[reportMissingImports]
    from usearch.index import search  # pyright: ignore[reportMissingImports]

    def exact(queries: Codes, k: int) -> tuple[Any, Any]:
        found = search(codes, queries, k, MetricKind.Hamming, exact=True, threads=threads)
        return np.atleast_2d(found.keys), np.atleast_2d(found.distances)

    if len(codes) <= _MOST_SLOW:
        yield Contender("usearch exact", threads, exact)


def contenders(codes: Codes, bits: int, threads: int) -> list[Contender]:
    found: list[Contender] = []
    for maker in (_ours, _faiss, _usearch):
        try:
            found += maker(codes, bits, threads)
        except ImportError as error:
            print(f"skipped: {error}")
    return found


def check(found: list[Contender], queries: Codes, k: int) -> bool | None:
    """Whether our results equal those of faiss, whose counting mode orders ties by position too."""
    peers = [one for one in found if one.name == "faiss Flat count"]
    want = peers[0].search(queries[:_CHECKED], k) if peers else None
    for one in found:
        if want is not None and one.name.startswith("fisherhash"):
            got = one.search(queries[:_CHECKED], k)
            if not all(map(np.array_equal, got, want)):
                raise SystemExit(f"{one.name}: results are not those of faiss")
    return None if want is None else True


def time_batches(found: list[Contender], queries: Codes, k: int, rounds: int) -> list[Row]:
    """Median time per query in batches, for each contender; they take turns."""
    amounts = []
    for one in found:
        if one.name.startswith("fisherhash") and "numba" not in one.name:
            # the searches before are those that build what pays
            for _ in range(2):
                one.search(queries, k)
            amounts.append(len(queries))
            continue
        start = time.perf_counter()
        one.search(queries[:4], k)
        amounts.append(int(np.clip(0.3 * 4 / (time.perf_counter() - start), 4, len(queries))))
    walls: list[list[float]] = [[] for _ in found]
    for _ in range(rounds):
        for one, amount, wall in zip(found, amounts, walls, strict=True):
            # untimed: the threads of the previous contender may still be going to sleep
            one.search(queries[:1], k)
            start = time.perf_counter()
            one.search(queries[:amount], k)
            wall.append((time.perf_counter() - start) / amount)
    return rows(found, walls, amounts)


def time_single(found: list[Contender], queries: Codes, k: int, rounds: int) -> list[Row]:
    """Median latency of single queries; the contenders take turns."""
    walls: list[list[float]] = [[] for _ in found]
    numbers = itertools.cycle(range(len(queries)))
    for _ in range(2 * rounds):
        for one, wall in zip(found, walls, strict=True):
            # several queries in a row, each a new one: the cache is warm, but not with the result
            for number in itertools.islice(numbers, 8):
                start = time.perf_counter()
                one.search(queries[number][None], k)
                wall.append(time.perf_counter() - start)
    return rows(found, walls, [1] * len(found))


def rows(found: list[Contender], walls: list[list[float]], amounts: list[int]) -> list[Row]:
    return [
        {"engine": one.name, "threads": one.threads, "queries": n, "seconds": float(np.median(w))}
        for one, w, n in zip(found, walls, amounts, strict=True)
    ]


def best(engines: list[Row], name: str, threads: int) -> float | None:
    """The shortest of an engine's times with at most this many threads."""
    same = [r for r in engines if r["engine"] == name or r["engine"].startswith(f"{name} Flat")]
    return min((r["seconds"] for r in same if r["threads"] <= threads), default=None)


def times_faiss(engines: list[Row], threads: int) -> float | None:
    ours, theirs = best(engines, "fisherhash", threads), best(engines, "faiss", threads)
    return theirs / ours if ours and theirs else None


def measure(
    case: Case, database: Codes, queries: Codes, threads: int, rounds: int
) -> Iterator[Row]:
    found = contenders(database, case.bits, threads)
    for k in case.ks:
        equal = check(found, queries, k)
        for way, job in (("batch", time_batches), ("single", time_single)):
            engines = job(found, queries, k, rounds)
            yield {
                "data": case.data,
                "n": len(database),
                "bits": case.bits,
                "k": k,
                "way": way,
                "equal_to_faiss": equal,
                "load_average": os.getloadavg()[0],
                "times_faiss": times_faiss(engines, threads),
                "times_faiss_one_thread": times_faiss(engines, 1),
                "engines": engines,
            }


def show(result: Row, threads: int) -> None:
    engines, shown = result["engines"], []
    for name in ("fisherhash", "fisherhash scan", "fisherhash without numba", "faiss"):
        seconds = best(engines, name, threads)
        shown.append("-" if seconds is None else f"{1e6 * seconds:,.1f}")
    ratios = [result["times_faiss"], result["times_faiss_one_thread"]]
    shown += ["-" if ratio is None else f"{ratio:.1f}x" for ratio in ratios]
    about = [result[name] for name in ("data", "n", "bits", "k", "way")]
    print("| " + " | ".join(map(str, [*about, *shown])) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes, about a minute")
    about = "learned codes: .npy, or .npz with database, query and bits"
    parser.add_argument("--codes", type=Path, action="append", default=[], help=about)
    parser.add_argument("--only", default="", help="cases whose name contains this: uniform-32")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    jobs: list[Callable[[], tuple[Case, Codes, Codes]]]
    jobs = [lambda path=path: read_codes(path) for path in options.codes]
    for case in QUICK if options.quick else FULL:
        if options.only in f"{case.data}-{case.bits}":
            jobs.append(
                lambda c=case: (
                    c, make(c.data, c.n, c.bits, 0), make(c.data, QUERIES, c.bits, 1)
                )
            )  # fmt: skip
    print(f"{available_cores()} cores, {options.threads} threads; load {os.getloadavg()[0]:.1f}")
    print("microseconds per query, and our speed relative to faiss with all threads and with one\n")
    print("| codes | N | bits | k | queries | ours | scan | numpy | faiss | all | one |")
    print("|---" * 11 + "|")
    results = []
    for job in jobs:
        for result in measure(*job(), options.threads, 3 if options.quick else 7):
            results.append(result)
            show(result, options.threads)
    if options.json:
        report = {
            "machine": f"{platform.system()} {platform.machine()}",
            "cores": available_cores(),
            "threads": options.threads,
            "numpy": np.__version__,
            "clustered": f"{CENTRES} centres, {FLIPS:.0%} of the bits flipped",
            "results": results,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
