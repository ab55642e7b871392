"""Measures training on images that stay on disk: peak memory, and speed beside images in memory.

    python benchmarks/streaming.py [--quick] [--device cuda] [--json FILE]

Every training is a process of its own. The images are drawn from their numbers, so that nothing but
the cache is read from the disk; they are decoded once, by the first training, and the peak memory
is that of a later one. Speed is images per second in the fastest epoch, on the same images in
memory and on disk. The network's weights are random. Needs torch, numpy and Pillow.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

CLASSES = 10


class DrawnImages:
    """A reader whose images are noise around a colour per class."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size

    def open(self, index: int) -> Image.Image:
        rng = np.random.default_rng(index)
        tint = 20 * (index % CLASSES)
        pixels = rng.integers(0, 60, (self.size, self.size, 3), dtype=np.uint8) + np.uint8(tint)
        return Image.fromarray(pixels)

    def fingerprint(self) -> str:
        return f"drawn images {self.count} {self.size}"


def train(given: argparse.Namespace) -> dict[str, Any]:
    """One training in this process."""
    import torch

    from fisherhash import backbones
    from fisherhash.data.collection import Collection
    from fisherhash.data.splits import Split
    from fisherhash.training.fitting import fit
    from fisherhash.training.settings import Settings

    count = given.images
    labels = np.eye(CLASSES, dtype=np.uint8)[np.arange(count) % CLASSES]
    names = [f"{i:08d}" for i in range(count)]
    classes = tuple("abcdefghij")
    reader = DrawnImages(count, given.size)
    collection = Collection("drawn", names, labels, classes, reader)
    few = np.arange(4)
    every = np.arange(4, count)
    split = Split("drawn", None, every, few[:2], few[2:], None, checksum="drawn", names=names)
    settings = Settings(
        epochs=given.epochs, batch_size=given.batch, head_epochs=1, learning_rate=1e-4
    )
    torch.manual_seed(0)
    network = backbones.create(given.backbone, pretrained=False, image_size=given.size)
    began = time.perf_counter()
    found = fit(
        collection,
        protocol=split,
        backbone=network,
        bits=48,
        finetune=True,
        settings=settings,
        device=given.device,
        stream=given.stream,
    )
    seconds = min(row["seconds"] for row in found.history)
    steps = len(every) // given.batch
    return {
        "images": count,
        "stream": given.stream,
        "peak_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "images_per_second": round(steps * given.batch / seconds, 1),
        "epoch_seconds": [row["seconds"] for row in found.history],
        "seconds": round(time.perf_counter() - began, 1),
        "loss": found.history[-1]["loss"],
    }


def run(words: list[str], cache: str, images: int, *, stream: bool, epochs: int) -> dict[str, Any]:
    """One training in a new process."""
    command = [sys.executable, __file__, "--one", "--images", str(images), "--epochs", str(epochs)]
    command += ["--stream"] if stream else []
    environment = os.environ | {"FISHERHASH_CACHE": cache}
    done = subprocess.run([*command, *words], env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures training on images on disk.")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--few", type=int, default=20_000)
    parser.add_argument("--many", type=int, default=200_000)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--backbone", default="efficientnet-lite0")
    parser.add_argument("--device", default=None)
    parser.add_argument("--cache", default=None, help="folder for decoded images; by default new")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--images", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=3, help=argparse.SUPPRESS)
    parser.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.quick:
        given.few, given.many, given.size, given.backbone = 400, 4000, 32, "tiny"
    if given.one:
        print(json.dumps(train(given)))
        return
    words = ["--size", str(given.size), "--batch", str(given.batch), "--backbone", given.backbone]
    words += ["--device", given.device] if given.device else []
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cache = given.cache or folder
        # The first training of a set decodes it; its memory is that of the decoder, too.
        for images, stream, epochs, kept in (
            (given.few, True, 1, False),
            (given.few, True, 3, True),
            (given.few, False, 3, True),
            (given.many, True, 1, False),
            (given.many, True, 2, True),
        ):
            row = run(words, cache, images, stream=stream, epochs=epochs)
            where = "on disk" if stream else "in memory"
            about = "" if kept else ", with decoding"
            print(
                f"{images:,} images, {where}: {row['images_per_second']:,.0f} images/s, peak "
                f"{row['peak_megabytes']:,} MB, {row['seconds']:.0f} s{about}",
                flush=True,
            )
            rows += [row] if kept else []
    few, resident, many = rows
    memory = many["peak_megabytes"] / few["peak_megabytes"]
    speed = few["images_per_second"] / resident["images_per_second"]
    print(f"memory of {given.many:,} images: {memory:.2f} times that of {given.few:,}")
    print(f"speed on disk: {100 * speed:.0f} % of that in memory; with {given.many:,} images "
          f"{100 * many['images_per_second'] / resident['images_per_second']:.0f} %")  # fmt: skip
    if given.json is not None:
        about = {"size": given.size, "batch": given.batch, "backbone": given.backbone}
        about |= {"rows": rows, "memory_ratio": memory, "speed_ratio": speed}
        given.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
