"""Every shallow method on frozen features: mAP, time to fit, time to encode, in one run.

python benchmarks/shallow.py --data cifar10 --bits 12 24 32 48 64 --out results/shallow-cifar10.json

Features are computed once and stored. The first row is the float features themselves, ranked by
cosine, which no code of them is expected to beat without labels.
"""

from __future__ import annotations

import argparse
import json
import time
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
from fisherhash.model.runtime import feature_rows
from fisherhash.model.torch_runtime import TorchRuntime, on_device
from fisherhash.system.storage import write_file


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
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()

    collection = open_data(chosen.data)
    split = resolve(collection, chosen.protocol)
    network = backbones.create("efficientnet-lite0", weights=None, image_size=chosen.image_size)
    device = torch.device("cpu")
    runtime = TorchRuntime(on_device(network, device), device)
    database = split.database[
        :: -(-len(split.database) // (chosen.database or len(split.database)))
    ]
    parts = {"train": split.train, "query": split.query, "database": database}
    rows = {name: feature_rows(runtime, collection, own) for name, own in parts.items()}
    features = {name: torch.from_numpy(own.values) for name, own in rows.items()}
    labels = {name: collection.labels[own.indices] for name, own in rows.items()}

    results: dict[str, Any] = {
        "what": "mAP of shallow methods on frozen EfficientNet-Lite0 features, one seed",
        "data": collection.name,
        "protocol": {**split.to_json()},
        "image_size": chosen.image_size,
        "features": _cosine(features, labels, split.top),
        "rows": [],
    }
    print(f"float features, cosine: mAP {results['features']:.4f}")
    for name, method in methods.registry().items():
        if not issubclass(method, FeatureMethod) or (chosen.methods and name not in chosen.methods):
            continue
        for bits in chosen.bits:
            results["rows"].append(_measured(name, bits, features, labels, split.top, chosen.seed))
            row = results["rows"][-1]
            said = row.get("error") or (
                f"mAP {row['map']:.4f}  fit {row['fit_seconds']:.1f} s  "
                f"encode {row['encode_microseconds']:.1f} µs per image"
            )
            print(f"{name:17} {bits:3} bits  {said}", flush=True)
            if chosen.out:
                write_file(chosen.out, json.dumps(results, indent=1) + "\n")


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
