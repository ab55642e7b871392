"""A table as one value, with a renderer for Markdown and one for HTML; results as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

LINE_LENGTH = 110


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

    def markdown(self) -> str:
        """Render the table and its note as Markdown.

        >>> print(Table(["method", "mAP"], [["dfh", TableCell(" (best)", "0.9")]]).markdown())
        | method | mAP |
        |---|---|
        | dfh | **0.9** (best) |
        """
        lines = [self.header, *(_rendered(row, "**{}**", str) for row in self.rows)]
        text = [f"| {' | '.join(cells)} |" for cells in lines]
        text.insert(1, "|---" * len(self.header) + "|")
        return "\n".join([*text, "", self.note] if self.note else text)

    def html(self) -> str:
        """Render the table and its note as HTML, with all text escaped."""
        head = "".join(f'<th scope="col">{escape(text)}</th>' for text in self.header)
        body = ""
        for row in self.rows:
            name, *others = _rendered(row, "<b>{}</b>", escape)
            cells = "".join(f"<td>{cell}</td>" for cell in others)
            body += f'<tr><th scope="row">{name}</th>{cells}</tr>'
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return (
            f'<div class="scroll"><table class="numbers"><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>{note}"
        )


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


def _rendered(
    row: Sequence[TableCell | str], strong: str, escaped: Callable[[str], str]
) -> list[str]:
    cells = [TableCell(cell) if isinstance(cell, str) else cell for cell in row]
    return [
        (strong.format(escaped(cell.strong)) if cell.strong else "") + escaped(cell.text)
        for cell in cells
    ]
