"""The winners of searches, by setup and row: what a table trains its rows with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fisherhash.errors import UsageError
from fisherhash.experiments.cells import Setup
from fisherhash.experiments.report import dump_results
from fisherhash.experiments.runner import Runner, check_same
from fisherhash.experiments.specs import Row
from fisherhash.experiments.trials import Result, cells_of, trial_key
from fisherhash.experiments.tuning import HELD_OUT, Tuning
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


@dataclass(frozen=True)
class Winners:
    """The content of a tuning file: what was searched, and the winners.

    Attributes:
        benches: by the slug of the setup; its ``rows`` are what :meth:`Tuning.summary` returns.
    """

    benches: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tunings: Sequence[Tuning], runner: Runner) -> Winners:
        """Return what searches found so far."""
        found: dict[str, Any] = {}
        for tuning in tunings:
            shared = _shared(tuning) | {"identity": None, "rows": {}}
            entry = found.setdefault(tuning.setup.slug, shared)
            entry["rows"][tuning.row.space] = tuning.summary(runner)
            if entry["identity"] is None:
                cells = cells_of(tuning.trials(runner))
                entry["identity"] = runner.identity(tuning.setup, cells)
        return cls(found)

    @classmethod
    def load(cls, path: Path) -> Winners:
        """Read a file."""
        if not path.is_file():
            raise UsageError(f"there is no file '{path}'")
        benches = storage.read_json(path).get("benches")
        if not isinstance(benches, dict):
            raise UsageError(f"{path} is not a tuning file: it has no 'benches'")
        return cls(benches)

    def save(self, path: Path) -> None:
        """Write the winners into a file; other searches' entries in it stay."""
        benches = Winners.load(path).benches if path.is_file() else {}
        for slug, bench in self.benches.items():
            rows = benches.get(slug, {}).get("rows", {})
            benches[slug] = {**bench, "rows": {**rows, **bench["rows"]}}
        storage.write_file(path, dump_results({"benches": benches}))

    def check_joins(
        self, tunings: Sequence[Tuning], what: str, *, instead: str = "another --out"
    ) -> None:
        """Refuse searches with other settings than those of the same setup in here.

        Args:
            tunings: what is to be searched.
            what: the beginning of the message.
            instead: what the user can choose.
        """
        for tuning in tunings:
            if (bench := self.benches.get(tuning.setup.slug)) is not None:
                check_same(bench, _shared(tuning), what, instead=instead)

    @property
    def identities(self) -> dict[str, Mapping[str, Any]]:
        """The images, split and weights of the trials of each setup, where they are known."""
        known = {slug: bench.get("identity") for slug, bench in self.benches.items()}
        return {slug: one for slug, one in known.items() if one}

    def continued(self, tuning: Tuning) -> Tuning:
        """Return a search that goes on from the trials recorded here, in the ranges they were in.

        So a hyper-parameter that has been added since does not make the row be searched anew, nor
        does a range that has changed.
        Trials at other code lengths, or with other fixed options, do not count.

        Raises:
            UsageError: the setup was searched with other settings.
        """
        what = f"the recorded trials of {tuning.setup.slug} were run"
        self.check_joins([tuning], what, instead="another --tuning")
        rows = self.benches.get(tuning.setup.slug, {}).get("rows", {})
        entry = rows.get(tuning.row.space, {})
        mine = {"bits": list(tuning.bits), "base": dict(tuning.row.base)}
        if not mine.items() <= entry.items():
            return tuning
        ranges = {name: Tuned.from_json(values) for name, values in entry["space"].items()}
        known, guess = recorded_trials(entry), entry.get("guess", {})
        return dataclasses.replace(tuning, recorded=known, ranges=ranges, guess=guess)

    def choice(self, setup: Setup, row: Row) -> Choice:
        """Return what a row is trained with in a setup; the defaults where nothing was searched.

        A winner that was found with other fixed options than the row has now does not count.
        """
        # Nothing is searched with held-out classes: the search with all of them has to do.
        known = self.benches.get(setup.slug) or self.benches.get(setup.with_all_classes.slug, {})
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


def recorded_trials(entry: Mapping[str, Any]) -> dict[str, Result]:
    """Return the trials that a search recorded and that need not be repeated, by point and epochs.

    Those that an error ended are tried again. So is the winner with the class step, if its step lay
    at a border of its grid, which was smaller than today's: beyond it may lie a better one.

    Args:
        entry: what :meth:`Tuning.summary` returned.
    """
    winner = entry.get("winner_step", {})
    score, edges = winner.get("score"), {*winner.get("edges", ())}
    return {
        trial_key({**one["settings"], **one["options"]}, one["epochs"]): one
        for one in entry["trials"]
        if "failed" not in one
        if not (edges & {*one.get("step_edges", ())} and one["step"]["score"] == score)
    }


def _shared(tuning: Tuning) -> dict[str, Any]:
    """Return what all searches of a setup share."""
    settings = dataclasses.replace(tuning.settings, validation=HELD_OUT)
    return {
        "bench": tuning.setup.to_json(),
        "seed": settings.seed,
        "settings": settings.to_json(),
    }
