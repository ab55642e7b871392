"""From results to Markdown and one HTML page: our numbers, the paper's, and the ties."""

from __future__ import annotations

import base64
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fisherhash.errors import counted
from fisherhash.experiments.comparison import RANKINGS, Comparison, Score, comparisons, verdicts

LINE_LENGTH = 110
CAPTIONS = {
    "separable": "Separable before quantisation, but not after it",
    "margin-loss": "The pairwise loss with a margin",
    "centre-learning": "Centre learning: 2 bits, two classes of CIFAR-10, 100 images each",
    "centre-moves": "How the centres move, as printed in the paper",
    "modules": "The modules: pairs (P), margin (M), centres (C)",
    "margin": "Sensitivity to the margin",
    "pr-curves": "Precision and recall of all methods",
}
TUNING = (
    "Every row was searched in the same way: the same number of quasi-random points in the ranges "
    "that its hyper-parameters declare, each trained for a quarter of the epochs, then the best "
    "quarter of the points for all epochs, as many points near the best ones, points beyond the "
    "edge of a range where a winner lay, and the best point with every way to make bits. A fifth "
    "of the training images was held out, each of them queried against the others. The score is "
    "the table's own metric, scaled to their number, as a mean over the code lengths. The "
    "queries were not used."
)
AGREEMENT = "Agreement with the neighbours of the float features inside a class"
NOTE = "Bold: the highest mean of the column. †: not significantly lower (95 %, over {})."
UNTESTED = "Bold: the highest of the column. With one seed nothing is tested."
APART = (
    " ‡: has no Hamming distance and is ranked by its own, between real-valued queries and "
    "quantised images, so it does not compete here."
)


@dataclass(frozen=True)
class TableCell:
    """The text of one cell.

    Attributes:
        text: the plain text.
        strong: emphasised text in front of it.
    """

    text: str
    strong: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose first column names its rows.

    Attributes:
        header: one text per column.
        rows: the cells; a plain string is a cell without emphasis.
        note: a sentence below the table.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[TableCell | str]]
    note: str = ""

    @property
    def cells(self) -> list[list[TableCell]]:
        """The rows, every cell with its emphasis."""
        return [
            [TableCell(cell) if isinstance(cell, str) else cell for cell in row]
            for row in self.rows
        ]

    def markdown(self) -> str:
        """Render the table and its note as Markdown.

        >>> print(Table(["method", "mAP"], [["dfh", TableCell(" (best)", "0.9")]]).markdown())
        | method | mAP |
        |---|---|
        | dfh | **0.9** (best) |
        """
        lines = [list(self.header), ["---"] * len(self.header)]
        for row in self.cells:
            lines.append([f"**{one.strong}**" * bool(one.strong) + one.text for one in row])
        text = [f"| {' | '.join(cells)} |" for cells in lines]
        text[1] = text[1].replace(" ", "")
        return "\n".join([*text, "", self.note] if self.note else text)


@dataclass(frozen=True)
class PartReport:
    """One part of a table, ready to be rendered.

    Attributes:
        title: the data set.
        intro: one paragraph about data, network, training and metric.
        tables: our mAP by the name of the ranking, and the paper's number in brackets.
        verdicts: sentences about the best rows and the paper's numbers.
        ties: bounds of mAP over tie order, and its value in database order.
        agreement: with the neighbours of float features inside a class; None if not measured.
    """

    title: str
    intro: str
    tables: dict[str, Table]
    verdicts: list[str]
    ties: Table
    agreement: Table | None = None


def part_report(results: Mapping[str, Any], part: Mapping[str, Any]) -> PartReport:
    """Build the report of one part of the results."""
    rankings = comparisons(part)
    measured = {
        RANKINGS[key]: _score_table(one)
        for key, one in rankings.items()
        if key == "evaluation" or len({name for name, _ in one.rivals}) > 1
    }
    by_codes = rankings["evaluation"]
    said = verdicts(part, results["target"])
    ties = _table(part, lambda name, bits: _ties(by_codes.scores[name, bits]))
    return PartReport(part["title"], _intro(part), measured, said, ties, _agreement_table(part))


def markdown(results: Mapping[str, Any], *, level: int = 2) -> str:
    """Render the whole report as Markdown, with its title as a heading of that level."""
    mark = "#" * level
    blocks = [f"{mark} {results['title']}", *results["notes"]]
    for part in results["parts"]:
        one = part_report(results, part)
        blocks += [f"{mark}# {one.title}", one.intro]
        for name, table in one.tables.items():
            blocks += [f"Ranked by {name}:"] * (len(one.tables) > 1) + [table.markdown()]
        if one.agreement is not None:
            blocks += [AGREEMENT, one.agreement.markdown()]
        if one.verdicts:
            blocks.append("\n".join(f"- {sentence}" for sentence in one.verdicts))
        blocks += ["What the order within ties can change, as means over the seeds:"]
        blocks.append(one.ties.markdown())
    return "\n\n".join(blocks) + "\n"


def html_page(results: Mapping[str, Any], figures: Sequence[Path] = ()) -> str:
    """Render one self-contained page, with SVG files as figures.

    Raises:
        ImportError: there is no jinja2, as on a machine that has only what training needs.
    """
    from fisherhash.pages.html import render

    images = [
        (path.stem, CAPTIONS[path.stem], base64.b64encode(path.read_bytes()).decode())
        for path in figures
    ]
    return render(
        "report.html",
        title=results["title"],
        description=results["title"],
        notes=results["notes"],
        parts=[part_report(results, part) for part in results["parts"]],
        agreement=AGREEMENT,
        figures=[
            (name, title, f"data:image/svg+xml;base64,{data}") for name, title, data in images
        ],
        tuning=TUNING,
        winners={slug: _winners_table(found) for slug, found in results["tuning"].items()},
    )


def _intro(part: Mapping[str, Any]) -> str:
    bench, protocol, settings = part.get("bench"), part.get("protocol"), part["settings"]
    if bench is None:
        return "Not run: the data is not on this machine."
    if protocol is None:
        return "Every run failed." if part["runs"] else "Not run yet."
    top = "ALL" if protocol["top"] is None else protocol["top"]
    drawn = f" (split seed {protocol['seed']})" if protocol.get("seed") is not None else ""
    size = f" at {bench['image_size']} px" if bench["image_size"] else ""
    epochs = counted(settings["epochs"], "epoch")
    training = f"a trained head on frozen features, {epochs}"
    if bench["finetune"]:
        fixed, alone = settings.get("fixed_layers", 0), settings.get("head_epochs")
        training = "the network trained" + (f" except its first {fixed} layers" if fixed else "")
        training += f", {epochs}" + (f" after {alone} of the head alone" if alone else "")
    devices = ", ".join(sorted({run["device"] for run in part["runs"] if "device" in run}))
    said = [
        f"mAP@{top}, expected over tie order; {protocol['protocol']}{drawn}: "
        f"{protocol['train']:,} training images, {protocol['query']:,} queries, "
        f"{protocol['database']:,} database images, checksum {protocol['checksum'][:16]}.",
        f"{bench['backbone']}{size}, {training}, {counted(part['seeds'], 'seed')}, on {devices}.",
    ]
    if "dropout" in settings:
        said.append(
            f"Standardised features, dropout {settings['dropout']:g}; outputs start at unit scale."
        )
    if part["seeds"] > 1:
        said.append("Mean ± 95 % t-interval over the seeds.")
    # A row may have no number at all: DQN has no class step.
    ran = {run["row"] for run in part["runs"] if "evaluation" in run}
    untuned = [row["name"] for row in part["rows"] if row["name"] in ran and not row["tuned"]]
    if untuned:
        whose = "" if len(untuned) == len(ran) else f": {', '.join(untuned)}"
        said.append(f"With default hyper-parameters, not tuned{whose}.")
    edges = [
        f"{row['name']} ({', '.join(row['edges'])})" for row in part["rows"] if row.get("edges")
    ]
    if edges:
        said.append(f"Tuned to an edge of the range that was searched: {'; '.join(edges)}.")
    if part["stands_in"]:
        said.append("The paper's numbers are for its own data set, not for this stand-in.")
    return " ".join(said)


def _table(part: Mapping[str, Any], cell: Callable[[str, int], TableCell | str]) -> Table:
    """Return a table with one line per row and one column per code length."""
    header = ["method", *(f"{bits} bits" for bits in part["bits"])]
    names = [row["name"] for row in part["rows"]]
    return Table(header, [[name, *(cell(name, bits) for bits in part["bits"])] for name in names])


def _score_table(comparison: Comparison) -> Table:
    part, hamming = comparison.part, comparison.ranking == "evaluation"
    rivals = {name for name, _ in comparison.rivals}
    rows = [row for row in part["rows"] if hamming or row["name"] in rivals]
    beside = " [paper]" if hamming and any(row["paper"] for row in rows) else ""
    apart = {name for (name, _), score in comparison.scores.items() if not score.hamming}
    lines = [
        [
            row["name"] + (" ‡" if row["name"] in apart else ""),
            *(_score_cell(comparison, row["name"], bits) for bits in part["bits"]),
        ]
        for row in rows
    ]
    queries = any(test["queries"] for test in part.get("tests", ()))
    tested = any(map(comparison.tested, part["bits"]))
    note = NOTE.format("seeds and queries" if queries else "seeds") if tested else UNTESTED
    note += APART if apart and hamming else ""
    return Table(["method", *(f"{bits} bits{beside}" for bits in part["bits"])], lines, note)


def _score_cell(comparison: Comparison, name: str, bits: int) -> TableCell:
    score = comparison.scores[name, bits]
    known = comparison.ranking == "evaluation" and score.paper is not None
    paper = f" [{score.paper:.3f}]" if known else ""
    if not score.values:
        return TableCell(_nothing(score) + paper)
    mean = f"{score.mean:.3f}"
    best = name == (first := comparison.best(bits))
    if not comparison.tested(bits) and (name, bits) in comparison.rivals:
        # No † says what is level: what looks equal is equally bold.
        best = mean == f"{comparison.rivals[first, bits].mean:.3f}"
    text = f" ± {score.half:.3f}" if math.isfinite(score.half) else ""
    text += " †" if len(score.values) > 1 and name in comparison.level(bits) else ""
    if len(score.values) != comparison.part["seeds"]:
        text += f", {counted(len(score.values), 'seed')}"
    return TableCell(text + paper, strong=mean) if best else TableCell(mean + text + paper)


def _nothing(score: Score) -> str:
    """Why there is no number."""
    return "failed" if score.failed else "not run" if score.defined else "–"


def _ties(score: Score) -> str:
    if not score.values:
        return _nothing(score)
    none = score.lower is None or score.upper is None
    bounds = "no bounds" if none else f"{score.lower:.3f} to {score.upper:.3f}"
    return f"{bounds}; database order {score.stable:.3f}"


def _agreement_table(part: Mapping[str, Any]) -> Table | None:
    """The agreement of each row as a mean over the seeds, and what collapsed codes would have."""
    values: dict[tuple[str, int], list[float]] = {}
    chances: dict[int, float] = {}
    for run in part["runs"]:
        found = run.get("evaluation", {}).get("agreement")
        if found and found["value"] is not None:
            values.setdefault((run["row"], run["bits"]), []).append(found["value"])
            chances[run["bits"]] = found["chance"]
    if not values:
        return None

    def cell(name: str, bits: int) -> str:
        own = values.get((name, bits))
        return f"{statistics.fmean(own):.3f}" if own else "–"

    table = _table(part, cell)
    chance = [f"{chances[bits]:.3f}" if bits in chances else "–" for bits in part["bits"]]
    return Table(table.header, [*table.rows, ["one code per class (chance)", *chance]])


def _winners_table(found: Mapping[str, Any]) -> Table:
    """What was searched for each row and what won, without and with the class step."""
    rows = []
    for name, entry in found["rows"].items():
        trials = entry["trials"]
        first = first_round(trials)
        counts = f"{len(first)} points, {len(trials)} trials"
        if none := sum(trial["plain"] is None for trial in first):
            counts += f"; {none} of the points without a score"
        winners = [_winner(entry.get(key)) for key in ("winner", "winner_step")]
        rows.append([name, counts, ranges(entry["space"]), *winners])
    header = ["row", "trials", "searched", "best", "best with the class step"]
    return Table(header, rows, "⚠: at the edge of its range.")


def _winner(winner: Mapping[str, Any] | None) -> str:
    if winner is None:
        return "none yet"
    edges = winner.get("edges", ())
    step = {f"step_{key}": f"{value:g}" for key, value in (winner.get("class_step") or {}).items()}
    values = {**winner["settings"], **winner["options"], **step}
    words = [f"{key} {value}" + (" ⚠" if key in edges else "") for key, value in values.items()]
    score = f": {winner['score']:.3f}" if winner.get("score") is not None else ""
    return ", ".join(words) + score


def first_round(trials: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the trials of the quasi-random points: those with the fewest epochs.

    >>> first_round([{"epochs": 5}, {"epochs": 20}])
    [{'epochs': 5}]
    """
    shortest = min((trial["epochs"] for trial in trials), default=0)
    return [trial for trial in trials if trial["epochs"] == shortest]


def ranges(space: Mapping[str, Any], *, without: Sequence[str] = ()) -> str:
    """Return the ranges of a search in words.

    Args:
        space: the ranges by name, from a tuning file.
        without: names to leave out.

    >>> ranges({"rate": {"least": 0.1, "most": 1.0, "scale": "log"}, "cut": {"choices": [1, 2]}})
    'rate 0.1–1 (log); cut 1 / 2'
    """

    def words(one: Mapping[str, Any]) -> str:
        if "choices" in one:
            return " / ".join(str(choice) for choice in one["choices"])
        return f"{one['least']:g}–{one['most']:g}" + (" (log)" if one["scale"] == "log" else "")

    return "; ".join(f"{key} {words(one)}" for key, one in space.items() if key not in without)


def dump_results(results: Mapping[str, Any]) -> str:
    """Return the results of a table or of a search as JSON: one line per run and short value."""
    return _lines(results, "\n") + "\n"


def _lines(value: Any, margin: str) -> str:
    """JSON whose closing bracket follows ``margin``, a line break with its indentation."""
    line = json.dumps(value)
    if not isinstance(value, dict | list) or len(line) <= LINE_LENGTH or "row" in value:
        return line
    inner = f"{margin}  "
    if isinstance(value, list):
        items = [_lines(item, inner) for item in value]
        return "[" + inner + f",{inner}".join(items) + margin + "]"
    items = [f"{json.dumps(key)}: {_lines(item, inner)}" for key, item in value.items()]
    return "{" + inner + f",{inner}".join(items) + margin + "}"
