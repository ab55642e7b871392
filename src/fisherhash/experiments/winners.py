"""The winners of searches, by bench and row: what a table trains its rows with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fisherhash.errors import FisherhashError
from fisherhash.experiments.benches import Bench
from fisherhash.experiments.runner import Runner
from fisherhash.experiments.specs import Row
from fisherhash.experiments.tables import dump_results
from fisherhash.experiments.tuning import HELD_OUT, Search
from fisherhash.system import storage

TUNING_FILE = "tuning.json"
PACKAGED_TUNING = Path(__file__).parent / "tunings" / "quick.json"
"""The winners that are part of the package."""


@dataclass(frozen=True)
class Choice:
    """What a row is trained with, beyond what defines the row.

    Attributes:
        options: hyper-parameters of the method.
        settings: training settings.
        class_step: weight and sharpness of the class step; None without it.
        tuned: whether a search chose them; False for the defaults.
        edges: those that lie at an edge of the range that was searched.
    """

    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    class_step: Mapping[str, float] | None = None
    tuned: bool = True
    edges: Sequence[str] = ()


UNTUNED = Choice({}, {}, tuned=False)


def summarise(searches: Sequence[Search], runner: Runner) -> dict[str, Any]:
    """Return what was searched on each bench, by its slug, as JSON."""
    found: dict[str, Any] = {}
    for search in searches:
        settings = dataclasses.replace(search.settings, validation=HELD_OUT)
        entry = {
            "bench": search.bench.to_json(),
            "seed": settings.seed,
            "settings": settings.to_json(),
            "rows": {},
        }
        rows = found.setdefault(search.bench.slug, entry)["rows"]
        rows[search.row.space] = search.summary(runner)
    return found


@dataclass(frozen=True)
class Tuning:
    """The winners by bench and row.

    Attributes:
        benches: what was searched, by the slug of the bench.
    """

    benches: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Tuning:
        """Read a file."""
        benches = storage.read_json(path).get("benches")
        if not isinstance(benches, dict):
            raise FisherhashError(f"{path} is not a tuning file: it has no 'benches'")
        return cls(benches)

    def save(self, path: Path) -> None:
        """Write the winners into a file; other searches' entries in it stay."""
        benches = Tuning.load(path).benches if path.is_file() else {}
        for slug, bench in self.benches.items():
            rows = benches.get(slug, {}).get("rows", {})
            benches[slug] = {**bench, "rows": {**rows, **bench["rows"]}}
        storage.write_file(path, dump_results({"benches": benches}))

    def choice(self, bench: Bench, row: Row) -> Choice:
        """Return what a row is trained with on a bench; the defaults where nothing was searched.

        A winner that was found with other fixed options than the row has now does not count.
        """
        # Nothing is searched with held-out classes: the search with all of them has to do.
        known = self.benches.get(bench.slug) or self.benches.get(bench.with_all_classes.slug, {})
        entry = known.get("rows", {}).get(row.space, {})
        winner = entry.get("winner_step" if row.class_step else "winner")
        if winner is None or entry.get("base", {}) != row.base:
            return UNTUNED
        return Choice(
            winner["options"],
            winner["settings"],
            winner.get("class_step"),
            edges=winner.get("edges", ()),
        )
