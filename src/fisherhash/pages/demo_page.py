"""The demo's page: what was learned, ten queries, the centres, the times."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fisherhash import codes
from fisherhash.data.protocols import Split
from fisherhash.data.sample import CITATION
from fisherhash.data.sources import Collection
from fisherhash.evaluation import Evaluation, Matches
from fisherhash.methods.dfh import DFH
from fisherhash.model.hasher import versions
from fisherhash.pages import html as pages
from fisherhash.training.fitting import Trained
from fisherhash.training.settings import Settings

MODEL = "model"
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
class Shown:
    """The queries on the page: image numbers, codes of all images, and what was retrieved."""

    queries: NDArray[np.int64]
    packed: NDArray[np.uint8]
    matches: Matches
    right: NDArray[np.bool_]


def write(
    trained: Trained,
    evaluation: Evaluation,
    shown: Shown,
    split: Split,
    settings: Settings,
    folder: Path,
    seconds: dict[str, float],
) -> str:
    """The whole page as HTML."""
    body = "\n".join(
        [
            _header(trained, evaluation, shown),
            _queries(trained, evaluation, shown),
            _centres(trained, shown),
            _learning(trained, evaluation),
            _next_steps(folder),
            _times(seconds),
            _footer(trained, split, settings),
        ]
    )
    return pages.page(
        f"fisherhash: {trained.hasher.bits}-bit image codes",
        body,
        description="Ten queries against binary codes learned with Deep Fisher Hashing.",
    )


def _class_name(collection: Collection, item: int) -> str:
    return collection.classes[int(collection.labels[item].argmax())]


def _header(trained: Trained, evaluation: Evaluation, shown: Shown) -> str:
    bits, collection = trained.hasher.bits, trained.collection
    size = codes.code_bytes(bits)
    weight = "1 byte" if size == 1 else f"{size} bytes"
    rows = ", one byte a row" if bits <= 64 else ""
    item = int(shown.queries[0])
    code = shown.packed[item]
    learned = len(trained.split.train) if trained.split else 0
    found = evaluation.precision_at.get(SHOWN)
    numbers = [
        (
            f"{evaluation.map:.3f}",
            "mean average precision",
            f"mAP, expected over the order inside ties; {bounds(evaluation, 3)}",
        ),
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


def bounds(evaluation: Evaluation, digits: int) -> str:
    """The least and the greatest mAP that ties allow, in words."""
    low, high = evaluation.map_lower, evaluation.map_upper
    if low is None or high is None:
        return "its bounds are not known"
    return f"at worst {low:.{digits}f}, at best {high:.{digits}f}"


def _queries(trained: Trained, evaluation: Evaluation, shown: Shown) -> str:
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


def _centres(trained: Trained, shown: Shown) -> str:
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
href="{DFH.info.url}">{escape(DFH.info.title)}</a>, {DFH.info.venue} {DFH.info.year}.
Images: {escape(CITATION)}.</p>
<p>Features: {escape(hasher.backbone.name)} with the weights it comes with; images enlarged
to {hasher.preprocessing.size} pixels. Trained: the head only, {settings.epochs} epochs, seed
{settings.seed}. Split: {escape(str(split))}.</p>
<p>{escape(made)}</p>
</footer>"""
