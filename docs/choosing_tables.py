"""The tables of docs/choosing.md, from results/: what to take, what it costs."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from fisherhash import backbones, methods
from fisherhash.data.protocol_table import PROTOCOLS
from fisherhash.experiments.tables import Table

RESULTS = Path(__file__).resolve().parents[1] / "results"


def short(value: float) -> str:
    """Return a number in about three digits."""
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def reproduced() -> list[tuple[str, dict[str, Any]]]:
    """Return the reproduced tables in results/, by file name."""
    found = [(path.name, json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    return [(name, one) for name, one in found if isinstance(one, dict) and "target" in one]


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
        queries = ", fresh queries" if part["bench"].get("split_seed") else ""
        known = [
            f"{part['data']}{queries}",
            labels,
            str(PROTOCOLS[part["protocol"]["protocol"]].classes),
        ]
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
        if run["bits"] == bits
        if run.get("evaluation", {}).get("ranking") == "Hamming distance"
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
            f"{lengths[-1]} bits, on one core. {_whole(result)}{known_order(by_method, lengths)}"
        )
        header = ["method", "learns from", *(f"{bits} bits" for bits in lengths), "fit", "encode"]
        blocks.append(Table(header, rows, note).markdown())
    return "\n\n".join(blocks) + "\n" if blocks else "Not measured yet.\n"


def _whole(result: dict[str, Any]) -> str:
    """Return a sentence on the time of the whole run, features aside."""
    if "seconds" not in result:
        return ""
    minutes = result["seconds"] / 60
    return (
        f"All {len(result['rows'])} fits, encodings and measurements took {minutes:.1f} minutes "
        f"in {result['processes']} processes. "
    )


ORDER = ("supervised", "unsupervised", "data-independent")
# Why a method may fall below the best of the group beneath it.
BELOW = {
    "bre": "a bit of `bre` has 20 anchors only, and its targets ask every two images of different "
    "classes to differ in all bits, which no code of three or more classes can do",
    "pcah": "each further bit of `pcah` follows a direction of less variance",
    "sh": "`sh` takes its bits from the few directions of largest range",
    "agh": "each further bit of `agh` is a rougher function on its graph",
}


def known_order(by_method: dict[str, dict[int, dict[str, Any]]], lengths: list[int]) -> str:
    """Return whether supervised > unsupervised > data-independent holds, and what breaks it."""
    groups: dict[str, list[str]] = {name: [] for name in ORDER}
    for name in by_method:
        kind = _learns(name)
        groups[{"nothing": ORDER[2], "the features": ORDER[1]}.get(kind, ORDER[0])].append(name)

    def score(name: str, bits: int) -> float:
        return by_method[name].get(bits, {}).get("map", 0.0)

    text = f"Expected order: {', then '.join(ORDER)}. "
    below = []
    for upper, lower in itertools.pairwise(ORDER):
        for name in sorted(groups[upper]):
            own = [
                bits
                for bits in lengths
                if groups[lower] and score(name, bits) < max(score(o, bits) for o in groups[lower])
            ]
            if own:
                words = "all lengths" if own == lengths else ", ".join(map(str, own)) + " bits"
                why = f": {BELOW[name]}" if name in BELOW else ""
                below.append(f"`{name}` ({words}{why})")
    if not below:
        return text + "It holds for every method and length."
    return text + "Below the best of the next group: " + "; ".join(below) + "."


def _best_score(own: dict[int, dict[str, Any]]) -> float:
    return max((row["map"] for row in own.values() if "map" in row), default=0.0)


def _shallow_row(name: str, own: dict[int, dict[str, Any]], lengths: list[int]) -> list[str]:
    scores = [f"{own[b]['map']:.3f}" if "map" in own.get(b, {}) else "–" for b in lengths]
    last = own.get(lengths[-1], {})
    times = ["–", "–"]
    if "map" in last:
        times = [f"{short(last['fit_seconds'])} s", f"{short(last['encode_microseconds'])} µs"]
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
        return "On frozen features: not measured yet.\n"
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
    header = [
        "you have",
        "bits",
        "highest mAP of the shallow methods",
        "fastest to fit within one point of it",
    ]
    return Table(header, rows).markdown() + "\n"


def _choice(row: dict[str, Any]) -> str:
    return f"`{row['method']}` {row['map']:.3f}, {short(row['fit_seconds'])} s"


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
            times = [f"{short(statistics.median(row['seconds'] for row in own))} s" for own in pair]
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
