"""The results in the README, from results/: every method on every data set, where DFH stands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from choosing_tables import reproduced

from fisherhash import backbones
from fisherhash.experiments.places import ColumnPlace, signed
from fisherhash.experiments.specs import Row, find_spec
from fisherhash.experiments.standing import RANKINGS, Standing
from fisherhash.experiments.tables import Table, TableCell

NOTE = (
    "{metrics} by Hamming distance, expected over tie order: means over the seeds, with "
    "EfficientNet-Lite0{others} at 128 px, fine-tuned. Bold: the highest of the column. +: with "
    "the class step, where the method's search on held-out training images preferred it. ‡: has no "
    "Hamming distance and is ranked by its own, with real-valued queries. –: not run, or not "
    "defined for several labels."
)

PLACES_NOTE = (
    "The row of DFH that held-out images prefer, against the highest row of any other method (in "
    "brackets): the difference in points of mAP, with its 95 % interval. First: tests put DFH "
    "ahead of every other row. Behind: a test puts some row ahead of DFH. Level: neither. coco21 "
    "and tiny100 stand in for NUS-WIDE and ImageNet100, so only CIFAR-10 can be compared with the "
    "paper."
)


@dataclass(frozen=True)
class FreshPart:
    """One data set of a table, measured on fresh queries.

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
    def title(self) -> str:
        """The data set in one word, and the network if it is not the default."""
        name = self.part["title"].split(" (")[0]
        return name if self.usual else f"{name} with {self.network}"

    @property
    def network(self) -> str:
        """The network without its year."""
        return backbones.info(self.part["bench"]["backbone"]).title.split(" (")[0]

    @property
    def metric(self) -> str:
        """What is measured on it, and where."""
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


def readme_table() -> str:
    """Return where DFH stands on the fresh queries of every data set, and every method."""
    parts = sorted(_fresh_parts(), key=lambda one: not one.usual)
    return f"{_places(parts).markdown()}\n\n{_summary(parts).markdown()}\n"


def _fresh_parts() -> Iterator[FreshPart]:
    for _, result in reproduced():
        for part in result["parts"] if result["target"] in ("table2", "table3") else ():
            if part["bench"]["finetune"] and part["bench"].get("split_seed"):
                yield FreshPart(result, part)


def _places(parts: list[FreshPart]) -> Table:
    """Return one line per data set and code length: where DFH stands in both rankings."""
    lines = []
    for one in parts:
        places = {(place.ranking, place.bits): place for place in Standing(one.part).places()}
        for bits in one.part["bits"]:
            cells = [_place(places[ranking, bits]) for ranking in RANKINGS]
            lines.append([f"{one.title}, {bits} bits", *cells])
    return Table(["", "by Hamming distance", "with real-valued queries"], lines, PLACES_NOTE)


def _place(place: ColumnPlace) -> TableCell:
    """Return where DFH stands in a column, bold where it is behind."""
    rest = f", {signed(place.gap)} ({place.rival})"
    behind = place.verdict == "behind"
    return TableCell(rest, place.verdict) if behind else TableCell(place.verdict + rest)


def _summary(parts: list[FreshPart]) -> Table:
    """Return one line per method, one column per data set and code length."""
    columns = [(one, bits) for one in parts for bits in one.part["bits"]]
    header = [f"{one.title}, {bits} bits" for one, bits in columns]
    lines: dict[str, list[TableCell]] = defaultdict(lambda: [TableCell("–")] * len(columns))
    for number, (one, bits) in enumerate(columns):
        scores = Standing(one.part).scores
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
    note = NOTE.format(metrics=metrics, others=named)
    return Table(["method", *header], [[name, *cells] for name, cells in lines.items()], note)
