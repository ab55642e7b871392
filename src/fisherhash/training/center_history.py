"""How the class centres of Deep Fisher Hashing moved during a training, from its history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CENTER_METRICS = ("flips", "center_distance", "center_distance_min")
"""What DFH logs in every epoch: bits of centres flipped, the centres' mean and least distance."""


def center_history(history: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return one list per metric, with the epochs they belong to; empty lists without centres.

    >>> row = {"epoch": 1, "flips": 3.0, "center_distance": 6.5, "center_distance_min": 4.0}
    >>> center_history([{"epoch": 2, "loss": 0.1}, row])["flips"]
    [3.0]
    """
    rows = [row for row in history if all(name in row for name in CENTER_METRICS)]
    names = ("epoch", *CENTER_METRICS)
    return {name: [float(row[name]) for row in rows] for name in names}
