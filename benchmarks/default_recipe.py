"""What ``fisherhash train`` gives by default on frozen features, measured as the tables are.

    python benchmarks/default_recipe.py [--data coco21 …] [--seeds 3] [--epochs 15] [--json FILE]

Trains DFH with the best known recipe at the code lengths of ``reproduce --quick``, on the same
split, images of 128 pixels and epochs, and ranks the codes in both ways. Nothing is searched: this
is the row to hold beside the searched rows of the quick tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path
from typing import Any

from fisherhash.data.protocols import resolve
from fisherhash.data.sources import open_data
from fisherhash.experiments.cells import locate
from fisherhash.experiments.planning import IMAGE_SIZE, QUICK_EPOCHS
from fisherhash.system.storage import dump_json
from fisherhash.training.fitting import fit
from fisherhash.training.settings import Settings

SETS = {
    "cifar10": ("cifar10-small", (12, 48)),
    "coco21": ("coco21", (12, 48)),
    "tiny100": ("tiny100", (16, 64)),
}
SPLIT_SEED = 1


def measure(data: str, bits: int, settings: Settings) -> dict[str, float]:
    """mAP of the default recipe, by Hamming distance and with real-valued queries."""
    collection = open_data(locate(data) or data)
    trained = fit(
        collection,
        bits=bits,
        recipe="best",
        finetune=False,
        protocol=resolve(collection, SETS[data][0], SPLIT_SEED),
        image_size=IMAGE_SIZE,
        settings=settings,
        device="cpu",
        fitted=False,
    )
    found = {"hamming": trained.evaluate(), "real": trained.evaluate(real_queries=True)}
    return {ranking: float(one.map) for ranking, one in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--bits", nargs="+", type=int, help="else those of the quick tables")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=QUICK_EPOCHS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for data in given.data:
        for bits in given.bits or SETS[data][1]:
            settings = [Settings(epochs=given.epochs, seed=seed) for seed in range(given.seeds)]
            runs = [measure(data, bits, one) for one in settings]
            means = {way: round(statistics.mean(run[way] for run in runs), 4) for way in runs[0]}
            rows.append({"data": data, "bits": bits, "means": means, "runs": runs})
            print(data, bits, means, flush=True)
    if given.json is not None:
        result = {
            "what": "mAP of the default recipe of DFH on frozen features",
            "settings": dataclasses.asdict(Settings(epochs=given.epochs)),
            "image_size": IMAGE_SIZE,
            "split_seed": SPLIT_SEED,
            "rows": rows,
        }
        given.json.write_text(dump_json(result), "utf-8")


if __name__ == "__main__":
    main()
