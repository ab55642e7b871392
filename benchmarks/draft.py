"""What decoding large JPEG files at a part of their size changes, for the hashers that do so.

    python benchmarks/draft.py --data FOLDER [--data …] [--fit] [--images 1000] [--json FILE]
    python benchmarks/draft.py --files FOLDER [--images 20] [--json FILE]

Images of labelled data are enlarged so that their shorter sides have 1,800 to 3,000 pixels, get
sensor noise, and become JPEG files. The files are decoded in full, and at 1/2, 1/4 or 1/8 of their
size as ``Preprocessing.draft`` chooses, for several values of it. Each image queries all others.
P@10 is the share of the ten nearest that have a label in common with it, expected over ties. A
difference is that from decoding in full, with its standard error over the queries. Enlarged images
have less detail than photos of that size. With ``--fit``, the codes are such as ``index sync`` fits
to the images of a folder.

With ``--files``, processor time per JPEG file of a folder: decoding at each scale, the resize after
it, and both, with Pillow in the memory that workers have and in the usual one; with simplejpeg,
too, if it is installed. Grey at 1/8 of the size is little more than the entropy decoding, which no
scale avoids.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fisherhash.codes import hamming, pack
from fisherhash.data.images import load_image
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.sources import open_data
from fisherhash.data.splits import hash_order
from fisherhash.data.workers import MEMORY
from fisherhash.evaluation import evaluate
from fisherhash.index.images.choosing import DRAFT, FITTED_BITS
from fisherhash.model import builtin
from fisherhash.model.hasher import Hasher
from fisherhash.model.itq_fit import fit_itq
from fisherhash.system.storage import dump_json

MODEL = "general2-256"
LENGTHS = (64, 128, 256)
DRAFTS = (0.0, 1.5, 3.0)
"""0 decodes in full."""
LEAST, MOST = 1800, 3000
NOISE = 3.0
QUALITY = 90


def enlarged(image: Image.Image, rng: np.random.Generator, noise: np.ndarray) -> bytes:
    """A JPEG file of an image with several megapixels."""
    scale = rng.integers(LEAST, MOST + 1) / min(image.size)
    size = (round(image.width * scale), round(image.height * scale))
    pixels = np.asarray(image.resize(size, Image.Resampling.BICUBIC), dtype=np.float32)
    top, left = rng.integers(0, noise.shape[0] - max(size) + 1, 2)
    noisy = pixels + noise[top : top + size[1], left : left + size[0], None]
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def measure(data: str, count: int, *, fitted: bool = False) -> dict[str, Any]:
    """P@10, mAP and the bits that differ, of every way to decode.

    Args:
        data: labelled images.
        count: how many of them.
        fitted: fit codes to the features of these images, for every way anew; bits that differ are
            those of one fit.
    """
    model, lengths = (builtin.DEFAULT_HASHER, (FITTED_BITS,)) if fitted else (MODEL, LENGTHS)
    hasher, collection = Hasher.load_builtin(model), open_data(data)

    def compute(pixels: np.ndarray) -> np.ndarray:
        found = hasher.check_takes_images().features(pixels)
        return found if fitted else hasher.head.logits(found)

    drafts = (0.0, DRAFT) if fitted else DRAFTS
    chosen = hash_order(list(collection.names), range(len(collection)), seed=0)[:count]
    rng = np.random.default_rng(0)
    noise = rng.normal(0, NOISE, (MOST + 64, MOST + 64)).astype(np.float32)
    ways = {draft: dataclasses.replace(hasher.preprocessing, draft=draft) for draft in drafts}
    rows: dict[float, list[np.ndarray]] = {draft: [] for draft in drafts}
    from_memory: dict[float, list[np.ndarray]] = {draft: [] for draft in drafts}
    scales: dict[float, Counter[str]] = {draft: Counter() for draft in drafts}
    for number in chosen:
        file = enlarged(collection.reader.open(int(number)), rng, noise)
        whole = load_image(file)
        for draft, way in ways.items():
            image = load_image(file, enough=way.enough)
            scales[draft][f"1/{round(whole.height / image.height)}"] += 1
            for source, found in ((image, rows), (whole, from_memory)):
                pixels = np.ascontiguousarray(way.pixels(source).transpose(2, 0, 1))
                found[draft].append(compute(pixels[None])[0])
    labels = collection.labels[chosen]
    results: dict[str, Any] = {}
    for draft in drafts:
        results[str(draft)] = {"scales": dict(sorted(scales[draft].items()))}
        for bits in lengths:
            own, full = np.stack(rows[draft]), np.stack(rows[0.0])
            logits = fitted_logits(own, bits) if fitted else lambda found, n=bits: found[:, :n]
            usual = fitted_logits(full, bits) if fitted else logits
            here, memory = logits(own), logits(np.stack(from_memory[draft]))
            scores, before = scored(here, labels), scored(usual(full), labels)
            results[str(draft)][str(bits)] = {
                **{name: round(float(np.nanmean(values)), 4) for name, values in scores.items()},
                "difference": {
                    name: _with_error(values - before[name]) for name, values in scores.items()
                },
                "bits that differ from decoding in full": _differing(here, logits(full)),
                "bits that differ from an image in memory": _differing(here, memory),
            }
    return {"data": collection.name, "images": len(chosen), "draft": results}


def fitted_logits(features: np.ndarray, bits: int) -> Callable[[np.ndarray], np.ndarray]:
    """The codes that are fitted to features: from features to logits."""
    weight, offset = fit_itq(features, bits)
    return lambda found: found @ weight + offset


def scored(logits: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """P@10 and average precision of each image as a query for all others."""
    codes = pack(logits)
    every = np.arange(len(codes))
    found = evaluate(codes, codes, labels, labels, bits=logits.shape[1], self_index=every)
    distances = hamming(codes, codes).astype(np.int64)
    np.fill_diagonal(distances, logits.shape[1] + 1)
    similar = labels.astype(np.int64) @ labels.T.astype(np.int64) > 0
    tenth = np.partition(distances, 9, axis=1)[:, 9:10]
    sure, tied = distances < tenth, distances == tenth
    share = (10 - sure.sum(1)) / tied.sum(1)
    right = (sure & similar).sum(1) + share * (tied & similar).sum(1)
    return {"P@10": right / 10, "mAP": found.average_precision}


def _with_error(differences: np.ndarray) -> list[float]:
    known = differences[~np.isnan(differences)]
    return [round(float(known.mean()), 4), round(float(known.std() / len(known) ** 0.5), 4)]


def _differing(one: np.ndarray, other: np.ndarray) -> float:
    return round(float(((one > 0) != (other > 0)).sum(1).mean()), 2)


def milliseconds(files: list[bytes], task: Callable[[bytes], object]) -> float:
    """Processor time per file, the least of three runs each."""
    times = []
    for file in files:
        least = float("inf")
        for _ in range(3):
            start = time.process_time()
            task(file)
            least = min(least, time.process_time() - start)
        times.append(1000 * least)
    return round(statistics.mean(times), 1)


def time_files(folder: Path, count: int) -> dict[str, Any]:
    """Milliseconds of decoding and resizing JPEG files at each scale, in this process."""
    files = [path.read_bytes() for path in sorted(folder.glob("*.jpg"))[:count]]
    how, found = Preprocessing(), {}
    for scale in (1, 2, 4, 8):

        def decoded(file: bytes, mode: str | None = None, scale: int = scale) -> Image.Image:
            image = Image.open(io.BytesIO(file))
            if scale > 1:
                image.draft(mode, (image.width // scale, image.height // scale))
            image.load()
            return image

        decoding = milliseconds(files, decoded)
        both = milliseconds(files, lambda file, decoded=decoded: how.pixels(decoded(file)))
        found[f"1/{scale}"] = {"decoding": decoding, "decoding and resize": both}
        if scale == 8:
            found["1/8"]["grey"] = milliseconds(files, lambda file, d=decoded: d(file, "L"))
    return found


def time_simplejpeg(folder: Path, count: int) -> dict[str, Any]:
    """Milliseconds of decoding alone with simplejpeg, in full into a buffer that stays."""
    import simplejpeg  # pyright: ignore[reportMissingImports]

    files = [path.read_bytes() for path in sorted(folder.glob("*.jpg"))[:count]]
    height, width, *_ = simplejpeg.decode_jpeg_header(files[0])
    buffer = np.empty((height, width, 3), np.uint8)
    found = {}
    for name, options in (("exact", {}), ("fast", {"fastdct": True, "fastupsample": True})):
        found[f"1/1, {name}"] = milliseconds(
            files, lambda file, o=options: simplejpeg.decode_jpeg(file, buffer=buffer, **o)
        )
    for scale in (2, 4, 8):
        least = {"min_height": height // scale, "min_width": width // scale, "min_factor": 1}
        found[f"1/{scale}"] = milliseconds(
            files, lambda file, o=least: simplejpeg.decode_jpeg(file, **o)
        )
    return found


def time_everything(folder: Path, count: int) -> dict[str, Any]:
    """Milliseconds per file, each kind of memory in a process of its own."""
    found: dict[str, Any] = {
        "what": "milliseconds of one core per JPEG file, without reading it from the disk",
        "files": min(count, len([*folder.glob("*.jpg")])),
    }
    for name, more in (("memory of a worker", MEMORY), ("usual memory", {})):
        script = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "import draft, json; from pathlib import Path\n"
            f"print(json.dumps(draft.time_files(Path({str(folder)!r}), {count})))"
        )
        environment = {k: v for k, v in os.environ.items() if k not in MEMORY} | more
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, check=True
        )
        found[f"Pillow, {name}"] = json.loads(done.stdout)
    if importlib.util.find_spec("simplejpeg") is not None:
        found["simplejpeg"] = time_simplejpeg(folder, count)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", action="append", help="labelled images to enlarge")
    parser.add_argument("--files", type=Path, help="a folder of large JPEG files to time")
    parser.add_argument("--fit", action="store_true", help="fit codes to the images")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.files is not None:
        result = time_everything(given.files, given.images)
    else:
        model = f"itq, fitted to features of {builtin.DEFAULT_HASHER}" if given.fit else MODEL
        network = builtin.DEFAULT_HASHER if given.fit else MODEL
        result = {
            "what": "codes of enlarged images, decoded in full and at a part of their size",
            "model": model,
            "fingerprint": builtin.fingerprint(network),
            "found": [measure(data, given.images, fitted=given.fit) for data in given.data or ()],
        }
    text = dump_json(result)
    print(text)
    if given.json is not None:
        given.json.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
