"""What a second code changes: P@10 by class and distinct results, with and without it.

    python benchmarks/second_code.py [--data tiny100] [--bits 48] [--image-size N] [--seeds 3]
        [--held-out N] [--json results/second-code.json]

A hasher is trained as ``fisherhash train --frozen`` does, once per seed. Every query is compared
with the whole database, which is ordered by the first code alone, by the first code and inside its
ties by the second, and by the sum of both distances. P@10 is the share of the ten nearest that
share a label with the query, in expectation over ties. The interval is that of the mean difference
per query, 95 %, where the difference of a query is its mean over the seeds. Two queries share their
results if both have the same ten in the same order; if their second codes are equal, they must.

With ``--held-out``, some database images that were not trained on are the queries, and the sum is
compared at several weights of the second distance, also with real-valued queries.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash import codes
from fisherhash.data import open_data
from fisherhash.data.protocols import Split, resolve
from fisherhash.data.splits import hash_order
from fisherhash.index.images.nearest import FINE_WEIGHT
from fisherhash.model.folder import versions
from fisherhash.training.fitting import fit
from fisherhash.training.second_code import FINE_BITS
from fisherhash.training.settings import Settings

K = 10
BLOCK = 200
WEIGHTS = (16, 12, 8, 6, 5, 4, 3, 2, 1)
"""Parts of the second distance that a held-out comparison adds: a sixteenth, a twelfth, …"""
Distances = NDArray[np.int64] | NDArray[np.float64]


def precision(distances: Distances, relevant: NDArray[np.bool_]) -> NDArray[np.float64]:
    """P@K of each query (n,), expected over ties.

    >>> near = np.array([[0] * 9 + [1, 1]])
    >>> precision(near, np.array([[True] * 10 + [False]])).tolist()
    [0.95]
    """
    last = np.partition(distances, K - 1, axis=1)[:, K - 1 : K]
    sure, tied = distances < last, distances == last
    share = (relevant & tied).sum(1) / tied.sum(1)
    return ((relevant & sure).sum(1) + share * (K - sure.sum(1))) / K


def results(distances: Distances) -> list[bytes]:
    """The K nearest of each query in order, ties by number."""
    return [row.tobytes() for row in distances.argsort(1, kind="stable")[:, :K]]


def sharing(found: list[bytes], second: list[bytes]) -> int:
    """How many queries have the results of another query whose second code differs.

    >>> sharing([b"x", b"x", b"y", b"y"], [b"1", b"2", b"3", b"3"])
    2
    """
    of: dict[bytes, set[bytes]] = {}
    for result, code in zip(found, second, strict=True):
        of.setdefault(result, set()).add(code)
    return sum(len(of[result]) > 1 for result in found)


def parts(split: Split, held_out: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Queries and database: those of the split, or database images that were not trained on."""
    if not held_out:
        return split.query, split.database
    free = np.setdiff1d(split.database, split.train)
    order = hash_order([str(split.names[i]) for i in free.tolist()], range(len(free)), seed=0)
    queries = free[np.asarray(order[:held_out])]
    return queries, np.setdiff1d(split.database, queries)


def orders(first: Distances, second: Distances, fine_bits: int, *, many: bool) -> dict[str, Any]:
    """Numbers that order the database for each query, by the name of the order."""
    found = {"first code": first, "second code inside ties": first * (1 + fine_bits) + second}
    shares = WEIGHTS if many else (round(1 / FINE_WEIGHT),)
    return found | {f"sum, 1/{share}": first * share + second for share in shares}


def real_distances(logits: NDArray[np.float32], database: NDArray[np.uint8]) -> Distances:
    """Distances (n, m) that weigh a bit by the query's logit; one of mean weight counts 1.

    >>> real_distances(np.float32([[3, -1]]), np.uint8([[0b10000000], [0b01000000]])).tolist()
    [[0.0, 2.0]]
    """
    weights = np.abs(logits) / np.abs(logits).mean(1, keepdims=True)
    signs = 2.0 * np.unpackbits(database, axis=1)[:, : logits.shape[1]] - 1.0
    # Rounded, so that equal sums of weights tie.
    return np.round((weights.sum(1, keepdims=True) - (weights * np.sign(logits)) @ signs.T) / 2, 6)


def measure(
    data: str, bits: int, image_size: int | None, seed: int, held_out: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """P@K per query for every order, and how many queries share their results needlessly."""
    collection = open_data(data)
    split = resolve(collection, None)
    queries, database = parts(split, held_out)
    trained = fit(
        collection,
        method="dfh",
        bits=bits,
        recipe="best",
        fine_bits=FINE_BITS,
        image_size=image_size,
        settings=Settings(seed=seed),
        finetune=False,
        measured=False,
    )
    found = trained.hasher.encode_collection(collection, np.arange(len(collection)), cached=True)
    if found.fine is None or len(found.indices) != len(collection):
        raise SystemExit("there is no second code, or an image could not be read")
    encoded = trained.hasher.encode_collection(collection, queries, cached=True, queries=True)
    if encoded.queries is None:
        raise SystemExit("the codes are no signs of logits")
    labels = collection.labels.astype(bool)
    shares: dict[str, list[Any]] = {}
    nearest: dict[str, list[bytes]] = {}
    for start in range(0, len(queries), BLOCK):
        query = queries[start : start + BLOCK]
        relevant = labels[query].astype(np.float32) @ labels[database].T > 0
        first = codes.hamming(found.codes[query], found.codes[database]).astype(np.int64)
        second = codes.hamming(found.fine[query], found.fine[database]).astype(np.int64)
        ways = orders(first, second, trained.hasher.fine_bits, many=held_out > 0)
        if held_out:
            real = real_distances(encoded.queries[start : start + BLOCK], found.codes[database])
            ways["real"] = real
            ways |= {f"real, sum, 1/{share}": real + second / share for share in WEIGHTS}
        for name, distances in ways.items():
            shares.setdefault(name, []).append(precision(distances, relevant))
            if not held_out:
                nearest.setdefault(name, []).extend(results(distances))
    fine = [code.tobytes() for code in found.fine[queries]]
    return (
        {name: np.concatenate(parts) for name, parts in shares.items()},
        {name: sharing(rows, fine) for name, rows in nearest.items()},
    )


def main() -> None:
    """Train, measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="tiny100")
    parser.add_argument("--bits", type=int, default=48)
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--held-out", type=int, default=0, help="images to query, and more weights")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs = []
    for seed in range(args.seeds):
        runs.append(measure(args.data, args.bits, args.image_size, seed, args.held_out))
        print(seed, {name: round(float(row.mean()), 4) for name, row in runs[-1][0].items()})
    rows: dict[str, Any] = {}
    base = np.mean([shares["first code"] for shares, _ in runs], axis=0)
    for name in runs[0][0]:
        mean = np.mean([shares[name] for shares, _ in runs], axis=0)
        change = mean - base
        half = 1.96 * float(change.std(ddof=1)) / len(change) ** 0.5
        rows[name] = {
            f"p@{K}": round(float(mean.mean()), 4),
            "by seed": [round(float(shares[name].mean()), 4) for shares, _ in runs],
            "difference": round(float(change.mean()), 4),
            "interval": [round(float(change.mean()) + sign * half, 4) for sign in (-1, 1)],
        }
        if not args.held_out:
            rows[name]["queries that share results, by seed"] = [c[name] for _, c in runs]
        print(f"{name:26s}", rows[name], flush=True)
    if args.json is not None:
        facts = {
            "what": f"P@{K} by class with and without a second code of {FINE_BITS} bits",
            "data": args.data,
            "bits": args.bits,
            "image size": args.image_size,
            "queries": len(base),
            "of": "held-out database images" if args.held_out else "the queries of the protocol",
            "orders": rows,
            "versions": versions(),
        }
        args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
