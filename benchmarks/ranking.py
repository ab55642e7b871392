"""Compares ranked searches with plain Hamming search and with float scans, in one run.

    python benchmarks/ranking.py [--codes N] [--bits 64] [--k 100] [--json FILE]

The codes are the signs of noisy vectors around 100 centres, so that 5 % of the bits differ from
their centre's; the queries are such vectors too, and keep their real values. Second codes come from
other vectors of the same clusters, as a model's do. Rows "random second codes" are the worst case:
their second codes are unrelated to the first ones, so that the sum of both has to compare most of
them. The sum adds a sixth of the second distance, as an ``ImageIndex`` does, or another part. Every
way answers the same queries in turn; the result is the median over the rounds. The float scans come
last: a search right after one of them takes longer. They rank the codes as vectors of -1 and 1 by
their inner product with the queries, which is the order of ``real``: before they are timed, the
inner products of our answers are compared with theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# spinning threads made faiss a hundred times slower on a busy machine
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.engine import Engine
from fisherhash.index.images.nearest import FINE_WEIGHT
from fisherhash.index.ranking import WeightedQueries, ranked_queries
from fisherhash.system.cores import available_cores

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
Search = Callable[[slice], Any]

CENTRES = 100
NOISE = 0.608
"""Standard deviation around a centre of -1 and 1: 5 % of the signs differ from it."""
FINE_BITS = 128
BLOCK = 1 << 18


def centres(bits: int, seed: int | list[int]) -> Floats:
    """Middles of the clusters, vectors of -1 and 1."""
    middle = np.random.default_rng(seed).integers(0, 2, (CENTRES, bits)) * 2 - 1
    return middle.astype(np.float32)


def make(n: int, bits: int, seed: int) -> tuple[Floats, Codes]:
    """Noisy vectors around the centres, and the second codes of the same items."""
    rng = np.random.default_rng([seed, bits])
    vectors = rng.standard_normal((n, bits), dtype=np.float32)
    vectors *= np.float32(NOISE)
    clusters = rng.integers(0, CENTRES, n)
    vectors += centres(bits, bits)[clusters]
    second = rng.standard_normal((n, FINE_BITS), dtype=np.float32)
    second *= np.float32(NOISE)
    second += centres(FINE_BITS, [bits, FINE_BITS])[clusters]
    return vectors, np.packbits(second > 0, axis=1)


def make_codes(n: int, bits: int) -> tuple[Codes, Codes]:
    """The vectors' signs, packed, and the second codes."""
    codes, fine = [], []
    for start in range(0, n, BLOCK):
        vectors, second = make(min(BLOCK, n - start), bits, 1 + start)
        codes.append(np.packbits(vectors > 0, axis=1))
        fine.append(second)
    return np.concatenate(codes), np.concatenate(fine)


def signs(codes: Codes, bits: int) -> Floats:
    """Codes as vectors of -1 and 1."""
    values = np.empty((len(codes), bits), dtype=np.float32)
    for start in range(0, len(codes), BLOCK):
        part = np.unpackbits(codes[start : start + BLOCK], axis=1, count=bits)
        values[start : start + BLOCK] = part * np.float32(2) - 1
    return values


def numpy_scan(values: Floats, logits: Floats, k: int) -> NDArray[np.int64]:
    """The k largest inner products of each query, one query after the other."""
    rows = []
    for logit in logits:
        products = values @ logit
        best = np.argpartition(products, -k)[-k:]
        rows.append(best[np.argsort(-products[best], kind="stable")])
    return np.array(rows)


def faiss_scan(values: Floats, threads: int) -> Callable[[Floats, int], NDArray[np.int64]] | None:
    """The same with faiss; None where it is not installed."""
    try:
        import faiss  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    faiss.omp_set_num_threads(threads)
    index: Any = faiss.IndexFlatIP(values.shape[1])
    index.add(values)
    return lambda logits, k: index.search(logits, k)[1]


def measure(found: dict[str, Search], queries: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Median wall and processor time per query, in one batch and one by one."""
    rows: dict[str, Any] = {}
    for name, search in found.items():
        search(slice(0, 2))
        start = time.perf_counter()
        search(slice(2, 4))
        each = (time.perf_counter() - start) / 2
        rows[name] = {"queries": max(1, min(queries, int(seconds / each))), "wall": [], "cpu": []}
        rows[name]["single"] = []
    for number in range(rounds):
        for name, search in found.items():
            row = rows[name]
            wall, cpu = time.perf_counter(), time.process_time()
            search(slice(0, row["queries"]))
            row["wall"].append((time.perf_counter() - wall) / row["queries"])
            row["cpu"].append((time.process_time() - cpu) / row["queries"])
            for i in range(min(20, row["queries"])):
                at = (number * 20 + i) % queries
                start = time.perf_counter()
                search(slice(at, at + 1))
                row["single"].append(time.perf_counter() - start)
    return {
        name: {key: float(np.median(value)) if key != "queries" else value
               for key, value in row.items()}
        for name, row in rows.items()
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--codes", type=int, default=10_000_000)
    parser.add_argument("--bits", type=int, default=64)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="at most, per way and round")
    parser.add_argument("--no-float", action="store_true", help="leave out the float scans")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    n, bits, k, threads = args.codes, args.bits, args.k, available_cores()

    codes, fine = make_codes(n, bits)
    logits, fine_queries = make(args.queries, bits, 0)
    rng = np.random.default_rng(0)
    random = rng.integers(0, 256, fine.shape, dtype=np.uint8)
    random_queries = rng.integers(0, 256, fine_queries.shape, dtype=np.uint8)
    own = ranked_queries(None, bits, ranking="real", logits=logits)
    engine = Engine(codes, bits, fine=fine)
    engine.build()
    some = WeightedQueries(own.codes[:9], fine=fine_queries[:9])
    seconds = []
    for queries in (some, some._replace(fine_weight=np.ones(9, dtype=np.int64))):
        # compiles the kernels
        Engine(codes[: 1 << 15], bits, fine=fine[: 1 << 15], path="buckets").rank(queries, 1)
        start = time.perf_counter()
        engine.rank(queries, 1)
        seconds.append(time.perf_counter() - start)
    fine_seconds, sum_seconds = seconds
    worst = Engine(codes, bits, tables=engine.tables(), fine=random)

    def rank(part: slice, way: str, fine: Codes | None = None, weight: float | None = None) -> Any:
        second: dict[str, Any] = {}
        if fine is not None:
            second = {"fine": fine[part], "fine_bits": FINE_BITS, "fine_weight": weight}
        searched = worst if fine is random_queries else engine
        return searched.rank(
            ranked_queries(own.codes[part], bits, ranking=way, logits=logits[part], **second), k
        )

    found: dict[str, Search] = {
        "hamming": lambda part: engine.search(own.codes[part], k),
        "real": lambda part: rank(part, "real"),
        "hamming, fine code": lambda part: rank(part, "hamming", fine_queries),
        "real, fine code": lambda part: rank(part, "real", fine_queries),
    }
    for way, shares in (("hamming", (8, 6, 5, 4, 3)), ("real", (8, 6, 4, 3))):
        for share in shares:
            found[f"{way}, sum, 1/{share}"] = partial(
                rank, way=way, fine=fine_queries, weight=1 / share
            )
        found[f"{way}, sum, random second codes"] = partial(
            rank, way=way, fine=random_queries, weight=FINE_WEIGHT
        )
    rows = measure(found, len(logits), args.rounds, args.seconds)
    if not args.no_float:
        values = signs(codes, bits)
        check = slice(0, 5)
        ours = engine.rank(own.part(check), k).positions
        scans = {"float numpy": lambda part: numpy_scan(values, logits[part], k)}
        faiss = faiss_scan(values, threads)
        if faiss is not None:
            scans["float faiss"] = lambda part: faiss(logits[part], k)
        for name, scan in scans.items():
            # by value: the scans order ties, and what they round, in their own way
            for row, mine, theirs in zip(logits[check], ours, scan(check), strict=True):
                products = [np.sort(values[rows].astype(float) @ row) for rows in (mine, theirs)]
                if not np.allclose(*products, rtol=1e-5, atol=1e-4):
                    raise SystemExit(f"{name}: other results than those of the engine")
        rows |= measure(scans, len(logits), args.rounds, args.seconds)
    print(f"{n:,} codes of {bits} bits around {CENTRES} centres, k = {k}, {threads} threads")
    print(f"second codes of {FINE_BITS} bits prepared in {fine_seconds:.2f} s, ", end="")
    print(f"for sums in {sum_seconds:.2f} s")
    print("| ranking | queries per second | cpu ms | single ms | to hamming (wall, cpu, single) |")
    print("|---|---|---|---|---|")
    base = rows["hamming"]
    for name, row in rows.items():
        ratio = ", ".join(f"{row[key] / base[key]:.2f}" for key in ("wall", "cpu", "single"))
        print(
            f"| {name} | {1 / row['wall']:,.0f} | {1e3 * row['cpu']:.4f} | "
            f"{1e3 * row['single']:.3f} | {ratio} |"
        )
    for name in ("float numpy", "float faiss"):
        if name in rows:
            print(
                f"real is {rows[name]['wall'] / rows['real']['wall']:,.0f} times as fast as {name}"
            )
    if args.json:
        facts = {
            "codes": n, "bits": bits, "k": k, "threads": threads, "fine_bits": FINE_BITS,
            "machine": platform.processor(), "load_average": os.getloadavg()[0],
            "engine": engine.describe(), "fine_seconds": fine_seconds, "sum_seconds": sum_seconds,
            "rankings": rows,
        }  # fmt: skip
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
