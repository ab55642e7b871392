"""Measures training on images that stay on disk: peak memory, and speed beside images in memory.

    python benchmarks/streaming.py [--quick] [--device cuda] [--seconds N] [--json FILE]

Every training is a process of its own, and FILE is written after each. The images are drawn from
their numbers, so that nothing but the cache is read from the disk; a process before the trainings
decodes them. Speed is images per second in the fastest epoch, on the same images in memory and on
disk; all epochs train the whole network, whose weights are random. Needs torch, numpy and Pillow.
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

    def open(self, index: int, *, enough: int | None = None) -> Image.Image:
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
    from fisherhash.data.pixels import pixel_rows
    from fisherhash.data.splits import Split
    from fisherhash.model.networks import feature_rows
    from fisherhash.model.torch_network import TorchNetwork
    from fisherhash.system.devices import choose_device, device_name
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
    torch.manual_seed(0)
    network = backbones.create(given.backbone, pretrained=False, image_size=given.size)
    device = choose_device(given.device)
    began = time.perf_counter()
    if given.decode:
        feature_rows(TorchNetwork(network, device), collection, every, on_disk=True)
        pixel_rows(collection, every, network.preprocessing, on_disk=True)
        return {"images": count, "peak_megabytes": _peak(), "seconds": _since(began)}
    split = Split("drawn", None, every, few[:2], few[2:], None, checksum="drawn", names=names)
    settings = Settings(
        epochs=given.epochs, batch_size=given.batch, head_epochs=0, learning_rate=1e-4
    )
    found = fit(
        collection,
        protocol=split,
        method=given.method,
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
        "peak_megabytes": _peak(),
        "images_per_second": round(steps * given.batch / seconds, 1),
        "epoch_seconds": [row["seconds"] for row in found.history],
        "seconds": _since(began),
        "loss": found.history[-1]["loss"],
        "device": device_name(device),
        "load_average": round(os.getloadavg()[0], 1),
    }


def _peak() -> int:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 1)


def run(words: list[str], cache: str, seconds: float) -> dict[str, Any]:
    """One training in a new process: its row, or why there is none."""
    if seconds <= 0:
        return {"why": "the time is over"}
    environment = os.environ | {"FISHERHASH_CACHE": cache}
    command = [sys.executable, __file__, "--one", *words]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"why": "the time is over"}
    if done.returncode:
        return {"why": done.stderr.strip()[-2000:] or f"exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures training on images on disk.")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--few", type=int, default=20_000)
    parser.add_argument("--many", type=int, default=200_000)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--backbone", default="efficientnet-lite0")
    parser.add_argument("--method", default="dfh")
    parser.add_argument("--epochs", type=int, default=3, help="of a training that is measured")
    parser.add_argument("--device", default=None)
    parser.add_argument("--cache", default=None, help="folder for decoded images; by default new")
    parser.add_argument("--seconds", type=float, default=10**6, help="start nothing after this")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--images", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--decode", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.quick:
        given.few, given.many, given.size, given.backbone = 400, 4000, 32, "tiny"
    if given.one:
        print(json.dumps(train(given)))
        return
    until = time.monotonic() + given.seconds
    words = ["--size", str(given.size), "--batch", str(given.batch), "--backbone", given.backbone]
    words += ["--method", given.method]
    words += ["--device", given.device] if given.device else []
    report: dict[str, Any] = {"size": given.size, "batch": given.batch}
    report |= {"backbone": given.backbone, "method": given.method, "rows": [], "failed": []}
    with tempfile.TemporaryDirectory() as folder:
        for name, images, how, epochs in (
            ("decode few", given.few, "--decode", 0),
            ("few on disk", given.few, "--stream", given.epochs),
            ("few in memory", given.few, "", given.epochs),
            ("decode many", given.many, "--decode", 0),
            ("many on disk", given.many, "--stream", max(1, given.epochs - 1)),
        ):
            more = ["--images", str(images), "--epochs", str(epochs)]
            more += [how] if how else []
            row = {"name": name} | run(
                [*more, *words], given.cache or folder, until - time.monotonic()
            )
            report["failed" if "why" in row else "rows"].append(row)
            print(line(row), flush=True)
            report |= ratios({row["name"]: row for row in report["rows"]})
            if given.json is not None:
                given.json.write_text(json.dumps(report, indent=1) + "\n")
    for name, ratio in ratios({row["name"]: row for row in report["rows"]}).items():
        print(f"{name.replace('_', ' ')}: {ratio:.3f}")
    raise SystemExit(1 if report["failed"] else 0)


def line(row: dict[str, Any]) -> str:
    if "why" in row:
        return f"{row['name']}: failed: {row['why']}"
    speed = (
        f"{row['images_per_second']:,.0f} images/s, {row['device']}, " if "device" in row else ""
    )
    return (
        f"{row['name']}: {row['images']:,} images, {speed}peak {row['peak_megabytes']:,} MB, "
        f"{row['seconds']:.0f} s"
    )


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How trainings compare, as far as they are there."""
    wanted = {
        "memory_of_many_by_few": ("many on disk", "few on disk", "peak_megabytes"),
        "speed_on_disk_by_memory": ("few on disk", "few in memory", "images_per_second"),
        "speed_of_many_on_disk_by_memory": ("many on disk", "few in memory", "images_per_second"),
    }
    return {
        name: rows[one][what] / rows[two][what]
        for name, (one, two, what) in wanted.items()
        if one in rows and two in rows
    }


if __name__ == "__main__":
    main()
