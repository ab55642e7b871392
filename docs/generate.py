"""Write the generated parts of the documentation: method pages, and tables from results/.

python docs/generate.py            writes them
python docs/generate.py --check    exits with 1 if any of them is out of date
"""

from __future__ import annotations

import inspect
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from fisherhash import backbones, methods
from fisherhash.data.protocol_table import PROTOCOLS
from fisherhash.experiments import report
from fisherhash.experiments.tables import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


def method_page(method: type[methods.HashMethod] | type[methods.FeatureMethod]) -> str:
    """Return a method's page: its class docstring, its source and its defaults."""
    info = method.info
    options = methods.hyper_parameters(method)
    learns = "no labels" if info.supervision == "none" else info.supervision
    lines = [
        f"# {info.name}",
        "",
        f"*{info.title}*, {info.venue} {info.year}, <{info.url}>",
        "",
        f"Learns from {learns}; "
        + ("several labels per image" if info.multilabel else "one label per image only")
        + "; "
        + ("trained by gradient." if info.fit == "gradient" else "fitted on features."),
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
    table = Table(["method", "title", "venue", "learns from", "several labels"], rows)
    return (
        "# Methods\n\n"
        "Every method is one file that follows one contract; these pages are generated from the "
        "classes.\n"
        "[Write your own](../write-your-own-method.md) in about thirty lines.\n\n"
        f"{table.markdown()}\n"
    )


def ties_table() -> str:
    """Return how far ties move mAP on codes learned by DFH, by code length."""
    result = _load("cifar10-frozen-dfh")
    if result is None:
        return "Not run yet.\n"
    by_bits = defaultdict(list)
    for row in result["rows"]:
        by_bits[row["bits"]].append(row["evaluation"])
    rows = []
    for bits, evaluations in sorted(by_bits.items()):
        expected, stable, low, high = (
            statistics.mean(one[key] for one in evaluations)
            for key in ("map_expected", "map_stable", "map_lower", "map_upper")
        )
        values = [f"{value:.4f}" for value in (expected, stable, low, high)]
        rows.append([str(bits), *values, f"{100 * (high - low):.1f} points"])
    header = ["bits", "expected", "in database order", "lower bound", "upper bound"]
    return (
        f"Codes learned by DFH on {result['protocol']['protocol']} "
        f"({result['protocol']['database']:,} database images, checksum "
        f"{result['protocol']['checksum'][:16]}; {result['backbone']} features at "
        f"{result['image_size']} px), mean of {len(next(iter(by_bits.values())))} seeds:\n\n"
        f"{Table([*header, 'ties move it by'], rows).markdown()}\n"
    )


def readme_table() -> str:
    """Return the reproduced table 2 on CIFAR-10 with the default network."""
    parts = [
        report.part_report(result, part)
        for _, result in reproduced()
        if result["target"] == "table2"
        for part in result["parts"]
        if part["data"] == "cifar10" and part["runs"]
        if part["bench"]["backbone"] == backbones.DEFAULT
    ]
    return "\n\n".join(f"{part.intro}\n\n{part.markdown()}" for part in parts) + "\n"


def speed_table() -> str:
    """Return queries per second of our search and of others, measured in one run."""
    result, huge = _load("search-benchmark"), _load("search-huge")
    if result is None:
        return "Not run yet.\n"
    header = ["codes", "N", "bits", "k", "queries", "fisherhash", "faiss Flat", "usearch", "numpy"]
    rows = [
        [
            *(case["data"], f"{case['n']:,}", str(case["bits"]), str(case["k"]), case["way"]),
            *(_rate(case["engines"], name) for name in header[5:]),
            f"{_short(case['times_faiss'])} ×",
        ]
        for case in result["results"]
    ]
    loads = [case["load_average"] for case in result["results"]]
    note = (
        f"{result['threads']} threads on {result['cores']} cores; the load average of the machine "
        f"was {min(loads):.1f} to {max(loads):.1f} (2.0 is these threads alone). Clustered: "
        f"{result['clustered']}. faiss uses its faster mode and its better number of threads."
    )
    if huge is not None:
        found = huge["huge"]
        times = "; ".join(
            f"{name} {_short(value)} s" if value > 0.5 else f"{name} {_short(1e3 * value)} ms"
            for name, value in found["seconds"].items()
        )
        note += (
            f"\n\n{found['codes']:,} clustered codes of {found['bits']} bits in an index on disk, "
            f"k = {found['k']}: {times}. Peak memory {found['peak_gib']:.1f} GiB, "
            f"{found['disk_gib']:.2f} GiB on disk."
        )
    return Table([*header, "to faiss"], rows, note).markdown() + "\n"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _rate(engines: list[dict[str, Any]], name: str) -> str:
    """Return queries per second of an engine in its best mode and number of threads."""
    modes = (name, f"{name} count", f"{name} heap", f"{name} exact")
    same = [e["seconds"] for e in engines if e["engine"] in modes]
    return f"{1 / min(same):,.0f}" if same else "–"


def reproduced() -> list[tuple[str, dict[str, Any]]]:
    """Return the reproduced tables in results/, by file name."""
    found = [(path.name, json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    return [
        (name, result) for name, result in found if isinstance(result, dict) and "target" in result
    ]


def reproduced_tables() -> str:
    """Return every reproduced table with its verdicts and tie bounds."""
    blocks = [
        f"{report.markdown(result, level=3)}\nFrom `results/{name}`.\n"
        for name, result in reproduced()
    ]
    return "\n".join(blocks) or "Not run yet.\n"


def finetuned_table() -> str:
    """Return which rows are highest in the fine-tuned tables, by data and length."""
    rows = []
    parts = [
        part
        for _, result in reproduced()
        if result["target"] in ("table2", "table3")
        for part in result["parts"]
        if part["bench"]["finetune"] and part["bench"]["backbone"] == backbones.DEFAULT
    ]
    for part in parts:
        labels = "several" if part["data"] in SEVERAL_LABELS else "one"
        known = [part["data"], labels, str(PROTOCOLS[part["protocol"]["protocol"]].classes)]
        for bits in sorted({run["bits"] for run in part["runs"]}):
            if row := _highest(part, bits):
                rows.append([*known, f"{part['protocol']['train']:,}", *row])
    header = ["data", "labels per image", "classes", "training images", "bits"]
    header += ["highest", "within one point", "training"]
    return Table(header, rows).markdown() + "\n" if rows else "Not run yet.\n"


SEVERAL_LABELS = ("coco21", "nuswide21", "coco80")


def _highest(part: dict[str, Any], bits: int) -> list[str] | None:
    """Return the cells of one length: the best row, its rivals, and the time it took."""
    runs = [
        run
        for run in part["runs"]
        if run["bits"] == bits and run["evaluation"]["ranking"] == "Hamming distance"
    ]
    scores, seconds = defaultdict(list), defaultdict(list)
    for run in runs:
        scores[run["row"]].append(run["evaluation"]["map"])
        seconds[run["row"]].append(run["seconds"]["training"])
    means = sorted(((statistics.mean(own), name) for name, own in scores.items()), reverse=True)
    if len(means) < 2:
        return None
    best, name = means[0]
    near = [f"{other} {score:.3f}" for score, other in means[1:] if score > best - 0.01]
    time = f"{statistics.median(seconds[name]):.0f} s, {runs[0]['device']}"
    return [str(bits), f"{name} {best:.3f}", ", ".join(near) or "–", time]


def shallow_results() -> list[dict[str, Any]]:
    """Return the runs of benchmarks/shallow.py; that on CIFAR-10 comes first."""
    found = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("shallow-*.json"))]
    return sorted(found, key=lambda one: one["protocol"]["protocol"] != "cifar10-small")


def shallow_tables() -> str:
    """Return mAP, time to fit and time to encode of every shallow method."""
    blocks = []
    for result in shallow_results():
        lengths = sorted({row["bits"] for row in result["rows"]})
        by_method = defaultdict(dict)
        for row in result["rows"]:
            by_method[row["method"]][row["bits"]] = row
        order = sorted(by_method, key=lambda name: -_best_score(by_method[name]))
        rows = [_shallow_row(name, by_method[name], lengths) for name in order]
        note = (
            f"mAP on {result['protocol']['protocol']} "
            f"({result['protocol']['train']:,} training images, "
            f"{result['protocol']['query']:,} queries, {result['protocol']['database']:,} database "
            f"images), EfficientNet-Lite0 features at {result['image_size']} px. The features "
            f"themselves, ranked by cosine, have mAP {result['features']:.3f}. Times are at "
            f"{lengths[-1]} bits, on the CPU."
        )
        header = ["method", "learns from", *(f"{bits} bits" for bits in lengths), "fit", "encode"]
        blocks.append(Table(header, rows, note).markdown())
    return "\n\n".join(blocks) + "\n" if blocks else "Not run yet.\n"


def _best_score(own: dict[int, dict[str, Any]]) -> float:
    return max((row["map"] for row in own.values() if "map" in row), default=0.0)


def _shallow_row(name: str, own: dict[int, dict[str, Any]], lengths: list[int]) -> list[str]:
    scores = [f"{own[b]['map']:.3f}" if "map" in own.get(b, {}) else "–" for b in lengths]
    last = own.get(lengths[-1], {})
    times = ["–", "–"]
    if "map" in last:
        times = [f"{_short(last['fit_seconds'])} s", f"{_short(last['encode_microseconds'])} µs"]
    return [f"[{name}](methods/{name}.md)", _learns(name), *scores, *times]


def _learns(name: str) -> str:
    kind = methods.find(name).info.supervision
    if kind != "none":
        return kind
    return "nothing" if name in DATA_INDEPENDENT else "the features"


DATA_INDEPENDENT = ("lsh", "e2lsh", "klsh", "sklsh")


def choices_table() -> str:
    """Return what to take on frozen features, by labels, length and patience."""
    results = shallow_results()
    if not results:
        return "Not run yet.\n"
    result, rows = results[0], []
    measured = [row for row in result["rows"] if "map" in row]
    for kind, words in (("labels", "labels"), ("the features", "no labels")):
        for bits in sorted({row["bits"] for row in measured}):
            own = [
                row
                for row in measured
                if row["bits"] == bits
                and (_learns(row["method"]) not in ("nothing", "the features"))
                == (kind == "labels")
                and (kind == "labels" or _learns(row["method"]) == kind)
            ]
            if not own:
                continue
            best = max(own, key=lambda row: row["map"])
            near = [row for row in own if row["map"] >= best["map"] - 0.01]
            quick = min(near, key=lambda row: row["fit_seconds"])
            rows.append([words, str(bits), _choice(best), _choice(quick)])
    header = ["you have", "bits", "highest mAP", "fastest to fit within one point of it"]
    return Table(header, rows).markdown() + "\n"


def _choice(row: dict[str, Any]) -> str:
    return f"`{row['method']}` {row['map']:.3f}, {_short(row['fit_seconds'])} s"


def nested_table() -> str:
    """Return what one nested model costs against a separate model per length."""
    blocks = []
    for path in sorted(RESULTS.glob("nested-*.json")):
        result = json.loads(path.read_text("utf-8"))
        groups = defaultdict(list)
        for row in result["rows"]:
            groups[row["method"], row["bits"], row["kind"]].append(row)
        rows = []
        for method, bits in sorted({key[:2] for key in groups}):
            pair = [groups[method, bits, kind] for kind in ("separate", "nested")]
            if not all(pair):
                continue
            alone, nested = (statistics.mean(row["map"] for row in own) for own in pair)
            times = [
                f"{_short(statistics.median(row['seconds'] for row in own))} s" for own in pair
            ]
            points = f"{100 * (nested - alone):+.1f}"
            rows.append([f"`{method}`", str(bits), f"{alone:.3f}", f"{nested:.3f}", points, *times])
        note = (
            f"Frozen EfficientNet-Lite0 features of {result['data']} at {result['image_size']} px, "
            f"{result['protocol']['train']:,} training images, {result['epochs']} epochs, mean of "
            f"{1 + max(row['seed'] for row in result['rows'])} seeds. The nested time is that of "
            "one training for all lengths. From `results/" + path.name + "`."
        )
        header = ["method", "bits", "separate", "nested", "points", "training", "nested training"]
        blocks.append(Table(header, rows, note).markdown())
    return "\n\n".join(blocks) + "\n" if blocks else "Not run yet.\n"


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def between(text: str, mark: str, content: str) -> str:
    """Replace the text between ``<!-- mark -->`` and ``<!-- /mark -->``."""
    start, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{content}{end}{after}"


def generated() -> dict[Path, str]:
    """Return the expected content of every generated file."""
    docs = ROOT / "docs"
    files = {docs / "methods" / "README.md": method_index()}
    for name, method in methods.registry().items():
        files[docs / "methods" / f"{name}.md"] = method_page(method)
    for path, mark, content in (
        (docs / "choosing.md", "finetuned", finetuned_table()),
        (docs / "choosing.md", "shallow", shallow_tables()),
        (docs / "choosing.md", "choices", choices_table()),
        (docs / "choosing.md", "nested", nested_table()),
        (docs / "evaluation.md", "ties-table", ties_table()),
        (docs / "reproduce.md", "reproduced", reproduced_tables()),
        (docs / "search.md", "speed", speed_table()),
        (ROOT / "README.md", "results", readme_table()),
    ):
        text = files.get(path) or path.read_text(encoding="utf-8")
        files[path] = between(text, mark, content)
    return files


def main() -> None:
    """Write the generated files, or check them."""
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
