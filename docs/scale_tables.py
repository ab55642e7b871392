"""The tables of docs/scale.md, from results/: what back-ends do, and what many codes take."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from choosing_tables import short

from fisherhash.experiments.tables import Table

RESULTS = Path(__file__).resolve().parents[1] / "results"
SIZES = (1_000_000, 10_000_000, 100_000_000, 1_000_000_000, 10_000_000_000)
SHARD = 100_000_000
"""Codes of a shard: their tables fit into the memory of a small machine."""
MACHINE_GIGABYTES = 64
NOT_RUN = "Not measured yet.\n"


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def backends_table() -> str:
    """Return load rate, latency, throughput and recall of every back-end and of faiss."""
    result = _load("scale")
    if result is None:
        return NOT_RUN
    rows = []
    for row in result["rows"]:
        name = [row["engine"], f"{row['n']:,}"]
        if "why" in row:
            rows.append([*name, row["why"], "", "", "", "", ""])
            continue
        built = f"{short(row['build_seconds'])} s" if row["build_seconds"] > 0.05 else ""
        speeds = (row["load_per_second"], row["query_ms"], row["queries_per_second"])
        rows.append([*name, row["setting"], built, *map(short, speeds), f"{row['recall']:.3f}"])
    one = next(row for row in result["rows"] if "why" not in row)
    note = (
        f"Codes of {one['bits']} bits around 100 centres, k = {one['k']}, on {_machine(result)}; "
        f"the load average before the run was {result['load_average']:.1f}. One query: the median. "
        "The batch has up to 100 queries. An approximate engine has the first setting that reaches "
        "a recall of 0.95, or the one that comes nearest: equal codes break graphs apart. Milvus "
        "is Milvus Lite. From `results/scale.json`."
    )
    header = ["engine", "codes", "setting", "building", "loaded per s", "one query, ms"]
    return Table([*header, "queries per s in a batch", "recall"], rows, note).markdown() + "\n"


def billion_table() -> str:
    """Return what local indexes of many codes take, as measured."""
    result, measured = _load("scale-billion"), _measured()
    if result is None or not measured:
        return NOT_RUN
    rows = [
        [
            *(row["codes"], f"{row['n']:,}", f"{short(row['add_seconds'])} s"),
            f"{short(row['build_seconds'])} s",
            *(f"{row[key]:.1f} GB" for key in ("own_gigabytes", "disk_gigabytes")),
            f"{short(row['median_query_ms'])} / {short(row['p99_query_ms'])} ms",
            f"{short(row['median_filtered_query_ms'])} / {short(row['p99_filtered_query_ms'])} ms",
            f"{short(5 * row['batch_seconds'])} ms" if "batch_seconds" in row else "",
        ]
        for row in measured
    ]
    loads = [row["load_average"] for row in measured]
    note = (
        f"Codes of {measured[0]['bits']} bits, k = {measured[0]['k']}, on {_machine(result)}; the "
        f"load average was {min(loads)} to {max(loads)}, so times are upper bounds. *tables*: the "
        "time to build them. *memory*: the most that the "
        "process had to itself; the tables are mapped. One query, and one with a filter on a "
        "label: median / 99th percentile of 200. *in a batch*: each of these 200, searched at "
        "once. Clustered: 100 centres, 5 % of the bits flipped; "
        "low-rank: the signs of sums of 12 numbers. The tables of a billion codes did not fit into "
        "memory, so that single queries waited for the disk. From `results/scale-billion.json`."
    )
    header = ["codes", "number", "adding", "tables", "memory", "disk", "query", "filtered"]
    return Table([*header, "in a batch"], rows, note).markdown() + "\n"


def growth_table() -> str:
    """Return what collections up to ten billion take, worked out from the measured ones."""
    largest = SHARD
    kinds = [row for row in _measured() if row["n"] == largest]
    if not kinds:
        return NOT_RUN
    shard = max(kinds, key=lambda row: row["median_query_ms"])
    rows = []
    for size in SIZES:
        shards = max(1, math.ceil(size / largest))
        share = size / largest
        disk = shard["disk_gigabytes"] * share
        middle, high = (_slowest(shard["query_ms"], shards, part) for part in (0.5, 0.99))
        merge = min(shard["merge_ms"].items(), key=lambda one: abs(int(one[0]) - shards))[1]
        rebuild = shard["build_seconds"] * min(1.0, share)
        latency = (
            f"up to {short(middle)} / {short(high)} ms"
            if share < 1
            else (f"{short(middle + merge)} / {short(high + merge)} ms")
        )
        rows.append(
            [
                *(f"{size:,}", f"{short(size * shard['bits'] / 8e9)} GB", f"{short(disk)} GB"),
                *(str(shards), str(max(1, math.ceil(disk / MACHINE_GIGABYTES)))),
                *(f"{short(rebuild)} s", latency),
            ]
        )
    note = (
        f"Worked out, not measured, from the slowest kind of codes with {largest:,} codes above "
        f"({shard['codes']}). A query waits for the slowest of the shards, whose times are drawn "
        "from the measured ones, and for the merge, which was measured; the network is not "
        f"included. Machines have {MACHINE_GIGABYTES} GB of memory for the tables. Every shard "
        "has a core, and builds its own tables while the others do."
    )
    header = ["codes of 64 bits", "codes alone", "with tables", "shards", "machines"]
    return Table([*header, "building the tables", "query"], rows, note).markdown() + "\n"


def gpu_table() -> str:
    """Return the speed of searches on a GPU."""
    result = _load("gpu-engine")
    if result is None or "copy_gigabytes_per_second" not in result:
        return NOT_RUN
    copied = result["copy_gigabytes_per_second"]
    rows = [
        [
            *(f"{row['n']:,} {row['codes']}", str(row["bits"]), str(row["queries"]), row["search"]),
            *(short(row["ms"]), short(row["queries_per_second"])),
            f"{row['distances_per_second'] / 1e12:.2f}",
            f"{100 * row['search_gigabytes_per_second'] / copied:.0f} %"
            if row["queries"] == 1
            else "",
        ]
        for row in result["rows"]
        if row["way"] == "auto" and row["queries"] in (1, 32, 1024)
    ]
    note = (
        f"{result['device']}, torch {result['torch']}; a plain copy moves {copied:,.0f} GB/s. "
        "Times include the copies of queries and results. Ties: few distinct codes. *of the copy*: "
        "the bytes of the codes per second, beside those that the copy reads and writes. From "
        "`results/gpu-engine.json`."
    )
    header = ["codes", "bits", "queries", "search", "ms", "queries per s", "10^12 distances per s"]
    return Table([*header, "of the copy"], rows, note).markdown() + "\n"


def streaming_table() -> str:
    """Return memory and speed of trainings on images in memory and on disk."""
    results = [one for name in ("streaming-h200", "streaming") if (one := _load(name)) is not None]
    if not results:
        return NOT_RUN
    rows = [
        [
            row["name"].split(" ", 1)[1],
            f"{row['images']:,}",
            f"{result['backbone']}, {row['device']}",
            f"{row['peak_megabytes']:,} MB",
            short(row["images_per_second"]),
        ]
        for result in results
        for row in result["rows"]
        if "device" in row
    ]
    loads = [row["load_average"] for one in results for row in one["rows"] if "device" in row]
    one = results[0]
    note = (
        f"{one['method']} on images of {one['size']} pixels, batches of {one['batch']}, images per "
        "second in the fastest epoch; memory of the process, not of a GPU. The load average was "
        f"{min(loads)} to {max(loads)}. From `results/streaming-h200.json` and `streaming.json`."
    )
    header = ["images", "number", "training", "peak memory", "images per s"]
    return Table(header, rows, note).markdown() + "\n"


def _machine(result: dict[str, Any]) -> str:
    return result["machine"].replace(", 1 cores", ", 1 core")


def _measured() -> list[dict[str, Any]]:
    result = _load("scale-billion")
    return [] if result is None else [row for row in result["rows"] if "why" not in row]


def _slowest(times: list[float], count: int, share: float) -> float:
    """A quantile of the slowest of ``count`` times, each drawn from those measured.

    The slowest of n is below t with the probability that one is, to the power of n.
    """
    ordered = sorted(times)
    place = math.ceil(len(ordered) * share ** (1 / count)) - 1
    return ordered[max(0, place)]
