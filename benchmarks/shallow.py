"""Every shallow method on frozen features: mAP, time to fit, time to encode, in one run.

python benchmarks/shallow.py --data cifar10 --bits 12 24 32 48 64 --out results/shallow-cifar10.json

Features are computed once and stored. The first row is the float features themselves, ranked by
cosine, which no code of them is expected to beat without labels.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fisherhash import backbones, methods
from fisherhash.codes import pack
from fisherhash.data.protocols import resolve
from fisherhash.data.sources import open_data
from fisherhash.errors import FisherhashError
from fisherhash.evaluation import evaluate, metrics
from fisherhash.methods import FeatureMethod
from fisherhash.model.networks import feature_rows
from fisherhash.model.torch_network import TorchNetwork
from fisherhash.system.cores import available_cores
from fisherhash.system.storage import write_file

_stage: Stage
_seed: int


@dataclass(frozen=True)
class Stage:
    """The features and labels of each part of the split, and how deep a ranking is measured."""

    features: dict[str, torch.Tensor]
    labels: dict[str, np.ndarray]
    top: int | None
    about: dict[str, Any]


def main() -> None:
    """Fit, encode and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--protocol")
    parser.add_argument("--bits", type=int, nargs="+", default=[12, 24, 32, 48, 64])
    parser.add_argument("--methods", nargs="+", default=[])
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", type=int, default=0, help="use only so many database images")
    parser.add_argument("--processes", type=int, default=min(2, available_cores()))
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()

    stage = opened(chosen)
    shallow = [
        name for name, method in methods.registry().items() if issubclass(method, FeatureMethod)
    ]
    names = [name for name in shallow if not chosen.methods or name in chosen.methods]
    results: dict[str, Any] = {
        "what": "mAP of shallow methods on frozen EfficientNet-Lite0 features, one seed",
        **stage.about,
        "features": _cosine(stage.features, stage.labels, stage.top),
        "processes": chosen.processes,
    }
    print(f"float features, cosine: mAP {results['features']:.4f}")
    # Long codes first: the last cells to end are short ones, so no process waits for long.
    cells = [(name, bits) for bits in sorted(chosen.bits, reverse=True) for name in names]
    began, rows = time.perf_counter(), []
    with multiprocessing.get_context("spawn").Pool(
        chosen.processes, initializer=prepare, initargs=(chosen,)
    ) as pool:
        for row in pool.imap_unordered(measured, cells):
            rows.append(row)
            said = row.get("error") or (
                f"mAP {row['map']:.4f}  fit {row['fit_seconds']:.1f} s  "
                f"encode {row['encode_microseconds']:.1f} µs per image"
            )
            print(f"{row['method']:17} {row['bits']:3} bits  {said}", flush=True)
            if chosen.out:
                rows.sort(key=lambda row: (names.index(row["method"]), row["bits"]))
                results["seconds"] = round(time.perf_counter() - began, 1)
                results["cpu_seconds"] = round(sum(row["cpu_seconds"] for row in rows), 1)
                write_file(chosen.out, json.dumps({**results, "rows": rows}, indent=1) + "\n")
    cpu = sum(row["cpu_seconds"] for row in rows)
    print(f"{len(rows)} cells in {time.perf_counter() - began:.0f} s, {cpu:.0f} s of CPU time")


def opened(chosen: argparse.Namespace) -> Stage:
    """Read the features of a data set; they are computed once and stored."""
    collection = open_data(chosen.data)
    split = resolve(collection, chosen.protocol)
    network = backbones.create("efficientnet-lite0", weights=None, image_size=chosen.image_size)
    device = torch.device("cpu")
    computing = TorchNetwork(network, device)
    database = split.database[
        :: -(-len(split.database) // (chosen.database or len(split.database)))
    ]
    parts = {"train": split.train, "query": split.query, "database": database}
    rows = {name: feature_rows(computing, collection, own) for name, own in parts.items()}
    return Stage(
        {name: torch.from_numpy(own.values) for name, own in rows.items()},
        {name: collection.labels[own.indices] for name, own in rows.items()},
        split.top,
        {
            "data": collection.name,
            "protocol": {**split.to_json()},
            "image_size": chosen.image_size,
        },
    )


def prepare(chosen: argparse.Namespace) -> None:
    """Open the features in a process of their own, which shares the cores with the others."""
    global _stage, _seed
    torch.set_num_threads(max(1, available_cores() // chosen.processes))
    _stage, _seed = opened(chosen), chosen.seed


def measured(cell: tuple[str, int]) -> dict[str, Any]:
    """Fit one method at one length and measure it; the whole costs ``cpu_seconds``."""
    began = time.process_time()
    row = _measured(*cell, _stage.features, _stage.labels, _stage.top, _seed)
    return row | {"cpu_seconds": round(time.process_time() - began, 2)}


def _measured(
    name: str,
    bits: int,
    features: dict[str, torch.Tensor],
    labels: dict[str, np.ndarray],
    top: int | None,
    seed: int,
) -> dict[str, Any]:
    """Fit one method at one length and measure it."""
    info = methods.find(name).info
    row: dict[str, Any] = {"method": name, "supervision": info.supervision, "bits": bits}
    began = time.perf_counter()
    try:
        method = methods.create(name, bits=bits, classes=labels["train"].shape[1])
        with torch.no_grad():
            head = method.fit(  # type: ignore[union-attr]
                features["train"], torch.from_numpy(labels["train"]).float(), seed=seed
            ).eval()
    except FisherhashError as error:
        return row | {"error": str(error)}
    fitted = time.perf_counter()
    with torch.inference_mode():
        packed = {
            part: pack(torch.cat([head.logits(b) for b in features[part].split(8192)]).numpy())
            for part in ("query", "database")
        }
    encoded = time.perf_counter()
    found = evaluate(
        packed["query"], packed["database"], labels["query"], labels["database"], bits=bits, top=top
    )
    count = len(features["query"]) + len(features["database"])
    return row | {
        "map": round(float(found.map), 5),
        "fit_seconds": round(fitted - began, 3),
        "encode_microseconds": round(1e6 * (encoded - fitted) / count, 2),
    }


def _cosine(
    features: dict[str, torch.Tensor], labels: dict[str, np.ndarray], top: int | None
) -> float:
    """Return the mAP of the features themselves, centred, ranked by cosine."""
    mean = features["train"].mean(0)
    query, database = (
        torch.nn.functional.normalize(features[part] - mean, dim=1)
        for part in ("query", "database")
    )
    blocks = (-block @ database.T for block in query.split(50))
    return float(metrics(blocks, labels["query"], labels["database"], top=top).map)


if __name__ == "__main__":
    main()
