"""What a second code changes: P@10 by class and distinct results, with and without it.

    python benchmarks/second_code.py [--data tiny100] [--bits 48] [--image-size N] [--seeds 3]
        [--json results/second-code.json]

A hasher is trained as ``fisherhash train --frozen`` does, once per seed. Every query is compared
with the whole database, which is ordered by the first code alone, by the first code and inside its
ties by the second, and by the sum of both distances. P@10 is the share of the ten nearest that
share a label with the query, in expectation over ties. The interval is that of the mean difference
per query, 95 %, where the difference of a query is its mean over the seeds. Two queries share their
results if both have the same ten in the same order; if their second codes are equal, they must.
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
from fisherhash.data.protocols import resolve
from fisherhash.model.folder import versions
from fisherhash.training.fitting import fit
from fisherhash.training.second_code import FINE_BITS
from fisherhash.training.settings import Settings

K = 10
BLOCK = 200
Distances = NDArray[np.int64]


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


def measure(
    data: str, bits: int, image_size: int | None, seed: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """P@K per query for every order, and how many queries share their results needlessly."""
    collection = open_data(data)
    split = resolve(collection, None)
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
    labels = collection.labels.astype(bool)
    shares: dict[str, list[Any]] = {}
    nearest: dict[str, list[bytes]] = {}
    weight = 1 + trained.hasher.fine_bits
    for start in range(0, len(split.query), BLOCK):
        query = split.query[start : start + BLOCK]
        relevant = labels[query].astype(np.float32) @ labels[split.database].T > 0
        first = codes.hamming(found.codes[query], found.codes[split.database]).astype(np.int64)
        second = codes.hamming(found.fine[query], found.fine[split.database])
        for name, distances in {
            "first code": first,
            "second code inside ties": first * weight + second,
            "sum": first * round(trained.hasher.fine_bits / bits) + second,
        }.items():
            shares.setdefault(name, []).append(precision(distances, relevant))
            nearest.setdefault(name, []).extend(results(distances))
    fine = [code.tobytes() for code in found.fine[split.query]]
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
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs = []
    for seed in range(args.seeds):
        runs.append(measure(args.data, args.bits, args.image_size, seed))
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
            "queries that share results, by seed": [counts[name] for _, counts in runs],
        }
        print(f"{name:26s}", rows[name], flush=True)
    if args.json is not None:
        facts = {
            "what": f"P@{K} by class with and without a second code of {FINE_BITS} bits",
            "data": args.data,
            "bits": args.bits,
            "image size": args.image_size,
            "queries": len(base),
            "orders": rows,
            "versions": versions(),
        }
        args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
