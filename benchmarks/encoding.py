"""Images per second of ``index sync``, beside what limits it and beside what people write.

    python benchmarks/encoding.py --work FOLDER [--small 2000] [--large 200] [--source PHOTOS]
        [--model MODEL …] [--repeats 3] [--out FILE]

Two folders of JPEG files are written to ``--work`` once: about 500 pixels wide, and 12 megapixels.
They are mosaics of real photos, enlarged, with sensor noise, so that their files are as large as
those of cameras. Measured in turn, on the same cores:

- ``eager``: a plain script, eager torch on batches of 32 images that Pillow decodes in the same
  process, or in the processes of a DataLoader;
- ``decoding``: one process per core that only decodes and resizes, as the model's preprocessing
  says; ``decoding MODEL`` where that is not how the first model does it;
- ``inference``: one process per core that runs ONNX Runtime, one thread each, on decoded images;
- ``sync``: the command ``fisherhash index sync`` on a new index, from its start to its end.

The bound is 1 / (1 / decoding + 1 / inference). Every number is the median of the repeats. Prints
JSON; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fisherhash.data.cifar import open_sample
from fisherhash.data.folders import walk_images
from fisherhash.data.images import load_image
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.workers import MEMORY
from fisherhash.model.hasher import Hasher
from fisherhash.system.cores import available_cores

MODELS = ("general-64", "general-64-int8", "general2-128")
BATCH = 32
DECODED = 256
"""Decoded images that inference alone runs on, again and again."""
NOISE = 3.0
QUALITY = 90


@dataclass(frozen=True)
class Kind:
    """A folder of images: its name, the size of one image, and how much its tiles are enlarged."""

    name: str
    width: int
    height: int
    enlarged: int


SMALL, LARGE = Kind("small", 500, 375, 2), Kind("large", 4000, 3000, 4)


def make_images(kind: Kind, count: int, folder: Path, source: Path | None) -> None:
    """Write the images of a kind that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [number for number in range(count) if not (folder / f"{number:05d}.jpg").exists()]
    for extra in sorted(folder.glob("*.jpg"))[count:]:
        extra.unlink()
    if not missing:
        return
    tiles = _tiles(source)
    for number in missing:
        rng = np.random.default_rng([kind.width, number])
        canvas = Image.new("RGB", (kind.width, kind.height))
        top = 0
        while top < kind.height:
            left, tall = 0, 0
            while left < kind.width:
                tile = tiles(int(rng.integers(1 << 30)))
                size = (tile.width * kind.enlarged, tile.height * kind.enlarged)
                canvas.paste(tile.resize(size, Image.Resampling.BICUBIC), (left, top))
                left, tall = left + size[0], max(tall, size[1])
            top += tall
        noise = rng.normal(0, NOISE, (kind.height, kind.width, 1)).astype(np.float32)
        pixels = (np.asarray(canvas, dtype=np.float32) + noise).clip(0, 255).astype(np.uint8)
        path = folder / f"{number:05d}.jpg"
        Image.fromarray(pixels).save(f"{path}.part", "JPEG", quality=QUALITY)
        os.replace(f"{path}.part", path)


def _tiles(source: Path | None) -> Callable[[int], Image.Image]:
    if source is None:
        images = open_sample()
        return lambda number: images.reader.open(number % len(images))
    files = [file.path for file in walk_images(source).files]
    if not files:
        sys.exit(f"{source} holds no images")
    return lambda number: load_image(files[number % len(files)])


def in_processes(task: Callable[..., None], shares: Sequence[tuple[Any, ...]]) -> float:
    """Seconds from the moment that all processes are ready to the end of the last one."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(shares) + 1)
    processes = [context.Process(target=task, args=(barrier, *share)) for share in shares]
    theirs = dict(os.environ)
    os.environ |= MEMORY | theirs  # as in the processes of ``index sync``
    for process in processes:
        process.start()
    for name in MEMORY.keys() - theirs.keys():
        del os.environ[name]
    barrier.wait()
    start = time.perf_counter()
    for process in processes:
        process.join()
    seconds = time.perf_counter() - start
    if any(process.exitcode for process in processes):
        sys.exit("a process failed; see its message above")
    return seconds


def decode_share(barrier: Any, paths: list[str], preprocessing: Preprocessing) -> None:
    """Decode and resize image files; the first one is not timed."""
    preprocessing.pixels(load_image(paths[0], enough=preprocessing.enough))
    barrier.wait()
    for path in paths:
        preprocessing.pixels(load_image(path, enough=preprocessing.enough))


def infer_share(barrier: Any, model: str, pixels: Any, count: int) -> None:
    """Run ONNX Runtime on decoded images, one after the other."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    name, output = session.get_inputs()[0].name, session.get_outputs()[0].name
    session.run([output], {name: pixels[:1]})
    barrier.wait()
    for number in range(count):
        row = number % len(pixels)
        session.run([output], {name: pixels[row : row + 1]})


def eager_torch(network: Any, hasher: Hasher, paths: list[str], workers: int) -> float:
    """Seconds of the script that people write: a data set, a loader, a network, a loop."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(available_cores())
    preprocessing = hasher.preprocessing
    network = network.to(memory_format=torch.contiguous_format).eval()
    start = time.perf_counter()
    files: Any = _Files(paths, preprocessing)
    loader = DataLoader(files, BATCH, num_workers=workers)
    with torch.no_grad():
        for batch in loader:
            np.packbits(hasher.head.logits(network(batch).numpy()) > 0, axis=1)
    return time.perf_counter() - start


@dataclass
class _Files:
    paths: list[str]
    preprocessing: Preprocessing

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Any:
        with Image.open(self.paths[number]) as image:
            # As a transform does it: the whole image, resized, then cropped.
            rgb, side = image.convert("RGB"), self.preprocessing.size
            scale = side / self.preprocessing.crop / min(rgb.size)
            size = (max(side, round(rgb.width * scale)), max(side, round(rgb.height * scale)))
            rgb = rgb.resize(size, Image.Resampling.BICUBIC)
        left, top = (rgb.width - side) // 2, (rgb.height - side) // 2
        cut = np.asarray(rgb.crop((left, top, left + side, top + side)))
        return np.ascontiguousarray(cut.transpose(2, 0, 1))


def sync(folder: Path, index: Path, model: str) -> dict[str, float]:
    """Seconds of the command, from its first line to its last, and of its verb alone."""
    index.unlink(missing_ok=True)
    words = ["index", "sync", str(index), str(folder), "--model", model, "--json"]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", "from fisherhash.cli import main; main()", *words],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    seconds = time.perf_counter() - start
    return {"command": seconds, "verb": float(json.loads(done.stdout)["seconds"])}


def shared_out(paths: list[str], count: int) -> Iterator[list[str]]:
    """Every n-th path per process, so that all have as much to do."""
    return (paths[start::count] for start in range(count))


def measure(kind: Kind, folder: Path, work: Path, models: list[str], repeats: int) -> Any:
    """All numbers of one folder of images."""
    cores = available_cores()
    paths = sorted(str(path) for path in folder.glob("*.jpg"))
    found: dict[str, list[float]] = {}
    hashers = {name: Hasher.load(name) for name in models}
    sources = {name: _exported(hasher, work / "bare.onnx") for name, hasher in hashers.items()}
    first_model = hashers[models[0]]
    network = _torch_network(first_model)

    def note(name: str, seconds: float, count: int) -> None:
        found.setdefault(name, []).append(count / seconds)

    some = paths[:DECODED]
    for _ in range(repeats):
        if network is not None:
            few = paths[: max(BATCH, len(paths) // 4)]
            note("eager", eager_torch(network, first_model, few, 0), len(few))
            seconds = eager_torch(network, first_model, few, cores)
            note("eager, loader processes", seconds, len(few))
        first = first_model.preprocessing
        for name, hasher in hashers.items():
            how = hasher.preprocessing
            if name == models[0] or how != first:
                shares = [(part, how) for part in shared_out(paths, cores)]
                key = "decoding" if how == first else f"decoding {name}"
                note(key, in_processes(decode_share, shares), len(paths))
            pixels = np.stack([how.pixels(load_image(path)) for path in some[:BATCH]]).transpose(
                0, 3, 1, 2
            )
            pixels, each = np.ascontiguousarray(pixels), math.ceil(len(some) / cores)
            seconds = in_processes(infer_share, [(sources[name], pixels, each)] * cores)
            note(f"inference {name}", seconds, each * cores)
            times = sync(folder, work / "encoding.index", name)
            note(f"sync {name}", times["command"], len(paths))
            note(f"sync {name}, without start-up", times["verb"], len(paths))
    rates = {name: statistics.median(values) for name, values in found.items()}
    (work / "encoding.index").unlink(missing_ok=True)
    return {
        "images": len(paths),
        "size": [kind.width, kind.height],
        "mean_bytes": round(statistics.mean(os.path.getsize(path) for path in paths)),
        "images_per_second": {name: round(rate, 2) for name, rate in rates.items()},
        "models": {name: _ratios(name, rates) for name in models},
        "all_repeats": {name: [round(v, 2) for v in values] for name, values in found.items()},
    }


def _ratios(model: str, rates: dict[str, float]) -> dict[str, float | None]:
    decoding = rates.get(f"decoding {model}", rates["decoding"])
    bound = 1 / (1 / decoding + 1 / rates[f"inference {model}"])
    speed, verb = rates[f"sync {model}"], rates[f"sync {model}, without start-up"]
    eager = rates.get("eager")
    loaders = rates.get("eager, loader processes")
    return {
        "bound": round(bound, 2),
        "of_bound": round(speed / bound, 3),
        "of_bound_without_start_up": round(verb / bound, 3),
        "of_bare_onnx": round(speed / rates[f"inference {model}"], 3),
        "times_eager": None if eager is None else round(speed / eager, 2),
        "times_eager_with_loader_processes": None if loaders is None else round(speed / loaders, 2),
    }


def _exported(hasher: Any, base: Path) -> str:
    """The ONNX file of a hasher, under a name of its own."""
    content = hasher.network.content()
    path = base.with_name(f"{base.stem}-{hasher.fingerprint()[:12]}.onnx")
    path.write_bytes(content)
    return str(path)


def _torch_network(hasher: Hasher) -> Any:
    """The network of a model in torch, with any weights; None without torch."""
    try:
        from fisherhash import backbones
    except ImportError as error:
        print(f"no eager torch: {error}", file=sys.stderr)
        return None
    return backbones.create(hasher.backbone_name, pretrained=False)


def summary(parts: dict[str, Any], models: list[str]) -> dict[str, Any]:
    """Both folders together, as one collection of so many images."""
    total = sum(part["images"] for part in parts.values())

    def together(name: str) -> float | None:
        speeds = [part["images_per_second"].get(name) for part in parts.values()]
        if any(speed is None for speed in speeds):
            return None
        seconds = [p["images"] / s for p, s in zip(parts.values(), speeds, strict=True)]
        return total / sum(seconds)

    found = {}
    for model in models:
        sync_, eager = together(f"sync {model}"), together("eager")
        bounds = [p["images"] / p["models"][model]["bound"] for p in parts.values()]
        found[model] = {
            "sync": None if sync_ is None else round(sync_, 2),
            "of_bound": None if sync_ is None else round(sync_ * sum(bounds) / total, 3),
            "times_eager": None if sync_ is None or eager is None else round(sync_ / eager, 2),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="where images are written")
    parser.add_argument("--small", type=int, default=2000, help="images of about 500 pixels")
    parser.add_argument("--large", type=int, default=200, help="images of 12 megapixels")
    parser.add_argument("--source", type=Path, help="photos to make them from; else the sample")
    parser.add_argument(
        "--model", action="append", help=f"repeat for several; else {', '.join(MODELS)}"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the JSON here, too")
    given = parser.parse_args()
    models: list[str] = given.model or list(MODELS)
    parts: dict[str, Any] = {}
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    for kind, count in ((SMALL, given.small), (LARGE, given.large)):
        if count:
            make_images(kind, count, given.work / kind.name, given.source)
            folder = given.work / kind.name
            parts[kind.name] = measure(kind, folder, given.work, models, given.repeats)
    result = {
        "cores": available_cores(),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "load_average_before": load,
        "repeats": given.repeats,
        **parts,
        "together": summary(parts, models),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
