"""The demo: the main job on the built-in sample, and one page that shows what came out."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fisherhash import backbones, codes, pages, storage
from fisherhash.data.protocols import Split, resolve
from fisherhash.data.sample import CITATION
from fisherhash.data.sources import Collection, open_data
from fisherhash.data.splits import hash_order
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.evaluation import Evaluation, Matches, retrieve
from fisherhash.features import Extractor
from fisherhash.hasher import versions
from fisherhash.loop import Settings
from fisherhash.methods.dfh import DFH
from fisherhash.training import Trained, fit

logger = logging.getLogger(__name__)

PAGE, MODEL, RECORD = "index.html", "model", "demo.json"
MADE_BY = "fisherhash demo"
SHOWN = 10
"""Results shown a query."""
PARTS = {
    "features": "features of all images, or reading them from the cache",
    "training": "training on the features",
    "saving": "saving the model",
    "evaluation": "codes of all images, and mAP",
    "page": "this page",
}


@dataclass(frozen=True)
class DemoResult:
    """What the demo made.

    Attributes:
        page: the HTML page.
        model: the model folder.
        evaluation: how good the codes are.
        seconds: how long each part took.
    """

    page: Path
    model: Path
    evaluation: Evaluation
    seconds: dict[str, float]


@dataclass(frozen=True)
class _Shown:
    """The queries on the page: image numbers, codes of all images, and what was retrieved."""

    queries: NDArray[np.int64]
    packed: NDArray[np.uint8]
    matches: Matches
    right: NDArray[np.bool_]


def run_demo(
    out: str | os.PathLike[str] = "fisherhash-demo",
    *,
    bits: int = 24,
    image_size: int = 128,
    epochs: int = 40,
    seed: int = 0,
    backbone: str = backbones.DEFAULT,
    say: Callable[[str], object] = logger.info,
) -> DemoResult:
    """Learn codes of the built-in sample with DFH, measure them, and write a page about it.

    The same arguments give the same model and the same page, but for the times on it.

    Args:
        out: the folder for the page and the model; it must be new, empty, or a former demo.
        bits: length of the codes.
        image_size: side in pixels that the 32-pixel images are enlarged to for the backbone.
        epochs: passes over the training set.
        seed: of the training.
        backbone: what turns images into features.
        say: told one line about each part.

    Raises:
        UsageError: ``out`` holds something else, or a number is out of its range.
    """
    codes.check_bits(bits)
    settings = Settings(epochs=epochs, seed=seed)
    network = backbones.create(backbone, image_size=image_size)
    folder = _claim(Path(out))
    seconds: dict[str, float] = {}

    collection = open_data("sample")
    split = resolve(collection)
    say(
        f"{len(collection):,} images of CIFAR-10 in {len(collection.classes)} classes: "
        f"{len(split.database):,} to learn from and to search, {len(split.query):,} to ask with"
    )
    say(f"features: {network.name} at {image_size} px, the longest part, kept for the next time …")
    clock = _Clock(seconds)
    # One place on every machine: a GPU would give other bits.
    Extractor(network, torch.device("cpu")).of_collection(collection)
    clock.lap("features")
    say(f"features of {len(collection):,} images: {seconds['features']:.1f} s")

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
    clock.lap("training")
    # Inside fit: opening the cached features again, the loop, and then writing the model.
    learning = sum(trained.seconds.values())
    seconds["saving"] = max(0.0, seconds["training"] - learning)
    seconds["training"] = learning
    say(f"DFH, {bits} bits, {epochs} epochs: {seconds['training']:.1f} s")
    say(f"the model is in {folder / MODEL}: {seconds['saving']:.1f} s")

    evaluation = trained.evaluate()
    shown = _retrieve(trained, split)
    clock.lap("evaluation")
    say(f"{_map_sentence(evaluation)}: {seconds['evaluation']:.1f} s")

    body = _body(trained, evaluation, shown, folder)
    clock.lap("page")
    html = pages.page(
        f"fisherhash: {bits}-bit image codes",
        f"{body}\n{_times(seconds)}\n{_footer(trained, split, settings)}",
        description="Ten queries against binary codes learned with Deep Fisher Hashing.",
    )
    record = {
        "made_by": MADE_BY,
        "finished": True,
        "evaluation": evaluation.to_json(),
        "split": split.to_json(),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "versions": versions(),
    }
    storage.write_files(
        folder,
        {
            PAGE: storage.write_text(html),
            RECORD: storage.write_text(storage.dump_json(record)),
        },
    )
    say(f"the page is {folder / PAGE}: {seconds['page']:.1f} s; in all {clock.total():.1f} s")
    return DemoResult(folder / PAGE, folder / MODEL, evaluation, seconds)


class _Clock:
    """Writes down the seconds since the last lap."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.began = self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = now - self.last
        self.last = now

    def total(self) -> float:
        return time.perf_counter() - self.began


def _claim(folder: Path) -> Path:
    """Make sure that ``folder`` is new, empty or ours, and leave the mark that it is."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; the demo needs a folder. Choose another --out")
    if folder.is_dir() and any(folder.iterdir()) and not _is_demo(folder):
        raise UsageError(
            f"{folder} is not empty and was not made by the demo; nothing in it was changed. "
            "Choose another --out"
        )
    mark = storage.dump_json({"made_by": MADE_BY, "finished": False})
    storage.write_files(folder, {RECORD: storage.write_text(mark)})
    return folder


def _is_demo(folder: Path) -> bool:
    try:
        record: Any = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("made_by") == MADE_BY


def _retrieve(trained: Trained, split: Split) -> _Shown:
    """The first query of each class in hash order, and its nearest images."""
    collection = trained.collection
    encoded = trained.hasher.encode_collection(collection, cached=True)
    if len(encoded.indices) != len(collection):
        raise FisherhashError(
            f"{len(encoded.skipped)} images of the built-in sample cannot be read; "
            "reinstall fisherhash"
        )
    numbers = collection.labels.argmax(axis=1)
    first: dict[int, int] = {}
    for item in hash_order(collection.names, split.query, seed=0):
        first.setdefault(int(numbers[item]), item)
    queries = np.array([first[number] for number in sorted(first)], dtype=np.int64)
    matches = retrieve(
        encoded.codes[queries], encoded.codes[split.database], SHOWN, trained.hasher.bits
    )
    right = matches.similar(collection.labels[queries], collection.labels[split.database])
    return _Shown(queries, encoded.codes, matches, right)


def _map_sentence(evaluation: Evaluation) -> str:
    return (
        f"mAP {evaluation.map:.4f} over {evaluation.queries:,} queries and "
        f"{evaluation.database:,} images, {_bounds(evaluation)}"
    )


def _bounds(evaluation: Evaluation) -> str:
    if evaluation.map_lower is None or evaluation.map_upper is None:
        return "bounds not available"
    return f"between {evaluation.map_lower:.4f} and {evaluation.map_upper:.4f} by order of ties"


def _class_name(collection: Collection, item: int) -> str:
    return collection.classes[int(collection.labels[item].argmax())]


def _body(trained: Trained, evaluation: Evaluation, shown: _Shown, folder: Path) -> str:
    return "\n".join(
        [
            _header(trained, evaluation, shown),
            _queries(trained, evaluation, shown),
            _centres(trained, shown),
            _learning(trained, evaluation),
            _next_steps(folder),
        ]
    )


def _header(trained: Trained, evaluation: Evaluation, shown: _Shown) -> str:
    bits, collection = trained.hasher.bits, trained.collection
    size = codes.code_bytes(bits)
    weight = "1 byte" if size == 1 else f"{size} bytes"
    rows = ", one byte a row" if bits <= 64 else ""
    item = int(shown.queries[0])
    code = shown.packed[item]
    learned = len(trained.split.train) if trained.split else 0
    found = evaluation.precision_at.get(SHOWN)
    numbers = [
        (f"{evaluation.map:.3f}", "mean average precision (mAP)", _bounds_short(evaluation)),
        (
            weight,
            "an image",
            f"{bits} bits; {size * evaluation.database:,} bytes for the whole database",
        ),
        (
            f"{evaluation.database:,}",
            "images in the database",
            f"asked by {evaluation.queries:,} queries that took no part in training",
        ),
    ]
    if found is not None:
        numbers.append(
            (
                f"{SHOWN * found:.1f} of {SHOWN}",
                "nearest images are right",
                "on average over all queries, ties in random order",
            )
        )
    return f"""<header>
<div class="top"><div>
<p class="eyebrow">fisherhash demo · Deep Fisher Hashing on CIFAR-10</p>
<h1>Similar images, found with {weight} each</h1>
<p class="lead">From {learned:,} labelled pictures, fisherhash learned to turn an image into
{bits} bits, so that images of one class get nearly the same bits and images of different classes
do not. Searching is then counting: the fewer bits two images differ in, the more alike they
are.</p>
<p class="lead">The {evaluation.queries:,} pictures asked with took no part in the training. The
{evaluation.database:,} pictures searched are the ones it learned from.</p>
</div>
<figure class="sketch"><img src="{pages.data_uri(collection.reader.open(item))}"
alt="a query of the class {escape(_class_name(collection, item))}">
<span class="arrow" aria-hidden="true">→</span>
<div>{pages.bits_svg(code, bits)}<figcaption>{bits} bits{rows}:
<code>{" ".join(f"{byte:02x}" for byte in code.tolist())}</code></figcaption></div></figure></div>
{pages.tiles(numbers)}
</header>"""


def _bounds_short(evaluation: Evaluation) -> str:
    if evaluation.map_lower is None or evaluation.map_upper is None:
        return "expected over the order inside ties"
    return (
        f"expected over ties; {evaluation.map_lower:.3f} to {evaluation.map_upper:.3f} "
        "are the exact bounds"
    )


def _queries(trained: Trained, evaluation: Evaluation, shown: _Shown) -> str:
    collection, split = trained.collection, trained.split
    if split is None:
        return ""
    place = {int(item): row for row, item in enumerate(split.query)}
    rows = []
    for query, ids, distances, right in zip(
        shown.queries, shown.matches.ids, shown.matches.distances, shown.right, strict=True
    ):
        items = split.database[ids]
        results = [
            pages.Result(
                collection.reader.open(int(item)),
                int(distance),
                shown.packed[item],
                _class_name(collection, int(item)),
                bool(same),
            )
            for item, distance, same in zip(items, distances, right, strict=True)
        ]
        precision = evaluation.average_precision[place[int(query)]]
        rows.append(
            pages.Query(
                collection.reader.open(int(query)),
                shown.packed[query],
                _class_name(collection, int(query)),
                results,
                [f"{int(right.sum())} of {len(results)} right", f"AP {precision:.3f}"],
            )
        )
    return pages.section(
        "Ten queries, and the ten nearest images of each",
        pages.legend(marks=True) + pages.query_rows(rows, trained.hasher.bits),
        name="queries",
        intro=(
            "Not chosen by hand: each is the first query of its class in the order of a hash of "
            "the images' names. Results are ordered by Hamming distance, then by their row in "
            "the database. AP is the query's average precision over the whole database."
        ),
    )


def _centres(trained: Trained, shown: _Shown) -> str:
    method, split = trained.method, trained.split
    if not isinstance(method, DFH) or split is None:
        return ""
    bits, names = trained.hasher.bits, trained.collection.classes
    centres = codes.pack(method.centers.T.cpu().numpy())
    distances = codes.hamming(centres, centres).astype(np.int64)
    count = len(names)
    pairs = distances[np.triu_indices(count, 1)]
    # In every bit at most half of the classes can differ from the other half.
    most = bits * (count // 2) * math.ceil(count / 2) / len(pairs)
    numbers = trained.collection.labels[split.database].argmax(axis=1)
    own = codes.hamming(shown.packed[split.database], centres)
    near = own[np.arange(len(numbers)), numbers]
    notes = [f"{near[numbers == number].mean():.1f}" for number in range(count)]
    tables = (
        pages.code_table(names, centres, bits, notes, "mean distance of its images"),
        pages.distance_matrix(names, distances),
    )
    return pages.section(
        "One binary centre a class",
        f'<div class="pair"><div>{tables[0]}</div><div>{tables[1]}</div></div>',
        name="centres",
        intro=(
            "Deep Fisher Hashing draws the codes of a class towards a centre and pushes the "
            f"centres apart. The closest two differ in {pairs.min()} of {bits} bits (outlined), "
            f"the mean over all pairs is {pairs.mean():.1f}; no {count} codes of {bits} bits can "
            f"have a mean above {most:.1f}."
        ),
    )


def _learning(trained: Trained, evaluation: Evaluation) -> str:
    history = trained.history
    charts = [
        pages.line_chart(
            [
                pages.Series("whole loss", [row["loss"] for row in history], "area"),
                pages.Series("its pair term", [row["pair"] for row in history], "dashed"),
            ],
            [row["epoch"] for row in history],
            title="Training",
            x_label="epoch",
            y_label="mean loss of an epoch; the rest is the distance of the logits to their bits",
        )
    ]
    pairs = evaluation.distances
    if pairs is not None:
        charts.append(
            pages.line_chart(
                [
                    pages.Series("same class", _percent(pairs.similar), "area"),
                    pages.Series("different classes", _percent(pairs.dissimilar), "dashed"),
                ],
                pairs.distance,
                title="How far apart queries and database images are",
                x_label="Hamming distance",
                y_label="percent of the pairs of each kind",
            )
        )
    return pages.section(
        "What was learned", f'<div class="pair">{"".join(charts)}</div>', name="learning"
    )


def _percent(counts: list[int]) -> list[float]:
    total = sum(counts) or 1
    return [100 * count / total for count in counts]


def _next_steps(folder: Path) -> str:
    model = escape(shlex.quote(str(folder / MODEL)))
    return pages.section(
        "Now with your own pictures",
        f"""<pre><code><span class="soft"># a folder with one sub-folder of images a class</span>
fisherhash train FOLDER --out MODEL
fisherhash encode FOLDER --model MODEL --out codes.npz</code></pre>
<pre><code><span class="soft"># the model of this page</span>
fisherhash encode PICTURE.jpg --model {model}</code></pre>""",
        name="next",
    )


def _times(seconds: dict[str, float]) -> str:
    rows = [(PARTS[name], seconds[name]) for name in PARTS if name in seconds]
    return pages.section("How long it took", pages.time_table(rows), name="times")


def _footer(trained: Trained, split: Split, settings: Settings) -> str:
    hasher, found = trained.hasher, versions()
    made = ", ".join(f"{name} {number}" for name, number in found.items())
    return f"""<footer>
<p>Method: Y. Li, W. Pei, Y. Zha, J. van Gemert, <a
href="{DFH.info.url}">{escape(DFH.info.title)}</a>, {DFH.info.venue} {DFH.info.year}. Images: {escape(CITATION)}.</p>
<p>Features: {escape(hasher.backbone.name)} with its ImageNet weights, not changed; images enlarged
to {hasher.preprocessing.size} pixels. Trained: the head only, {settings.epochs} epochs, seed
{settings.seed}. Split: {escape(str(split))}.</p>
<p>{escape(made)}</p>
</footer>"""
