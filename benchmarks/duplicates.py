"""Copies that are found, beside imagehash and imagededup, at the same rate of false pairs.

    python benchmarks/duplicates.py --cache DIR --json results/duplicates.json [--only recall]
    python benchmarks/duplicates.py --from-json results/duplicates.json --table

Needs the data sets coco21 and tiny100 (see FISHERHASH_DATA), imagehash, imagededup and PyWavelets:
``pip install imagehash PyWavelets && pip install --no-deps imagededup``. Of imagededup only the
hashes are loaded, which need no torchvision. The images are those that nothing was fitted or chosen
on, see ``image_changes.py``. ``--cache`` stores codes, so that a run that was stopped goes on.

* recall: for every hash, the largest radius at which at most one in a million pairs of unrelated
  images is taken for copies, and the share of changed copies within that radius.
* groups: changed copies are planted among other images, and ``ImageIndex.duplicates`` finds them.
* speed: images per second from JPEG files to codes, the hashes by turns. Ours compute with all
  cores, the others with one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fisherhash import Hasher, ImageIndex
from fisherhash.model import builtin
from fisherhash.model.folder import versions
from image_changes import (
    CHOSEN_ON,
    REPORTED,
    SEEN,
    SETS,
    UNSEEN,
    Change,
    Images,
    pair_distances,
    pair_histogram,
    radius_at,
)

RATES = (1e-5, 1e-6, 1e-7)
MAIN_RATE = 1e-6
PLANTED, AMONG = 500, 10_000
Encode = Callable[[Iterable[Image.Image]], NDArray[np.uint8]]


def ours(name: str) -> Encode:
    hasher = Hasher.load(name)
    return lambda images: hasher.encode(list(images))


def of_imagehash(function: str, **options: Any) -> Encode:
    import imagehash  # pyright: ignore[reportMissingImports]

    compute = getattr(imagehash, function)

    def encode(images: Iterable[Image.Image]) -> NDArray[np.uint8]:
        return np.stack([np.packbits(compute(image, **options).hash.ravel()) for image in images])

    return encode


def of_imagededup(kind: str) -> Encode:
    """A hash of imagededup; its packages would import torchvision, which the hashes do not need."""
    found = importlib.util.find_spec("imagededup")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("imagededup is not installed: pip install --no-deps imagededup")
    for part in ("methods", "utils"):
        module = types.ModuleType(f"imagededup.{part}")
        module.__path__ = [f"{found.submodule_search_locations[0]}/{part}"]
        sys.modules.setdefault(f"imagededup.{part}", module)
    hashing = importlib.import_module("imagededup.methods.hashing")
    hasher = getattr(hashing, kind)(verbose=False)

    def encode(images: Iterable[Image.Image]) -> NDArray[np.uint8]:
        texts = [hasher.encode_image(image_array=np.asarray(image)) for image in images]
        return np.stack([np.frombuffer(bytes.fromhex(text), np.uint8) for text in texts])

    return encode


HASHES: dict[str, Callable[[], Encode]] = {
    "fisherhash copy-256": lambda: ours("copy-256"),
    "fisherhash copy-128": lambda: ours("copy-128"),
    "fisherhash copy-64": lambda: ours("copy-64"),
    "imagehash pHash": lambda: of_imagehash("phash"),
    "imagehash dHash": lambda: of_imagehash("dhash"),
    "imagehash aHash": lambda: of_imagehash("average_hash"),
    "imagehash wHash": lambda: of_imagehash("whash"),
    "imagehash pHash, 256 bits": lambda: of_imagehash("phash", hash_size=16),
    "imagededup pHash": lambda: of_imagededup("PHash"),
    "imagededup dHash": lambda: of_imagededup("DHash"),
    "imagededup aHash": lambda: of_imagededup("AHash"),
    "imagededup wHash": lambda: of_imagededup("WHash"),
}
OURS = ("fisherhash copy-256", "fisherhash copy-128", "fisherhash copy-64")


class Coded:
    """The codes of one hash, stored on disk."""

    def __init__(self, images: Images, name: str) -> None:
        self.images, self.name = images, name
        self._encode: Encode | None = None
        self._what = name
        if name.startswith("fisherhash"):
            model = name.split()[1]
            self._what += builtin.fingerprint(model)

    def codes(self, part: str, kind: str = "original", change: Change | None = None) -> Any:
        """Codes of a part of both sets; of changed images, those that are changed."""
        return np.concatenate([self._of(name, part, kind, change) for name in SETS])

    def first(self, part: str) -> Any:
        """Codes of the originals of the changed images."""
        parts = []
        for name in SETS:
            count = len(self.images.original_numbers(name, part, changed=True))
            parts.append(self._of(name, part, "original", None)[:count])
        return np.concatenate(parts)

    def unrelated(self, part: str) -> NDArray[np.int64]:
        """How many pairs of different images have each distance."""
        originals = self.codes(part)
        return pair_histogram(originals, 8 * originals.shape[1])

    def distances(self, part: str, kind: str, change: Change) -> NDArray[np.int64]:
        """Between originals and their changed copies; far where there was nothing to measure."""
        first = self.first(part)
        try:
            return pair_distances(first, self.codes(part, kind, change))
        except FileNotFoundError:
            return np.full(len(first), 8 * first.shape[1] + 1)

    def _of(self, name: str, part: str, kind: str, change: Change | None) -> Any:
        return np.load(self.file(name, part, kind, change))

    def file(self, name: str, part: str, kind: str, change: Change | None) -> Path:
        """Where the codes of a part of a set are stored."""
        numbers = self.images.original_numbers(name, part, changed=change is not None)
        text = f"{self._what} {name} {part} {kind} {len(numbers)}"
        return self.images.cache / (hashlib.sha256(text.encode()).hexdigest()[:24] + ".codes.npy")

    def encode(self, images: list[Image.Image]) -> NDArray[np.uint8]:
        """Codes (n, bytes) of images."""
        if self._encode is None:
            self._encode = HASHES[self.name]()
        return self._encode(images)


def encode_all(images: Images, hashes: Iterable[Coded], part: str = "report") -> None:
    """Store the codes that are missing; every image is changed once for all hashes."""
    _encode_kinds(images, hashes, part, {"original": None})
    # The others find no copy at any rate, so that there is nothing to measure.
    usable = [one for one in hashes if radius_at(one.unrelated(part), max(RATES)) >= 0]
    _encode_kinds(images, usable, part, dict(REPORTED))


def _encode_kinds(
    images: Images, hashes: Iterable[Coded], part: str, kinds: dict[str, Change | None]
) -> None:
    for name in SETS:
        for kind, change in kinds.items():
            missing = [one for one in hashes if not one.file(name, part, kind, change).exists()]
            if not missing:
                continue
            numbers = images.original_numbers(name, part, changed=change is not None)
            made = list(images.changed(name, numbers, change))
            for one in missing:
                np.save(one.file(name, part, kind, change), one.encode(made))
            print(name, kind, len(made), flush=True)


def recall(images: Images, names: Iterable[str]) -> dict[str, Any]:
    """For every hash and rate, the radius and the share of copies within it."""
    rows: dict[str, Any] = {}
    hits: dict[str, dict[str, NDArray[np.bool_]]] = {}
    hashes = [Coded(images, name) for name in names]
    encode_all(images, hashes)
    for coded in hashes:
        name = coded.name
        counts = coded.unrelated("report")
        bits = len(counts) - 1
        distances = {
            kind: coded.distances("report", kind, change) for kind, change in REPORTED.items()
        }
        rates: dict[str, Any] = {}
        for rate in RATES:
            radius = radius_at(counts, rate)
            found = {kind: float((row <= radius).mean()) for kind, row in distances.items()}
            mean = float(np.mean(list(found.values())))
            rates[f"{rate:g}"] = {"radius": radius, "mean": mean, "recall": found}
        rows[name] = {"bits": bits, "pairs": int(counts.sum()), "rates": rates}
        main = rates[f"{MAIN_RATE:g}"]
        hits[name] = {kind: row <= main["radius"] for kind, row in distances.items()}
        print(f"{name:30s} radius {main['radius']:3d}  mean {main['mean']:.4f}", flush=True)
    others = [name for name in rows if name not in OURS]
    for name in OURS:
        if name in rows and others:
            rows[name]["beside the best other"] = {
                kind: beside(found, {other: hits[other][kind] for other in others})
                for kind, found in hits[name].items()
            }
    return rows


def beside(ours: NDArray[np.bool_], others: dict[str, NDArray[np.bool_]]) -> dict[str, Any]:
    """Copies of one kind that only ours or only the best other hash finds.

    The interval is that of the difference between the two shares, 95 %, over the images.
    """
    best = max(others, key=lambda name: others[name].sum())
    gained, lost = int((ours & ~others[best]).sum()), int((others[best] & ~ours).sum())
    count, mean = len(ours), (gained - lost) / len(ours)
    half = 1.96 * float(np.sqrt((gained + lost) / count - mean**2) / np.sqrt(count))
    return {
        "best other": best,
        "copies": count,
        "only ours": gained,
        "only the other": lost,
        "difference": round(mean, 4),
        "interval": [round(mean - half, 4), round(mean + half, 4)],
    }


def groups(images: Images, names: Iterable[str], planted: int, among: int) -> dict[str, Any]:
    """Plant changed copies among other images and let ``duplicates`` find them.

    A copy is found if it is in a group with its original, a group is mixed if it holds images that
    are no copies of each other, and an original is split if its copies are in several groups.
    """
    kinds = list(REPORTED.values())
    chosen = [
        (name, int(number))
        for part in ("report", "choose")
        for name in SETS
        for number in images.original_numbers(name, part)
    ][:among]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "images"
        place.mkdir()
        for name, number in chosen:
            images.open(name, number).save(place / f"{name}-{number}.png")
        for copy in range(planted):
            # Every fifth original has two copies.
            name, number = chosen[copy % max(planted * 4 // 5, 1)]
            made = kinds[copy % len(kinds)](
                images.open(name, number), np.random.default_rng([7, copy])
            )
            made.save(place / f"{name}-{number}.copy{copy}.jpg", quality=90)
        for model in names:
            uri = Path(folder) / f"{model}.index"
            began = time.perf_counter()
            with ImageIndex.create(uri, Hasher.load(model)) as index:
                index.sync(place)
                encoded = time.perf_counter() - began
                for rate in (0.0, 0.01, 0.1, 1.0):
                    known = builtin.false_pairs(model)
                    radius = 0 if known is None else known.radius(rate)
                    found = index.duplicates(radius=radius, code="own", confirm=False)
                    members = [[Path(hit.name).name for hit in group] for group in found.groups]
                    rows[f"{model}, {rate:g} false pairs per million"] = {
                        "radius": radius,
                        "images": len(chosen),
                        **judged(members, planted),
                    }
                found = index.duplicates(code="own")
                sure = [group for group in found.groups if group.confirmed]
                rows[f"{model}, defaults of dedup"] = {
                    "radius": found.radius,
                    **judged([[Path(m.name).name for m in group] for group in sure], planted),
                    "groups not confirmed": len(found.groups) - len(sure),
                }
            rows[model] = {"seconds to encode": round(encoded, 1)}
    return rows


def judged(members: list[list[str]], planted: int) -> dict[str, int]:
    """Count what groups of file names found."""
    together, mixed, split = 0, 0, 0
    places: dict[str, set[int]] = {}
    for number, group in enumerate(members):
        stems = [name.split(".")[0] for name in group]
        mixed += len(set(stems)) > 1
        for stem, name in zip(stems, group, strict=True):
            places.setdefault(stem, set()).add(number)
            together += ".copy" in name and stems.count(stem) > 1
    split = sum(len(numbers) > 1 for numbers in places.values())
    return {
        "copies": planted,
        "found": together,
        "groups": len(members),
        "mixed groups": mixed,
        "split originals": split,
        "largest group": max(map(len, members), default=0),
    }


def speed(images: Images, names: Iterable[str], count: int = 200) -> dict[str, float]:
    """Images per second from JPEG files to codes; the fastest of five turns."""
    numbers = images.original_numbers("coco21", "report")[:count]
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number in numbers:
            files.append(Path(folder) / f"{number}.jpg")
            images.open("coco21", int(number)).save(files[-1], quality=95)
        encoders = {name: HASHES[name]() for name in names}
        fastest = dict.fromkeys(encoders, float("inf"))
        for _ in range(5):
            for name, encode in encoders.items():
                began = time.perf_counter()
                encode(Image.open(file).convert("RGB") for file in files)
                fastest[name] = min(fastest[name], time.perf_counter() - began)
    return {name: round(count / seconds) for name, seconds in fastest.items()}


def table(result: dict[str, Any]) -> str:
    """The numbers as tables in Markdown."""
    rows = result["recall"]
    rate = f"{MAIN_RATE:g}"
    pairs = next(iter(rows.values()))["pairs"]
    best = {
        kind: max(rows[name]["rates"][rate]["recall"][kind] for name in rows if name not in OURS)
        for kind in REPORTED
    }
    lines = [
        f"The radius of a hash is the largest with at most one in a million of {pairs / 1e6:.0f} "
        "million pairs of",
        "unrelated images. Where it is *none*, more than one pair in a million has equal codes.",
        "",
        "| hash | bytes | radius | mean share of copies found | images per second |",
        "|---|---|---|---|---|",
    ]
    for name in rows:
        main = rows[name]["rates"][rate]
        per_second = result.get("speed", {}).get(name, "")
        lines.append(
            f"| {name} | {rows[name]['bits'] // 8} | {_radius(main['radius'])} | "
            f"{main['mean']:.3f} | {per_second} |"
        )
    usable = [name for name in rows if rows[name]["rates"][rate]["radius"] >= 0]
    shown = [*[name for name in OURS if name in rows], "best other"]
    shown += [name for name in usable if name.startswith("imagehash")]
    lines += ["", "| change | " + " | ".join(shown) + " |", "|---|" + "---|" * len(shown)]
    for kinds, mark in ((SEEN, ""), (CHOSEN_ON, " +"), (UNSEEN, " *")):
        for kind in kinds:
            cells = [
                best[kind] if name == "best other" else rows[name]["rates"][rate]["recall"][kind]
                for name in shown
            ]
            lines.append(f"| {kind}{mark} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    if "groups" in result:
        rows = {name: row for name, row in result["groups"].items() if "found" in row}
        first = next(iter(rows.values()))
        lines += [
            "",
            f"{first['copies']:,} changed copies among {first['images']:,} images, grouped by "
            "`ImageIndex.duplicates`. A copy is",
            "found if it is in a group with its original or with another copy of it. A group is",
            "mixed if it holds different images.",
            "",
            "| hasher and threshold | radius | found | groups | mixed | split | largest |",
            "|---|---|---|---|---|---|---|",
        ]
        columns = ("radius", "found", "groups", "mixed groups", "split originals", "largest group")
        for name, row in rows.items():
            lines.append(f"| {name} | " + " | ".join(str(row[key]) for key in columns) + " |")
    return "\n".join(lines)


def _radius(radius: int) -> str:
    return "none" if radius < 0 else str(radius)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, help="store codes here")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--from-json", type=Path, help="start from the numbers in this file")
    parser.add_argument("--only", choices=("recall", "groups", "speed"), help="measure only this")
    parser.add_argument("--hashes", help="only hashes whose name contains this")
    parser.add_argument("--planted", type=int, default=PLANTED)
    parser.add_argument("--among", type=int, default=AMONG)
    parser.add_argument("--table", action="store_true", help="print the numbers as tables")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result: dict[str, Any] = {}
    if args.from_json:
        result = json.loads(args.from_json.read_text(encoding="utf-8"))
    if args.cache:
        images = Images(args.cache)
        names = [name for name in HASHES if args.hashes is None or args.hashes in name]
        if args.only in (None, "recall"):
            result["recall"] = result.get("recall", {}) | recall(images, names)
        if args.only in (None, "groups"):
            models = [name.split()[1] for name in names if name in OURS]
            result["groups"] = groups(images, models, args.planted, args.among)
        if args.only in (None, "speed"):
            result["speed"] = speed(images, names)
        result["versions"] = versions() | _peer_versions()
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.table:
        print(table(result))


def _peer_versions() -> dict[str, str]:
    from importlib import metadata

    return {name: metadata.version(name) for name in ("imagehash", "imagededup")}


if __name__ == "__main__":
    main()
