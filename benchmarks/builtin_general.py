"""Chooses, measures and builds general2-256, a better hasher for images of similar content.

    python benchmarks/builtin_general.py --json results/builtin-general.json [--write]

The network is that of general-64-int8. What is new is the head, which is not linear: the scores of
the ImageNet classes, divided by a temperature, become probabilities, and their square roots are put
beside the features, whose covariance inside classes was divided out. ITQ then makes the bits. The
first 64 and 128 of the 256 bits are codes of their own, so that one file serves three lengths.

Every candidate learns from 60 classes of tiny100 and from coco21, and is measured on classes of
which it saw no image and no label, as in ``builtin_hasher.py``: chosen on the choice classes alone.
Needs the data sets tiny100, coco21 and cifar10 (see FISHERHASH_DATA), and faiss for the comparison.
Features are cached.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from fisherhash.model.head_base import Head
from fisherhash.model.onnx_hasher import OnnxHasher
from fisherhash.model.onnx_runtime import FEATURES, LOGITS, OnnxRuntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor
from torch.nn import functional

from builtin_hasher import SEEDS, SIZE, TESTS, Data, Learning, Trial, learning, score, within
from fisherhash import codes
from fisherhash.data.computing import decode
from fisherhash.evaluation import evaluate, metrics
from fisherhash.methods.base import sign
from fisherhash.model import builtin
from fisherhash.model.export import with_metadata
from fisherhash.model.folder import versions
from fisherhash.system import storage

NAME, NETWORK = "general2-256", "general-64-int8"
LENGTHS = (64, 128, 256)
DRAFT = 1.5
"""How far a JPEG decoder may reduce large images, see ``Preprocessing``; measured by draft.py."""
DIRECTIONS = 3
"""Directions of largest variance per two bits."""
STARTS = 3
"""Random starts of ITQ, whose results differ by up to a point; recipes are compared by the mean."""
MADE_UP = 10
"""Made-up images per row of the classifier."""


class ScoresHead(Head):
    """u = U sqrt(softmax(A f / T)) + V f + v: scores of known classes beside the features."""

    kind = "scores"

    def __init__(self, in_features: int, bits: int, classes: int, temperature: float) -> None:
        super().__init__(in_features, bits)
        self.temperature = temperature
        self.classifier = torch.nn.Linear(in_features, classes, bias=False)
        self.of_scores = torch.nn.Linear(classes, bits, bias=False)
        self.of_features = torch.nn.Linear(in_features, bits)

    def forward(self, features: Tensor) -> Tensor:
        """Features (n, in_features) to logits (n, bits)."""
        roots = functional.softmax(self.classifier(features) / self.temperature, dim=1).sqrt()
        return self.of_scores(roots) + self.of_features(features)


@dataclass(frozen=True)
class Recipe:
    """How a head is fitted.

    Attributes:
        temperature: of the softmax.
        features: weight of the features beside the scores.
        shrinkage: of the covariance inside classes towards a sphere.
        unseen: fit as if every class were an unseen one, with made-up images of all classes.
        stranger: leave out the rows of the classifier that CIFAR-10's images choose (a check).
    """

    temperature: float = 4.0
    features: float = 1.0
    shrinkage: float = 0.7
    unseen: bool = False
    stranger: bool = False

    def __str__(self) -> str:
        check = "check: " if self.stranger else ""
        unseen = ", as for unseen classes" if self.unseen else ""
        return (
            f"{check}temperature {self.temperature:g}, features {self.features:g}, "
            f"shrunk by {self.shrinkage:g}{unseen}"
        )


class Fitting:
    """A recipe on what is learnt from: all but the rotation, which has a random start."""

    @torch.no_grad()
    def __init__(self, recipe: Recipe, given: Learning, own: Tensor) -> None:
        self.recipe, self.seed = recipe, given.seed
        self.rows = given.stranger if recipe.stranger else given.classifier
        self.metric = within(recipe.shrinkage)(given)
        features, hidden = given.features, None
        if recipe.unseen:
            features, hidden = as_unseen(given, own, self.rows)
        scores = features @ self.rows.T / recipe.temperature
        if hidden is not None:
            known = torch.nonzero(hidden >= 0).flatten()
            scores[known, hidden[known]] = -torch.inf
        roots = functional.softmax(scores, dim=1).sqrt()
        rest = features @ self.metric
        self.scales = [
            (part - part.mean(0))[: len(given.features)].square().sum(1).mean().sqrt()
            for part in (roots, rest)
        ]
        joined = torch.cat([roots / self.scales[0], recipe.features * rest / self.scales[1]], 1)
        self.mean = joined.mean(0)
        centred = joined - self.mean
        _, vectors = torch.linalg.eigh((centred.T @ centred / len(centred)).double())
        self.main = vectors.flip(1)[:, : DIRECTIONS * max(LENGTHS) // 2].float()
        self.reduced = centred @ self.main

    @torch.no_grad()
    def head(self, start: int = 0, lengths: Sequence[int] = LENGTHS) -> ScoresHead:
        """A head of 256 bits, of which the first 64 and 128 are codes too."""
        mixing = nested(self.reduced, self.seed + 1000 * start, lengths)
        weight = (self.main @ mixing).T
        head = ScoresHead(len(self.metric), lengths[-1], len(self.rows), self.recipe.temperature)
        head.classifier.weight.copy_(self.rows)
        split = len(self.rows)
        of_features = weight[:, split:] @ self.metric.T * self.recipe.features / self.scales[1]
        head.of_scores.weight.copy_(weight[:, :split] / self.scales[0])
        head.of_features.weight.copy_(of_features)
        head.of_features.bias.copy_(-weight @ self.mean)
        return head.eval()


def as_unseen(given: Learning, own: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Features, and the row of the classifier that each should do without, or -1.

    Images of a class that the classifier knows have one high score. Those of other classes, which
    the codes are for, have several lower ones. So an image of tiny100 does without the row of its
    own class, and all rows get made-up images, which do without that row in turn. The mean of a
    class is guessed from its row w as m + a S w, with S the covariance inside classes: as if the
    classifier were a discriminant. A residual of a real image is added.

    Args:
        given: the images.
        own: (classes of tiny100,) the row of each, in the whole of given.classifier.
        rows: (n, d) of the classifier that are used.
    """
    labels = given.labels[: given.tiny]
    labels = labels[:, labels.any(0)]
    features = given.features[: given.tiny]
    means = labels.T @ features / labels.sum(0)[:, None]
    rest = features - labels @ means
    inside = rest.T @ rest / len(rest)
    inside = (inside + torch.trace(inside) / len(inside) * torch.eye(len(inside))) / 2
    guessed = given.classifier @ inside
    guessed -= guessed[own].mean(0)
    known, centre = means - means.mean(0), means.mean(0)
    guessed *= (guessed[own] * known).sum() / guessed[own].square().sum()
    # Equal rows are the same row: those of a check are some of the whole classifier's.
    place = {row.numpy().tobytes(): i for i, row in enumerate(rows)}
    number = torch.tensor([place.get(row.numpy().tobytes(), -1) for row in given.classifier])
    used = torch.nonzero(number >= 0).flatten().repeat(MADE_UP)
    generator = torch.Generator().manual_seed(given.seed)
    drawn = torch.randint(len(rest), (len(used),), generator=generator)
    made_up = (centre + guessed[used] + rest[drawn]).clamp_min(0)
    hidden = torch.cat(
        [
            number[own][labels.argmax(1)],
            torch.full((len(given.features) - given.tiny,), -1),
            number[used],
        ]
    )
    return torch.cat([given.features, made_up]), hidden


def nested(reduced: Tensor, seed: int, lengths: Sequence[int]) -> Tensor:
    """(k, 256): 64 bits from the first 96 directions, 64 from 192, 128 from 384, each by ITQ."""
    parts, done = [], 0
    for length in lengths:
        used = DIRECTIONS * length // 2
        rotation = torch.zeros(reduced.shape[1], length - done, dtype=reduced.dtype)
        rotation[:used] = rotated(reduced[:, :used], length - done, seed + done)
        parts.append(rotation)
        done = length
    return torch.cat(parts, 1)


def rotated(reduced: Tensor, bits: int, seed: int) -> Tensor:
    """ITQ's rotation (k, bits) of k directions, of which fewer bits may be made."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(reduced.shape[1], bits, generator=generator, dtype=reduced.dtype)
    rotation = torch.linalg.qr(start).Q
    for _ in range(50):
        aim = reduced.T @ sign(reduced @ rotation)
        left, _, right = torch.linalg.svd(aim, full_matrices=False)
        rotation = left @ right
    return rotation


CANDIDATES = [
    *(Recipe(temperature=temperature) for temperature in (2.0, 4.0)),
    *(Recipe(temperature=temperature, unseen=True) for temperature in (2.0, 3.0)),
    Recipe(temperature=2.0, unseen=True, shrinkage=0.5),
]
Logits = Callable[[Tensor], NDArray[np.float32]]


def measured(trial: Trial, logits: Logits, bits: int, tests: Iterable[str]) -> dict[str, float]:
    """mAP of the first bits, expected over ties."""
    found = {}
    for test in tests:
        query, database, *labels = trial.tests[test]
        pair = (codes.pack(logits(part)[:, :bits]) for part in (query, database))
        result = evaluate(*pair, *labels, bits=bits, bit_statistics=False)
        found[test] = float(result.map)
    return found


def of_head(head: Head) -> Logits:
    def logits(features: Tensor) -> NDArray[np.float32]:
        with torch.inference_mode():
            return head.logits(features).numpy()

    return logits


def quantised_floats(trial: Trial, size: int) -> dict[str, dict[str, float]]:
    """mAP of features in so many bytes: signs of random directions, product quantisation."""
    import faiss

    features = trial.learning.features.numpy()
    mean = features.mean(0)
    drawn = np.random.default_rng(trial.learning.seed).normal(size=(features.shape[1], 8 * size))

    def signs(given: Tensor) -> NDArray[np.float32]:
        return (given.numpy() - mean) @ drawn.astype(np.float32)

    def unit(given: NDArray[np.float32]) -> NDArray[np.float32]:
        centred = given - mean
        return centred / np.linalg.norm(centred, axis=1, keepdims=True)

    index = faiss.index_factory(features.shape[1], f"PCAR{4 * size},PQ{size}")
    index.train(unit(features))
    product: dict[str, float] = {}
    for test in TESTS:
        query, database, *labels = trial.tests[test]
        index.reset()
        index.add(unit(database.numpy()))
        stored = index.reconstruct_n(0, len(database))
        # The query in full, the database quantised: ||q - x||^2.
        distances = (
            torch.cdist(torch.from_numpy(unit(part.numpy())), torch.from_numpy(stored))
            for part in query.split(64)
        )
        product[test] = float(metrics(distances, *labels).map)
    found = {
        f"signs of the features, {size} bytes": measured(trial, signs, 8 * size, TESTS),
        f"product quantisation after PCA (faiss), {size} bytes": product,
    }
    return {name: row | {"choice": score(row)} for name, row in found.items()}


def own_rows(data: Data, classes: list[str], keep: NDArray[np.int64]) -> Tensor:
    """Where the row of each class is among the rows of the classifier that are kept."""
    known = data.imagenet_rows()
    return torch.from_numpy(np.searchsorted(keep, [known[name] for name in classes]))


def own_of(data: Data, trial: Trial) -> Tensor:
    """The same for the classes that a trial learns from."""
    known = data.imagenet_rows()
    held = [known[name] for part in ("report", "choice") for name in trial.classes[part]]
    keep = np.setdiff1d(np.arange(len(data.classifier)), held)
    return own_rows(data, trial.classes["train"], keep)


def compare(data: Data, trials: list[Trial]) -> tuple[Recipe, dict[str, Any]]:
    """Choose on the choice classes at 64 bits, then measure everything at every length."""
    choice = [test for test in TESTS if "choice" in test]
    tried: dict[Recipe, float] = {}
    for recipe in CANDIDATES:
        found = []
        for trial in trials:
            fitting = Fitting(recipe, trial.learning, own_of(data, trial))
            for start in range(STARTS):
                logits = of_head(fitting.head(start, LENGTHS[:1]))
                found.append(score(measured(trial, logits, LENGTHS[0], choice)))
        tried[recipe] = statistics.mean(found)
        print(f"{recipe!s:60s} {tried[recipe]:.4f}", flush=True)
    best = max(tried, key=tried.__getitem__)
    table: dict[str, Any] = {}
    for trial in trials:
        for recipe in (best, Recipe(**(vars(best) | {"stranger": True}))):
            logits = of_head(Fitting(recipe, trial.learning, own_of(data, trial)).head())
            for bits in LENGTHS:
                row = measured(trial, logits, bits, TESTS)
                check = "check: " if recipe.stranger else ""
                table.setdefault(f"{check}general2-{bits}", []).append(row | {"choice": score(row)})
        for size in (8, 16, 32):
            for name, row in quantised_floats(trial, size).items():
                table.setdefault(name, []).append(row)
        floats = trial.ceiling()
        table.setdefault("centred features, cosine (5,120 bytes)", []).append(
            floats | {"choice": score(floats)}
        )
    means = {
        name: {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
        for name, rows in table.items()
    }
    for name, row in means.items():
        print(f"{name:50s}", {key: round(value, 3) for key, value in row.items()}, flush=True)
    return best, {"tried": {str(r): v for r, v in tried.items()}, "rows": table, "means": means}


def with_head(network: OnnxRuntime, head: ScoresHead) -> bytes:
    """The quantised network with another head, its matrices in bytes with a step per column."""
    model = onnx.load_from_string(network.content())
    graph = model.graph
    keep, needed = [], {FEATURES}
    for node in reversed(graph.node):
        if needed & {*node.output}:
            keep.append(node)
            needed |= {*node.input}
    del graph.node[:]
    graph.node.extend(reversed(keep))
    used = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)

    def constant(name: str, value: Tensor) -> str:
        matrix = value.detach().numpy()
        step = np.abs(matrix).max(0) / 127
        stored = {"bytes": np.rint(matrix / step).astype(np.int8), "step": step}
        for part, array in stored.items():
            tensor = numpy_helper.from_array(array, f"head.{name}.{part}")
            graph.initializer.append(tensor)
        cast = f"head.{name}.cast"
        # Not DequantizeLinear: products with these stay in full precision.
        graph.node.append(
            helper.make_node("Cast", [f"head.{name}.bytes"], [cast], to=TensorProto.FLOAT)
        )
        graph.node.append(helper.make_node("Mul", [cast, f"head.{name}.step"], [f"head.{name}"]))
        return f"head.{name}"

    scaled = head.classifier.weight.T / head.temperature
    steps = [
        ("MatMul", [FEATURES, constant("classifier", scaled)], "head.scores", {}),
        ("Softmax", ["head.scores"], "head.shares", {"axis": 1}),
        ("Sqrt", ["head.shares"], "head.roots", {}),
        ("MatMul", ["head.roots", constant("of_scores", head.of_scores.weight.T)], "head.1", {}),
        ("MatMul", [FEATURES, constant("of_features", head.of_features.weight.T)], "head.2", {}),
        ("Add", ["head.1", "head.2"], "head.3", {}),
    ]
    bias = head.of_features.bias.detach().numpy()
    graph.initializer.append(numpy_helper.from_array(bias, "head.bias"))
    steps.append(("Add", ["head.3", "head.bias"], LOGITS, {}))
    for kind, inputs, output, options in steps:
        graph.node.append(helper.make_node(kind, inputs, [output], **options))
    for output in graph.output:
        if output.name == LOGITS:
            output.type.tensor_type.shape.dim[1].dim_value = head.bits
    onnx.checker.check_model(model)
    digest = hashlib.sha256(graph.SerializeToString(deterministic=True)).hexdigest()
    known = network.metadata | {"bits": head.bits, "head": head.config()}
    known["method"] = "itq"
    known["preprocessing"] = network.metadata["preprocessing"] | {"draft": DRAFT}
    text = f"{digest} {known['preprocessing']} {known['backbone']}"
    known["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()
    return with_metadata(model, known)


def write(data: Data, network: OnnxRuntime, recipe: Recipe, result: dict[str, Any]) -> None:
    """Fit on all classes and labels and on the whole classifier; write the shipped files."""
    classes = data.of["tiny100"][0].classes
    given = learning(data, classes, (), np.arange(len(data.classifier)), 0)
    own = own_rows(data, list(classes), np.arange(len(data.classifier)))
    head = Fitting(recipe, given, own).head()
    content = with_head(network, head)
    made = OnnxRuntime(content)
    collection, split = data.of["coco21"]
    blocks = decode(collection, split.query[:500], made.preprocessing)
    pixels = np.concatenate([block.values for block in blocks])
    in_full = of_head(head)(torch.from_numpy(network.features(pixels)))
    changed = float(((made.logits(pixels) > 0) != (in_full > 0)).mean())
    print(
        f"{len(content):,} bytes; bytes instead of full precision change {changed:.3%} of the bits"
    )
    if changed > 0.01:
        raise SystemExit("the head in the file is not the one that was fitted")
    result["written"] = {"bytes": len(content), "bits that bytes change": changed}
    details = {
        "data": {
            "tiny100": f"{given.tiny:,} images",
            "coco21": f"{len(given.features) - given.tiny:,} images",
        },
        "options": {"recipe": str(recipe)},
        "settings": {"seed": given.seed},
        "nested": list(LENGTHS[:-1]),
        "results": {
            f"mAP on {test} classes at {bits} bits, which were not trained on then": round(
                result["means"][f"general2-{bits}"][test], 3
            )
            for bits in LENGTHS
            for test in TESTS
            if "seen" not in test
        },
    }
    config = {"format": builtin.HEAD_FORMAT, **OnnxHasher(made, details=details).config()}
    config["onnx_sha256"] = hashlib.sha256(content).hexdigest()
    storage.write_files(
        Path(builtin.__file__).parent / NAME,
        {
            builtin.HEAD_ONNX: content,
            builtin.HEAD_CARD: card(recipe, result, len(content)),
            builtin.HEAD_CONFIG: storage.dump_json(config),
        },
    )


def card(recipe: Recipe, result: dict[str, Any], size: int) -> str:
    """The shipped README, with the numbers of a result."""
    text = Path(__file__).with_name("builtin_general.md").read_text(encoding="utf-8")
    shown = ("choice", *TESTS)
    lines = ["| | " + " | ".join(shown) + " |", "|---|" + "---|" * len(shown)]
    for name, row in result["means"].items():
        lines.append(f"| {name} | " + " | ".join(f"{row[key]:.3f}" for key in shown) + " |")
    for key, value in {
        "recipe": str(recipe),
        "temperature": f"{recipe.temperature:g}",
        "table": "\n".join(lines),
        "size": f"{size / 1e6:.1f}",
    }.items():
        text = text.replace("{" + key + "}", value)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="write the numbers here")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--write", action="store_true", help="write the shipped files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = Data()
    network = OnnxRuntime(builtin.folder(NETWORK) / builtin.HEAD_ONNX)
    data.runtimes[SIZE] = network  # type: ignore[assignment]
    best, result = compare(data, [Trial(data, seed) for seed in range(args.seeds)])
    known = storage.read_json(Path(__file__).parents[1] / "results" / "builtin-int8.json")
    before = {}
    for name in ("general-64", NETWORK):
        rows = [{test: row[test] for test in TESTS} for row in known[name]]
        rows = [row | {"choice": score(row)} for row in rows]
        before[name] = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
    result["means"] = before | result["means"]
    if args.write:
        write(data, network, best, result)
    about = {
        "what": "mAP, expected over ties, on classes that were not trained on",
        "chosen": str(best),
        **result,
        "versions": versions(),
    }
    args.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
