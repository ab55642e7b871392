"""From results to Markdown tables and one HTML page: the paper's numbers, ours, and the ties."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fisherhash.experiments.standing import Score, best, contest, is_level, scores, verdicts

NOT_RUN, NOT_DEFINED, FAILED = "not run", "–", "failed"
LEVEL, REAL = " †", " ‡"
PLOT_STYLE = 'style="max-width:100%;height:auto;background:white;border-radius:12px"'
TABLE_STYLE = (
    "<style>.numbers td,.numbers th{padding:5px 16px 5px 0;vertical-align:top;"
    "font-variant-numeric:tabular-nums}.numbers tbody tr{border-top:1px solid var(--line)}"
    ".numbers tbody th{white-space:nowrap}</style>"
)
CAPTIONS = {
    "separable": "Separable before quantisation, and not after it",
    "margin-loss": "The pairwise loss with a margin",
    "centre-learning": "Centre learning: 2 bits, two classes of CIFAR-10, 100 images each",
    "modules": "The modules: pairs (P), margin (M), centres (C)",
    "margin": "How sensitive the margin is",
    "pr-curves": "Precision and recall of all methods",
}


def markdown(results: Mapping[str, Any], *, level: int = 2) -> str:
    """The whole report as Markdown, its title a heading of that level."""
    mark = "#" * level
    lines = [f"{mark} {results['title']}", ""]
    for note in results["notes"]:
        lines += [note, ""]
    for part in results["parts"]:
        lines += [f"{mark}# {part['title']}", "", describe(part), ""]
        lines += [*table(part, of=results["of"]), ""]
        lines += [f"- {sentence}" for sentence in verdicts(results, part)]
        lines += ["", "What the order inside ties can do, means over the seeds:", ""]
        lines += [*ties_table(part), ""]
    return "\n".join(lines).rstrip() + "\n"


def describe(part: Mapping[str, Any]) -> str:
    """One paragraph: data, network, training, metric."""
    bench, protocol = part.get("bench"), part.get("protocol")
    if bench is None:
        return "Not run: the data is not on this machine."
    if protocol is None:
        return "Every run failed." if part["runs"] else "Not run yet."
    top = "ALL" if protocol["top"] is None else protocol["top"]
    way = "frozen features, a trained head"
    if bench["finetune"]:
        fixed = part["settings"].get("fixed_layers", 0)
        way = "the network trained" + (f", its first {fixed} layers fixed" if fixed else "")
    runs = part["runs"]
    devices = sorted({run["device"] for run in runs if "device" in run})
    untuned = [row["name"] for row in part["rows"] if not row["tuned"]]
    text = (
        f"mAP@{top}, expected over the order inside ties; {protocol['protocol']}: "
        f"{protocol['train']:,} images to train, {protocol['query']:,} queries, "
        f"{protocol['database']:,} in the database, checksum {protocol['checksum'][:16]}. "
        f"{bench['backbone']} at {bench['image_size']} px, {way}, "
        f"{_count(part['settings']['epochs'], 'epoch')}, {_count(part['seeds'], 'seed')}, on "
        f"{', '.join(devices)}."
    )
    if part["seeds"] > 1:
        text += " Mean (range)."
    if untuned:
        text += f" With default hyper-parameters, not tuned: {', '.join(untuned)}."
    if part["stands_in"]:
        text += " The paper's numbers are for its own data set, not for this stand-in."
    return text


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def table(part: Mapping[str, Any], *, of: str = "paper") -> list[str]:
    """Lines of a Markdown table: ours, and beside it the paper's number in brackets."""
    found = scores(part)
    rivals = contest(part, found)
    beside = f" [{of}]" if any(row["paper"] for row in part["rows"]) else ""
    header = " | ".join(f"{bits} bits{beside}" for bits in part["bits"])
    lines = [f"| method | {header} |", "|---" * (len(part["bits"]) + 1) + "|"]
    real = {name for (name, _), score in found.items() if not score.hamming}
    for row in part["rows"]:
        cells = [
            _cell(found[row["name"], bits], rivals, row["name"], bits, part["seeds"])
            for bits in part["bits"]
        ]
        mark = REAL if row["name"] in real else ""
        lines.append(f"| {row['name']}{mark} | " + " | ".join(cells) + " |")
    lines += ["", "Bold: the best of a column; †: level with it, the means differ by less than"]
    lines[-1] += " their standard errors together."
    if real:
        lines[-1] += " ‡: ranked by distances of real-valued queries to quantised images."
    if any(row.get("real_queries_of") for row in part["rows"]):
        lines[-1] += " Codes of another row that are asked so have no part in who is best."
    return lines


def _cell(
    score: Score, rivals: Mapping[tuple[str, int], Score], name: str, bits: int, seeds: int
) -> str:
    paper = "" if score.paper is None else f" [{score.paper:.3f}]"
    if not score.values:
        return _nothing(score) + paper
    text = f"{score.mean:.3f}"
    first = best(rivals, bits)
    if name == first:
        text = f"**{text}**"
    elif first is not None and (name, bits) in rivals and is_level(rivals, name, first, bits):
        text += LEVEL
    if len(score.values) > 1:
        text += f" ({min(score.values):.3f}–{max(score.values):.3f})"
    if len(score.values) < seeds:
        text += f", {len(score.values)} of {seeds} seeds"
    return text + paper


def _nothing(score: Score) -> str:
    """Why there is no number."""
    return FAILED if score.failed else NOT_RUN if score.defined else NOT_DEFINED


def ties_table(part: Mapping[str, Any]) -> list[str]:
    """Lines of a Markdown table: bounds over tie order, and the value in database order."""
    found = scores(part)
    header = " | ".join(f"{bits} bits" for bits in part["bits"])
    lines = [f"| method | {header} |", "|---" * (len(part["bits"]) + 1) + "|"]
    for row in part["rows"]:
        cells = []
        for bits in part["bits"]:
            score = found[row["name"], bits]
            if not score.values:
                cells.append(_nothing(score))
                continue
            bounds = "no bounds"
            if score.lower is not None and score.upper is not None:
                bounds = f"{score.lower:.3f} to {score.upper:.3f}"
            cells.append(f"{bounds}; database order {score.stable:.3f}")
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    return lines


def html_page(results: Mapping[str, Any], pictures: Sequence[Path] = ()) -> str:
    """One self-contained page, with SVG files as pictures."""
    from fisherhash.pages import html as pages

    blocks = []
    for number, part in enumerate(results["parts"]):
        said = "".join(f"<li>{escape(s)}</li>" for s in verdicts(results, part))
        body = (
            _html_table(table(part, of=results["of"]))
            + (f"<ul>{said}</ul>" if said else "")
            + "<details><summary>What ties can do</summary>"
            + _html_table(ties_table(part))
            + "</details>"
        )
        blocks.append(
            pages.section(part["title"], body, name=f"part{number}", intro=describe(part))
        )
    for path in pictures:
        blocks.append(pages.section(CAPTIONS.get(path.stem, path.stem), _img(path), name=path.stem))
    notes = "".join(f"<p>{escape(note)}</p>" for note in results["notes"])
    tuning = "".join(
        f"<h3>{escape(slug)}</h3>{_html_table(tuning_table(found))}"
        for slug, found in results["tuning"].items()
    )
    if tuning:
        intro = (
            "Every row had the same number of trials, or fewer where its first ones all failed, at "
            "one code length and one seed, on a fifth of the training images that was held out; "
            "queries were not looked at."
        )
        blocks.append(
            pages.section(
                "How the hyper-parameters were chosen", tuning, name="tuning", intro=intro
            )
        )
    body = f"{TABLE_STYLE}<h1>{escape(results['title'])}</h1>\n{notes}\n" + "\n".join(blocks)
    return pages.page(results["title"], body, description=results["title"])


def tuning_table(found: Mapping[str, Any]) -> list[str]:
    """Lines of a Markdown table: the trials of each row and their validation mAP, best in bold."""
    most = max((len(entry["trials"]) for entry in found["rows"].values()), default=0)
    header = " | ".join(f"trial {number + 1}" for number in range(most))
    lines = [f"| {found['bits']} bits | {header} |", "|---" * (most + 1) + "|"]
    for name, entry in found["rows"].items():
        values = [t["validation_map"] for t in entry["trials"] if t["validation_map"] is not None]
        shown = []
        for trial in entry["trials"]:
            changes = ", ".join(f"{k} {v}" for k, v in trial.items() if k != "validation_map")
            value = trial["validation_map"]
            text = f"{changes}: {'failed' if value is None else f'{value:.3f}'}"
            shown.append(f"**{text}**" if values and value == max(values) else text)
        shown += [""] * (most - len(shown))
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return lines


def _html_table(lines: Sequence[str]) -> str:
    """A Markdown table as HTML, and what follows it as a paragraph."""
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    after = " ".join(line for line in lines if line and not line.startswith("|"))
    head = "".join(f'<th scope="col">{_inline(cell)}</th>' for cell in rows[0])
    body = "".join(
        f'<tr><th scope="row">{_inline(cells[0])}</th>'
        + "".join(f"<td>{_inline(cell)}</td>" for cell in cells[1:])
        + "</tr>"
        for cells in rows[2:]
    )
    note = f"<p>{escape(after)}</p>" if after else ""
    return (
        f'<div class="scroll"><table class="numbers"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}"
    )


def _inline(text: str) -> str:
    """Escaped, with **bold** kept."""
    parts = escape(text.strip()).split("**")
    return "".join(f"<b>{part}</b>" if n % 2 else part for n, part in enumerate(parts))


def write(results: Mapping[str, Any], folder: Path, pictures: Sequence[Path] = ()) -> Path:
    """Write ``<target>.md`` and ``<target>.html``; returns the page."""
    from fisherhash.system import storage

    name = results["target"]
    storage.write_files(
        folder,
        {
            f"{name}.md": storage.write_text(markdown(results)),
            f"{name}.html": storage.write_text(html_page(results, pictures)),
        },
    )
    return folder / f"{name}.html"


def _img(path: Path) -> str:
    """A picture inside the page; as an image, so that the page's style does not reach into it."""
    data = base64.b64encode(path.read_bytes()).decode()
    alt = escape(CAPTIONS.get(path.stem, path.stem))
    return f'<img class="plot" src="data:image/svg+xml;base64,{data}" alt="{alt}" {PLOT_STYLE}>'
