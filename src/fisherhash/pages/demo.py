"""The demo: train, measure and search the built-in sample, and write a page about it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fisherhash import backbones, codes
from fisherhash.data.protocols import resolve
from fisherhash.data.sources import open_data
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.model.folder import versions
from fisherhash.model.networks import feature_rows
from fisherhash.model.torch_network import TorchNetwork
from fisherhash.pages import demo_page
from fisherhash.pages.demo_page import MODEL, PAGE, Demo
from fisherhash.system import storage
from fisherhash.training.fitting import fit
from fisherhash.training.settings import Settings

logger = logging.getLogger(__name__)

RECORD = "demo.json"
MADE_BY = "fisherhash demo"


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
        f"({demo_page.bounds(evaluation, 4)}): {lap('evaluation')}"
    )

    blocks = demo_page.blocks(demo)
    said = lap("page")
    record = {
        "made_by": MADE_BY,
        "finished": True,
        "evaluation": evaluation.to_json(),
        "split": split.to_json(),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "versions": versions(),
    }
    page = demo_page.demo_html(demo, blocks)
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
