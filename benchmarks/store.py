"""How long a local index takes: codes in bulk, one item per commit, a million rows with metadata.

    python benchmarks/store.py store.json

Every commit waits for the disk, so the disk of the temporary folder is measured, too.
"""

from __future__ import annotations

import argparse
import json
import platform
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fisherhash.index import Entry, Index
from fisherhash.index.local import backup


def seconds(call: Callable[[], Any], times: int = 1) -> float:
    """The median time of some calls."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def loaded(path: Path) -> None:
    """Open an index, load its codes and check them."""
    with Index.open(path) as index:
        index.count()


def bulk(folder: Path, count: int) -> dict[str, float]:
    """Codes without keys, and single items beside them."""
    codes = np.random.default_rng(0).integers(0, 256, (count, 8), dtype=np.uint8)
    path, found = folder / "bulk.index", {}
    with Index.create(path, bits=64) as index:
        found["add_codes"] = seconds(lambda: index.add_codes(codes))
        found["bytes"] = index.info()["bytes"]
        numbers = iter(range(10**6))
        add = lambda: index.add([Entry(f"k{next(numbers)}", codes[0])])  # noqa: E731
        found["commit_of_one_item"] = seconds(add, 200)
    found["open_load_check"] = seconds(lambda: loaded(path), 5)
    found["backup_and_check"] = seconds(lambda: backup(path, folder / "copy.index"))
    with Index.open(path, write=True) as index:
        found["remove_half"] = seconds(lambda: index.remove(ids=range(0, count, 2)))
        found["close_with_vacuum"] = seconds(index.close)
    return found


def rows(folder: Path, count: int) -> dict[str, float]:
    """Items with paths and metadata."""
    codes = np.random.default_rng(0).integers(0, 256, (count, 8), dtype=np.uint8)
    exif = {"camera": "Nikon D90", "taken": "2021-06-15T14:03:22"}
    entries = [
        Entry(f"a/b/{i}.jpg", code, f"/photos/a/b/{i}.jpg", i, 10**18 + i, "cat", {"n": i} | exif)
        for i, code in enumerate(codes)
    ]
    path, found = folder / "rows.index", {}
    with Index.create(path, bits=64) as index:
        found["add"] = seconds(lambda: index.add(entries))
        found["bytes"] = index.info()["bytes"]
        numbers = iter(range(10**6))
        more = lambda: index.add([Entry(f"k{next(numbers)}", codes[0])])  # noqa: E731
        found["commit_of_one_item"] = seconds(more, 100)
    found["open_load_check"] = seconds(lambda: loaded(path), 5)
    with Index.open(path) as index:
        keys = (f"a/b/{i}.jpg" for i in range(0, count, max(1, count // 300)))
        found["get_by_key"] = seconds(lambda: index.get(next(keys)), 200)
        found["filter"] = seconds(lambda: index.count(f"n>={count // 2}"))
        found["filter_again"] = seconds(lambda: index.count(f"n>={count // 2}"))
        found["filter_by_label"] = seconds(lambda: index.count("label=dog"))
        found["files"] = seconds(index.files)
        found["verify"] = seconds(index.verify)
    return found


def main() -> None:
    """Measure, and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the JSON file to write")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary folder")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        result = {
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            "machine": platform.machine(),
            "10_000_000_codes_of_64_bits": bulk(Path(folder), 10_000_000),
            "1_000_000_rows": rows(Path(folder), 1_000_000),
        }
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        result["20_000_rows"] = rows(Path(folder), 20_000)
    text = json.dumps(result, indent=2)
    chosen.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
