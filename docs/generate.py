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

from choosing_tables import (
    RESULTS,
    choices_table,
    finetuned_table,
    nested_table,
    reproduced,
    shallow_tables,
    short,
)
from readme_table import readme_table
from scale_tables import (
    backends_table,
    billion_table,
    gpu_table,
    growth_table,
    streaming_table,
)

from fisherhash import backbones, methods
from fisherhash.errors import counted
from fisherhash.experiments import report
from fisherhash.experiments.specs import SPECS, Row, find_spec
from fisherhash.experiments.tables import Table

ROOT = RESULTS.parent


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
            f"{short(case['times_faiss'])} ×",
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
            f"{name} {short(value)} s" if value > 0.5 else f"{name} {short(1e3 * value)} ms"
            for name, value in found["seconds"].items()
        )
        note += (
            f"\n\n{found['codes']:,} clustered codes of {found['bits']} bits in an index on disk, "
            f"k = {found['k']}: {times}. Peak memory {found['peak_gib']:.1f} GiB, "
            f"{found['disk_gib']:.2f} GiB on disk."
        )
    return Table([*header, "to faiss"], rows, note).markdown() + "\n"


def _rate(engines: list[dict[str, Any]], name: str) -> str:
    """Return queries per second of an engine in its best mode and number of threads."""
    modes = (name, f"{name} count", f"{name} heap", f"{name} exact")
    same = [e["seconds"] for e in engines if e["engine"] in modes]
    return f"{1 / min(same):,.0f}" if same else "–"


def results_page() -> str:
    """Return the page of all reproduced tables, with their verdicts and tie bounds."""
    blocks = [
        f"{report.markdown(_titled(result), level=2)}\nFrom `results/{name}`.\n"
        for name, result in reproduced()
    ]
    return "\n".join([RESULTS_INTRODUCTION, *blocks])


def searches_page() -> str:
    """Return the page on the searches of every row: counts, winners, ranges."""
    result = _load("tuning-seed1")
    if result is None:
        return "# The searches\n\nNot run yet.\n"
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
        way = "fine-tuned" if bench["finetune"] else "frozen features"
        network = backbones.info(bench["backbone"]).title.split(" (")[0]
        title = f"{bench['data']}, {network}, {way}"
        blocks.append(f"## {title}\n\n{Table(header, counts).markdown()}\n")
        blocks.append("The winners:\n")
        table = Table(["row", "without the class step", "with it"], winners)
        blocks.append(f"{table.markdown()}\n")
    table = Table(["row", "searched"], [[name, text] for name, text in ranges.items()])
    blocks.append(f"## Ranges\n\n{RANGES}\n{table.markdown()}\n")
    return "\n".join([SEARCHES, *blocks])


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


RESULTS_INTRODUCTION = """# All results

Every table that was made with [`fisherhash reproduce`](reproduce.md), generated from its JSON in
`results/`. [What a run is](reproduce.md#what-a-run-is), [how rows are
tuned](reproduce.md#how-rows-are-tuned) and [when a row is first](reproduce.md#when-a-row-is-first)
stand there, with what the tables say.
"""
SEARCHES = """# The searches

Every row of [the tables](results.md) was searched as
[described there](reproduce.md#how-rows-are-tuned), on held-out training images. Each data set and
network has two tables below. The first counts the quasi-random points that have a score (*live*:
in the others the loss became infinite or not a number) and all trials, of which a row has more
where its winner lay at an edge or where late rounds were run; then come the best scores, the mean
of mAP at two code lengths.
*At an edge* names what the best has at an edge of its range with nothing tried beyond it, or at a
border of the grid of the class step. Table 1 has no class step: what *pair* and *pair + intra* have
with it is not used. The second table has the winners. All trials are in
`results/tuning-seed1.json`.
"""

RANGES = """Beside these, the learning rate was searched for every row that has one: from 0.0005 to
0.2 where the network is trained, from 0.001 to 1 on frozen features, both on a logarithmic scale.
Rows that were searched in several ways have the last one here.
"""


def _titled(result: dict[str, Any]) -> dict[str, Any]:
    """Return a table whose title says what sets it apart from others of the same target."""
    bench = result["parts"][0]["bench"]
    words = [result["title"], "fine-tuned" if bench["finetune"] else "frozen features"]
    if bench["backbone"] != backbones.DEFAULT:
        words.append(backbones.info(bench["backbone"]).title)
    if not bench.get("split_seed"):
        words.append("first queries, earlier search")
    return {**result, "title": " – ".join([words[0], ", ".join(words[1:])])}


def encoding_table() -> str:
    """Return images per second of ``index sync`` beside what limits it and a plain script."""
    result = _load("encoding-benchmark")
    if result is None:
        return "Not run yet.\n"
    rows = []
    for part in ("small", "large"):
        found, rates = result[part], result[part]["images_per_second"]
        size = f"{found['images']:,} of {found['size'][0]} × {found['size'][1]}"
        for model, known in found["models"].items():
            speeds = (rates[f"sync {model}"], rates["eager"], rates[f"inference {model}"])
            rows.append(
                [
                    *(f"`{model}`", size, *(f"{speed:,.1f}" for speed in speeds)),
                    *(f"{known['times_eager']} ×", f"{100 * known['of_bound']:.0f} %"),
                ]
            )
    runs, load = counted(result["repeats"], "run"), result["load_average_before"][0]
    note = (
        f"Images per second on {result['cores']} cores, medians of {runs}; the load average before "
        f"was {load:.1f}. *plain script*: eager torch, images decoded by Pillow in the same "
        "process. *network alone*: ONNX Runtime on decoded images. The bound is "
        "1 / (1 / decoding + 1 / network), each measured alone. "
        "From `results/encoding-benchmark.json`."
    )
    header = ["model", "JPEG files", "`index sync`", "plain script", "network alone"]
    return Table([*header, "to the script", "of the bound"], rows, note).markdown() + "\n"


def serving_table() -> str:
    """Return how fast the server answers, alone and beside a writer, and its memory."""
    result = _load("serving")
    if result is None:
        return "Not run yet.\n"
    kinds = {"search": "search by item, JSON", "page": "the same, HTML", "image": "image, JSON"}
    settings, memory = result["settings"], result["memory"]
    rows = [
        [
            *(text, f"{alone['p50_ms']:g}", f"{alone['p95_ms']:g}"),
            *(f"{many[name]:g}" for name in ("p50_ms", "p95_ms", "p99_ms")),
            str(many["errors"]),
        ]
        for kind, text in kinds.items()
        for alone, many in [(result["alone"][kind], result["together"][kind])]
    ]
    clients = counted(settings["clients"], "client")
    note = (
        f"Milliseconds. {settings['codes']:,} codes, {counted(settings['workers'], 'process')}, "
        f"{result['machine']['cores']} cores. Together: {clients} for {settings['seconds']:g} s "
        f"while another process added {result['added']:,} items, {result['per_second']:g} answers "
        f"per second. Memory of the server: {memory['first_mib']:g} MiB at the start, "
        f"{memory['last_mib']:g} MiB at the end, {memory['growth_mib_per_minute']:g} MiB per "
        "minute in the second half. From `results/serving.json`."
    )
    header = ["request", "alone: p50", "p95", "together: p50", "p95", "p99", "errors"]
    return Table(header, rows, note).markdown() + "\n"


def default_recipe_table() -> str:
    """Return what the default recipe reaches on frozen features."""
    result = _load("default-recipe-frozen")
    if result is None:
        return "Not run yet.\n"
    rows = [
        [
            row["data"],
            str(row["bits"]),
            *(f"{row['means'][way]:.3f}" for way in ("hamming", "real")),
        ]
        for row in result["rows"]
    ]
    return Table(["data", "bits", "Hamming", "real-valued queries"], rows).markdown() + "\n"


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
    files[docs / "results.md"] = results_page()
    files[docs / "searches.md"] = searches_page()
    for name, method in methods.registry().items():
        files[docs / "methods" / f"{name}.md"] = method_page(method)
    for path, mark, content in (
        (docs / "choosing.md", "finetuned", finetuned_table()),
        (docs / "deploy.md", "encoding", encoding_table()),
        (docs / "choosing.md", "shallow", shallow_tables()),
        (docs / "choosing.md", "choices", choices_table()),
        (docs / "choosing.md", "nested", nested_table()),
        (docs / "evaluation.md", "ties-table", ties_table()),
        (docs / "reproduce.md", "default recipe", default_recipe_table()),
        (docs / "scale.md", "backends", backends_table()),
        (docs / "scale.md", "billion", billion_table()),
        (docs / "scale.md", "growth", growth_table()),
        (docs / "scale.md", "gpu", gpu_table()),
        (docs / "scale.md", "streaming", streaming_table()),
        (docs / "search.md", "speed", speed_table()),
        (docs / "serve.md", "serving", serving_table()),
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
