"""Write the generated parts of the documentation: method pages, and tables from results/.

python docs/generate.py            writes
python docs/generate.py --check    exits with 1 if anything is out of date
"""

from __future__ import annotations

import inspect
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fisherhash import methods
from fisherhash.experiments import report

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


def method_page(method: type[methods.HashMethod] | type[methods.FeatureMethod]) -> str:
    """A method's page: its class docstring, where it comes from, its defaults."""
    info = method.info
    options = methods.hyper_parameters(method)
    learns = "no labels" if info.supervision == "none" else info.supervision
    lines = [
        f"# {info.name}",
        "",
        f"*{info.title}*, {info.venue} {info.year}, <{info.url}>",
        "",
        f"Learns from {learns}; "
        + ("several labels an image" if info.multilabel else "one label an image only")
        + "; "
        + ("trained by gradient." if info.fit == "gradient" else "fitted on features."),
        "",
        _markdown(inspect.cleandoc(method.__doc__ or "")),
    ]
    if options:
        lines += ["", "## Defaults", "", "| option | default |", "|---|---|"]
        lines += [f"| `{name}` | `{p.default}` |" for name, p in options.items()]
    lines += ["", f"    fisherhash train DATA --method {info.name} --out MODEL"]
    return "\n".join(lines) + "\n"


def _markdown(docstring: str) -> str:
    """Google-style sections as headings, arguments as a list, double back-ticks as single ones."""
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
    """The list of all methods."""
    lines = [
        "# Methods",
        "",
        "Every method has one file and one contract; these pages are made from the classes.",
        "[Write your own](../write-your-own-method.md) in about thirty lines.",
        "",
        "| method | title | venue | learns from | several labels |",
        "|---|---|---|---|---|",
    ]
    for name, method in methods.registry().items():
        info = method.info
        several = "yes" if info.multilabel else "no"
        lines.append(
            f"| [{name}]({name}.md) | {info.title} | {info.venue} {info.year} "
            f"| {info.supervision} | {several} |"
        )
    return "\n".join(lines) + "\n"


def ties_table() -> str:
    """How far ties move mAP on codes learned by DFH, by code length."""
    result = _load("cifar10-frozen-dfh")
    if result is None:
        return "Not run yet.\n"
    by_bits = defaultdict(list)
    for row in result["rows"]:
        by_bits[row["bits"]].append(row["evaluation"])
    lines = [
        f"Codes learned by DFH on {result['protocol']['protocol']} "
        f"({result['protocol']['database']:,} images in the database, checksum "
        f"{result['protocol']['checksum'][:16]}; {result['backbone']} features at "
        f"{result['image_size']} px), mean of {len(next(iter(by_bits.values())))} seeds:",
        "",
        "| bits | expected | in database order | lower bound | upper bound | ties move it by |",
        "|---|---|---|---|---|---|",
    ]
    for bits, evaluations in sorted(by_bits.items()):
        mean: Callable[[str], float] = lambda key, rows=evaluations: statistics.mean(  # noqa: E731
            row[key] for row in rows
        )
        low, high = mean("map_lower"), mean("map_upper")
        lines.append(
            f"| {bits} | {mean('map_expected'):.4f} | {mean('map_stable'):.4f} | {low:.4f} "
            f"| {high:.4f} | {100 * (high - low):.1f} points |"
        )
    return "\n".join(lines) + "\n"


def readme_table() -> str:
    """CIFAR-10 small: the reproduced table 2."""
    tables = [
        (part, result["of"])
        for _, result in reproduced()
        if result["target"] == "table2"
        for part in result["parts"]
        if part["data"] == "cifar10" and part["runs"]
    ]
    blocks = [
        f"{report.describe(part)}\n\n" + "\n".join(report.table(part, of=of)) for part, of in tables
    ]
    return "\n\n".join(blocks) + "\n"


def speed_table() -> str:
    """Queries per second of our search and of the others, from one run."""
    result, huge = _load("search-benchmark"), _load("search-huge")
    if result is None:
        return "Not run yet.\n"
    lines = [
        "| codes | N | bits | k | queries | fisherhash | faiss Flat | usearch | numpy | to faiss |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in result["results"]:
        peers = [_rate(case["engines"], name) for name in ("faiss Flat", "usearch", "numpy")]
        lines.append(
            f"| {case['data']} | {case['n']:,} | {case['bits']} | {case['k']} | {case['way']} "
            f"| {_rate(case['engines'], 'fisherhash')} | {' | '.join(peers)} "
            f"| {_short(case['times_faiss'])} × |"
        )
    loads = [case["load_average"] for case in result["results"]]
    lines += [
        "",
        f"{result['threads']} threads on {result['cores']} cores; the load average of the machine "
        f"was {min(loads):.1f} to {max(loads):.1f} (2.0 is these threads alone). Clustered: "
        f"{result['clustered']}. faiss is taken at its better mode and number of threads.",
    ]
    if huge is not None:
        found = huge["huge"]
        times = "; ".join(
            f"{name} {_short(value)} s" if value > 0.5 else f"{name} {_short(1e3 * value)} ms"
            for name, value in found["seconds"].items()
        )
        lines += [
            "",
            f"{found['codes']:,} clustered codes of {found['bits']} bits in an index on disk, "
            f"k = {found['k']}: {times}. Peak memory {found['peak_gib']:.1f} GiB, "
            f"{found['disk_gib']:.2f} GiB on disk.",
        ]
    return "\n".join(lines) + "\n"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _rate(engines: list[dict[str, Any]], name: str) -> str:
    """Queries per second of an engine at its best mode and number of threads."""
    modes = (name, f"{name} count", f"{name} heap", f"{name} exact")
    same = [e["seconds"] for e in engines if e["engine"] in modes]
    return f"{1 / min(same):,.0f}" if same else "–"


def reproduced() -> list[tuple[str, dict[str, Any]]]:
    """The reproduced tables in results/, by file name."""
    found = [(path.name, json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    return [
        (name, result) for name, result in found if isinstance(result, dict) and "target" in result
    ]


def reproduced_tables() -> str:
    """Every reproduced table with its verdicts and tie bounds."""
    blocks = [
        f"{report.markdown(result, level=3)}\nFrom `results/{name}`.\n"
        for name, result in reproduced()
    ]
    return "\n".join(blocks) or "Not run yet.\n"


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def between(text: str, mark: str, content: str) -> str:
    """Replace what stands between ``<!-- mark -->`` and ``<!-- /mark -->``."""
    start, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{content}{end}{after}"


def generated() -> dict[Path, str]:
    """Every generated file with what it should hold."""
    docs = ROOT / "docs"
    files = {docs / "methods" / "README.md": method_index()}
    for name, method in methods.registry().items():
        files[docs / "methods" / f"{name}.md"] = method_page(method)
    for path, mark, content in (
        (docs / "evaluation.md", "ties-table", ties_table()),
        (docs / "reproduce.md", "reproduced", reproduced_tables()),
        (docs / "search.md", "speed", speed_table()),
        (ROOT / "README.md", "results", readme_table()),
    ):
        files[path] = between(path.read_text(encoding="utf-8"), mark, content)
    return files


def main() -> None:
    """Write, or check."""
    stale = []
    for path, content in generated().items():
        if path.is_file() and path.read_text(encoding="utf-8") == content:
            continue
        stale.append(path.relative_to(ROOT))
        if "--check" not in sys.argv:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    for path in stale:
        print(path)
    if stale and "--check" in sys.argv:
        sys.exit("out of date: run python docs/generate.py")


if __name__ == "__main__":
    main()
