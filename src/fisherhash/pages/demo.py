"""The demo: the main job on the built-in sample, and one page that shows what came out."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fisherhash import backbones, codes
from fisherhash.data.protocols import Split, resolve
from fisherhash.data.sources import open_data
from fisherhash.data.splits import hash_order
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.evaluation import Evaluation, retrieve
from fisherhash.model.features import Extractor
from fisherhash.model.hasher import versions
from fisherhash.pages import demo_page
from fisherhash.pages.demo_page import MODEL, SHOWN, Shown
from fisherhash.system import storage
from fisherhash.training.fitting import Trained, fit
from fisherhash.training.settings import Settings

logger = logging.getLogger(__name__)

PAGE, RECORD = "index.html", "demo.json"
MADE_BY = "fisherhash demo"


@dataclass(frozen=True)
class DemoResult:
    """What the demo made.

    Attributes:
        page: the HTML page.
        model: the model folder.
        evaluation: how good the codes are.
        seconds: how long each part took.
    """

    page: Path
    model: Path
    evaluation: Evaluation
    seconds: dict[str, float]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch to one thread.

    The work comes in small steps, and on a busy machine the waiting of threads for each other was
    seen to make it ten times slower. It also makes the bits the same whatever the number of cores.
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
) -> DemoResult:
    """Learn codes of the built-in sample with DFH, measure them, and write a page about it.

    The same arguments give the same model and the same page, but for the times on it.

    Args:
        out: the folder for the page and the model; it must be new, empty, or a former demo.
        bits: length of the codes.
        image_size: side in pixels that the 32-pixel images are enlarged to for the backbone.
        epochs: passes over the training set.
        seed: of the training.
        backbone: what turns images into features.
        say: told one line about each part.

    Raises:
        UsageError: ``out`` holds something else, or a number is out of its range.
    """
    codes.check_bits(bits)
    settings = Settings(epochs=epochs, seed=seed)
    network = backbones.create(backbone, image_size=image_size)
    folder = _claim(Path(out))
    seconds: dict[str, float] = {}

    collection = open_data("sample")
    split = resolve(collection)
    say(
        f"{len(collection):,} images of CIFAR-10 in {len(collection.classes)} classes: "
        f"{len(split.database):,} to learn from and to search, {len(split.query):,} to ask with"
    )
    say(f"features: {network.name} at {image_size} px, the longest part, kept for the next time …")
    clock = _Clock(seconds)
    # One place on every machine: a GPU would give other bits.
    Extractor(network, torch.device("cpu")).of_collection(collection)
    clock.lap("features")
    say(f"features of {len(collection):,} images: {seconds['features']:.1f} s")

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
    clock.lap("training")
    # Inside fit: opening the cached features again, the loop, and then writing the model.
    learning = sum(trained.seconds.values())
    seconds["saving"] = max(0.0, seconds["training"] - learning)
    seconds["training"] = learning
    say(f"DFH, {bits} bits, {epochs} epochs: {seconds['training']:.1f} s")
    say(f"the model is in {folder / MODEL}: {seconds['saving']:.1f} s")

    evaluation = trained.evaluate()
    shown = _retrieve(trained, split)
    clock.lap("evaluation")
    say(
        f"mAP {evaluation.map:.4f}, expected over the order inside ties "
        f"({demo_page.bounds(evaluation, 4)}): {seconds['evaluation']:.1f} s"
    )

    clock.lap("page")
    html = demo_page.write(trained, evaluation, shown, split, settings, folder, seconds)
    record = {
        "made_by": MADE_BY,
        "finished": True,
        "evaluation": evaluation.to_json(),
        "split": split.to_json(),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "versions": versions(),
    }
    storage.write_files(
        folder,
        {
            PAGE: storage.write_text(html),
            RECORD: storage.write_text(storage.dump_json(record)),
        },
    )
    say(f"the page is {folder / PAGE}: {seconds['page']:.1f} s; in all {clock.total():.1f} s")
    return DemoResult(folder / PAGE, folder / MODEL, evaluation, seconds)


class _Clock:
    """Writes down the seconds since the last lap."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.began = self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = now - self.last
        self.last = now

    def total(self) -> float:
        return time.perf_counter() - self.began


def _claim(folder: Path) -> Path:
    """Make sure that ``folder`` is new, empty or ours, and leave the mark that it is."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; the demo needs a folder. Choose another --out")
    if folder.is_dir() and any(folder.iterdir()) and not _is_demo(folder):
        raise UsageError(
            f"{folder} is not empty and was not made by the demo; nothing in it was changed. "
            "Choose another --out"
        )
    mark = storage.dump_json({"made_by": MADE_BY, "finished": False})
    storage.write_files(folder, {RECORD: storage.write_text(mark)})
    return folder


def _is_demo(folder: Path) -> bool:
    try:
        record: Any = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("made_by") == MADE_BY


def _retrieve(trained: Trained, split: Split) -> Shown:
    """The first query of each class in hash order, and its nearest images."""
    collection = trained.collection
    encoded = trained.hasher.encode_collection(collection, cached=True)
    if len(encoded.indices) != len(collection):
        raise FisherhashError(
            f"{len(encoded.skipped)} images of the built-in sample cannot be read; "
            "reinstall fisherhash"
        )
    numbers = collection.labels.argmax(axis=1)
    first: dict[int, int] = {}
    for item in hash_order(collection.names, split.query, seed=0):
        first.setdefault(int(numbers[item]), item)
    queries = np.array([first[number] for number in sorted(first)], dtype=np.int64)
    matches = retrieve(
        encoded.codes[queries], encoded.codes[split.database], SHOWN, trained.hasher.bits
    )
    right = matches.similar(collection.labels[queries], collection.labels[split.database])
    return Shown(queries, encoded.codes, matches, right)
