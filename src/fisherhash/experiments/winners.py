"""The winners of searches, by bench and row: what a table trains its rows with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fisherhash.errors import UsageError
from fisherhash.experiments.benches import Bench
from fisherhash.experiments.runner import Runner, check_same
from fisherhash.experiments.specs import Row
from fisherhash.experiments.tables import dump_results
from fisherhash.experiments.trials import cells_of, recorded_trials
from fisherhash.experiments.tuning import HELD_OUT, Search
from fisherhash.system import storage
from fisherhash.system.options import Tuned

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
        score: on held-out images; None where nothing was searched.
    """

    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    class_step: Mapping[str, float] | None = None
    tuned: bool = True
    edges: Sequence[str] = ()
    score: float | None = None


UNTUNED = Choice({}, {}, tuned=False)


def summarise(searches: Sequence[Search], runner: Runner) -> dict[str, Any]:
    """Return what was searched on each bench, by its slug, as JSON."""
    found: dict[str, Any] = {}
    for search in searches:
        head = _head(search) | {"identity": None, "rows": {}}
        entry = found.setdefault(search.bench.slug, head)
        entry["rows"][search.row.space] = search.summary(runner)
        if entry["identity"] is None:
            trials = search.known(runner)
            entry["identity"] = runner.identity(search.bench, cells_of(trials))
    return found


def _head(search: Search) -> dict[str, Any]:
    """Return what all searches of a bench share."""
    settings = dataclasses.replace(search.settings, validation=HELD_OUT)
    return {
        "bench": search.bench.to_json(),
        "seed": settings.seed,
        "settings": settings.to_json(),
    }


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
        if not path.is_file():
            raise UsageError(f"there is no file '{path}'")
        benches = storage.read_json(path).get("benches")
        if not isinstance(benches, dict):
            raise UsageError(f"{path} is not a tuning file: it has no 'benches'")
        return cls(benches)

    def save(self, path: Path) -> None:
        """Write the winners into a file; other searches' entries in it stay."""
        benches = Tuning.load(path).benches if path.is_file() else {}
        for slug, bench in self.benches.items():
            rows = benches.get(slug, {}).get("rows", {})
            benches[slug] = {**bench, "rows": {**rows, **bench["rows"]}}
        storage.write_file(path, dump_results({"benches": benches}))

    def check_joins(self, searches: Sequence[Search], where: str) -> None:
        """Refuse searches that were run in another way than those of the same bench in here.

        Args:
            searches: what is to be searched.
            where: the file of these winners.
        """
        for search in searches:
            if (bench := self.benches.get(search.bench.slug)) is not None:
                check_same(bench, _head(search), f"{where} has searches that were run")

    @property
    def identities(self) -> dict[str, Mapping[str, Any]]:
        """The images, split and weights of the trials of each bench, where they are known."""
        known = {slug: bench.get("identity") for slug, bench in self.benches.items()}
        return {slug: one for slug, one in known.items() if one}

    def continued(self, search: Search) -> Search:
        """Return a search that goes on from the trials recorded here, in the ranges they were in.

        So a hyper-parameter that has been added since does not make the row be searched anew, nor
        does a range that has changed.
        Trials at other code lengths, or with other fixed options, do not count.

        Raises:
            UsageError: the bench was searched in another way.
        """
        bench = self.benches.get(search.bench.slug)
        if bench is None:
            return search
        check_same(
            bench,
            _head(search),
            f"the recorded trials of {search.bench.slug} were run",
            instead="another --tuning",
        )
        entry = bench["rows"].get(search.row.space, {})
        mine = {"bits": list(search.bits), "base": dict(search.row.base)}
        if not mine.items() <= entry.items():
            return search
        ranges = {name: Tuned.from_json(values) for name, values in entry["space"].items()}
        return dataclasses.replace(
            search,
            recorded=recorded_trials(entry),
            ranges=ranges,
            guess=entry.get("guess", {}),
        )

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
            score=winner.get("score"),
        )
