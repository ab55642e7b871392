"""How the built-in hasher was chosen, measured and built; run it to check or to rebuild it.

    python benchmarks/builtin_hasher.py --json FILE            measure and choose
    python benchmarks/builtin_hasher.py --json FILE --write    … and write the shipped files
    python benchmarks/builtin_hasher.py --from-json FILE --only NAME --json FILE
                                                               add or re-measure some candidates

Needs the data sets tiny100, coco21 and cifar10 (see FISHERHASH_DATA). Features are cached.

Every candidate learns from 60 classes of tiny100 and from coco21. It is measured on classes of
which it saw no image and no label: 20 choice classes and 20 report classes of tiny100, and
CIFAR-10, whose classes are divided into two halves in the same way. No candidate trains on classes
of tiny100 or labels of coco21 that CIFAR-10 also shows. The hasher is chosen on the choice classes
only. Each seed draws new choice and training classes and a new start of the method; the report
classes stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fisherhash import backbones, codes, methods
from fisherhash.backbones.efficientnet_lite import EfficientNetLite0
from fisherhash.backbones.weights import read_weights
from fisherhash.data import Collection, Split, open_data, resolve
from fisherhash.data.splits import hash_order
from fisherhash.evaluation import evaluate, metrics
from fisherhash.methods import FeatureMethod, HashMethod
from fisherhash.methods.base import sign
from fisherhash.model import builtin
from fisherhash.model.folder import versions
from fisherhash.model.heads import Head, LinearHead
from fisherhash.model.runtime import feature_rows
from fisherhash.model.torch_hasher import TorchHasher
from fisherhash.model.torch_runtime import TorchRuntime
from fisherhash.system import storage
from fisherhash.training.images import FrozenImages
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings

BITS, SIZE, SEEDS = 64, 224, 3
SIZES = (128, 160, 224)
CIFAR_DATABASE = 5000
# Classes that CIFAR-10 also shows: geese, penguins, albatrosses, dogs, a cat, cars, vans, boats.
KIN = [
    *("n01855672", "n02056570", "n02058221", "n02085620", "n02099712", "n02123045", "n02814533"),
    *("n03100240", "n03670208", "n04285008", "n03796401", "n03977966", "n03662601", "n03447447"),
]
KIN_LABELS = ("car", "dog", "truck")
TESTS = ("tiny100 choice", "cifar10 choice", "tiny100 report", "cifar10 report", "coco21 seen")

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Learning:
    """What a candidate learns from: tiny100's images first, then coco21's."""

    features: Tensor
    labels: Tensor
    tiny: int
    classifier: Tensor
    """(rows, d) ImageNet classifier of the backbone, without the rows of held-out classes."""
    stranger: Tensor
    """The same, without the rows that CIFAR-10's images choose."""
    seed: int


Recipe = Callable[[Learning], Head]
Metric = Callable[[Learning], Tensor]


@dataclass
class Data:
    """The three collections with their splits and features."""

    def __post_init__(self) -> None:
        names = ("tiny100", "coco21", "cifar10")
        self.of: dict[str, tuple[Collection, Split]] = {}
        for name in names:
            collection = open_data(name)
            self.of[name] = collection, resolve(collection)
        self.classifier = read_weights(EfficientNetLite0.installed_weights())["_fc.weight"].float()
        self.runtimes: dict[int, TorchRuntime] = {}

    def features(self, name: str, numbers: Numbers, size: int = SIZE) -> Tensor:
        if size not in self.runtimes:
            network = backbones.create(image_size=size)
            self.runtimes[size] = TorchRuntime(network, torch.device("cpu"))
        rows = feature_rows(self.runtimes[size], self.of[name][0], numbers)
        if rows.skipped:
            raise SystemExit(f"{len(rows.skipped)} images of {name} cannot be read")
        return torch.from_numpy(np.array(rows.values))

    def showing(self, name: str, numbers: Numbers, classes: Iterable[str]) -> Numbers:
        """The images that have one of the classes."""
        collection = self.of[name][0]
        columns = [collection.classes.index(c) for c in classes]
        return numbers[collection.labels[numbers][:, columns].any(1)]

    def cifar_rows(self) -> Numbers:
        """The classifier's rows that at least one in a thousand of CIFAR-10's images choose."""
        scores = self.features("cifar10", self.cifar_database()) @ self.classifier.T
        counts = np.bincount(scores.argmax(1).numpy(), minlength=len(self.classifier))
        return np.flatnonzero(counts >= CIFAR_DATABASE / 1000)

    def cifar_database(self) -> Numbers:
        """A part of CIFAR-10's database."""
        collection, split = self.of["cifar10"]
        order = hash_order(collection.names, split.database.tolist(), 0)
        return np.sort(np.array(order[:CIFAR_DATABASE]))

    def imagenet_rows(self) -> dict[str, int]:
        """The classifier's row for each class of tiny100: the one most of its images choose."""
        collection, split = self.of["tiny100"]
        chosen = (self.features("tiny100", split.train) @ self.classifier.T).argmax(1).numpy()
        truth = collection.labels[split.train].argmax(1)
        return {
            c: int(np.bincount(chosen[truth == i], minlength=1000).argmax())
            for i, c in enumerate(collection.classes)
        }


def drawn(names: Iterable[str], tag: str) -> list[str]:
    return sorted(names, key=lambda name: hashlib.sha256(f"{tag} {name}".encode()).digest())


class Trial:
    """One seed: the training images, and the sets for measuring."""

    def __init__(self, data: Data, seed: int) -> None:
        tiny, tiny_split = data.of["tiny100"]
        kin = drawn(KIN, "report")
        others = drawn(set(tiny.classes) - set(KIN), "report")
        left = drawn(others[13:], f"choice {seed}")
        self.classes = {
            "report": kin[:7] + others[:13],
            "choice": kin[7:] + left[:13],
            "train": left[13:],
        }
        rows = data.imagenet_rows()
        held = [rows[c] for part in ("report", "choice") for c in self.classes[part]]
        keep = np.setdiff1d(np.arange(len(data.classifier)), held)
        self.learning = learning(data, self.classes["train"], KIN_LABELS, keep, seed)
        self.tests: dict[str, tuple[Tensor, Tensor, NDArray, NDArray]] = {}
        cifar, cifar_split = data.of["cifar10"]
        halves = drawn(cifar.classes, "cifar")
        self.halves = {"choice": halves[:5], "report": halves[5:]}
        for part in ("choice", "report"):
            for name, classes, query, base in (
                ("tiny100", self.classes[part], tiny_split.query, tiny_split.train),
                ("cifar10", self.halves[part], cifar_split.query, data.cifar_database()),
            ):
                self._add(
                    data,
                    f"{name} {part}",
                    name,
                    data.showing(name, query, classes),
                    data.showing(name, base, classes),
                )
        coco_split = data.of["coco21"][1]
        self._add(data, "coco21 seen", "coco21", coco_split.query, coco_split.train)

    def _add(self, data: Data, test: str, name: str, query: Numbers, database: Numbers) -> None:
        labels = data.of[name][0].labels
        values = data.features(name, query), data.features(name, database)
        self.tests[test] = (*values, labels[query], labels[database])

    def measure(self, head: Head) -> dict[str, float]:
        """mAP on every set, expected over ties."""
        found = {}
        for test in TESTS:
            query, database, query_labels, database_labels = self.tests[test]
            result = evaluate(
                _codes(head, query),
                _codes(head, database),
                query_labels,
                database_labels,
                bits=BITS,
                bit_statistics=False,
            )
            found[test] = float(result.map)
        return found

    def ceiling(self) -> dict[str, float]:
        """mAP of the centred features themselves, by cosine: 40,960 bits per image."""
        mean = self.learning.features.mean(0)
        found = {}
        for test in TESTS:
            query, database, *labels = self.tests[test]
            found[test] = cosine_map(query - mean, database - mean, labels[0], labels[1])
        return found


def learning(
    data: Data, classes: Sequence[str], hidden: Sequence[str], keep: Numbers, seed: int
) -> Learning:
    """The training lists, without what is held out."""
    tiny, tiny_split = data.of["tiny100"]
    coco, coco_split = data.of["coco21"]
    first = data.showing("tiny100", tiny_split.train, classes)
    second = np.setdiff1d(coco_split.train, data.showing("coco21", coco_split.train, hidden))
    of_tiny = tiny.labels[first][:, [tiny.classes.index(c) for c in classes]]
    of_coco = coco.labels[second][:, [i for i, c in enumerate(coco.classes) if c not in hidden]]
    return Learning(
        torch.cat([data.features("tiny100", first), data.features("coco21", second)]),
        torch.block_diag(torch.from_numpy(of_tiny).float(), torch.from_numpy(of_coco).float()),
        len(first),
        data.classifier[torch.from_numpy(keep)],
        data.classifier[torch.from_numpy(np.setdiff1d(keep, data.cifar_rows()))],
        seed,
    )


def _codes(head: Head, features: Tensor) -> NDArray[np.uint8]:
    with torch.inference_mode():
        return codes.pack(head.logits(features).numpy())


def cosine_map(
    query: Tensor, database: Tensor, query_labels: NDArray, database_labels: NDArray
) -> float:
    query, database = F.normalize(query, dim=1), F.normalize(database, dim=1)
    blocks = (1.0 - some @ database.T for some in query.split(64))
    return float(metrics(blocks, query_labels, database_labels).map)


# Candidates: each returns a head. The linear ones share one form: a metric A (d x k) on the
# features, the 64 directions in which A^T f varies most, a rotation towards the cube's corners.


def rotated(metric: Metric, *, power: float = 1.0) -> Recipe:
    def recipe(given: Learning) -> Head:
        A = metric(given).double()
        mean = given.features.mean(0)
        centred = (given.features - mean).double()
        projected = centred @ A
        values, vectors = torch.linalg.eigh(projected.T @ projected / len(projected))
        values, vectors = values.flip(0)[:BITS], vectors.flip(1)[:, :BITS]
        # Deviations to the power: 1 leaves them, 0 whitens.
        main = A @ (vectors * values.clamp_min(1e-12) ** ((power - 1) / 2))
        reduced = centred @ main
        generator = torch.Generator().manual_seed(given.seed)
        start = torch.randn(BITS, BITS, generator=generator, dtype=torch.float64)
        rotation = torch.linalg.qr(start).Q
        for _ in range(50):
            left, _, right = torch.linalg.svd(reduced.T @ sign(reduced @ rotation))
            rotation = left @ right
        weight = (main @ rotation).T
        return LinearHead.from_matrix((weight / weight.norm(dim=1).mean()).float(), mean)

    return recipe


def plain(given: Learning) -> Tensor:
    return torch.eye(given.features.shape[1])


def standardised(given: Learning) -> Tensor:
    return torch.diag(1.0 / given.features.std(0).clamp_min(1e-6))


def within(shrinkage: float, of: Metric = plain) -> Metric:
    """The inverse root of the covariance inside tiny100's classes, shrunk towards a sphere."""

    def metric(given: Learning) -> Tensor:
        first = of(given)
        features = given.features[: given.tiny] @ first
        labels = given.labels[: given.tiny]
        means = (labels.T @ features) / labels.sum(0).clamp_min(1)[:, None]
        rest = (features - labels @ means).double()
        inside = rest.T @ rest / len(rest)
        sphere = torch.trace(inside) / len(inside) * torch.eye(len(inside)).double()
        values, vectors = torch.linalg.eigh((1 - shrinkage) * inside + shrinkage * sphere)
        return first @ (vectors / values.sqrt() @ vectors.T).float()

    return metric


def classifier(given: Learning) -> Tensor:
    """Scores of the ImageNet classes, centred: the backbone's own last layer."""
    return (given.classifier - given.classifier.mean(0)).T


def stranger(given: Learning) -> Tensor:
    return classifier(dataclasses.replace(given, classifier=given.stranger))


def joined(*metrics_: Metric) -> Metric:
    """Several metrics side by side, each with the same total variance."""

    def metric(given: Learning) -> Tensor:
        centred = given.features - given.features.mean(0)
        parts = [one(given) for one in metrics_]
        return torch.cat([part / (centred @ part).square().sum().sqrt() for part in parts], 1)

    return metric


def fisher(shrinkage: float) -> Recipe:
    """Discriminant analysis: the directions that separate the training classes, then rotated."""

    def metric(given: Learning) -> Tensor:
        whitening = within(shrinkage)(given)
        labels, features = given.labels[: given.tiny], given.features[: given.tiny]
        means = (labels.T @ features) / labels.sum(0).clamp_min(1)[:, None]
        spread = (means - features.mean(0)) @ whitening
        _, _, directions = torch.linalg.svd(spread, full_matrices=False)
        rest = whitening - whitening @ directions.T @ directions
        # 60 classes span 59 directions; the rest of the 64 are weak ones from the other features.
        return torch.cat([whitening @ directions[: BITS - 1].T, 0.1 * rest], 1)

    return rotated(metric)


def by_method(
    name: str,
    *,
    epochs: int = 10,
    rate: float = 0.01,
    tiny_only: bool = False,
    begin: Recipe | None = None,
) -> Recipe:
    """A method of the package; ``begin`` returns the linear head that training starts from."""

    def recipe(given: Learning) -> Head:
        if tiny_only:
            labels = given.labels[: given.tiny]
            given = dataclasses.replace(
                given,
                features=given.features[: given.tiny],
                labels=labels[:, labels.any(0)],
            )
        torch.manual_seed(given.seed)
        learner = methods.create(name, bits=BITS, classes=given.labels.shape[1])
        if isinstance(learner, FeatureMethod):
            return learner.fit(given.features, given.labels, seed=given.seed)
        assert isinstance(learner, HashMethod)
        head = learner.head(given.features.shape[1])
        head.start(given.features)
        if begin is not None:
            first = begin(given)
            assert isinstance(head, LinearHead)
            assert isinstance(first, LinearHead)
            with torch.no_grad():
                weight = first.linear.weight
                outputs = (given.features - head.shift) @ weight.T
                head.linear.weight.copy_(weight / outputs.std(0)[:, None] / head.scale)
                head.linear.bias.zero_()
        images = FrozenImages(given.features, given.labels, head)
        settings = Settings(epochs=epochs, learning_rate=rate, seed=given.seed)
        Loop(learner, images, settings).run()
        return head.eval()

    return recipe


CANDIDATES: dict[str, Recipe] = {
    "LSH": by_method("lsh"),
    "ITQ": by_method("itq"),
    "ITQ, tiny100 alone": by_method("itq", tiny_only=True),
    "ITQ on standardised features": rotated(standardised),
    "ITQ on half-whitened features": rotated(plain, power=0.5),
    "ITQ on whitened features": rotated(plain, power=0.0),
    "ITQ, covariance within classes divided out, shrunk by 0.9": rotated(within(0.9)),
    "ITQ, covariance within classes divided out, shrunk by 0.5": rotated(within(0.5)),
    "discriminant analysis shrunk by 0.5, ITQ rotation": fisher(0.5),
    "ITQ on the classifier's scores": rotated(classifier),
    "ITQ on the classifier's scores, deviations to the power 1.3": rotated(classifier, power=1.3),
    "ITQ on the classifier's scores and the features": rotated(joined(classifier, plain)),
    "ITQ on the classifier's scores and within-class metric 0.7": rotated(
        joined(classifier, within(0.7))
    ),
    "ITQ on the classifier's scores and within-class metric 0.9": rotated(
        joined(classifier, within(0.9))
    ),
    "ITQ on the classifier's scores, covariance within classes divided out, shrunk by 0.9": rotated(
        within(0.9, classifier)
    ),
    "BiHalf": by_method("bihalf"),
    "DFH, 10 epochs": by_method("dfh"),
    "DFH, 3 epochs": by_method("dfh", epochs=3),
    "DFH, tiny100 alone": by_method("dfh", tiny_only=True),
    "DFH, 3 gentle epochs from ITQ on the classifier's scores": by_method(
        "dfh", epochs=3, rate=0.001, begin=rotated(classifier)
    ),
    "OrthoHash": by_method("orthohash"),
    "CSQ": by_method("csq"),
    "Greedy Hash": by_method("greedyhash"),
    "DPN": by_method("dpn"),
}
# For comparison only: the candidates without the classifier rows that CIFAR-10 would choose.
CHECKS: dict[str, Recipe] = {
    "check: ITQ on the classifier's scores": rotated(stranger),
    "check: ITQ on the classifier's scores and within-class metric 0.7": rotated(
        joined(stranger, within(0.7))
    ),
    "check: ITQ on the classifier's scores and within-class metric 0.9": rotated(
        joined(stranger, within(0.9))
    ),
}
FLOATS = "centred features, cosine (not a code)"


def score(found: dict[str, float]) -> float:
    """The criterion: the mean over the two choice sets."""
    return (found["tiny100 choice"] + found["cifar10 choice"]) / 2


def compare(data: Data, names: Sequence[str]) -> dict[str, list[dict[str, float]]]:
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for seed in range(SEEDS):
        trial = Trial(data, seed)
        for name in rows:
            began = time.perf_counter()
            if name == FLOATS:
                found = trial.ceiling()
            else:
                found = trial.measure((CANDIDATES | CHECKS)[name](trial.learning))
            found["choice"] = score(found)
            found["seconds"] = round(time.perf_counter() - began, 1)
            rows[name].append(found)
            text = "  ".join(f"{test} {found[test]:.3f}" for test in ("choice", *TESTS))
            print(f"seed {seed}  {name:62s} {text}", flush=True)
    return rows


def sizes(data: Data) -> dict[str, dict[str, float]]:
    """Cosine mAP of features at several image sizes, 500 queries against 2,000 images each."""
    table: dict[str, dict[str, float]] = {}
    for size in SIZES:
        row: dict[str, float] = {}
        for name, (collection, split) in data.of.items():
            parts = []
            for numbers, count in ((split.query, 500), (split.database, 2000)):
                order = hash_order(collection.names, numbers.tolist(), 0)[:count]
                parts.append(np.sort(np.array(order)))
            query, database = (data.features(name, part, size) for part in parts)
            mean = database.mean(0)
            labels = [collection.labels[part] for part in parts]
            row[name] = cosine_map(query - mean, database - mean, labels[0], labels[1])
        table[f"{size} px"] = row
    fastest = dict.fromkeys(SIZES, float("inf"))
    for _ in range(12):  # the sizes by turns: other work on the machine then slows all of them
        for size in SIZES:
            pixels = np.zeros((16, 3, size, size), dtype=np.uint8)
            began = time.perf_counter()
            data.runtimes[size].features(pixels)
            fastest[size] = min(fastest[size], time.perf_counter() - began)
    for size in SIZES:
        table[f"{size} px"]["images per second"] = round(16 / fastest[size])
    return table


def _jpeg(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "jpeg", quality=quality)
    return Image.open(file).convert("RGB")


def _crop(image: Image.Image, share: float) -> Image.Image:
    width, height = image.size
    left, top = width * (1 - share) / 2, height * (1 - share) / 2
    return image.crop((round(left), round(top), round(width - left), round(height - top)))


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG quality 75": lambda image: _jpeg(image, 75),
    "JPEG quality 30": lambda image: _jpeg(image, 30),
    "two thirds of the size": lambda image: image.resize(
        (image.width * 2 // 3, image.height * 2 // 3), Image.Resampling.LANCZOS
    ),
    "brighter by a fifth": lambda image: ImageEnhance.Brightness(image).enhance(1.2),
    "5 % cut off each side": lambda image: _crop(image, 0.9),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "grey": lambda image: image.convert("L").convert("RGB"),
}


def changes(data: Data, hasher: TorchHasher, count: int = 200) -> dict[str, dict[str, float]]:
    """Bits that differ between an image of coco21 and an altered copy, and between other pairs."""
    collection, split = data.of["coco21"]
    numbers = hash_order(collection.names, split.query.tolist(), 0)[:count]
    images = [collection.reader.open(i).convert("RGB") for i in numbers]
    first = hasher.encode(images)
    rows = {}
    for name, change in CHANGES.items():
        second = hasher.encode([change(image) for image in images])
        rows[name] = codes.hamming(first, second).diagonal()
    distances = codes.hamming(first, first)
    rows["another image"] = distances[np.triu_indices(count, 1)]
    return {
        name: {
            "median": float(np.median(row)),
            "95 %": float(np.quantile(row, 0.95)),
            **{f"within {radius}": float((row <= radius).mean()) for radius in (2, 4, 6, 8, 12)},
        }
        for name, row in rows.items()
    }


def make(data: Data, name: str, rows: list[dict[str, float]]) -> TorchHasher:
    """Train the chosen recipe on all classes, all labels and the whole classifier."""
    classes = data.of["tiny100"][0].classes
    given = learning(data, classes, (), np.arange(len(data.classifier)), 0)
    head = CANDIDATES[name](given)
    network = backbones.create(image_size=SIZE)
    details = {
        "data": {
            "tiny100": f"{given.tiny:,} images",
            "coco21": f"{len(given.features) - given.tiny:,} images",
        },
        "options": {"recipe": name},
        "settings": {"seed": given.seed},
        "results": {
            f"mAP on {test} classes, which were not trained on then": summary(rows, test)
            for test in TESTS
            if "seen" not in test
        },
    }
    return TorchHasher(network, head, "itq", (), details)


def summary(rows: list[dict[str, float]], test: str) -> str:
    values = [row[test] for row in rows]
    return f"{statistics.mean(values):.3f} ({min(values):.3f}–{max(values):.3f})"


def card(hasher: TorchHasher, result: dict[str, Any]) -> str:
    """The shipped README, with the numbers of a result."""
    template = Path(__file__).with_name("builtin_hasher.md").read_text(encoding="utf-8")
    rows = result["candidates"]
    order = sorted(rows, key=lambda name: -statistics.mean(row["choice"] for row in rows[name]))
    lines = ["| | chosen by | " + " | ".join(TESTS) + " |", "|---|" + "---|" * (len(TESTS) + 1)]
    for name in order:
        title = f"**{name}**" if name == result["chosen"] else name
        cells = " | ".join(summary(rows[name], test) for test in ("choice", *TESTS))
        lines.append(f"| {title} | {cells} |")
    tables = {"candidates": "\n".join(lines), "chosen": result["chosen"]}
    tables |= {"size": str(result["size"]), "rows removed": str(result["rows removed"])}
    tables |= {f"{name} images": count for name, count in hasher.details["data"].items()}
    for key in ("sizes", "changes"):
        columns = list(next(iter(result[key].values())))
        lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
        for name, row in result[key].items():
            lines.append(f"| {name} | " + " | ".join(f"{row[c]:.3g}" for c in columns) + " |")
        tables[key] = "\n".join(lines)
    for key, name in (("dfh seen", "DFH, 10 epochs"), ("chosen seen", result["chosen"])):
        tables[key] = f"{statistics.mean(row['coco21 seen'] for row in rows[name]):.3f}"
    for part in ("choice", "report"):
        tables[f"cifar10 {part}"] = ", ".join(sorted(result["cifar10"][part]))
    for key, text in tables.items():
        template = template.replace("{" + key + "}", text)
    return template


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--from-json", type=Path, help="take the numbers from here")
    parser.add_argument("--only", help="candidates whose name contains this")
    parser.add_argument("--write", action="store_true", help="write the shipped files")
    args = parser.parse_args()
    data = Data()
    result = storage.read_json(args.from_json) if args.from_json else {}
    known = (*CANDIDATES, *CHECKS, FLOATS)
    rows = result.get("candidates", {})
    names = [name for name in known if (args.only in name if args.only else name not in rows)]
    rows = rows | compare(data, names)
    trial = Trial(data, 0)
    result |= {
        "what": "mAP, expected over ties, of the candidates for the built-in hasher",
        "bits": BITS,
        "size": SIZE,
        "chosen": max(
            (name for name in rows if name in CANDIDATES),
            key=lambda name: statistics.mean(row["choice"] for row in rows[name]),
        ),
        "tiny100": {"report": trial.classes["report"]},
        "cifar10": trial.halves,
        "rows removed": len(data.cifar_rows()),
        "candidates": {name: rows[name] for name in known if name in rows},
        "versions": versions(),
    }
    if "sizes" not in result:
        result["sizes"] = sizes(data)
    hasher = make(data, result["chosen"], rows[result["chosen"]])
    if "changes" not in result:
        result["changes"] = changes(data, hasher)
    print("chosen:", result["chosen"])
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.write:
        write(hasher, builtin.folder(), card(hasher, result))


def write(hasher: TorchHasher, place: Path, text: str) -> None:
    """Write the files that ``builtin.read_builtin`` reads."""
    state = hasher.head.state_dict()
    config = {
        "format": builtin.HEAD_FORMAT,
        "bits": hasher.bits,
        "method": hasher.method,
        "backbone": hasher.backbone.name,
        "backbone_sha256": hasher.runtime.checksum,
        "preprocessing": hasher.preprocessing.to_config(),
        "head": hasher.head.config(),
        "head_sha256": storage.tensors_checksum(state),
        "versions": versions(),
        "details": hasher.details,
    }
    files = {
        builtin.HEAD_WEIGHTS: storage.write_tensors(state),
        builtin.HEAD_CARD: text,
        builtin.HEAD_CONFIG: storage.dump_json(config),
    }
    storage.write_files(place, files)


if __name__ == "__main__":
    main()
