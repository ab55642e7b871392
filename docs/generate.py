"""Write the pages of the site that are made from the code and from results/.

They are a page per method, all reproduced tables, and the searches of their hyper-parameters. None
of them is committed: `make docs` writes them before it builds the site.

python docs/generate.py [FOLDER]    writes them to a folder, docs/ by default
"""

from __future__ import annotations

import inspect
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fisherhash import backbones, methods
from fisherhash.experiments import report
from fisherhash.experiments.comparison import RANKINGS, Comparison, Verdict, signed, verdicts_of
from fisherhash.experiments.report import Table, TableCell
from fisherhash.experiments.specs import SPECS, Row, find_spec

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "results"

METHODS = """# Methods

Every method is one file that follows one contract. Its page is made from its class.
[Write your own](../write-your-own-method.md) in about thirty lines.

"""
RESULTS_INTRODUCTION = """# All results

Every table that was made with [`fisherhash reproduce`](reproduce.md), from its JSON in `results/`.
[How the rows are tuned](reproduce.md#how-rows-are-tuned) and
[when a row is first](reproduce.md#when-a-row-is-first) are explained there.

## Where DFH stands
"""
STANDING = (
    "The row of DFH that held-out images prefer, against the highest row of any other method (in "
    "brackets): the difference in points of mAP, with its 95 % interval. First: tests put DFH "
    "ahead of every other row. Behind: a test puts some row ahead of DFH. Level: neither. coco21 "
    "and tiny100 stand in for NUS-WIDE and ImageNet100, so only CIFAR-10 can be compared with the "
    "paper."
)
SUMMARY = (
    "{metrics} by Hamming distance, expected over tie order: means over the seeds, with "
    "EfficientNet-Lite0{others} at 128 px, fine-tuned. Bold: the highest of the column. +: with "
    "the class step, where the method's search on held-out training images preferred it. ‡: has no "
    "Hamming distance and is ranked by its own, with real-valued queries. –: not run, or not "
    "defined for several labels."
)
SEARCHES = """# The searches

Every row of [the tables](results.md) was searched
[in the same way](reproduce.md#how-rows-are-tuned), on held-out training images. Each data set and
network has two tables here. The first counts the quasi-random points that have a score (*live*: in
the others the loss became infinite or not a number) and all trials; then come the best scores, each
the mean of mAP at two code lengths. *At an edge* names what the best has at an edge of its range
with nothing tried beyond it, or at the end of the grid of the class step. The second table has the
winners. All trials are in `results/tuning-seed1.json`.
"""
SEARCHED = """Beside these, the learning rate was searched for every row that has one: from 0.0005
to 0.2 where the network is trained, from 0.001 to 1 on frozen features, both on a logarithmic
scale. Rows that were searched in several ways have the last one here.
"""


# Methods


def method_page(method: type[methods.HashMethod] | type[methods.FeatureMethod]) -> str:
    """Return a method's page: its class docstring, its source and its defaults."""
    info = method.info
    options = methods.hyper_parameters(method)
    learns = "no labels" if info.supervision == "none" else info.supervision
    images = "several labels per image" if info.multilabel else "one label per image only"
    by_gradient = issubclass(method, methods.HashMethod)
    fit = "trained by gradient" if by_gradient else "fitted on features"
    lines = [
        f"# {info.name}",
        "",
        f"*{info.title}*, {info.venue} {info.year}, <{info.url}>",
        "",
        f"Learns from {learns}; {images}; {fit}.",
        "",
        _markdown(inspect.cleandoc(method.__doc__ or "")),
    ]
    if options:
        rows = [[f"`{name}`", f"`{p.default}`"] for name, p in options.items()]
        lines += ["", "## Defaults", "", Table(["option", "default"], rows).markdown()]
    lines += ["", f"    fisherhash train DATA --method {info.name} --out MODEL"]
    return "\n".join(lines) + "\n"


def _markdown(docstring: str) -> str:
    """Turn Google-style sections into headings, arguments into a list, `` into `."""
    lines: list[str] = []
    arguments = False
    for line in docstring.replace("``", "`").splitlines():
        if line == "Args:":
            lines += ["## Options", ""]
            arguments = True
        elif arguments and line.startswith("    ") and not line.startswith("     "):
            name, _, text = line.strip().partition(": ")
            lines.append(f"- `{name}`: {text}")
        elif arguments and line.startswith("        "):
            lines.append("  " + line.strip())
        else:
            lines.append(line)
    return "\n".join(lines)


def method_index() -> str:
    """Return the list of all methods."""
    rows = [
        [
            f"[{name}]({name}.md)",
            info.title,
            f"{info.venue} {info.year}",
            info.supervision,
            "yes" if info.multilabel else "no",
        ]
        for name, method in methods.registry().items()
        for info in [method.info]
    ]
    header = ["method", "title", "venue", "learns from", "several labels"]
    return f"{METHODS}{Table(header, rows).markdown()}\n"


# Results


def reproduced() -> list[tuple[str, dict[str, Any]]]:
    """Return the reproduced tables in results/, by file name."""
    found = [(path.name, json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    return [(name, one) for name, one in found if isinstance(one, dict) and "target" in one]


def results_page() -> str:
    """Return the page of all reproduced tables, with their verdicts and tie bounds."""
    tables = reproduced()
    parts = [
        FinetunedPart(result, part)
        for _, result in tables
        if result["target"] in ("table2", "table3")
        for part in result["parts"]
        if part["bench"]["finetune"]
    ]
    parts.sort(key=lambda one: not one.usual)
    blocks = [_standing(parts).markdown(), "## Every method", _summary(parts).markdown()]
    blocks += [
        f"{report.markdown(_titled(result), level=2)}\nFrom `results/{name}`."
        for name, result in tables
    ]
    return RESULTS_INTRODUCTION + "\n" + "\n\n".join(blocks) + "\n"


def _titled(result: dict[str, Any]) -> dict[str, Any]:
    """Return a table whose title says what sets it apart from others of the same target."""
    bench = result["parts"][0]["bench"]
    words = ["fine-tuned" if bench["finetune"] else "frozen features"]
    if bench["backbone"] != backbones.DEFAULT:
        words.append(backbones.info(bench["backbone"]).title)
    return {**result, "title": f"{result['title']} – {', '.join(words)}"}


@dataclass(frozen=True)
class FinetunedPart:
    """One data set of a table whose network was trained.

    Attributes:
        result: the table.
        part: its part on this data set.
    """

    result: dict[str, Any]
    part: dict[str, Any]

    @property
    def usual(self) -> bool:
        """Whether it was measured with the default network."""
        return self.part["bench"]["backbone"] == backbones.DEFAULT

    @property
    def network(self) -> str:
        """The network without its year."""
        return backbones.info(self.part["bench"]["backbone"]).title.split(" (")[0]

    @property
    def title(self) -> str:
        """The data set in one word, and the network if it is not the default."""
        name = self.part["title"].split(" (")[0]
        return name if self.usual else f"{name} with {self.network}"

    @property
    def metric(self) -> str:
        """What is measured on it."""
        top = self.part["protocol"]["top"]
        return f"mAP@{'ALL' if top is None else top} ({self.title})"

    @property
    def rows(self) -> list[Row]:
        """The rows of the part, without those with the class step."""
        names = {row["name"] for row in self.part["rows"]}
        parts = find_spec(self.result["target"]).parts
        known = {row.name: row for one in parts for row in one.rows if not row.class_step}
        return [row for name, row in known.items() if name in names]

    def chosen(self, row: Row) -> Row:
        """Return a row, with the class step if that had the higher score on held-out images."""
        entry = self.result["tuning"][self.part["bench"]["slug"]]["rows"][row.space]
        scores = [entry[key]["score"] for key in ("winner", "winner_step") if key in entry]
        return row.stepped() if scores and max(scores) > scores[0] else row


def _standing(parts: list[FinetunedPart]) -> Table:
    """Return one line per data set and code length: where DFH stands in both rankings."""
    lines = []
    for one in parts:
        found = {(verdict.ranking, verdict.bits): verdict for verdict in verdicts_of(one.part)}
        for bits in one.part["bits"]:
            cells = [_verdict(found[ranking, bits]) for ranking in RANKINGS]
            lines.append([f"{one.title}, {bits} bits", *cells])
    return Table(["", "by Hamming distance", "with real-valued queries"], lines, STANDING)


def _verdict(verdict: Verdict) -> TableCell:
    """Return where DFH stands in a column, bold where it is behind."""
    rest = f", {signed(verdict.gap)} ({verdict.rival})"
    behind = verdict.word == "behind"
    return TableCell(rest, verdict.word) if behind else TableCell(verdict.word + rest)


def _summary(parts: list[FinetunedPart]) -> Table:
    """Return one line per method, one column per data set and code length."""
    columns = [(one, bits) for one in parts for bits in one.part["bits"]]
    header = [f"{one.title}, {bits} bits" for one, bits in columns]
    lines: dict[str, list[TableCell]] = defaultdict(lambda: [TableCell("–")] * len(columns))
    for number, (one, bits) in enumerate(columns):
        scores = Comparison(one.part).scores
        chosen = {row.name: one.chosen(row) for row in one.rows}
        known = {name: scores[row.name, bits] for name, row in chosen.items()}
        found = {name: score for name, score in known.items() if score.values}
        best = max(score.mean for score in found.values() if score.hamming)
        for name, score in found.items():
            text = f"{score.mean:.3f}"
            mark = " +" if chosen[name].class_step else ""
            first = score.hamming and score.mean == best
            title = name if score.hamming else f"{name} ‡"
            lines[title][number] = TableCell(mark, text) if first else TableCell(text + mark)
    others = sorted({one.network for one in parts if not one.usual})
    named = f" ({' or '.join(others)} where it is named)" if others else ""
    metrics = ", ".join(one.metric for one in parts if one.usual)
    note = SUMMARY.format(metrics=metrics, others=named)
    return Table(["method", *header], [[name, *cells] for name, cells in lines.items()], note)


# Searches


def searches_page() -> str:
    """Return the page on the searches of every row: counts, winners, ranges."""
    result = json.loads((RESULTS / "tuning-seed1.json").read_text("utf-8"))
    names = {row.space: row.name for row in _searched_rows()}
    blocks, ranges = [], dict[str, str]()
    for found in result["benches"].values():
        bench, counts, winners = found["bench"], [], []
        for space, entry in found["rows"].items():
            name = names[space]
            first = report.first_round(entry["trials"])
            live = sum(trial["plain"] is not None for trial in first)
            best = [entry.get(key) for key in ("winner", "winner_step")]
            edges = dict.fromkeys(edge for one in best if one for edge in one["edges"])
            scores = [f"{one['score']:.3f}" if one else "–" for one in best]
            counts.append([name, f"{live} of {len(first)}", str(len(entry["trials"])), *scores])
            counts[-1].append(", ".join(f"`{edge}`" for edge in edges) or "–")
            winners.append([name, *(_values(one) for one in best)])
            ranges[name] = report.ranges(entry["space"], without=("learning_rate",))
        header = ["row", "live points", "trials", "best", "with the class step", "at an edge"]
        how = "fine-tuned" if bench["finetune"] else "frozen features"
        network = backbones.info(bench["backbone"]).title.split(" (")[0]
        blocks.append(f"## {bench['data']}, {network}, {how}")
        blocks += [Table(header, counts).markdown(), "The winners:"]
        blocks.append(Table(["row", "without the class step", "with it"], winners).markdown())
    table = Table(["row", "searched"], [[name, text] for name, text in ranges.items()])
    return "\n\n".join([SEARCHES, *blocks, f"## Ranges\n\n{SEARCHED}", table.markdown()]) + "\n"


def _searched_rows() -> list[Row]:
    """Return one row of every search."""
    specs = [find_spec("table2"), *SPECS.values()]  # a row's name in the main table comes first
    rows = [row for spec in specs for part in spec.parts for row in part.rows]
    return list({row.space: row for row in reversed(rows) if not row.class_step}.values())


def _values(winner: dict[str, Any] | None) -> str:
    """Return the values of a winner that its row does not fix, with its class step."""
    if winner is None:
        return "–"
    step = {f"step_{key}": value for key, value in (winner.get("class_step") or {}).items()}
    values = {**winner["settings"], **winner["options"], **step}
    return ", ".join(f"{key} {value}" for key, value in values.items())


def generated() -> dict[str, str]:
    """Return the content of every generated page, by its path in the folder."""
    pages = {f"methods/{name}.md": method_page(one) for name, one in methods.registry().items()}
    return pages | {
        "methods/README.md": method_index(),
        "results.md": results_page(),
        "searches.md": searches_page(),
    }


def main(folder: Path = DOCS) -> None:
    """Write the pages to a folder."""
    for name, content in generated().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
