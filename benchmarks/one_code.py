"""How many fitted bits an index appends to the learned ones: P@10 of seen and of unseen classes.

    python benchmarks/one_code.py DATA… [--bits 48] [--image-size 128] [--seeds 3] [--json FILE]

A hasher is trained with the default recipe on frozen features, without a quarter of the classes
(another quarter for each seed). Every query is then compared with the whole database, in which all
classes are. Queries of seen classes and of unseen ones are counted apart; P@10 is the share of the
ten nearest that share a label with the query, in expectation over ties. *learned* are the learned
bits alone; *learned + m* are the same with m bits behind them that are fitted without labels (ITQ)
to at most 10,000 images of the database, compared by plain Hamming distance; *fitted m* are these
alone. *sum 1/6* is what an index did before: the distance of the learned bits plus a sixth of that
of 128 bits fitted to the training images.
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
from fisherhash.data.splits import hash_order, hold_out_classes
from fisherhash.model.folder import versions
from fisherhash.model.itq_fit import fit_itq
from fisherhash.training.fitting import fit
from fisherhash.training.settings import Settings

K = 10
LENGTHS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)
ALONE = (64, 128)
SAMPLE = 10_000
BLOCK = 100
Bits = NDArray[np.uint8]


def precision(distances: NDArray[Any], relevant: NDArray[np.bool_]) -> NDArray[np.float64]:
    """P@K of each query (n,), expected over ties.

    >>> near = np.array([[0] * 9 + [1, 1]])
    >>> precision(near, np.array([[True] * 10 + [False]])).tolist()
    [0.95]
    """
    last = np.partition(distances, K - 1, axis=1)[:, K - 1 : K]
    sure, tied = distances < last, distances == last
    share = (relevant & tied).sum(1) / tied.sum(1)
    return ((relevant & sure).sum(1) + share * (K - sure.sum(1))) / K


def fitted(features: NDArray[np.float32], to: NDArray[np.int64], bits: int) -> Bits:
    """Codes of all features, by bits that are fitted to some of them."""
    weight, offset = fit_itq(features[to], bits)
    return codes.pack(features @ weight + offset)


def measure(data: str, bits: int, image_size: int, seed: int) -> dict[str, Any]:
    """P@K by kind of code, for queries of seen and of unseen classes."""
    collection = open_data(data)
    split = resolve(collection, None)
    parts = hold_out_classes(collection, split, seed=seed)
    hasher = fit(
        parts.seen,
        bits=bits,
        recipe="best",
        image_size=image_size,
        settings=Settings(seed=seed),
        finetune=False,
        protocol=parts.split,
    ).hasher
    blocks = list(hasher.row_blocks(collection, np.arange(len(collection)), 256, True))
    features = np.concatenate([block.values for block in blocks])
    if len(features) != len(collection):
        raise SystemExit("an image could not be read")
    names = [str(collection.names[i]) for i in split.database.tolist()]
    order = hash_order(names, range(len(names)), seed=0)
    sample = np.sort(split.database[order[:SAMPLE]])
    learned = codes.pack(hasher.head.logits(features))
    before = fitted(features, parts.split.train, 128)
    added = {length: fitted(features, sample, length) for length in LENGTHS}
    labels = collection.labels.astype(bool)
    columns = {name: number for number, name in enumerate(collection.classes)}
    unseen = [columns[name] for name in parts.unseen.classes]
    is_new: NDArray[np.bool_] = labels[:, unseen].sum(axis=1) > 0
    found: dict[str, Any] = {"data": Path(data).name, "bits": bits, "seed": seed}
    for kind, own, queries in (
        ("seen", [columns[name] for name in parts.seen.classes], split.query[~is_new[split.query]]),
        ("unseen", unseen, split.query[is_new[split.query]]),
    ):
        scores: dict[str, list[NDArray[np.float64]]] = {}
        for start in range(0, len(queries), BLOCK):
            some = queries[start : start + BLOCK]
            relevant = (
                labels[some][:, own].astype(np.float32) @ labels[split.database][:, own].T > 0
            )

            def apart(made: Bits, some: NDArray[np.int64] = some) -> NDArray[np.int64]:
                return codes.hamming(made[some], made[split.database]).astype(np.int64)

            first = apart(learned)
            kinds = {"learned": first, "sum 1/6": 6 * first + apart(before)}
            for length, made in added.items():
                second = apart(made)
                kinds[f"learned + {length}"] = first + second
                if length in ALONE:
                    kinds[f"fitted {length}"] = second
            for name, distances in kinds.items():
                scores.setdefault(name, []).append(precision(distances, relevant))
        found[kind] = {
            name: round(float(np.concatenate(p).mean()), 4) for name, p in scores.items()
        }
        found[f"{kind} queries"] = len(queries)
    return found


def main() -> None:
    """Measure and print; write the JSON if requested."""
    parser = argparse.ArgumentParser(
        description="P@10 of seen and of unseen classes, by the number of fitted bits."
    )
    parser.add_argument("data", nargs="+")
    parser.add_argument("--bits", type=int, default=48)
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for data in given.data:
        for seed in range(given.seeds):
            rows.append(measure(data, given.bits, given.image_size, seed))
            print(json.dumps(rows[-1]), flush=True)
    if given.json:
        about = {"k": K, "image_size": given.image_size, "versions": versions()}
        given.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
