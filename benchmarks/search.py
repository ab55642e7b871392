"""Compares exact Hamming search with faiss, usearch and numpy: queries per second, in one run.

    python benchmarks/search.py [--quick] [--huge] [--codes FILE] [--json FILE] [--plot FILE]

Every round times all engines one after the other on the same codes and queries; the result is the
median over the rounds. A slow engine gets fewer queries. faiss runs at its best: both modes, one
thread and all threads, with OpenMP waiting passively. Before anything is timed, our distances and
ids are compared with those of faiss. On a busy machine, look at the ratio of processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# spinning threads made faiss a hundred times slower on a busy machine
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
from numpy.typing import NDArray

from fisherhash.index import Index
from fisherhash.index.engine import Engine, small
from fisherhash.system.cores import available_cores

Codes = NDArray[np.uint8]
Search = Callable[[Codes, int], tuple[Any, Any]]

CENTRES = 100
FLIPS = 0.05


@dataclass(frozen=True)
class Case:
    """One collection: ``data`` is uniform, clustered or the name of a file of codes."""

    data: str
    n: int
    bits: int
    ks: tuple[int, ...]
    single: bool = False
    multi_hash: bool = False


FULL = [
    *(Case("uniform", 1_000_000, bits, (100,), multi_hash=bits in (32, 64))
      for bits in (16, 24, 32, 48, 64, 128)),
    *(Case("clustered", 10_000_000, bits, (10, 100), single=True) for bits in (32, 48, 64)),
    Case("uniform", 10_000_000, 64, (10, 100), single=True),
]  # fmt: skip
QUICK = [
    *(Case("uniform", 1_000_000, bits, (100,)) for bits in (16, 24, 32, 48, 64)),
    *(Case("clustered", 1_000_000, bits, (10, 100), single=True) for bits in (32, 64)),
]
GROWTH = [
    Case(data, n, 64, (100,))
    for data in ("uniform", "clustered")
    for n in (10_000, 100_000, 1_000_000)
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


def read_codes(path: Path, bits: int | None) -> tuple[Codes, Codes, int]:
    """Database, queries and bits of an .npy (codes) or an .npz (database, query, bits)."""
    held = np.load(path)
    if isinstance(held, np.ndarray):
        rows = np.random.default_rng(0).permutation(len(held))
        count = max(1, min(1000, len(held) // 10))
        database, query = held[np.sort(rows[count:])], held[rows[:count]]
    else:
        names = {name.rsplit("_codes")[0]: name for name in held.files}
        database, query = held[names["database"]], held[names["query"]]
        bits = int(held["bits"]) if bits is None and "bits" in held.files else bits
    database, query = np.ascontiguousarray(database), np.ascontiguousarray(query)
    return database, query, bits or 8 * database.shape[1]


@dataclass
class Contender:
    """One way to search; ``exact`` is the share of queries with the true distances."""

    name: str
    threads: int
    search: Search
    build_seconds: float = 0.0
    exact: float | None = 1.0
    note: str = ""


def _ours(codes: Codes, bits: int, threads: int) -> Iterator[Contender]:
    start = time.perf_counter()
    engine = Engine(codes, bits, threads=threads)
    engine.build()
    built = time.perf_counter() - start
    tables = engine.tables()
    for count in sorted({1, threads}):
        other = Engine(codes, bits, threads=count, tables=tables)
        yield Contender("fisherhash", count, other.search, built)
    scan = Engine(codes, bits, threads=threads, path="scan")
    yield Contender("fisherhash scan", threads, scan.search)


def _faiss(codes: Codes, bits: int, threads: int) -> Iterator[Contender]:
    import faiss  # pyright: ignore[reportMissingImports]

    index: Any = faiss.IndexBinaryFlat(bits)
    index.add(codes)

    def search(queries: Codes, k: int, heap: bool, count: int) -> tuple[Any, Any]:
        faiss.omp_set_num_threads(count)
        index.use_heap = heap
        distances, ids = index.search(queries, k)
        return ids, distances

    for heap in (False, True):
        for count in sorted({1, threads}):
            yield Contender(
                f"faiss Flat {'heap' if heap else 'count'}",
                count,
                lambda q, k, heap=heap, count=count: search(q, k, heap, count),
            )


def _multi_hash(
    codes: Codes, bits: int, threads: int, queries: Codes, k: int, truth: Any
) -> Iterator[Contender]:
    """IndexBinaryMultiHash with as many flips as it needs, up to one second per query."""
    import faiss  # pyright: ignore[reportMissingImports]

    faiss.omp_set_num_threads(threads)
    start = time.perf_counter()
    index: Any = faiss.IndexBinaryMultiHash(bits, bits // 16, 16)
    index.add(codes)
    built = time.perf_counter() - start
    exact = 0.0
    count = min(16, len(queries))
    for flips in range(8):
        index.nflip = flips
        start = time.perf_counter()
        distances, _ = index.search(queries[:count], k)
        spent = (time.perf_counter() - start) / count
        exact = float(np.mean((distances == truth[:count]).all(axis=1)))
        if exact == 1 or spent > 0.2:
            break

    def search(some: Codes, k: int) -> tuple[Any, Any]:
        faiss.omp_set_num_threads(threads)
        distances, ids = index.search(some, k)
        return ids, distances

    note = f"{bits // 16} x 16 bits, nflip {index.nflip}"
    yield Contender("faiss MultiHash", threads, search, built, exact, note)


def _usearch(codes: Codes, bits: int, threads: int) -> Iterator[Contender]:
    from usearch.compiled import MetricKind  # pyright: ignore[reportMissingImports]
    from usearch.index import search  # pyright: ignore[reportMissingImports]

    def exact(queries: Codes, k: int) -> tuple[Any, Any]:
        found = search(codes, queries, k, MetricKind.Hamming, exact=True, threads=threads)
        return np.atleast_2d(found.keys), np.atleast_2d(found.distances)

    yield Contender("usearch exact", threads, exact)


def _numpy(codes: Codes, bits: int, threads: int) -> Iterator[Contender]:
    yield Contender("numpy", 1, lambda q, k: small.nearest_by_numpy(q, codes, bits, k))


def contenders(
    codes: Codes, bits: int, threads: int, skipped: set[str], largest: int
) -> list[Contender]:
    found: list[Contender] = []
    for name, maker in (
        ("fisherhash", _ours),
        ("faiss", _faiss),
        ("usearch", _usearch),
        ("numpy", _numpy),
    ):
        if name in ("usearch", "numpy") and len(codes) > largest:
            continue
        try:
            found += maker(codes, bits, threads)
        except ImportError:
            skipped.add(name)
    return found


def check(found: list[Contender], queries: Codes, k: int) -> tuple[bool | None, Any]:
    """Check that our results equal those of faiss, ids included; return the true distances.

    faiss's counting mode orders ties by id, so its ids must be the same as ours.
    """
    ids, distances = found[0].search(queries, k)
    equal: bool | None = None
    for other in found[1:]:
        if not other.name.startswith(("faiss Flat", "fisherhash")) or other.threads == 1:
            continue
        some = slice(0, min(len(queries), 32))
        peer_ids, peer_distances = other.search(queries[some], k)
        same = np.array_equal(peer_distances, distances[some])
        if other.name != "faiss Flat heap":
            same = same and np.array_equal(peer_ids, ids[some])
        equal = same if equal is None else equal and same
    return equal, distances


def time_all(
    found: list[Contender], queries: Codes, k: int, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Median wall and processor time per query, for each contender."""
    amounts = []
    for one in found:
        start = time.perf_counter()
        one.search(queries[:1], k)
        few = max(1, min(len(queries), int(0.1 / (time.perf_counter() - start))))
        start = time.perf_counter()
        one.search(queries[:few], k)
        each = (time.perf_counter() - start) / few
        amounts.append(max(1, min(len(queries), int(seconds / each))))
    walls: list[list[float]] = [[] for _ in found]
    cpus: list[list[float]] = [[] for _ in found]
    for _ in range(rounds):
        for i, one in enumerate(found):
            part = queries[: amounts[i]]
            # untimed: the threads of the previous contender may still be going to sleep
            one.search(queries[:1], k)
            wall, cpu = time.perf_counter(), time.process_time()
            one.search(part, k)
            walls[i].append((time.perf_counter() - wall) / len(part))
            cpus[i].append((time.process_time() - cpu) / len(part))
    return [
        {
            "engine": one.name,
            "threads": one.threads,
            "queries": amount,
            "seconds": float(np.median(wall)),
            "cpu_seconds": float(np.median(cpu)),
            "build_seconds": one.build_seconds,
            "exact": one.exact,
            "note": one.note,
        }
        for one, amount, wall, cpu in zip(found, amounts, walls, cpus, strict=True)
    ]


def time_single(
    found: list[Contender], queries: Codes, k: int, rounds: int
) -> list[dict[str, Any]]:
    """Median latency of single queries; the contenders take turns."""
    walls: list[list[float]] = [[] for _ in found]
    count = 0
    for _ in range(2 * rounds):
        for i, one in enumerate(found):
            # several queries in a row, each a new one: the cache is warm, but not with the result
            for _ in range(8):
                query = queries[count % len(queries)][None]
                count += 1
                start = time.perf_counter()
                one.search(query, k)
                walls[i].append(time.perf_counter() - start)
    return [
        {
            "engine": one.name,
            "threads": one.threads,
            "queries": 1,
            "seconds": float(np.median(wall)),
            "cpu_seconds": None,
            "build_seconds": one.build_seconds,
            "exact": one.exact,
            "note": one.note,
        }
        for one, wall in zip(found, walls, strict=True)
    ]


def best(rows: list[dict[str, Any]], name: str, threads: int, key: str = "seconds") -> float | None:
    """The shortest of an engine's times with at most this many threads."""
    times = [r[key] for r in rows if r["engine"].startswith(name) and r["threads"] <= threads]
    return min(times) if times and None not in times else None


def summary(rows: list[dict[str, Any]], threads: int) -> dict[str, Any]:
    """Ratios to faiss: all threads, one thread, and processor time."""

    def ratio(count: int, key: str = "seconds") -> float | None:
        ours = best([r for r in rows if r["engine"] == "fisherhash"], "fisherhash", count, key)
        theirs = best(rows, "faiss Flat", count, key)
        return theirs / ours if ours and theirs else None

    return {
        "times_faiss": ratio(threads),
        "times_faiss_one_thread": ratio(1),
        "times_faiss_cpu": ratio(threads, "cpu_seconds"),
    }


def measure(
    case: Case,
    database: Codes,
    queries: Codes,
    threads: int,
    rounds: int,
    seconds: float,
    skipped: set[str],
) -> Iterator[dict[str, Any]]:
    found = contenders(database, case.bits, threads, skipped, largest=2_000_000)
    for k in case.ks:
        equal, truth = check(found, queries, k)
        if equal is False:
            raise SystemExit(f"{case}: our results are not those of faiss")
        entered = list(found)
        if case.multi_hash and "faiss" not in skipped:
            entered += _multi_hash(database, case.bits, threads, queries, k, truth)
        jobs = [("batch", lambda e=entered, k=k: time_all(e, queries, k, rounds, seconds))]
        if case.single:
            quick = [one for one in found if one.name.startswith(("fisherhash", "faiss"))]
            jobs.append(("single", lambda e=quick, k=k: time_single(e, queries, k, rounds)))
        for way, job in jobs:
            rows = job()
            yield {
                "data": case.data,
                "n": len(database),
                "bits": case.bits,
                "k": k,
                "way": way,
                "equal_to_faiss": equal,
                "load_average": os.getloadavg()[0],
                **summary(rows, threads),
                "engines": rows,
            }


def rate(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    value = 1 / seconds
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}x" if value >= 20 else f"{value:.1f}x"


HEAD = (
    "| data | N | bits | k | queries | fisherhash | its scan | faiss Flat | faiss MultiHash | "
    "usearch | numpy | to faiss | one thread | cpu | load |\n" + "|---" * 15 + "|"
)


def table_row(result: dict[str, Any], threads: int) -> str:
    rows = result["engines"]
    multi = next((r for r in rows if r["engine"] == "faiss MultiHash"), None)
    cells = [
        result["data"],
        f"{result['n']:,}",
        result["bits"],
        result["k"],
        result["way"],
        rate(best([r for r in rows if r["engine"] == "fisherhash"], "fisherhash", threads)),
        rate(best(rows, "fisherhash scan", threads)),
        rate(best(rows, "faiss Flat", threads)),
        "-" if multi is None else f"{rate(multi['seconds'])} ({multi['exact']:.0%} exact)",
        rate(best(rows, "usearch", threads)),
        rate(best(rows, "numpy", threads)),
        times(result["times_faiss"]),
        times(result["times_faiss_one_thread"]),
        times(result["times_faiss_cpu"]),
        f"{result['load_average']:.1f}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def draw(results: list[dict[str, Any]], threads: int, path: Path) -> None:
    """Plot queries per second against N, both axes logarithmic, one panel per kind of data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    wanted = [r for r in results if r["bits"] == 64 and r["k"] == 100 and r["way"] == "batch"]
    engines = {
        "fisherhash": ("fisherhash", "#0b6e4f", "o"),
        "fisherhash, scan only": ("fisherhash scan", "#6bbf59", "s"),
        "faiss IndexBinaryFlat": ("faiss Flat", "#c1440e", "^"),
        "usearch exact": ("usearch", "#5b6c9e", "v"),
        "numpy": ("numpy", "#888888", "D"),
    }
    kinds = [kind for kind in ("uniform", "clustered") if any(r["data"] == kind for r in wanted)]
    figure, panels = pyplot.subplots(
        1, len(kinds), figsize=(5.2 * len(kinds), 4.4), sharey=True, squeeze=False
    )
    for kind, panel in zip(kinds, panels[0], strict=True):
        cases = sorted((r for r in wanted if r["data"] == kind), key=lambda r: r["n"])
        for label, (name, colour, mark) in engines.items():
            points = []
            for case in cases:
                rows = case["engines"]
                if name == "fisherhash":
                    rows = [r for r in rows if r["engine"] == name]
                seconds = best(rows, name, threads)
                if seconds is not None:
                    points.append((case["n"], 1 / seconds))
            if points:
                panel.plot(*zip(*points, strict=True), color=colour, marker=mark, label=label)
        panel.set(xscale="log", yscale="log", xlabel="codes", title=f"{kind} codes")
        panel.grid(True, which="major", alpha=0.3)
    panels[0][0].set_ylabel("queries per second")
    panels[0][0].legend(frameon=False, fontsize=9, loc="lower left")
    figure.suptitle(f"Exact Hamming search: 64 bits, k = 100, batches, {threads} threads")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def huge(n: int = 100_000_000, bits: int = 32, k: int = 100) -> dict[str, Any]:
    """Search 100 million clustered codes in an index on disk, and measure the memory used."""
    queries = make("clustered", 10_000, bits, seed=1)
    block = 10_000_000
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "huge.index"
        with Index.create(path, bits=bits) as index:
            blocks = (make("clustered", block, bits, seed=2 + i) for i in range(n // block))
            timed("add_codes, making them included", lambda: index.add_codes(blocks))
            timed("building the tables", index.build)
        with Index.open(path) as index:
            timed("first query, checksums included", lambda: index.search(queries[:1], k))
            walls = []
            for query in queries[:200]:
                start = time.perf_counter()
                index.search(query[None], k)
                walls.append(time.perf_counter() - start)
            seconds["a query, median of 200"] = float(np.median(walls))
            timed(f"{len(queries):,} queries at once", lambda: index.search(queries, k))
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    unit = 1 if platform.system() == "Darwin" else 1024
    return {
        "codes": n,
        "bits": bits,
        "k": k,
        "seconds": seconds,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30,
        "disk_gib": size / 2**30,
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes, about a minute")
    parser.add_argument("--huge", action="store_true", help="only 100 million codes, in an index")
    about = "learned codes: .npy, or .npz with database, query and bits"
    parser.add_argument("--codes", type=Path, action="append", default=[], help=about)
    parser.add_argument("--bits", type=int, help="bits of the codes in --codes files")
    parser.add_argument("--only", default="", help="cases whose name contains this: uniform-32")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--plot", type=Path, help="draw queries per second against N")
    options = parser.parse_args()
    threads = options.threads
    report: dict[str, Any] = {
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": available_cores(),
        "threads": threads,
        "numpy": np.__version__,
        "clustered": f"{CENTRES} centres, {FLIPS:.0%} of the bits flipped",
    }
    print(
        f"{platform.machine()}, {available_cores()} cores, {threads} threads, "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    if options.huge:
        report["huge"] = huge()
        print(json.dumps(report["huge"], indent=2))
    else:
        report["results"] = compare(options, threads)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def compare(options: argparse.Namespace, threads: int) -> list[dict[str, Any]]:
    skipped: set[str] = set()
    results: list[dict[str, Any]] = []
    print("queries per second; the last columns are our speed relative to the best faiss Flat")
    print(f"with as many threads or fewer, with one thread, and by processor time\n\n{HEAD}")
    cases = list(QUICK if options.quick else FULL)
    if options.plot:
        known = {(c.data, c.n, c.bits) for c in cases if 100 in c.ks}
        cases += [c for c in GROWTH if (c.data, c.n, c.bits) not in known]
    jobs: list[tuple[Case, Callable[[], tuple[Codes, Codes]]]] = [
        (case, lambda case=case: (make(case.data, case.n, case.bits, 0),
                                  make(case.data, 2000, case.bits, 1)))
        for case in cases
        if options.only in f"{case.data}-{case.bits}"
    ]  # fmt: skip
    for path in options.codes:
        database, query, bits = read_codes(path, options.bits)
        case = Case(path.stem, len(database), bits, (10, 100), single=True)
        jobs.insert(0, (case, lambda pair=(database, query): pair))
    rounds, seconds = (3, 0.15) if options.quick else (7, 0.3)
    for case, data in jobs:
        database, queries = data()
        for result in measure(case, database, queries, threads, rounds, seconds, skipped):
            results.append(result)
            print(table_row(result, threads), flush=True)
    for name in sorted(skipped):
        print(f"{name} is not installed and was skipped")
    if options.plot:
        draw(results, threads, options.plot)
    return results


if __name__ == "__main__":
    main()
