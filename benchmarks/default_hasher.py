"""Which hasher is best for a folder without labels: the built-in one, or one fitted to its images.

    python benchmarks/default_hasher.py [--data tiny100 coco21 cifar10 FOLDER] [--bits 64 128]
        [--images 200 1000 2500] [--rows FOLDER] [--json results/default-hasher.json]

Each data set is treated as a folder of unlabelled images. Only images are used that no built-in
hasher was trained on: those outside of the protocol's training set. A folder of your own has one
sub-folder per class, and all of its images are used, but for classes that are too small to fill ten
results, or left out by name (``--without unsorted``). Every method is fitted to the
same features of the same images. Each image then queries all others. P@10 is the share of the ten
nearest that share a label with it, in expectation over ties. ``float`` is the cosine of the
features themselves.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fisherhash import methods
from fisherhash.codes import pack
from fisherhash.data.protocols import resolve
from fisherhash.data.sources import NAMED, open_data
from fisherhash.data.splits import hash_order
from fisherhash.errors import FisherhashError
from fisherhash.evaluation import evaluate, metrics
from fisherhash.methods import FeatureMethod
from fisherhash.model.hasher import Hasher
from fisherhash.model.networks import feature_rows
from fisherhash.system.storage import write_file

K = 10
FEWEST = 50
"""Images of the smallest class of a folder that is used."""
Rows = NDArray[np.float32]


def images_of(data: str, count: int, without: list[str]) -> tuple[Any, NDArray[np.int64]]:
    """A collection, and images of it that are in no training set."""
    collection = open_data(data)
    if data in NAMED:
        split = resolve(collection, None)
        free = np.setdiff1d(np.concatenate([split.query, split.database]), split.train)
    else:
        large = collection.labels.sum(axis=0) >= FEWEST
        large &= ~np.isin(collection.classes, without)
        free = np.flatnonzero(collection.labels[:, large].any(axis=1))
    order = hash_order([str(collection.names[i]) for i in free.tolist()], range(len(free)), seed=0)
    return collection, np.sort(free[np.asarray(order[:count])])


def rows_of(
    data: str, count: int, hasher: Hasher, folder: Path | None, without: list[str]
) -> dict[str, Rows]:
    """Features, logits and labels of the images of a data set, computed once."""
    place = None
    if folder is not None:
        place = folder / f"{Path(data).name}-{count}-{hasher.fingerprint()[:12]}.npz"
    if place is not None and place.exists():
        with np.load(place) as stored:
            return dict(stored)
    collection, chosen = images_of(data, count, without)
    found = feature_rows(hasher.features_network, collection, chosen)
    # The int8 hashers run from pixels to logits only.
    blocks = hasher.encode_blocks(collection, found.indices, queries=True)
    logits = np.concatenate([cast(Rows, block.queries) for block in blocks])
    rows = {
        "features": found.values,
        "logits": logits,
        "labels": collection.labels[found.indices],
    }
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        np.savez(place, **rows)
    return rows


def precision(logits: Rows, labels: Rows) -> float:
    """P@10 of codes, each image against all others."""
    codes = pack(logits)
    found = evaluate(
        codes,
        codes,
        labels,
        labels,
        bits=logits.shape[1],
        self_index=np.arange(len(codes)),
        precision_at=[K],
    )
    return found.precision_at[K]


def float_precision(features: Rows, labels: Rows) -> float:
    """P@10 of the features by cosine."""
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    blocks = (-(unit[i : i + 500] @ unit.T) for i in range(0, len(unit), 500))
    found = metrics(blocks, labels, labels, self_index=np.arange(len(unit)), precision_at=[K])
    return found.precision_at[K]


def main() -> None:
    """Compute features, fit, measure, and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["tiny100", "coco21", "cifar10"])
    parser.add_argument("--without", nargs="+", default=[], help="classes to leave out of a folder")
    parser.add_argument("--images", type=int, nargs="+", default=[2500])
    parser.add_argument("--bits", type=int, nargs="+", default=[64])
    parser.add_argument("--methods", nargs="+", default=[])
    parser.add_argument("--hasher", default="general-64")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, help="a folder that keeps features between runs")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    hasher = Hasher.load_builtin(chosen.hasher)
    unsupervised = {
        name: method
        for name, method in methods.registry().items()
        if issubclass(method, FeatureMethod)
        and not method.info.needs_labels
        and (not chosen.methods or name in chosen.methods)
    }
    results: dict[str, Any] = {
        "what": "P@10 in folders without labels: built-in hashers and fitted ones",
        "hasher": chosen.hasher,
        "fingerprint": hasher.fingerprint(),
        "rows": [],
    }

    def note(data: str, count: int, method: str, bits: int | None, value: float) -> None:
        row = {"data": data, "images": count, "method": method, "bits": bits}
        results["rows"].append(row | {f"p@{K}": round(value, 4)})
        length = "float" if bits is None else f"{bits} bits"
        print(f"{data:8} {count:6,} {method:18} {length:>8}  P@{K} {value:.4f}", flush=True)
        if chosen.json is not None:
            write_file(chosen.json, json.dumps(results, indent=1) + "\n")

    for data in chosen.data:
        all_rows = rows_of(data, max(chosen.images), hasher, chosen.rows, chosen.without)
        data = Path(data).name
        order = np.random.default_rng(0).permutation(len(all_rows["labels"]))
        for count in chosen.images:
            rows = {name: values[order[:count]] for name, values in all_rows.items()}
            features, labels = rows["features"], rows["labels"]
            note(data, count, "float", None, float_precision(features, labels))
            note(data, count, chosen.hasher, hasher.bits, precision(rows["logits"], labels))
            for name, method in unsupervised.items():
                for bits in chosen.bits:
                    try:
                        logits = fitted_logits(method, bits, features, chosen.seed)
                    except FisherhashError as error:
                        print(f"{data:8} {count:6,} {name:18} {bits} bits: {error}")
                        continue
                    note(data, count, name, bits, precision(logits, labels))


def fitted_logits(method: type[FeatureMethod], bits: int, features: Rows, seed: int) -> Rows:
    """Fit a method to features; returns their logits (n, bits)."""
    values = torch.from_numpy(features)
    with torch.no_grad():
        return method(bits=bits, classes=0).fit(values, seed=seed).logits(values).numpy()


if __name__ == "__main__":
    main()
