"""What queries gain from a class step of their own: their code leans further towards a class.

    python benchmarks/query_step.py [--data cifar10 tiny100 coco21] [--method dfh] [--seeds 3]
        [--json results/query-step.json]

A query asks for images of its class, so images that surely belong to that class should come first.
Two images whose classes are equally doubtful have similar codes, though, and rank before them. If
the query alone takes a class step with a larger weight, its code is nearly that of its most likely
class, and the distance of an image in the database says how likely that image is of this class.

A hasher is trained as ``fisherhash train --frozen`` does, on four fifths of the training images
(split seed 1, 128 px, the epochs of the quick tables). The others are the queries and the database;
the queries of the protocol are not used. Printed are mAP by Hamming distance, with real-valued
queries, and P@10 by Hamming distance, for steps of the database and of the queries. With
``--unseen``, every fourth class is left out of the training, and the images of these classes are
queried among themselves.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherhash import methods
from fisherhash.codes import pack
from fisherhash.data.protocols import Split, resolve
from fisherhash.data.sources import Collection, open_data
from fisherhash.data.splits import hash_order
from fisherhash.evaluation import evaluate
from fisherhash.experiments.benches import locate
from fisherhash.experiments.planning import IMAGE_SIZE, QUICK_EPOCHS
from fisherhash.model.finished_heads import ClassStepHead
from fisherhash.model.runtime import feature_rows
from fisherhash.system.storage import dump_json
from fisherhash.training.class_step import ClassStep, fit_class_step
from fisherhash.training.finishing import cut_centers
from fisherhash.training.fitting import fit
from fisherhash.training.measuring import EncodedSplit, held_out_top, measure
from fisherhash.training.settings import Settings

SETS = {
    "cifar10": ("cifar10-small", (12, 48)),
    "coco21": ("coco21", (12, 48)),
    "tiny100": ("tiny100", (16, 48)),
}
SPLIT_SEED = 1
DATABASE = tuple(
    ClassStep(*step) for step in ((0.0, 1.0), (0.25, 1.0), (0.5, 0.25), (1.0, 0.5), (2.0, 1.0))
)
QUERIES = (None, *(ClassStep(*step) for step in ((1.0, 1.0), (2.0, 1.0), (8.0, 1.0), (8.0, 4.0))))
"""None: the step of the database."""
AT = 10


def parts(collection: Collection, split: Split, *, unseen: bool) -> tuple[Split, NDArray[np.int64]]:
    """Return a split that trains on some training images, and the images to measure."""
    train = split.train
    if unseen:
        out = collection.labels[train].argmax(1) % 4 == 3
        return dataclasses.replace(split, train=train[~out]), train[out]
    order = np.array(hash_order(collection.names, train, seed=SPLIT_SEED))
    held, rest = np.split(order, [len(order) // 5])
    return dataclasses.replace(split, train=np.sort(rest)), np.sort(held)


def scores(
    step: ClassStepHead, query: Tensor, database: Tensor, labels: NDArray[np.uint8], top: int | None
) -> dict[str, float]:
    """Measure logits of queries against codes of the same images, each among the others."""
    rows = np.arange(len(labels))
    codes = pack(query.numpy()), pack(database.numpy())
    encoded = EncodedSplit(*codes, labels, labels, step, [], query.numpy())
    found = evaluate(*codes, labels, labels, bits=step.bits, top=top, self_index=rows)
    real = measure(encoded, top=top, self_index=rows, real_queries=True)
    precision = evaluate(
        *codes, labels, labels, bits=step.bits, self_index=rows, precision_at=[AT]
    ).precision_at[AT]
    return {"hamming": float(found.map), "real": float(real.map), "precision": float(precision)}


def measured(
    data: str, bits: int, method: str, seed: int, *, unseen: bool
) -> dict[tuple[ClassStep, ClassStep | None], dict[str, float]]:
    """Train a hasher and measure every pair of steps."""
    collection = open_data(locate(data) or data)
    split, held = parts(collection, resolve(collection, SETS[data][0], SPLIT_SEED), unseen=unseen)
    trained = fit(
        collection,
        method=method,
        bits=bits,
        recipe="best" if method == "dfh" else None,
        finetune=False,
        protocol=split,
        image_size=IMAGE_SIZE,
        settings=Settings(epochs=QUICK_EPOCHS, seed=seed),
        device="cpu",
    )
    head = trained.plain_head.eval()
    features = {
        name: torch.from_numpy(feature_rows(trained.hasher.runtime, collection, part).values)
        for name, part in (("train", split.train), ("held", held))
    }
    labels = collection.labels[split.train]
    learner = trained.method
    with torch.no_grad():
        step = trained.step or fit_class_step(
            head,
            features["train"].float(),
            torch.from_numpy(labels).float(),
            centers=cut_centers(learner, head) if isinstance(learner, methods.HashMethod) else None,
            seed=seed,
        )
        inner, raw = head.logits(features["held"].float()), step.scores(features["held"].float())

        def logits(one: ClassStep) -> Tensor:
            return step.with_step(one.weight, one.sharpness).combine(inner, raw)

        share = held_out_top(split)
        top = None if share is None else max(AT, round(share * (len(held) - 1)))
        own = collection.labels[held].astype(np.uint8)
        return {
            (database, query): scores(step, logits(query or database), logits(database), own, top)
            for database in DATABASE
            for query in QUERIES
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--method", default="dfh")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--unseen", action="store_true", help="measure classes not trained on")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for data in given.data:
        for bits in SETS[data][1]:
            found = defaultdict(list)
            for seed in range(given.seeds):
                one = measured(data, bits, given.method, seed, unseen=given.unseen)
                for pair, values in one.items():
                    found[pair].append(values)
            for (database, query), runs in found.items():
                means = {
                    key: round(statistics.mean(run[key] for run in runs), 4) for key in runs[0]
                }
                steps = {
                    "database": dataclasses.asdict(database),
                    "query": None if query is None else dataclasses.asdict(query),
                }
                rows.append({"data": data, "bits": bits, **steps, **means})
                print(*rows[-1].values(), flush=True)
    if given.json is not None:
        result = {
            "what": "held-out training images by the class steps of the database and the queries",
            "method": given.method,
            "seeds": given.seeds,
            "unseen": given.unseen,
            "rows": rows,
        }
        given.json.write_text(dump_json(result), "utf-8")


if __name__ == "__main__":
    main()
