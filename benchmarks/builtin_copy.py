"""How copy-64, copy-128 and copy-256 were chosen and built; run it to check or rebuild them.

    python benchmarks/builtin_copy.py --cache DIR --json results/builtin-copy.json
    python benchmarks/builtin_copy.py --cache DIR --json results/builtin-copy.json --write

A copy code says whether two files show the same image. It is Fisher's discriminant in closed form:
the outputs of an early block of EfficientNet-Lite0, for the whole image, are projected on the
directions in which images differ most from each other and least from changed copies of themselves;
a random rotation spreads these over the bits.

Needs the data sets coco21 and tiny100 (see FISHERHASH_DATA). Their images are divided into three
parts: one to fit on, one to choose on, one to report on. Pixels and features are cached in DIR.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from builtin_changes import CHOICE, SEEN, Change, cropped, mixed, regraded
from fisherhash import backbones, codes
from fisherhash.backbones import Backbone
from fisherhash.backbones.efficientnet_lite import EfficientNetLite0
from fisherhash.data import open_data
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.data.splits import hash_order
from fisherhash.model import builtin
from fisherhash.model.folder import versions
from fisherhash.model.heads import LinearHead
from fisherhash.model.onnx_hasher import OnnxHasher
from fisherhash.model.onnx_runtime import OnnxRuntime
from fisherhash.model.torch_hasher import TorchHasher
from fisherhash.system import storage

SIZE, GRID = 64, 4
"""Sides of the square that an image is squashed into, and of the grid of averaged outputs."""
BLURS = (1.0, 1.5, 2.0)
"""Standard deviations, in pixels of that square, of the blurs to choose from."""
BLOCKS, WIDTH = 5, 40
"""The blocks of the network that are used, and the channels of the last of them."""
SETS = {"coco21": (7500, 3000, 4500), "tiny100": (6000, 3000, 4500)}
"""Images to fit, to choose and to report on."""
CHANGED = {"coco21": (400, 300), "tiny100": (200, 200)}
"""How many of those to choose and to report on are changed in every way."""
LENGTHS = (256, 128, 64)
FALSE_PAIRS = 1e-6
SURE = 0.998
"""Share of the copies of a kind from which on that kind counts as found."""
Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
Encoder = Callable[[Floats], Codes]


class EarlyLite0(Backbone):
    """The first blocks of EfficientNet-Lite0; the output of the last, averaged to a coarse grid.

    The image is blurred first: lines, dots and noise are no part of what an image shows.
    """

    name = "efficientnet-lite0-early"
    features = GRID * GRID * WIDTH
    kernel: Tensor

    def __init__(self, blur: float) -> None:
        given = EfficientNetLite0.preprocessing
        super().__init__(Preprocessing(SIZE, mean=given.mean, std=given.std, whole=True))
        network = backbones.create(image_size=SIZE)
        if not isinstance(network, EfficientNetLite0):
            raise TypeError("the default backbone is another one")
        self.stem = network.stem
        self.blocks = nn.Sequential(*list(network.blocks)[:BLOCKS])
        self.reach = math.ceil(3 * blur)
        values = torch.exp(-0.5 * (torch.arange(-self.reach, self.reach + 1) / blur) ** 2)
        self.register_buffer("kernel", (values / values.sum()).expand(3, 1, -1).clone())

    def extract(self, images: Tensor) -> Tensor:
        """Turn normalised images (n, 3, size, size) into features (n, features)."""
        images = functional.pad(images, [self.reach] * 4, mode="replicate")
        images = functional.conv2d(images, self.kernel[..., None], groups=3)
        images = functional.conv2d(images, self.kernel[..., None, :], groups=3)
        values = self.blocks(self.stem(images))
        return functional.adaptive_avg_pool2d(values, GRID).flatten(1)


def exported(head: LinearHead, blur: float) -> tuple[bytes, str]:
    """The ONNX file of the network with a head, and how it agrees with torch."""
    hasher = TorchHasher(EarlyLite0(blur), head.eval(), "fisher-pairs")
    data, agreement = hasher.export()
    return data, str(agreement)


class Images:
    """The images of the packs, in three parts, and the features of them and of changed copies."""

    def __init__(self, cache: Path, blur: float = BLURS[0]) -> None:
        self.cache, self.blur = cache, blur
        cache.mkdir(parents=True, exist_ok=True)
        self.collections = {name: open_data(name) for name in SETS}
        self.parts: dict[str, dict[str, NDArray[np.int64]]] = {}
        for name, counts in SETS.items():
            collection = self.collections[name]
            order = np.array(hash_order(collection.names, list(range(len(collection))), 0))
            ends = np.cumsum((0, *counts))
            self.parts[name] = {
                part: order[start:end]
                for part, start, end in zip(
                    ("fit", "choose", "report"), ends[:-1], ends[1:], strict=True
                )
            }
        self._runtime: OnnxRuntime | None = None

    def open(self, name: str, number: int) -> Image.Image:
        return self.collections[name].reader.open(int(number)).convert("RGB")

    def changed(self, name: str, numbers: Iterable[int], change: Change | None) -> Iterator[Any]:
        """The images, changed; every image has a random generator of its own."""
        for number in numbers:
            image = self.open(name, number)
            yield image if change is None else change(image, np.random.default_rng(int(number)))

    def features(self, name: str, part: str, what: str, change: Change | None = None) -> Floats:
        """Features (n, d) of a part of a set; of changed images, those that are to be changed."""
        measured = change is not None and part != "fit"
        numbers = self.original_numbers(name, part, changed=measured)
        text = f"{name} {part} {what} {len(numbers)}"
        file = self._stored(f"{self.blur} {GRID} {BLOCKS} {text}")
        if file.exists():
            return np.load(file).astype(np.float32)
        began = time.perf_counter()
        pixels = self._pixels(text, self.changed(name, numbers, change))
        rows = [
            self.runtime.features(pixels[start : start + 64]) for start in range(0, len(pixels), 64)
        ]
        made = np.concatenate(rows).astype(np.float16)
        np.save(file, made)
        print(f"{text}: {len(made) / (time.perf_counter() - began):.0f} images/s", flush=True)
        return made.astype(np.float32)

    def _stored(self, text: str) -> Path:
        return self.cache / (hashlib.sha256(text.encode()).hexdigest()[:24] + ".npy")

    def _pixels(self, text: str, images: Iterable[Image.Image]) -> Codes:
        """Pixels (n, 3, size, size) of images; they are changed once for every blur."""
        file = self._stored(f"{SIZE} {text}")
        if not file.exists():
            rows = [self.runtime.preprocessing.pixels(image).transpose(2, 0, 1) for image in images]
            np.save(file, np.stack(rows))
        return np.load(file)

    @property
    def runtime(self) -> OnnxRuntime:
        if self._runtime is None:
            self._runtime = OnnxRuntime(exported(LinearHead(EarlyLite0.features, 8), self.blur)[0])
        return self._runtime

    def both(self, part: str, what: str, change: Change | None = None) -> Floats:
        """Features of both sets, one below the other."""
        return np.concatenate([self.features(name, part, what, change) for name in SETS])

    def original_numbers(self, name: str, part: str, *, changed: bool = False) -> NDArray[np.int64]:
        """The images of a part of a set, or the first of them, which are changed."""
        numbers = self.parts[name][part]
        return numbers[: CHANGED[name][("choose", "report").index(part)]] if changed else numbers

    def unchanged(self, part: str) -> Floats:
        """Features of the originals of the images that are changed."""
        place = ("choose", "report").index(part)
        found = [
            self.features(name, part, "original")[: counts[place]]
            for name, counts in CHANGED.items()
        ]
        return np.concatenate(found)


def cut(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A crop, often followed by another change."""
    image = cropped(image, rng.uniform(0.75, 0.97), rng)
    return mixed(image, rng, most=1) if rng.random() < 0.6 else image


def again(number: int) -> Change:
    """Random changes, others for each number."""

    def change(image: Image.Image, rng: np.random.Generator) -> Image.Image:
        return mixed(image, np.random.default_rng([number, int(rng.integers(1 << 62))]))

    return change


# One entry per copy that every image to fit on has.
COPIES: dict[str, Change] = {
    "mixed 1": again(1),
    "mixed 2": again(2),
    "cut": cut,
    "tones": regraded,
}


@dataclass(frozen=True)
class Recipe:
    """How a matrix is fitted.

    Attributes:
        crops: weight of the cropped copies; that of the mixed copies is 1.
        tones: weight of the copies with other tones.
        power: deviations of the directions to this power before the rotation: 0 makes all equal, 1
            leaves each as large as it is beside the differences between copies.
        directions: how many are kept, as a multiple of the bits.
        ridge: added to the variance of the differences in every direction, as a share of its mean.
        blur: standard deviation of the blur, in pixels.
        seed: of the rotation.
    """

    crops: float = 0.25
    tones: float = 0.5
    power: float = 0.0
    directions: float = 1.0
    ridge: float = 0.01
    blur: float = BLURS[0]
    seed: int = 0

    def __str__(self) -> str:
        return (
            f"blur {self.blur:g}, crops {self.crops:g}, tones {self.tones:g}, "
            f"power {self.power:g}, directions {self.directions:g}, ridge {self.ridge:g}"
        )


class Fitting:
    """The covariances that every recipe is fitted on."""

    def __init__(self, images: Images) -> None:
        self.images = images
        self.originals = images.both("fit", "original")
        self.mean = self.originals.mean(0)
        centred = self.originals - self.mean
        self.total = centred.T.astype(np.float64) @ centred / len(centred)
        self.within: dict[str, NDArray[np.float64]] = {}
        for name, change in COPIES.items():
            rest = images.both("fit", name, change) - self.originals
            self.within[name] = (rest.T @ rest / len(rest)).astype(np.float64)
        self._solved: dict[tuple[float, ...], tuple[NDArray, NDArray]] = {}

    def directions(self, recipe: Recipe) -> tuple[NDArray, NDArray]:
        """Eigenvalues and directions of the generalised problem, the best first."""
        key = recipe.crops, recipe.tones, recipe.ridge
        if key not in self._solved:
            special = {"cut": recipe.crops, "tones": recipe.tones}
            weights = [special.get(name, 1.0) for name in COPIES]
            parts = np.stack([self.within[name] for name in COPIES])
            inside = np.average(parts, axis=0, weights=weights)
            size = len(inside)
            inside += recipe.ridge * np.trace(inside) / size * np.eye(size)
            values, vectors = scipy.linalg.eigh(
                self.total, inside, subset_by_index=[size - 320, size - 1]
            )
            self._solved[key] = values[::-1], vectors[:, ::-1]
        return self._solved[key]

    def fit(self, recipe: Recipe, bits: int) -> tuple[Floats, Floats]:
        """The matrix (bits, d) and the thresholds (bits,) of a recipe."""
        values, vectors = self.directions(recipe)
        count = round(recipe.directions * bits)
        main = vectors[:, :count] * values[:count] ** ((recipe.power - 1) / 2)
        drawn = np.random.default_rng(recipe.seed).normal(size=(count, count))
        rotation = np.linalg.qr(drawn)[0][:, :bits]
        weight = (main @ rotation).T
        weight = (weight / (self.originals @ weight.T).std(0).mean()).astype(np.float32)
        # Each bit is 1 for half of the images.
        return weight, np.median(self.originals @ weight.T, axis=0)

    def encoder(self, recipe: Recipe, bits: int) -> Encoder:
        weight, threshold = self.fit(recipe, bits)
        return lambda features: codes.pack(features @ weight.T - threshold)

    def head(self, recipe: Recipe, bits: int) -> LinearHead:
        """The matrix as a head, for the export."""
        weight, threshold = self.fit(recipe, bits)
        head = LinearHead.from_matrix(torch.from_numpy(weight), torch.zeros(weight.shape[1]))
        with torch.no_grad():
            head.linear.bias.copy_(torch.from_numpy(-threshold))
        return head


def pair_histogram(found: Codes, bits: int) -> NDArray[np.int64]:
    """How many pairs of different images have each distance 0..bits."""
    counts = np.zeros(bits + 1, dtype=np.int64)
    for start in range(0, len(found), 500):
        distances = codes.hamming(found[start : start + 500], found[start:])
        above = np.triu_indices(*((len(distances), 1, distances.shape[1])))
        counts += np.bincount(distances[above], minlength=bits + 1)
    return counts


def radius_at(counts: NDArray[np.int64], rate: float = FALSE_PAIRS) -> int:
    """The largest distance up to which at most this share of the pairs lies; -1 if none."""
    return int(np.searchsorted(np.cumsum(counts) / counts.sum(), rate, side="right")) - 1


def pair_distances(one: Codes, other: Codes) -> NDArray[np.int64]:
    """Distances (n,) between codes of the same row."""
    return np.bitwise_count(one ^ other).sum(1, dtype=np.int64)


def recalls(
    encode: Callable[[Floats], Codes],
    images: Images,
    part: str,
    kinds: dict[str, Change],
    bits: int,
) -> tuple[int, dict[str, float]]:
    """The radius of one false pair in a million, and the share of copies within it."""
    radius = radius_at(pair_histogram(encode(images.both(part, "original")), bits))
    first = encode(images.unchanged(part))
    found = {
        name: float(
            (pair_distances(first, encode(images.both(part, name, change))) <= radius).mean()
        )
        for name, change in kinds.items()
    }
    return radius, found


TRIED: dict[str, tuple[float, ...]] = {
    "blur": BLURS,
    "power": (0.0, 0.35, 0.6),
    "crops": (0.0, 0.1, 0.25, 0.5, 1.0),
    "tones": (0.0, 0.5, 1.0, 2.0),
    "ridge": (0.001, 0.01, 0.1),
    "directions": (1.0, 1.25),
}
"""Values of a recipe to choose from, one after the other."""


def chosen(at: dict[float, Fitting], bits: int, rotations: int) -> tuple[Recipe, list[Any]]:
    """The best recipe on the choice images, then the best of some rotations.

    What counts is the mean share of copies found, and the share of kinds of change of which almost
    every copy is found: a code that finds more crops but fewer grey copies is no gain.
    """
    rows: dict[Recipe, Any] = {}

    def measured(recipe: Recipe) -> float:
        if recipe not in rows:
            fitting = at[recipe.blur]
            radius, found = recalls(
                fitting.encoder(recipe, bits), fitting.images, "choose", SEEN | CHOICE, bits
            )
            shares = np.array(list(found.values()))
            rows[recipe] = {"recipe": str(recipe), "seed": recipe.seed, "radius": radius}
            rows[recipe] |= {"mean": float(shares.mean()), "sure": float((shares >= SURE).mean())}
            print(bits, rows[recipe], flush=True)
        return rows[recipe]["mean"] + rows[recipe]["sure"]

    def over_seeds(recipe: Recipe) -> float:
        # A radius is a whole number, which makes one rotation a noisy measure of a recipe.
        return float(np.mean([measured(replace(recipe, seed=seed)) for seed in range(3)]))

    best = Recipe()
    for name, values in TRIED.items():
        best = max((replace(best, **{name: value}) for value in values), key=over_seeds)
    drawn = [replace(best, seed=seed) for seed in range(rotations)]
    return max(drawn, key=measured), list(rows.values())


def false_pairs(counts: NDArray[np.int64]) -> list[float]:
    """Pairs within each distance per million, up to the first distance with a thousand of them."""
    share = np.cumsum(counts) / counts.sum() * 1e6
    # Rounded up, so that a radius never promises fewer false pairs than were counted.
    rounded = np.ceil(share * 1000) / 1000
    return [float(value) for value in rounded[: int(np.searchsorted(share, 1000.0)) + 1]]


def built(at: dict[float, Fitting], bits: int, rotations: int) -> dict[str, Any]:
    """Choose, then count the false pairs among images that nothing was chosen on."""
    recipe, tried = chosen(at, bits, rotations)
    fitting = at[recipe.blur]
    encode = fitting.encoder(recipe, bits)
    counts = pair_histogram(encode(fitting.images.both("report", "original")), bits)
    _, found = recalls(encode, fitting.images, "choose", SEEN | CHOICE, bits)
    return {
        "recipe": str(recipe),
        "seed": recipe.seed,
        "blur": recipe.blur,
        "choice images": {"mean recall": float(np.mean(list(found.values()))), "recall": found},
        "unrelated pairs": int(counts.sum()),
        "false pairs per million": false_pairs(counts),
        "tried": tried,
        "fitted": recipe,
    }


def write(name: str, fitting: Fitting, bits: int, result: dict[str, Any], text: str) -> int:
    """Write the files that ``Hasher.load_builtin`` reads; returns their bytes."""
    recipe = result["fitted"]
    data, agreement = exported(fitting.head(recipe, bits), recipe.blur)
    print(name, agreement)
    details = {
        "data": {name: f"{counts[0]:,} images" for name, counts in SETS.items()},
        "options": {"recipe": result["recipe"]},
        "settings": {"seed": recipe.seed},
        "results": {
            "share of changed copies found at one false pair in a million, mean over the kinds of "
            "change, on the images it was chosen on": round(
                result["choice images"]["mean recall"], 4
            ),
        },
        builtin.FALSE_PAIRS: {
            "pairs": result["unrelated pairs"],
            "per_million": result["false pairs per million"],
        },
    }
    hasher = OnnxHasher(OnnxRuntime(data), details=details)
    config = {"format": builtin.HEAD_FORMAT, **hasher.config()}
    config["onnx_sha256"] = hashlib.sha256(data).hexdigest()
    storage.write_files(
        builtin.folder().with_name(name),
        {
            builtin.HEAD_ONNX: data,
            builtin.HEAD_CARD: text,
            builtin.HEAD_CONFIG: storage.dump_json(config),
        },
    )
    return len(data)


def card(name: str, bits: int, result: dict[str, Any]) -> str:
    """The shipped README, with the numbers of a result."""
    text = Path(__file__).with_name("builtin_copy.md").read_text(encoding="utf-8")
    share = result["false pairs per million"]
    thresholds = ["| radius | false pairs per million comparisons |", "|---|---|"]
    thresholds += [f"| {radius} | {value:g} |" for radius, value in enumerate(share) if value > 0]
    for key, value in {
        "name": name,
        "bits": str(bits),
        "bytes": str(bits // 8),
        "recipe": result["recipe"],
        "blocks": str(BLOCKS),
        "size": str(SIZE),
        "blur": f"{result['blur']:g}",
        "grid": str(GRID),
        "features": str(EarlyLite0.features),
        "pairs": f"{result['unrelated pairs'] / 1e6:.0f}",
        "thresholds": "\n".join(thresholds),
        "fitted": " and ".join(f"{counts[0]:,} images of {key}" for key, counts in SETS.items()),
        "reported": " and ".join(f"{counts[2]:,} images of {key}" for key, counts in SETS.items()),
    }.items():
        text = text.replace("{" + key + "}", value)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="store features here")
    parser.add_argument("--json", type=Path, required=True, help="write the numbers here")
    parser.add_argument("--bits", type=int, nargs="+", default=LENGTHS, help="only these lengths")
    parser.add_argument("--rotations", type=int, default=10, help="how many to choose from")
    parser.add_argument("--write", action="store_true", help="write the shipped files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    at = {blur: Fitting(Images(args.cache, blur)) for blur in BLURS}
    results: dict[str, Any] = {}
    if args.json.exists():
        results = json.loads(args.json.read_text(encoding="utf-8"))
    for bits in args.bits:
        name = f"copy-{bits}"
        results[name] = built(at, bits, args.rotations)
        if args.write:
            fitting = at[results[name]["blur"]]
            made = write(name, fitting, bits, results[name], card(name, bits, results[name]))
            results[name]["bytes"] = made
        del results[name]["fitted"]
    about = {
        "what": "share of changed copies within the radius of one false pair in a million",
        "images": {
            name: dict(zip(("fit", "choose", "report"), counts, strict=True))
            for name, counts in SETS.items()
        },
        "changed": {name: counts[1] for name, counts in CHANGED.items()},
        "versions": versions(),
    }
    args.json.write_text(json.dumps(results | about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
