"""Runs the cells of a grid: one JSON file per run, resumable, shared by processes."""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fisherhash.errors import (
    DivergedError,
    FisherhashError,
    NotDefinedError,
    UsageError,
    counted,
)
from fisherhash.experiments.benches import Bench, Cell, OpenBench
from fisherhash.experiments.claims import Claims
from fisherhash.experiments.one_training import run_cells
from fisherhash.model.folder import versions
from fisherhash.system import storage
from fisherhash.system.devices import device_name

logger = logging.getLogger(__name__)

# Seconds per run before one was measured, by kind of device and whether it fine-tunes.
FIRST_GUESS = {("cpu", False): 12.0, ("cuda", False): 6.0, ("cuda", True): 30.0}
SLOW_GUESS = 3600.0
POLL_SECONDS = 0.5
LOOK_SECONDS = 10.0


@dataclass
class Runner:
    """Runs the cells whose result is not in a folder yet; several processes may share the folder.

    Attributes:
        folder: stores the results.
        device: where the runs compute.
        stop_at: the time (of ``time.time``) after which no run starts.
        token: identifies this call, so that it does not retry what failed in it, even if another
            call, which shares the folder, does.
        jobs: number of processes that share the folder, for the estimates.
        trials_only: whether nothing will be measured on queries, so that only training images are
            needed.
        recorded: the images, splits and weights of an earlier search's trials, by bench.
        say: receives one line per run.
        broken: whether an error has made the device useless to this process: all later runs would
            fail too.
    """

    folder: Path
    _: KW_ONLY
    device: torch.device
    stop_at: float | None = None
    token: str = field(default_factory=lambda: f"{time.time_ns()}")
    jobs: int = 1
    trials_only: bool = False
    recorded: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    say: Callable[[str], None] = logger.info
    broken: bool = field(default=False, init=False)
    _stage: tuple[Bench, OpenBench] | None = field(default=None, init=False)
    _paces: list[float] = field(default_factory=list, init=False)
    _rows: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)

    def row(self, cell: Cell) -> dict[str, Any] | None:
        """Return the finished run of a cell, or None."""
        if cell.file not in self._rows:
            path = self.folder / cell.file
            if not path.is_file():
                return None
            self._rows[cell.file] = storage.read_json(path)
        return self._rows[cell.file]

    def failure(self, cell: Cell) -> dict[str, Any] | None:
        """Return what a cell's last attempt failed with, or None."""
        path = self._failed_path(cell)
        return storage.read_json(path) if path.is_file() else None

    def ended(self, cell: Cell) -> bool:
        """Return whether a cell has a result, or failed at its last attempt."""
        return self.row(cell) is not None or self.failure(cell) is not None

    def identity(self, bench: Bench, cells: Sequence[Cell]) -> Mapping[str, Any] | None:
        """Return what identifies the images and the network of a bench; None before any result."""
        if bench.slug in self.recorded:
            return self.recorded[bench.slug]
        rows = (self.row(cell) for cell in cells)
        return next((images_and_weights(row) for row in rows if row is not None), None)

    def left(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells without a result."""
        return [cell for cell in cells if not (self.folder / cell.file).is_file()]

    @property
    def late(self) -> bool:
        """Whether no further run may start."""
        return self.broken or (self.stop_at is not None and time.time() >= self.stop_at)

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Fill the caches of each bench that is still needed, before processes share the work."""
        for bench in dict.fromkeys(cell.bench for cell in self.left(cells)):
            if not self.late:
                self.stage(bench).prepare()
        self.close()

    def run(self, known: Callable[[], Sequence[Cell]]) -> None:
        """Run the cells that are left, and wait for those that other processes are running.

        A failed run is recorded, and the next call retries it. A usage error is raised: it would
        be wrong for every other cell too.

        Args:
            known: returns the cells in the order in which they are to be run. It is called again
                from time to time, because a result may add cells.
        """
        with closing(Claims(self.folder / "lock")) as claims:
            while not self.late and self._run_some(known(), claims):
                pass

    def _run_some(self, cells: Sequence[Cell], claims: Claims) -> bool:
        """Run open cells, in order, until it is time to look for others; returns if any was open.

        Those that other processes run are passed over.
        """
        todo = [(number, cell) for number, cell in enumerate(cells, 1) if self._is_open(cell)]
        until, worked = time.monotonic() + LOOK_SECONDS, False
        for number, cell in todo:
            if self.late or time.monotonic() > until:
                return True
            with claims.claim(cell.training) as ours:
                # Another process may have ended it since the list was made.
                if ours and self._is_open(cell):
                    alike = [one for _, one in todo if one.training == cell.training]
                    group = [one for one in alike if self._is_open(one)]
                    self._attempt(group, f"[{number}/{len(cells)}]", cells)
                    worked = True
        if todo and not worked:
            time.sleep(POLL_SECONDS)
        return bool(todo)

    def estimate(self, cells: Sequence[Cell]) -> str:
        """Return one sentence: how many runs are left, and about how long they take."""
        left = self.left(cells)
        if not left:
            return f"all {len(cells)} runs are done"
        known = self._paces_of(cells)
        guess = FIRST_GUESS.get((self.device.type, left[0].bench.finetune), SLOW_GUESS)
        everywhere = statistics.mean(known.values()) if known else guess
        seconds = sum(known.get((cell.bench.slug, cell.method), everywhere) for cell in left)
        basis = "judging by earlier runs" if known else "a first guess"
        return (
            f"{len(left)} of {len(cells)} runs left ({len(cells) - len(left)} done), about "
            f"{_duration(seconds / self.jobs)} on {device_name(self.device)} with "
            f"{counted(self.jobs, 'job')} ({basis}; plus the time to compute features)"
        )

    def stage(self, bench: Bench) -> OpenBench:
        """Open a bench, or return the open one; the previous bench is released."""
        if self._stage is None or self._stage[0] != bench:
            self.close()
            stage = OpenBench(bench, self.device, trials_only=self.trials_only)
            self._check_same(bench, stage)
            self._stage = bench, stage
        return self._stage[1]

    def _check_same(self, bench: Bench, stage: OpenBench) -> None:
        """Refuse results of other images, splits or weights under the same names."""
        now = images_and_weights(stage.identity)
        for kind in ("runs", "trials"):
            for path in sorted((self.folder / kind / bench.slug).glob("*.json"))[:1]:
                found = images_and_weights(storage.read_json(path))
                check_same(found, now, f"{path.parent} holds runs")
        if found := self.recorded.get(bench.slug):
            what = f"the recorded trials of {bench.slug} were run"
            check_same(found, now, what, instead="another --tuning")

    def close(self) -> None:
        """Release the open bench."""
        self._stage = None
        gc.collect()
        if self.device.type == "cuda" and not self.broken:
            torch.cuda.empty_cache()

    def _attempt(self, group: Sequence[Cell], prefix: str, cells: Sequence[Cell]) -> None:
        """Run cells that one training serves, and write what becomes of each."""
        cell = group[0]
        what = f"{prefix} {cell.full_title}"
        if len(group) > 1:
            what += f" and {len(group) - 1} more of this training"
        began = time.perf_counter()
        one_by_one = known = False
        try:
            found = run_cells(group, self.stage(cell.bench))
        except Exception as error:  # one failed run must not end a night of runs
            known = isinstance(error, FisherhashError)
            if len(group) > 1 and not isinstance(error, DivergedError):
                # It may concern one of them only, such as its cut or the memory it needs.
                one_by_one = known or self._works()
            found = [] if one_by_one else self._ended_by(error, group, what)
        # Not above: there the error would hold on to the memory of what failed.
        if one_by_one:
            if not known:
                self.close()
            for one in group:
                if not self.late:
                    self._attempt([one], prefix, cells)
        elif found:
            self._write(group, found, time.perf_counter() - began, what, cells)

    def _ended_by(
        self, error: Exception, group: Sequence[Cell], what: str
    ) -> Sequence[dict[str, Any]]:
        """Return what an error makes of cells; none where it is a failure, which is recorded.

        Raises:
            UsageError: the request is wrong, for every other cell too.
        """
        measured, undefined = group[0].measured, isinstance(error, NotDefinedError)
        reason = " ".join(f"{error}".split()) or type(error).__name__
        if isinstance(error, UsageError) and (self._stage is None or (measured and not undefined)):
            raise error
        if undefined:
            return [{"not_defined": reason} for _ in group]
        if isinstance(error, FisherhashError) and not measured:
            # Two values of a quasi-random point may not go together, and whether a learning rate
            # diverges is what a trial is to find out.
            return [{"gave_up": reason} for _ in group]
        for one in group:
            self._record(one, reason)
        self.say(f"{what}: FAILED: {reason}")
        if not isinstance(error, FisherhashError):
            logger.exception("%s", what)
        self.broken = not self._works()
        if self.broken:
            self.say(f"the error has broken the use of {self.device} in this process")
        else:
            self.close()
        return []

    def _write(
        self,
        group: Sequence[Cell],
        found: Sequence[dict[str, Any]],
        seconds: float,
        what: str,
        cells: Sequence[Cell],
    ) -> None:
        """Write what became of the cells of one training, and say it."""
        rows = [
            self._row(cell, one, seconds, len(group))
            for cell, one in zip(group, found, strict=True)
        ]
        self._paces += [_pace(row) for row in rows]
        left = len(self.left(cells))
        rest = _duration(statistics.mean(self._paces) * left / self.jobs)
        self.say(f"{what}: {_result(rows[0])}, {seconds:.0f} s; about {rest} left")

    def _row(
        self, cell: Cell, found: Mapping[str, Any], seconds: float, shared_by: int
    ) -> dict[str, Any]:
        """Write what became of a cell; returns it. The times are those of the whole training."""
        row = {"method": cell.method, "bits": cell.bits, "seed": cell.seed, "config": cell.config}
        row |= {**self.stage(cell.bench).identity, **found}
        row["seconds"] = row.get("seconds", {}) | {"total": round(seconds, 3)}
        row |= {"device": device_name(self.device), "jobs": self.jobs, "versions": versions()}
        if shared_by > 1:
            row["shared_by"] = shared_by
        storage.write_file(self.folder / cell.file, storage.dump_json(row))
        self._failed_path(cell).unlink(missing_ok=True)
        return row

    def _works(self) -> bool:
        """Return whether the device still computes, after an error that may have broken it.

        After some errors of CUDA, such as one in the capture of a graph, every later use fails too.
        """
        try:
            float(torch.rand(1, device=self.device))
        except RuntimeError:
            return False
        return True

    def _record(self, cell: Cell, reason: str) -> None:
        """Write why a cell failed, and in which calls."""
        calls = [*self._failed_in(cell), self.token]
        failure = {"config": cell.config, "error": reason, "calls": list(dict.fromkeys(calls))}
        storage.write_file(self._failed_path(cell), storage.dump_json(failure))

    def _failed_in(self, cell: Cell) -> Sequence[str]:
        return (self.failure(cell) or {}).get("calls", ())

    def _is_open(self, cell: Cell) -> bool:
        """Return whether a cell has no result yet and did not fail in this call."""
        return self.token not in self._failed_in(cell) and bool(self.left([cell]))

    def _failed_path(self, cell: Cell) -> Path:
        return self.folder / "failed" / cell.file.replace("/", "_")

    def _paces_of(self, cells: Sequence[Cell]) -> dict[tuple[str, str], float]:
        """Return mean seconds of finished runs on this device, by bench and method."""
        found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for cell in cells:
            row = self.row(cell)
            if row is not None and row.get("device") == device_name(self.device):
                found[cell.bench.slug, cell.method].append(_pace(row))
        return {key: statistics.mean(paces) for key, paces in found.items()}


def _pace(row: Mapping[str, Any]) -> float:
    """Return a run's share of the seconds that its training took, with all that it ended in."""
    return row["seconds"]["total"] / row.get("shared_by", 1)


def images_and_weights(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what identifies the images, the split and the initial network of a run."""
    # Of a split the checksum: the wording of its notes may change between versions.
    checksum = (row.get("protocol") or {}).get("checksum")
    return {"protocol": checksum, **{key: row.get(key) for key in ("images", "weights")}}


def check_same(
    found: Mapping[str, Any], now: Mapping[str, Any], what: str, *, instead: str = "another --out"
) -> None:
    """Refuse to continue what was made with other values under the same names.

    Args:
        found: what is there.
        now: what would have to be there.
        what: the beginning of the message: the folder or the file, and its content.
        instead: what the user can choose.
    """
    if differ := [
        _named(key, found.get(key), now[key]) for key in now if found.get(key) != now[key]
    ]:
        raise UsageError(f"{what} with different {', '.join(differ)}; choose {instead}")


def _named(key: str, there: Any, here: Any) -> str:
    """Return what differs: a key, or what of its value where that has keys, too.

    >>> _named("settings", {"epochs": 20, "seed": 0}, {"epochs": 5, "seed": 0})
    'settings (epochs: 20 there, 5 here)'
    """
    if not (isinstance(there, Mapping) and isinstance(here, Mapping)):
        return key
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    words = [f"{name}: {there.get(name)} there, {here.get(name)} here" for name in names]
    return f"{key} ({'; '.join(words)})"


def _result(row: dict[str, Any]) -> str:
    if "evaluation" in row:
        step = row.get("class_step")
        more = f", with the class step {step['evaluation']['map']:.4f}" if step else ""
        return f"mAP {row['evaluation']['map']:.4f}{more}"
    value = row.get("validation", {}).get("plain")
    trained = "trained" if value is None else f"validation mAP {value:.4f}"
    return row.get("not_defined") or row.get("gave_up") or trained


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
