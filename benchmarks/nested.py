"""One nested model against a separate model per length: mAP and training time, in one run.

python benchmarks/nested.py --data cifar10 --out results/nested-cifar10.json

Both are trained on frozen features with the same settings. The nested model's first bits are its
shorter codes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fisherhash.data.protocols import resolve
from fisherhash.data.sources import open_data
from fisherhash.system.storage import write_file
from fisherhash.training.fitting import fit
from fisherhash.training.measuring import encode_split, measure
from fisherhash.training.settings import Settings
from fisherhash.training.trained import Trained


def main() -> None:
    """Train, measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--methods", nargs="+", default=["dfh", "csq", "orthohash"])
    parser.add_argument("--bits", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=Settings().epochs)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()

    collection = open_data(chosen.data)
    split = resolve(collection, None)
    longest = max(chosen.bits)
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {
        "what": "mAP of one nested model and of a separate model per length, frozen features",
        "data": collection.name,
        "protocol": split.to_json(),
        "image_size": chosen.image_size,
        "epochs": chosen.epochs,
        "rows": rows,
    }

    def trained(method: str, bits: int, seed: int, nested: list[int]) -> Trained:
        return fit(
            collection,
            method=method,
            bits=bits,
            protocol=split,
            image_size=chosen.image_size,
            finetune=False,
            device="cpu",
            settings=Settings(epochs=chosen.epochs, seed=seed),
            nested=nested,
            fitted=False,
        )

    def record(kind: str, method: str, seed: int, found: Trained, lengths: list[int]) -> None:
        for bits in lengths:
            encoded = encode_split(found.hasher.truncated(bits), collection, split)
            score = float(measure(encoded, top=split.top).map)
            row = {"kind": kind, "method": method, "bits": bits, "seed": seed}
            rows.append(row | {"map": round(score, 5), "seconds": found.seconds["training"]})
            print(f"{method:10} {kind:9} {bits:3} bits  seed {seed}  mAP {score:.4f}", flush=True)
        if chosen.out:
            write_file(chosen.out, json.dumps(results, indent=1) + "\n")

    for method in chosen.methods:
        for seed in range(chosen.seeds):
            shorter = [bits for bits in chosen.bits if bits != longest]
            record("nested", method, seed, trained(method, longest, seed, shorter), chosen.bits)
            for bits in chosen.bits:
                record("separate", method, seed, trained(method, bits, seed, []), [bits])


if __name__ == "__main__":
    main()
