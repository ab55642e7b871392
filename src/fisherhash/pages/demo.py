"""The demo: train, measure and search the built-in sample, and write a page about it."""

from __future__ import annotations

import logging
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from fisherhash import backbones, codes
from fisherhash.data.cifar import CITATION
from fisherhash.data.protocols import resolve
from fisherhash.data.sources import open_data
from fisherhash.data.splits import Split, hash_order
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.evaluation import Evaluation
from fisherhash.index.engine import Engine
from fisherhash.methods.dfh import DFH
from fisherhash.model.folder import versions
from fisherhash.model.networks import feature_rows
from fisherhash.model.torch_network import TorchNetwork
from fisherhash.pages import html as pages
from fisherhash.system import storage
from fisherhash.training.fitting import fit
from fisherhash.training.settings import Settings
from fisherhash.training.trained import Trained

logger = logging.getLogger(__name__)

PAGE, MODEL, RECORD = "index.html", "model", "demo.json"
MADE_BY = "fisherhash demo"
RESULTS_SHOWN = 10
"""Results per query on the page."""
DEMO_PARTS = {
    "features": "features of all images, or reading them from the cache",
    "training": "training on the features",
    "saving": "saving the model",
    "evaluation": "codes of all images, and mAP",
    "page": "this page",
}


@dataclass(frozen=True)
class Demo:
    """What the demo made, and what its page shows.

    Attributes:
        trained: the hasher, and the images it was trained on.
        split: queries and database.
        settings: of the training.
        evaluation: how good the codes are.
        packed: (n, bytes) codes of all images.
        folder: where the page and the model are.
        seconds: how long each part took.
    """

    trained: Trained
    split: Split
    settings: Settings
    evaluation: Evaluation
    packed: NDArray[np.uint8]
    folder: Path
    seconds: dict[str, float]

    @property
    def page(self) -> Path:
        """The HTML page."""
        return self.folder / PAGE

    @property
    def model(self) -> Path:
        """The model folder."""
        return self.folder / MODEL

    @property
    def bits(self) -> int:
        """Length of the codes."""
        return self.trained.hasher.bits

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """The number of the class of each image."""
        return self.trained.collection.labels.argmax(axis=1)

    def class_name(self, item: int) -> str:
        """The name of the class of an image."""
        return self.trained.collection.classes[self.numbers[item]]

    def image(self, item: int) -> Image.Image:
        """Image number ``item``."""
        return self.trained.collection.reader.open(int(item))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch to one thread.

    The work comes in small steps; on a busy machine, threads that wait for each other made it ten
    times slower. One thread also makes the bits independent of the number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def run_demo(
    out: str | os.PathLike[str] = "fisherhash-demo",
    *,
    bits: int = 24,
    image_size: int = 128,
    epochs: int = 40,
    seed: int = 0,
    backbone: str = backbones.DEFAULT,
    say: Callable[[str], object] = logger.info,
) -> Demo:
    """Learn codes of the built-in sample with DFH, measure them, and write a page about it.

    The same arguments produce the same model and the same page, except for the times on it.

    Args:
        out: the folder for the page and the model; it must be new, empty, or an earlier demo.
        bits: length of the codes.
        image_size: side in pixels to which the 32-pixel images are enlarged for the backbone.
        epochs: passes over the training set.
        seed: of the training.
        backbone: the network that turns images into features.
        say: called with one line about each part.

    Raises:
        UsageError: ``out`` holds something else, or a number is out of its range.
    """
    codes.check_bits(bits)
    settings = Settings(epochs=epochs, seed=seed)
    network = backbones.create(backbone, image_size=image_size)
    folder = _claim(Path(out))
    seconds: dict[str, float] = {}
    began = time.perf_counter()

    def lap(part: str) -> str:
        """Store the seconds that this part took; return them for a message."""
        seconds[part] = max(0.0, time.perf_counter() - began - sum(seconds.values()))
        return f"{seconds[part]:.1f} s"

    collection = open_data("sample")
    split = resolve(collection)
    say(
        f"{len(collection):,} images of CIFAR-10 in {len(collection.classes)} classes: "
        f"{len(split.database):,} to learn from and to search, {len(split.query):,} as queries"
    )
    say(f"features: {network.name} at {image_size} px, the longest part, cached for next time …")
    # On the CPU everywhere: a GPU would produce other bits.
    feature_rows(TorchNetwork(network, torch.device("cpu")), collection)
    say(f"features of {len(collection):,} images: {lap('features')}")

    trained = fit(
        collection,
        bits=bits,
        backbone=backbone,
        image_size=image_size,
        finetune=False,
        settings=settings,
        device="cpu",
        out=folder / MODEL,
        overwrite=True,
    )
    # The rest of the time in fit went into writing the model.
    seconds["training"] = sum(trained.seconds.values())
    say(f"DFH, {bits} bits, {epochs} epochs: {seconds['training']:.1f} s")
    say(f"the model is in {folder / MODEL}: {lap('saving')}")

    evaluation = trained.evaluate()
    encoded = trained.hasher.encode_collection(collection, cached=True)
    if len(encoded.indices) != len(collection):
        raise FisherhashError(
            f"{len(encoded.skipped)} images of the built-in sample cannot be read; "
            "reinstall fisherhash"
        )
    demo = Demo(trained, split, settings, evaluation, encoded.codes, folder, seconds)
    say(
        f"mAP {evaluation.map:.4f}, expected over the order inside ties "
        f"({_bounds(evaluation, 4)}): {lap('evaluation')}"
    )

    # Drawn before its own time is known, which is on it too.
    values = _page_values(demo)
    said = lap("page")
    record = {
        "made_by": MADE_BY,
        "finished": True,
        "evaluation": evaluation.to_json(),
        "split": split.to_json(),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "versions": versions(),
    }
    page = pages.render(
        "demo.html",
        title=f"fisherhash: {bits}-bit image codes",
        description="Ten queries against binary codes learned with Deep Fisher Hashing.",
        seconds={name: seconds[name] for name in DEMO_PARTS},
        **values,
    )
    storage.write_files(folder, {PAGE: page, RECORD: storage.dump_json(record)})
    say(f"the page is {demo.page}: {said}; in all {time.perf_counter() - began:.1f} s")
    return demo


def _claim(folder: Path) -> Path:
    """Make sure that ``folder`` is new, empty or a demo, and mark it as a demo."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; the demo needs a folder. Choose another --out")
    if folder.is_dir() and any(folder.iterdir()) and not _is_demo(folder):
        raise UsageError(
            f"{folder} is not empty and was not made by the demo; nothing in it was changed. "
            "Choose another --out"
        )
    mark = {"made_by": MADE_BY, "finished": False}
    storage.write_file(folder / RECORD, storage.dump_json(mark))
    return folder


def _is_demo(folder: Path) -> bool:
    try:
        return storage.read_json(folder / RECORD).get("made_by") == MADE_BY
    except FisherhashError:
        return False


def _page_values(demo: Demo) -> dict[str, Any]:
    """What the template of the page shows."""
    hasher, evaluation, bits = demo.trained.hasher, demo.evaluation, demo.bits
    size = codes.code_bytes(bits)
    weight = "1 byte" if size == 1 else f"{size} bytes"
    expected = f"mAP, expected over the order inside ties; {_bounds(evaluation, 3)}"
    stored = f"{bits} bits; {size * evaluation.database:,} bytes for the whole database"
    queried = f"searched with {evaluation.queries:,} queries that took no part in training"
    tiles = [
        (f"{evaluation.map:.3f}", "mean average precision", expected),
        (weight, "per image", stored),
        (f"{evaluation.database:,}", "images in the database", queried),
    ]
    found = evaluation.precision_at.get(RESULTS_SHOWN)
    if found is not None:
        right = f"{RESULTS_SHOWN * found:.1f} of {RESULTS_SHOWN}"
        average = "on average over all queries, ties in random order"
        tiles.append((right, "nearest images are right", average))
    return {
        "bits": bits,
        "weight": weight,
        "tiles": tiles,
        "split": demo.split,
        "evaluation": evaluation,
        "classes": demo.trained.collection.classes,
        "rows": _query_rows(demo),
        "centres": _centres(demo),
        "charts": _charts(demo),
        "model": shlex.quote(str(demo.model)),
        "parts_of_demo": DEMO_PARTS,
        "info": DFH.info,
        "citation": CITATION,
        "network": hasher.backbone_name,
        "image_size": hasher.preprocessing.size,
        "settings": demo.settings,
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
    }


def _bounds(evaluation: Evaluation, digits: int) -> str:
    """The least and the greatest mAP that ties allow, in words."""
    low, high = evaluation.map_lower, evaluation.map_upper
    if low is None or high is None:
        return "its bounds are not known"
    return f"at worst {low:.{digits}f}, at best {high:.{digits}f}"


def _query_rows(demo: Demo) -> list[pages.Query]:
    """The first query of each class in hash order, not chosen by hand, with what it finds."""
    first: dict[int, int] = {}
    for item in hash_order(demo.trained.collection.names, demo.split.query, seed=0):
        first.setdefault(int(demo.numbers[item]), item)
    queries = np.array([first[number] for number in sorted(first)], dtype=np.int64)
    database = demo.split.database
    engine = Engine(demo.packed[database], demo.bits)
    ranked = zip(demo.split.query.tolist(), demo.evaluation.average_precision, strict=True)
    precisions, rows = dict(ranked), []
    found = zip(queries, *engine.search(demo.packed[queries], RESULTS_SHOWN), strict=True)
    for query, positions, distances in found:
        items = database[positions]
        right = demo.numbers[items] == demo.numbers[query]
        results = [
            pages.Result(demo.image(i), int(distance), demo.packed[i], demo.class_name(i), bool(ok))
            for i, distance, ok in zip(items, distances, right, strict=True)
        ]
        notes = [f"{right.sum()} of {len(results)} right", f"AP {precisions[int(query)]:.3f}"]
        name = demo.class_name(query)
        rows.append(pages.Query(demo.image(query), demo.packed[query], name, results, notes))
    return rows


def _centres(demo: Demo) -> dict[str, Any] | None:
    """The codes of the class centres and their distances; None for a method without centres."""
    method = demo.trained.method
    if not isinstance(method, DFH):
        return None
    centres = codes.pack(method.centers.T.cpu().numpy())
    distances = codes.hamming(centres, centres).astype(np.int64)
    count = len(centres)
    pairs = distances[np.triu_indices(count, 1)]
    numbers = demo.numbers[demo.split.database]
    near = codes.hamming(demo.packed[demo.split.database], centres)
    near = near[np.arange(len(numbers)), numbers]
    return {
        "codes": centres,
        "distances": distances.tolist(),
        "least": int(pairs.min()),
        "greatest": int(pairs.max()),
        "mean": float(pairs.mean()),
        # In every bit at most half of the classes can differ from the other half.
        "most": demo.bits * (count // 2) * math.ceil(count / 2) / len(pairs),
        "near": [float(near[numbers == number].mean()) for number in range(count)],
    }


def _charts(demo: Demo) -> list[Markup]:
    history, pairs = demo.trained.history, demo.evaluation.distances
    charts = [
        pages.line_chart(
            [
                pages.Series("whole loss", [row["loss"] for row in history], "area"),
                pages.Series("its pair term", [row["pair"] for row in history], "dashed"),
            ],
            [row["epoch"] for row in history],
            title="Training",
            x_label="epoch",
            y_label="mean loss per epoch; the rest is the distance of the logits to their bits",
        )
    ]
    if pairs is not None:
        similar, others = (
            [100 * count / (sum(counts) or 1) for count in counts]
            for counts in (pairs.similar, pairs.dissimilar)
        )
        charts.append(
            pages.line_chart(
                [
                    pages.Series("same class", similar, "area"),
                    pages.Series("different classes", others, "dashed"),
                ],
                pairs.distance,
                title="How far apart queries and database images are",
                x_label="Hamming distance",
                y_label="percent of the pairs of each kind",
            )
        )
    return charts
