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
from fisherhash.experiments.standing import RANKINGS, Contest, Score, Standing
from fisherhash.experiments.tables import Table, TableCell

SIDE_BY_SIDE = "display:flex;flex-wrap:wrap;gap:0 2rem"
CAPTIONS = {
    "separable": "Separable before quantisation, but not after it",
    "margin-loss": "The pairwise loss with a margin",
    "centre-learning": "Centre learning: 2 bits, two classes of CIFAR-10, 100 images each",
    "centre-moves": "How the centres move, as printed in the paper",
    "modules": "The modules: pairs (P), margin (M), centres (C)",
    "margin": "Sensitivity to the margin",
    "pr-curves": "Precision and recall of all methods",
}
TUNING_INTRO = (
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

    def markdown(self) -> str:
        """Render the table of each ranking as Markdown."""
        if len(self.tables) == 1:
            return next(iter(self.tables.values())).markdown()
        blocks = [f"Ranked by {name}:\n\n{one.markdown()}" for name, one in self.tables.items()]
        return "\n\n".join(blocks)


def part_report(results: Mapping[str, Any], part: Mapping[str, Any]) -> PartReport:
    """Build the report of one part of the results."""
    standing = Standing(part)
    measured = {
        RANKINGS[key]: _score_table(part, contest, results["of"])
        for key, contest in standing.contests.items()
        if contest is standing.hamming or len({name for name, _ in contest.rivals}) > 1
    }
    return PartReport(
        part["title"],
        _intro(part),
        measured,
        standing.verdicts(results["target"]),
        _ties_table(part, standing),
        _agreement_table(part),
    )


def markdown(results: Mapping[str, Any], *, level: int = 2) -> str:
    """Render the whole report as Markdown, with its title as a heading of that level."""
    mark = "#" * level
    blocks = [f"{mark} {results['title']}", *results["notes"]]
    for part in results["parts"]:
        one = part_report(results, part)
        blocks += [f"{mark}# {one.title}", one.intro, one.markdown()]
        if one.agreement is not None:
            blocks += [AGREEMENT, one.agreement.markdown()]
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
        beside = "".join(
            f"<div><h3>Ranked by {escape(ranking)}</h3>{table.html()}</div>"
            for ranking, table in one.tables.items()
        )
        if one.agreement is not None:
            beside += f"<div><h3>{escape(AGREEMENT)}</h3>{one.agreement.html()}</div>"
        body = f'<div style="{SIDE_BY_SIDE}">{beside}</div>'
        body += (f"<ul>{said}</ul>" if said else "") + ties
        blocks.append(pages.section(one.title, body, name=f"part{number}", intro=one.intro))
    for path in figures:
        # As an image, so that the page's style does not reach into it.
        data, title = base64.b64encode(path.read_bytes()).decode(), CAPTIONS[path.stem]
        image = f'<img class="plot" src="data:image/svg+xml;base64,{data}" alt="{escape(title)}">'
        blocks.append(pages.section(title, image, name=path.stem))
    tuning = "".join(
        f"<h3>{escape(slug)}</h3>{_winners_table(found).html()}"
        f"<details><summary>Every trial</summary>{_trials_table(found).html()}</details>"
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
    settings = part["settings"]
    way = f"a trained head on frozen features, {counted(settings['epochs'], 'epoch')}"
    if bench["finetune"]:
        fixed = settings.get("fixed_layers", 0)
        way = "the network trained" + (f" except its first {fixed} layers" if fixed else "")
        way += f", {counted(settings['epochs'], 'epoch')}"
        if settings.get("head_epochs"):
            way += f" after {settings['head_epochs']} of the head alone"
    seed = protocol.get("seed")
    drawn = f" (split seed {seed})" if seed is not None else ""
    devices = sorted({run["device"] for run in part["runs"] if "device" in run})
    text = (
        f"mAP@{top}, expected over tie order; {protocol['protocol']}{drawn}: "
        f"{protocol['train']:,} training images, {protocol['query']:,} queries, "
        f"{protocol['database']:,} database images, checksum {protocol['checksum'][:16]}. "
        f"{bench['backbone']}{size}, {way}, {counted(seeds, 'seed')}, on {', '.join(devices)}."
    )
    if "dropout" in settings:
        text += (
            f" Standardised features, dropout {settings['dropout']:g}; outputs start at unit scale."
        )
    if seeds > 1:
        text += " Mean ± 95 % t-interval over the seeds."
    # A row may have no number at all: DQN has no class step.
    ran = {run["row"] for run in part["runs"] if "evaluation" in run}
    untuned = [row["name"] for row in part["rows"] if row["name"] in ran and not row["tuned"]]
    if untuned:
        whose = "" if len(untuned) == len(ran) else f": {', '.join(untuned)}"
        text += f" With default hyper-parameters, not tuned{whose}."
    edges = [
        f"{row['name']} ({', '.join(row['edges'])})" for row in part["rows"] if row.get("edges")
    ]
    if edges:
        text += f" Tuned to an edge of the range that was searched: {'; '.join(edges)}."
    if part["stands_in"]:
        text += " The paper's numbers are for its own data set, not for this stand-in."
    return text


def _score_table(part: Mapping[str, Any], contest: Contest, of: str) -> Table:
    hamming = contest.ranking == "evaluation"
    rows = [row for row in part["rows"] if not row.get("real_queries_of")]
    if not hamming:
        rows = [row for row in rows if any(name == row["name"] for name, _ in contest.rivals)]
    beside = f" [{of}]" if hamming and any(row["paper"] for row in rows) else ""
    apart = {name for (name, _), score in contest.scores.items() if not score.hamming}
    lines = [
        [
            row["name"] + (" ‡" if row["name"] in apart else ""),
            *(_score_cell(part, contest, row["name"], bits) for bits in part["bits"]),
        ]
        for row in rows
    ]
    queries = any(test["queries"] for test in part.get("tests", ()))
    tested = any(map(contest.tested, part["bits"]))
    note = NOTE.format("seeds and queries" if queries else "seeds") if tested else UNTESTED
    if apart and hamming:
        note += (
            " ‡: has no Hamming distance and is ranked by its own, between real-valued queries and "
            "quantised images, so it does not compete here."
        )
    return Table(["method", *(f"{bits} bits{beside}" for bits in part["bits"])], lines, note)


def _score_cell(part: Mapping[str, Any], contest: Contest, name: str, bits: int) -> TableCell:
    score = contest.scores[name, bits]
    known = contest.ranking == "evaluation" and score.paper is not None
    paper = f" [{score.paper:.3f}]" if known else ""
    if not score.values:
        return TableCell(_nothing(score) + paper)
    mean = f"{score.mean:.3f}"
    best = name == (first := contest.best(bits))
    if not contest.tested(bits) and (name, bits) in contest.rivals:
        # No † says what is level: what looks equal is equally bold.
        best = mean == f"{contest.rivals[first, bits].mean:.3f}"
    text = f" ± {score.half:.3f}" if math.isfinite(score.half) else ""
    text += " †" if len(score.values) > 1 and name in contest.level(bits) else ""
    if len(score.values) != part["seeds"]:
        text += f", {counted(len(score.values), 'seed')}"
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
        if not row.get("real_queries_of")
    ]
    return Table(["method", *(f"{bits} bits" for bits in part["bits"])], rows)


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
    lines = [
        [
            row["name"],
            *(
                f"{sum(own) / len(own):.3f}" if (own := values.get((row["name"], bits))) else "–"
                for bits in part["bits"]
            ),
        ]
        for row in part["rows"]
    ]
    chance = [f"{chances[bits]:.3f}" if bits in chances else "–" for bits in part["bits"]]
    lines.append(["one code per class (chance)", *chance])
    return Table(["method", *(f"{bits} bits" for bits in part["bits"])], lines)


def _winners_table(found: Mapping[str, Any]) -> Table:
    """What was searched for each row and what won, without and with the class step."""
    rows = []
    for name, entry in found["rows"].items():
        trials = [trial for trial in entry["trials"] if "plain" in trial]
        first = first_round(trials)
        counts = f"{len(first)} points, {len(trials)} trials"
        if none := sum(trial["plain"] is None for trial in first):
            counts += f"; {none} of the points without a score"
        winners = [_winner(entry.get(key)) for key in ("winner", "winner_step")]
        rows.append([name, counts, ranges(entry["space"]), *winners])
    header = ["row", "trials", "searched", "best", "best with the class step"]
    return Table(header, rows, "⚠: at the edge of its range.")


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
    known = {key: one for key, one in space.items() if isinstance(one, dict)}
    return "; ".join(f"{key} {_range(one)}" for key, one in known.items() if key not in without)


def _winner(winner: Mapping[str, Any] | None) -> str:
    if winner is None:
        return "none yet"
    edges = winner.get("edges", ())
    step = {f"step_{key}": f"{value:g}" for key, value in (winner.get("class_step") or {}).items()}
    values = {**winner["settings"], **winner["options"], **step}
    words = [f"{key} {value}" + (" ⚠" if key in edges else "") for key, value in values.items()]
    score = f": {winner['score']:.3f}" if winner.get("score") is not None else ""
    return ", ".join(words) + score


def _range(space: Mapping[str, Any]) -> str:
    if "choices" in space:
        return " / ".join(str(choice) for choice in space["choices"])
    return f"{space['least']:g}–{space['most']:g}" + (" (log)" if space["scale"] == "log" else "")


def _trials_table(found: Mapping[str, Any]) -> Table:
    """Every trial with its scores, the first round and the second."""
    rows = []
    for name, entry in found["rows"].items():
        for trial in entry["trials"]:
            if "plain" not in trial:  # a search of an earlier version
                continue
            values = {**trial["settings"], **trial["options"]}
            step = trial.get("step")
            rows.append(
                [
                    name,
                    str(trial["epochs"]),
                    ", ".join(f"{key} {value}" for key, value in values.items()),
                    "no score" if trial["plain"] is None else f"{trial['plain']:.3f}",
                    f"{step['score']:.3f}" if step else "–",
                ]
            )
    return Table(["row", "epochs", "point", "score", "with the class step"], rows)
