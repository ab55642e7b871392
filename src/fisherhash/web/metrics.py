"""Counters of requests in the text format of Prometheus, summed over the worker processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the times of requests, in seconds."""
_STATUSES = ("2xx", "3xx", "4xx", "5xx")


class RequestMetrics:
    """How often each route answered, with what, and how fast.

    Args:
        routes: their names; a request of none of them counts for the last one.
        folder: where the worker processes of a server keep their counters; None for one process.
    """

    def __init__(self, routes: Sequence[str], folder: str | None = None) -> None:
        self.routes = list(routes)
        self._number = {route: number for number, route in enumerate(self.routes)}
        self._folder = None if folder is None else Path(folder)
        self._lock = threading.Lock()
        # Per route: requests by status, then by time (one bucket above the bounds), then seconds.
        shape = (len(self.routes), len(_STATUSES) + len(BUCKETS) + 2)
        self._counts: NDArray[np.float64] = np.zeros(shape)
        if self._folder is not None:
            path = self._folder / f"{os.getpid()}.counts"
            self._counts = np.memmap(path, np.float64, "w+", shape=shape)

    def observe(self, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        row = self._number.get(route, len(self.routes) - 1)
        place = min(max(status // 100 - 2, 0), len(_STATUSES) - 1)
        bucket = int(np.searchsorted(BUCKETS, seconds))
        with self._lock:
            self._counts[row, place] += 1
            self._counts[row, len(_STATUSES) + bucket] += 1
            self._counts[row, -1] += seconds

    def render(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """All counters as text.

        Args:
            gauges: further numbers by name, each with what it is.
        """
        counts = self._total()
        lines = ["# HELP fisherhash_requests_total Requests by route and kind of status."]
        lines.append("# TYPE fisherhash_requests_total counter")
        for route, row in zip(self.routes, counts, strict=True):
            for status, count in zip(_STATUSES, row, strict=False):
                if count:
                    labels = f'route="{route}",status="{status}"'
                    lines.append(f"fisherhash_requests_total{{{labels}}} {count:.0f}")
        lines.append("# HELP fisherhash_request_seconds Time from the request to the whole answer.")
        lines.append("# TYPE fisherhash_request_seconds histogram")
        for route, row in zip(self.routes, counts, strict=True):
            times = np.cumsum(row[len(_STATUSES) : -1])
            if not times[-1]:
                continue
            for bound, count in zip((*map(str, BUCKETS), "+Inf"), times, strict=True):
                labels = f'route="{route}",le="{bound}"'
                lines.append(f"fisherhash_request_seconds_bucket{{{labels}}} {count:.0f}")
            lines.append(f'fisherhash_request_seconds_sum{{route="{route}"}} {row[-1]:.6f}')
            lines.append(f'fisherhash_request_seconds_count{{route="{route}"}} {times[-1]:.0f}')
        for name, (what, value) in gauges.items():
            lines += [f"# HELP {name} {what}", f"# TYPE {name} gauge", f"{name} {value:g}"]
        return "\n".join(lines) + "\n"

    def _total(self) -> NDArray[np.float64]:
        if self._folder is None:
            return self._counts.copy()
        total = np.zeros(self._counts.shape)
        for path in self._folder.glob("*.counts"):
            part = np.fromfile(path, np.float64)
            if part.size == total.size:
                total += part.reshape(total.shape)
        return total
