"""How often thumbnails confirm a copy, and two different images, with and without their details.

    python benchmarks/likeness.py --images tiny100 --json results/likeness.json

Copies are made by the changes of benchmarks/duplicates.py. Different images are random pairs.
How much details must correlate was chosen on coco21, so another set is to be measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from image_changes import REPORTED

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fisherhash.index.images import confirming
from fisherhash.index.images.confirming import Thumbnail, thumbnail_of


def confirmed(pairs: list[tuple[Thumbnail, Thumbnail]]) -> dict[str, float]:
    """The share of pairs that are confirmed, without regard to details and with it."""
    found, used = {}, confirming.DETAIL
    for name, least in (("without details", -1.0), ("with details", used)):
        confirming.DETAIL = least
        alike = [confirming.likeness(*pair) >= confirming.ALIKE for pair in pairs]
        found[name] = round(float(np.mean(alike)), 5)
    confirming.DETAIL = used
    return found


def main() -> None:
    """Measure and print, and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=Path, required=True, help="a folder of photos")
    parser.add_argument("--copies", type=int, default=60, help="images per kind of change")
    parser.add_argument("--pairs", type=int, default=10_000, help="pairs of different images")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    files = sorted(f for f in args.images.rglob("*") if f.suffix.lower() in (".jpg", ".jpeg"))
    rng = np.random.default_rng(0)
    chosen = [files[i] for i in rng.permutation(len(files))[: max(args.copies, 300)]]
    images = [Image.open(file).convert("RGB") for file in chosen]
    thumbnails = [thumbnail_of(image) for image in images]
    changes = {}
    for name, change in REPORTED.items():
        copies = [
            thumbnail_of(change(image, np.random.default_rng(number)))
            for number, image in enumerate(images[: args.copies])
        ]
        changes[name] = confirmed(list(zip(thumbnails, copies, strict=False)))
        print(f"{name:<40} {changes[name]}", flush=True)
    two = [rng.choice(len(images), 2, replace=False) for _ in range(args.pairs)]
    different = confirmed([(thumbnails[i], thumbnails[j]) for i, j in two])
    mean = {
        key: round(float(np.mean([one[key] for one in changes.values()])), 5) for key in different
    }
    result = {
        "data": args.images.name,
        "images": len(images),
        "copies_per_change": args.copies,
        "pairs": args.pairs,
        "alike": confirming.ALIKE,
        "detail": confirming.DETAIL,
        "copies": mean,
        "different": different,
        "changes": changes,
    }
    print(f"copies confirmed {mean}, different images confirmed {different}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
