"""Measures `fisherhash serve`: many clients at once beside a writer, and one client alone.

    python benchmarks/serving.py [--codes 1000000] [--clients 32] [--seconds 60] [--workers 1]
                                 [--json FILE] [--quick]

The index has clustered 64-bit codes without keys, and the model general-64, so that images can be
encoded. First one client alone sends each kind of request: searches by item as JSON, the same as a
page, and images. Then all clients send a mix at once, while another process adds items, a commit
every half second. Every answer that is not 200 counts as an error. The memory of the server is read
every second; its growth is that of the second half of the run, by a straight line. With the
defaults it takes about two and a half minutes.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fisherhash import Hasher
from fisherhash.index import Entry, Index
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.system.cores import available_cores

CENTRES, FLIPS = 1000, 0.08
KINDS = {"search": 0.6, "page": 0.3, "image": 0.1}
"""The share of each kind of request in the mix."""
MOST_ROUNDS = 8
"""How often the server is warmed up at the most, until no answer takes a second."""


@dataclass
class Times:
    """Seconds of the answers of one kind, and what went wrong."""

    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        values = np.array(self.seconds) * 1000
        at = {f"p{p}_ms": round(float(np.percentile(values, p)), 1) for p in (50, 95, 99)}
        return {"answers": len(values), "errors": len(self.errors), **(at if len(values) else {})}


def make_index(folder: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    hasher = Hasher.load("general-64")
    centres = rng.integers(0, 2, (CENTRES, 64), dtype=np.uint8)
    uri = folder / "codes.index"
    with ImageIndex.create(uri, hasher) as images:
        for start in range(0, count, 1 << 18):
            many = min(1 << 18, count - start)
            flips = rng.random((many, 64), dtype=np.float32) < FLIPS
            codes = centres[rng.integers(0, CENTRES, many)] ^ flips
            images.index.add_codes(np.packbits(codes, axis=1), fingerprint=hasher.fingerprint())
    return uri


def photo(seed: int) -> bytes:
    """A JPEG as a phone might send it, after its app made it smaller."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((1024, 768), Image.Resampling.BICUBIC).save(
        file, "jpeg", quality=85
    )
    return file.getvalue()


class Connection:
    """One client, with a connection that it keeps."""

    def __init__(self, port: int, count: int, seed: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._rng, self._count = np.random.default_rng(seed), count
        self._photos = [photo(seed * 10 + number) for number in range(4)]

    def send(self, kind: str) -> None:
        number = int(self._rng.integers(self._count))
        if kind == "image":
            body = self._photos[number % len(self._photos)]
            self._http.request("POST", "/api/search?k=24", body, {"Accept": "application/json"})
        else:
            path = "/api/search" if kind == "search" else "/results"
            accept = {"Accept": "application/json" if kind == "search" else "text/html"}
            self._http.request("GET", f"{path}?like={number}&k=24", headers=accept)
        answer = self._http.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {text[:200]!r}")


def run_client(
    port: int, count: int, seed: int, kinds: dict[str, float], until: float, times: dict[str, Times]
) -> None:
    client = Connection(port, count, seed)
    rng = np.random.default_rng(seed)
    names, shares = list(kinds), np.array(list(kinds.values()))
    while time.monotonic() < until:
        kind = names[int(rng.choice(len(names), p=shares / shares.sum()))]
        began = time.perf_counter()
        try:
            client.send(kind)
            times[kind].seconds.append(time.perf_counter() - began)
        except (OSError, ValueError, http.client.HTTPException) as error:
            times[kind].errors.append(f"{type(error).__name__}: {error}")
            client = Connection(port, count, seed)


def run_clients(
    port: int, count: int, clients: int, seconds: float, kinds: dict[str, float]
) -> dict[str, Times]:
    until = time.monotonic() + seconds
    each = [defaultdict(Times) for _ in range(clients)]
    threads = [
        threading.Thread(target=run_client, args=(port, count, seed, kinds, until, times))
        for seed, times in enumerate(each, start=1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total: dict[str, Times] = defaultdict(Times)
    for times in each:
        for kind, part in times.items():
            total[kind].seconds += part.seconds
            total[kind].errors += part.errors
    return total


def write_items(uri: str, seconds: float) -> None:
    """What the writer's process does: 50 items with keys per commit, two commits per second."""
    rng = np.random.default_rng(1)
    until, added = time.monotonic() + seconds, 0
    with Index.open(uri, write=True) as index:
        while time.monotonic() < until:
            codes = rng.integers(0, 256, (50, 8), dtype=np.uint8)
            rows = (Entry(f"new/{added + i}.jpg", code) for i, code in enumerate(codes))
            index.add(list(rows), fingerprint=index.fingerprint)
            added += 50
            time.sleep(0.5)
    print(added)


def resident(process: int) -> int:
    """Bytes of memory of a process and its children; pages that they share count once."""
    total = 0
    for pid in [process, *children(process)]:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1]) * 1024  # type: ignore[index]
    return total


def children(process: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for pid in map(int, task.read_text().split()):
            found += [pid, *children(pid)]
    return found


class Memory(threading.Thread):
    """Reads the memory of the server every second."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.ended = process, threading.Event()
        self.readings: list[tuple[float, int]] = []

    def run(self) -> None:
        while not self.ended.wait(1.0):
            self.readings.append((time.monotonic(), resident(self.process)))

    def summary(self) -> dict[str, Any]:
        self.ended.set()
        values = [value for _, value in self.readings]
        late = self.readings[len(self.readings) // 2 :]
        growth = 0.0
        if len(late) > 2:
            at, size = np.array(late).T
            growth = float(np.polyfit(at - at[0], size, 1)[0]) * 60
        return {
            "first_mib": round(values[0] / 2**20, 1) if values else None,
            "most_mib": round(max(values) / 2**20, 1) if values else None,
            "last_mib": round(values[-1] / 2**20, 1) if values else None,
            "growth_mib_per_minute": round(growth / 2**20, 2),
            "mib_every_second": [round(value / 2**20, 1) for value in values],
        }


@dataclass
class Report:
    """What was measured."""

    settings: dict[str, Any]
    alone: dict[str, Any]
    together: dict[str, Any]
    per_second: float
    added: int
    memory: dict[str, Any]
    errors: list[str]
    machine: dict[str, Any]


def measure(options: argparse.Namespace, folder: Path) -> Report:
    uri = make_index(folder, options.codes)
    print(f"{options.codes:,} codes in {uri}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "fisherhash", "serve", str(uri), "--port", "0", "--no-open"]
    command += ["--workers", str(options.workers), "--show-from", str(folder)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = (server.stderr.readline() if server.stderr else "") or ""
        port = int(re.search(r":(\d+)/", line)[1])  # type: ignore[index]
        threading.Thread(target=lambda: server.stderr and server.stderr.read(), daemon=True).start()
        # Kernels, tables and the model are loaded before anything is measured.
        for _ in range(MOST_ROUNDS):
            each = options.warm / len(KINDS)
            rounds = [run_clients(port, options.codes, 2, each, {kind: 1.0}) for kind in KINDS]
            slowest = [max(one.seconds) for times in rounds for one in times.values()]
            if max(slowest) < 1.0:
                break
        alone = {
            kind: run_clients(port, options.codes, 1, options.alone, {kind: 1.0})[kind].summary()
            for kind in KINDS
        }
        # Under this load, too: its caches are full before its memory is read.
        run_clients(port, options.codes, options.clients, options.warm, KINDS)
        memory = Memory(server.pid)
        memory.start()
        writer = subprocess.Popen(
            [sys.executable, __file__, "--write", str(uri), "--seconds", str(options.seconds)],
            stdout=subprocess.PIPE,
            text=True,
        )
        began = time.monotonic()
        together = run_clients(port, options.codes, options.clients, options.seconds, KINDS)
        took = time.monotonic() - began
        added = int(writer.communicate()[0])
        used = memory.summary()
    finally:
        server.terminate()
        server.wait(20)
    every = Times(
        [seconds for times in together.values() for seconds in times.seconds],
        [error for times in together.values() for error in times.errors],
    )
    return Report(
        {name: getattr(options, name) for name in ("codes", "clients", "seconds", "workers")},
        alone,
        {kind: together[kind].summary() for kind in KINDS} | {"all": every.summary()},
        round(len(every.seconds) / took, 1),
        added,
        used,
        every.errors[:10],
        {
            "cores": available_cores(),
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "load": [round(one, 1) for one in os.getloadavg()],
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--codes", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--alone", type=float, default=10.0, help="seconds of each kind alone")
    parser.add_argument("--warm", type=float, default=15.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="20,000 codes, 4 clients, 5 seconds")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_items(options.write, options.seconds)
        return
    if options.quick:
        options.codes, options.clients, options.seconds = 20_000, 4, 5.0
        options.alone, options.warm = 1.0, 3.0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FISHERHASH_CACHE"] = folder
        report = measure(options, Path(folder))
    text = json.dumps(asdict(report), indent=2)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    print(
        f"an image, one client, median: {report.alone['image'].get('p50_ms')} ms", file=sys.stderr
    )


if __name__ == "__main__":
    main()
