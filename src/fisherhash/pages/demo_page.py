"""The page of the demo: what was learned, ten queries, the class centres, the times."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fisherhash import codes
from fisherhash.data.sample import CITATION
from fisherhash.data.splits import Split, hash_order
from fisherhash.evaluation import Evaluation
from fisherhash.index.engine.engine import Engine
from fisherhash.methods.dfh import DFH
from fisherhash.model.folder import versions
from fisherhash.pages import html as pages
from fisherhash.training.settings import Settings
from fisherhash.training.trained import Trained

PAGE, MODEL = "index.html", "model"
RESULTS_SHOWN = 10
"""Results per query on the page."""
DEMO_PARTS = {
    "features": "features of all images, or reading them from the cache",
    "training": "training on the features",
    "saving": "saving the model",
    "evaluation": "codes of all images, and mAP",
    "page": "this page",
}


@dataclass(frozen=True)
class Demo:
    """What the demo made, and what its page shows.

    Attributes:
        trained: the hasher, and the images it was trained on.
        split: queries and database.
        settings: of the training.
        evaluation: how good the codes are.
        packed: (n, bytes) codes of all images.
        folder: where the page and the model are.
        seconds: how long each part took.
    """

    trained: Trained
    split: Split
    settings: Settings
    evaluation: Evaluation
    packed: NDArray[np.uint8]
    folder: Path
    seconds: dict[str, float]

    @property
    def page(self) -> Path:
        """The HTML page."""
        return self.folder / PAGE

    @property
    def model(self) -> Path:
        """The model folder."""
        return self.folder / MODEL

    @property
    def bits(self) -> int:
        """Length of the codes."""
        return self.trained.hasher.bits

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """The number of the class of each image."""
        return self.trained.collection.labels.argmax(axis=1)

    @cached_property
    def queries(self) -> NDArray[np.int64]:
        """The first query of each class in hash order: not chosen by hand."""
        first: dict[int, int] = {}
        for item in hash_order(self.trained.collection.names, self.split.query, seed=0):
            first.setdefault(int(self.numbers[item]), item)
        return np.array([first[number] for number in sorted(first)], dtype=np.int64)

    def class_name(self, item: int) -> str:
        """The name of the class of an image."""
        return self.trained.collection.classes[self.numbers[item]]

    def image(self, item: int) -> Image.Image:
        """Image number ``item``."""
        return self.trained.collection.reader.open(int(item))


def blocks(demo: Demo) -> list[str]:
    """Every part of the page except the times and the footer, as HTML."""
    return [_header(demo), _queries(demo), _centres(demo), _learning(demo), _next_steps(demo)]


def demo_html(demo: Demo, blocks: list[str]) -> str:
    """Return the whole page: ``blocks``, then how long each part took."""
    rows = [(title, demo.seconds[name]) for name, title in DEMO_PARTS.items()]
    times = pages.section("How long it took", pages.time_table(rows), name="times")
    return pages.page(
        f"fisherhash: {demo.bits}-bit image codes",
        "\n".join([*blocks, times, _footer(demo)]),
        description="Ten queries against binary codes learned with Deep Fisher Hashing.",
    )


def _header(demo: Demo) -> str:
    bits, evaluation = demo.bits, demo.evaluation
    size = codes.code_bytes(bits)
    weight = "1 byte" if size == 1 else f"{size} bytes"
    rows = ", one byte per row" if bits <= 64 else ""
    item = demo.queries[0]
    code = demo.packed[item]
    expected = f"mAP, expected over the order inside ties; {bounds(evaluation, 3)}"
    stored = f"{bits} bits; {size * evaluation.database:,} bytes for the whole database"
    queried = f"searched with {evaluation.queries:,} queries that took no part in training"
    numbers = [
        (f"{evaluation.map:.3f}", "mean average precision", expected),
        (weight, "per image", stored),
        (f"{evaluation.database:,}", "images in the database", queried),
    ]
    found = evaluation.precision_at.get(RESULTS_SHOWN)
    if found is not None:
        right = f"{RESULTS_SHOWN * found:.1f} of {RESULTS_SHOWN}"
        average = "on average over all queries, ties in random order"
        numbers.append((right, "nearest images are right", average))
    return f"""<header>
<div class="top"><div>
<p class="eyebrow">fisherhash demo · Deep Fisher Hashing on CIFAR-10</p>
<h1>Similar images, found with {weight} each</h1>
<p class="lead">From {len(demo.split.train):,} labelled images, fisherhash learned to turn an image
into {bits} bits, so that images of one class get nearly the same bits and images of different
classes do not. Searching is then counting: the fewer bits two images differ in, the more alike they
are.</p>
<p class="lead">The {evaluation.queries:,} query images took no part in the training. The
{evaluation.database:,} images in the database are the training images.</p>
</div>
<figure class="sketch"><img src="{pages.data_uri(demo.image(item))}"
alt="a query of the class {escape(demo.class_name(item))}">
<span class="arrow" aria-hidden="true">→</span>
<div>{pages.bits_svg(code, bits)}<figcaption>{bits} bits{rows}:
<code>{" ".join(f"{byte:02x}" for byte in code.tolist())}</code></figcaption></div></figure></div>
{pages.tiles(numbers)}
</header>"""


def bounds(evaluation: Evaluation, digits: int) -> str:
    """The least and the greatest mAP that ties allow, in words."""
    low, high = evaluation.map_lower, evaluation.map_upper
    if low is None or high is None:
        return "its bounds are not known"
    return f"at worst {low:.{digits}f}, at best {high:.{digits}f}"


def _queries(demo: Demo) -> str:
    database = demo.split.database
    engine = Engine(demo.packed[database], demo.bits)
    ranked = zip(demo.split.query.tolist(), demo.evaluation.average_precision, strict=True)
    precisions, rows = dict(ranked), []
    found = zip(demo.queries, *engine.search(demo.packed[demo.queries], RESULTS_SHOWN), strict=True)
    for query, positions, distances in found:
        items = database[positions]
        right = demo.numbers[items] == demo.numbers[query]
        results = [
            pages.Result(demo.image(i), int(distance), demo.packed[i], demo.class_name(i), bool(ok))
            for i, distance, ok in zip(items, distances, right, strict=True)
        ]
        notes = [f"{right.sum()} of {len(results)} right", f"AP {precisions[int(query)]:.3f}"]
        name = demo.class_name(query)
        rows.append(pages.Query(demo.image(query), demo.packed[query], name, results, notes))
    return pages.section(
        "Ten queries, and the ten nearest images of each",
        pages.legend(marks=True) + pages.query_rows(rows, demo.bits),
        name="queries",
        intro=(
            "Not chosen by hand: each is the first query of its class in the order of a hash of "
            "the images' names. Results are ordered by Hamming distance, then by their row in "
            "the database. AP is the query's average precision over the whole database."
        ),
    )


def _centres(demo: Demo) -> str:
    method = demo.trained.method
    if not isinstance(method, DFH):
        return ""
    bits, names, database = demo.bits, demo.trained.collection.classes, demo.split.database
    centres = codes.pack(method.centers.T.cpu().numpy())
    distances = codes.hamming(centres, centres).astype(np.int64)
    count = len(names)
    pairs = distances[np.triu_indices(count, 1)]
    # In every bit at most half of the classes can differ from the other half.
    most = bits * (count // 2) * math.ceil(count / 2) / len(pairs)
    numbers = demo.numbers[database]
    near = codes.hamming(demo.packed[database], centres)[np.arange(len(numbers)), numbers]
    notes = [f"{near[numbers == number].mean():.1f}" for number in range(count)]
    left = pages.code_table(names, centres, bits, notes, "mean distance of its images")
    right = pages.distance_matrix(names, distances)
    return pages.section(
        "One binary centre per class",
        f'<div class="pair"><div>{left}</div><div>{right}</div></div>',
        name="centres",
        intro=(
            "Deep Fisher Hashing draws the codes of a class towards a centre and pushes the "
            f"centres apart. The closest two differ in {pairs.min()} of {bits} bits (outlined), "
            f"the mean over all pairs is {pairs.mean():.1f}; no {count} codes of {bits} bits can "
            f"have a mean above {most:.1f}."
        ),
    )


def _learning(demo: Demo) -> str:
    history, pairs = demo.trained.history, demo.evaluation.distances
    charts = pages.line_chart(
        [
            pages.Series("whole loss", [row["loss"] for row in history], "area"),
            pages.Series("its pair term", [row["pair"] for row in history], "dashed"),
        ],
        [row["epoch"] for row in history],
        title="Training",
        x_label="epoch",
        y_label="mean loss per epoch; the rest is the distance of the logits to their bits",
    )
    if pairs is not None:
        charts += pages.line_chart(
            [
                pages.Series("same class", _percent(pairs.similar), "area"),
                pages.Series("different classes", _percent(pairs.dissimilar), "dashed"),
            ],
            pairs.distance,
            title="How far apart queries and database images are",
            x_label="Hamming distance",
            y_label="percent of the pairs of each kind",
        )
    return pages.section("What was learned", f'<div class="pair">{charts}</div>', name="learning")


def _percent(counts: list[int]) -> list[float]:
    total = sum(counts) or 1
    return [100 * count / total for count in counts]


def _next_steps(demo: Demo) -> str:
    model = escape(shlex.quote(str(demo.model)))
    return pages.section(
        "Now with your own images",
        f"""<pre><code><span class="soft"># a folder with one sub-folder of images per class</span>
fisherhash train FOLDER --out MODEL
fisherhash encode FOLDER --model MODEL --out codes.npz</code></pre>
<pre><code><span class="soft"># the model of this page</span>
fisherhash encode IMAGE.jpg --model {model}</code></pre>""",
        name="next",
    )


def _footer(demo: Demo) -> str:
    hasher, settings, info = demo.trained.hasher, demo.settings, DFH.info
    made = ", ".join(f"{name} {number}" for name, number in versions().items())
    return f"""<footer>
<p>Method: Y. Li, W. Pei, Y. Zha, J. van Gemert, <a
href="{info.url}">{escape(info.title)}</a>, {info.venue} {info.year}.
Images: {escape(CITATION)}.</p>
<p>Features: {escape(hasher.backbone_name)} with its default weights; images enlarged
to {hasher.preprocessing.size} pixels. Trained: the head only, {settings.epochs} epochs, seed
{settings.seed}. Split: {escape(str(demo.split))}.</p>
<p>{escape(made)}</p>
</footer>"""
