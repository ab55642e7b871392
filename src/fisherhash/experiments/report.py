"""From results to Markdown and one HTML page: our numbers, the paper's, and the ties."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from fisherhash.errors import counted
from fisherhash.experiments.standing import WITHIN, Score, Standing
from fisherhash.experiments.tables import Table, TableCell

CAPTIONS = {
    "separable": "Separable before quantisation, but not after it",
    "margin-loss": "The pairwise loss with a margin",
    "centre-learning": "Centre learning: 2 bits, two classes of CIFAR-10, 100 images each",
    "modules": "The modules: pairs (P), margin (M), centres (C)",
    "margin": "Sensitivity to the margin",
    "pr-curves": "Precision and recall of all methods",
}
TUNING_INTRO = (
    "Every row had the same number of trials, or fewer where all its first ones failed, at one "
    "code length and one seed, measured on a held-out fifth of the training images. The queries "
    "were not used."
)


@dataclass(frozen=True)
class PartReport:
    """One part of a table, ready to be rendered.

    Attributes:
        title: the data set.
        intro: one paragraph about data, network, training and metric.
        table: our mAP, and the paper's number in brackets.
        verdicts: sentences about the best rows and the paper's numbers.
        ties: bounds of mAP over tie order, and its value in database order.
    """

    title: str
    intro: str
    table: Table
    verdicts: list[str]
    ties: Table


def part_report(results: Mapping[str, Any], part: Mapping[str, Any]) -> PartReport:
    """Build the report of one part of the results."""
    standing = Standing(part)
    return PartReport(
        part["title"],
        _intro(part),
        _score_table(part, standing, results["of"]),
        standing.verdicts(results["target"]),
        _ties_table(part, standing),
    )


def markdown(results: Mapping[str, Any], *, level: int = 2) -> str:
    """Render the whole report as Markdown, with its title as a heading of that level."""
    mark = "#" * level
    blocks = [f"{mark} {results['title']}", *results["notes"]]
    for part in results["parts"]:
        one = part_report(results, part)
        blocks += [f"{mark}# {one.title}", one.intro, one.table.markdown()]
        if one.verdicts:
            blocks.append("\n".join(f"- {sentence}" for sentence in one.verdicts))
        blocks += ["What the order within ties can change, as means over the seeds:"]
        blocks.append(one.ties.markdown())
    return "\n\n".join(blocks) + "\n"


def html_page(results: Mapping[str, Any], figures: Sequence[Path] = ()) -> str:
    """Render one self-contained page, with SVG files as figures."""
    from fisherhash.pages import html as pages

    blocks = [f"<h1>{escape(results['title'])}</h1>"]
    blocks += [f"<p>{escape(note)}</p>" for note in results["notes"]]
    for number, part in enumerate(results["parts"]):
        one = part_report(results, part)
        said = "".join(f"<li>{escape(sentence)}</li>" for sentence in one.verdicts)
        ties = f"<details><summary>What ties can change</summary>{one.ties.html()}</details>"
        body = one.table.html() + (f"<ul>{said}</ul>" if said else "") + ties
        blocks.append(pages.section(one.title, body, name=f"part{number}", intro=one.intro))
    for path in figures:
        # As an image, so that the page's style does not reach into it.
        data, title = base64.b64encode(path.read_bytes()).decode(), CAPTIONS[path.stem]
        image = f'<img class="plot" src="data:image/svg+xml;base64,{data}" alt="{escape(title)}">'
        blocks.append(pages.section(title, image, name=path.stem))
    tuning = "".join(
        f"<h3>{escape(slug)}</h3>{_tuning_table(found).html()}"
        for slug, found in results["tuning"].items()
    )
    if tuning:
        title = "How the hyper-parameters were chosen"
        blocks.append(pages.section(title, tuning, name="tuning", intro=TUNING_INTRO))
    return pages.page(results["title"], "\n".join(blocks), description=results["title"])


def _intro(part: Mapping[str, Any]) -> str:
    bench, protocol, seeds = part.get("bench"), part.get("protocol"), part["seeds"]
    if bench is None:
        return "Not run: the data is not on this machine."
    if protocol is None:
        return "Every run failed." if part["runs"] else "Not run yet."
    top = "ALL" if protocol["top"] is None else protocol["top"]
    size = f" at {bench['image_size']} px" if bench["image_size"] else ""
    way = "a trained head on frozen features"
    if bench["finetune"]:
        fixed = part["settings"].get("fixed_layers", 0)
        way = "the network trained" + (f" except its first {fixed} layers" if fixed else "")
    devices = sorted({run["device"] for run in part["runs"] if "device" in run})
    text = (
        f"mAP@{top}, expected over tie order; {protocol['protocol']}: "
        f"{protocol['train']:,} training images, {protocol['query']:,} queries, "
        f"{protocol['database']:,} database images, checksum {protocol['checksum'][:16]}. "
        f"{bench['backbone']}{size}, {way}, {counted(part['settings']['epochs'], 'epoch')}, "
        f"{counted(seeds, 'seed')}, on {', '.join(devices)}."
    )
    if seeds > 1:
        text += " Mean (range)."
    untuned = [row["name"] for row in part["rows"] if not row["tuned"]]
    if untuned:
        whose = "" if len(untuned) == len(part["rows"]) else f": {', '.join(untuned)}"
        text += f" With default hyper-parameters, not tuned{whose}."
    if part["stands_in"]:
        text += " The paper's numbers are for its own data set, not for this stand-in."
    return text


def _score_table(part: Mapping[str, Any], standing: Standing, of: str) -> Table:
    beside = f" [{of}]" if any(row["paper"] for row in part["rows"]) else ""
    real = {name for (name, _), score in standing.scores.items() if not score.hamming}
    rows = [
        [
            row["name"] + (" ‡" if row["name"] in real else ""),
            *(_score_cell(part, standing, row["name"], bits) for bits in part["bits"]),
        ]
        for row in part["rows"]
    ]
    note = f"Bold: the best of the column. †: {WITHIN} of the best."
    if real:
        note += " ‡: ranked by the distance between real-valued queries and quantised images."
    if any(row.get("real_queries_of") for row in part["rows"]):
        note += " Rows that repeat another row's codes with such queries do not compete."
    return Table(["method", *(f"{bits} bits{beside}" for bits in part["bits"])], rows, note)


def _score_cell(part: Mapping[str, Any], standing: Standing, name: str, bits: int) -> TableCell:
    score = standing.scores[name, bits]
    paper = "" if score.paper is None else f" [{score.paper:.3f}]"
    if not score.values:
        return TableCell(_nothing(score) + paper)
    best = name == standing.best(bits)
    text = " †" if not best and standing.near_best(name, bits) else ""
    if len(score.values) > 1:
        text += f" ({min(score.values):.3f}–{max(score.values):.3f})"
    if len(score.values) < part["seeds"]:
        text += f", {len(score.values)} of {part['seeds']} seeds"
    mean = f"{score.mean:.3f}"
    return TableCell(text + paper, strong=mean) if best else TableCell(mean + text + paper)


def _nothing(score: Score) -> str:
    """Why there is no number."""
    return "failed" if score.failed else "not run" if score.defined else "–"


def _ties_table(part: Mapping[str, Any], standing: Standing) -> Table:
    def cell(score: Score) -> str:
        if not score.values:
            return _nothing(score)
        none = score.lower is None or score.upper is None
        bounds = "no bounds" if none else f"{score.lower:.3f} to {score.upper:.3f}"
        return f"{bounds}; database order {score.stable:.3f}"

    rows = [
        [row["name"], *(cell(standing.scores[row["name"], bits]) for bits in part["bits"])]
        for row in part["rows"]
    ]
    return Table(["method", *(f"{bits} bits" for bits in part["bits"])], rows)


def _tuning_table(found: Mapping[str, Any]) -> Table:
    """The trials of each row with their validation mAP, the best emphasised."""
    most = max((len(entry["trials"]) for entry in found["rows"].values()), default=0)
    rows = []
    for name, entry in found["rows"].items():
        values = [trial["validation_map"] for trial in entry["trials"]]
        best = max((value for value in values if value is not None), default=math.nan)
        cells: list[TableCell | str] = [name]
        for trial, value in zip(entry["trials"], values, strict=True):
            changes = ", ".join(f"{k} {v}" for k, v in trial.items() if k != "validation_map")
            text = f"{changes}: {'failed' if value is None else f'{value:.3f}'}"
            cells.append(TableCell("", text) if value == best else text)
        rows.append(cells + [""] * (most + 1 - len(cells)))
    return Table([f"{found['bits']} bits", *(f"trial {n + 1}" for n in range(most))], rows)
