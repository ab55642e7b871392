"""Runs the cells of a grid: one JSON file per run, resumable, shared by processes."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fisherhash.errors import DivergedError, FisherhashError, NotDefinedError, UsageError, counted
from fisherhash.experiments.cells import Cell, OpenSetup, Setup, run_cells
from fisherhash.model.folder import versions
from fisherhash.system import storage
from fisherhash.system.devices import device_name

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
LOOK_SECONDS = 10.0
"""How long a process works on one list of cells before it looks for new ones."""


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
        recorded: the images, splits and weights of an earlier search's trials, by setup.
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
    _opened: tuple[Setup, OpenSetup] | None = field(default=None, init=False)
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

    def identity(self, setup: Setup, cells: Sequence[Cell]) -> Mapping[str, Any] | None:
        """Return what identifies the images and the network of a setup; None before any result."""
        if setup.slug in self.recorded:
            return self.recorded[setup.slug]
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
        """Fill the caches of each setup that is still needed, before processes share the work."""
        for setup in dict.fromkeys(cell.setup for cell in self.left(cells)):
            if not self.late:
                self.open(setup).prepare()
        self.close()

    def run(self, known: Callable[[], Sequence[Cell]]) -> None:
        """Run the cells that are left, and wait for those that other processes are running.

        A failed run is recorded, and the next call retries it. A usage error is raised: it would
        be wrong for every other cell too.

        Args:
            known: returns the cells in the order in which they are to be run. It is called again
                from time to time, because a result may add cells.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "a+b") as locks:
            while not self.late and self._run_some(known(), locks.fileno()):
                pass

    def _run_some(self, cells: Sequence[Cell], locks: int) -> bool:
        """Run open cells, in order, until it is time to look for others; returns if any was open.

        Those that other processes run are passed over.
        """
        todo = [(number, cell) for number, cell in enumerate(cells, 1) if self._is_open(cell)]
        until, worked = time.monotonic() + LOOK_SECONDS, False
        for number, cell in todo:
            if self.late or time.monotonic() > until:
                return True
            with claimed(locks, cell.training) as ours:
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
        left, name = self.left(cells), device_name(self.device)
        if not left:
            return f"all {len(cells)} runs are done"
        where = f"on {name} with {counted(self.jobs, 'job')}"
        time_left = self._time_left(cells)
        about = (
            f", about {time_left} {where}, judging by earlier runs" if time_left else f" {where}"
        )
        return f"{len(left)} of {len(cells)} runs left ({len(cells) - len(left)} done){about}"

    def _time_left(self, cells: Sequence[Cell]) -> str:
        """Return about how long the cells without a result take; nothing before the first run."""
        rows = [row for cell in cells if (row := self.row(cell)) is not None]
        # A run's share of its training.
        paces = [
            row["seconds"]["total"] / row.get("shared_by", 1)
            for row in rows
            if row.get("device") == device_name(self.device)
        ]
        if not paces:
            return ""
        return _duration(statistics.mean(paces) * len(self.left(cells)) / self.jobs)

    def open(self, setup: Setup) -> OpenSetup:
        """Open a setup, or return the open one; the previous one is released.

        Raises:
            UsageError: its folder has results of other images, splits or weights.
        """
        if self._opened is None or self._opened[0] != setup:
            self.close()
            opened = OpenSetup(setup, self.device, trials_only=self.trials_only)
            now = images_and_weights(opened.identity)
            for kind in ("runs", "trials"):
                for path in sorted((self.folder / kind / setup.slug).glob("*.json"))[:1]:
                    found = images_and_weights(storage.read_json(path))
                    check_same(found, now, f"{path.parent} holds runs")
            if found := self.recorded.get(setup.slug):
                what = f"the recorded trials of {setup.slug} were run"
                check_same(found, now, what, instead="another --tuning")
            self._opened = setup, opened
        return self._opened[1]

    def close(self) -> None:
        """Release the open setup."""
        self._opened = None
        gc.collect()
        if self.device.type == "cuda" and not self.broken:
            torch.cuda.empty_cache()

    def _attempt(self, group: Sequence[Cell], prefix: str, cells: Sequence[Cell]) -> None:
        """Run cells that one training serves, and write what becomes of each.

        Args:
            group: the cells.
            prefix: for the line about them.
            cells: the whole grid, for the time that is left.
        """
        what = f"{prefix} {group[0].full_title}"
        if len(group) > 1:
            what += f" and {len(group) - 1} more of this training"
        began, one_by_one = time.perf_counter(), False
        try:
            found = run_cells(group, self.open(group[0].setup))
        except Exception as error:  # one failed run must not end a night of runs
            if len(group) > 1 and not isinstance(error, DivergedError):
                # It may concern one of them only, such as its cut or the memory it needs.
                one_by_one = isinstance(error, FisherhashError) or self._works()
            found = [] if one_by_one else self._ended_by(error, group, what)
        if one_by_one:  # not above: there the error would hold on to the memory of what failed
            self.close()
            for one in group:
                if not self.late:
                    self._attempt([one], prefix, cells)
        elif found:
            seconds = time.perf_counter() - began
            for cell, one in zip(group, found, strict=True):
                self._write(cell, one, seconds, len(group))
            rest = self._time_left(cells)
            self.say(f"{what}: {_result(found[0])}, {seconds:.0f} s; about {rest} left")

    def _ended_by(
        self, error: Exception, group: Sequence[Cell], what: str
    ) -> Sequence[dict[str, Any]]:
        """Return what an error makes of cells; none where it is a failure, which is recorded.

        Raises:
            UsageError: the request is wrong, for every other cell too.
        """
        measured, undefined = group[0].measured, isinstance(error, NotDefinedError)
        reason = " ".join(f"{error}".split()) or type(error).__name__
        if isinstance(error, UsageError) and (self._opened is None or (measured and not undefined)):
            raise error
        if undefined:
            return [{"not_defined": reason} for _ in group]
        if isinstance(error, FisherhashError) and not measured:
            # Two values of a quasi-random point may not go together, and whether a learning rate
            # diverges is what a trial is to find out.
            return [{"gave_up": reason} for _ in group]
        for cell in group:
            calls = [*self._failed_in(cell), self.token]
            failure = {"config": cell.config, "error": reason, "calls": list(dict.fromkeys(calls))}
            storage.write_file(self._failed_path(cell), storage.dump_json(failure))
        self.say(f"{what}: FAILED: {reason}")
        if not isinstance(error, FisherhashError):
            logger.exception("%s", what)
        self.broken = not self._works()
        if self.broken:
            self.say(f"the error has broken the use of {self.device} in this process")
        else:
            self.close()
        return []

    def _write(self, cell: Cell, found: Mapping[str, Any], seconds: float, shared_by: int) -> None:
        """Write what became of a cell. The times are those of the whole training."""
        row = {"method": cell.method, "bits": cell.bits, "seed": cell.seed, "config": cell.config}
        row |= {**self.open(cell.setup).identity, **found}
        row["seconds"] = row.get("seconds", {}) | {"total": round(seconds, 3)}
        row |= {"device": device_name(self.device), "jobs": self.jobs, "versions": versions()}
        if shared_by > 1:
            row["shared_by"] = shared_by
        storage.write_file(self.folder / cell.file, storage.dump_json(row))
        self._failed_path(cell).unlink(missing_ok=True)

    def _works(self) -> bool:
        """Return whether the device still computes, after an error that may have broken it.

        After some errors of CUDA, such as one in the capture of a graph, every later use fails too.
        """
        try:
            float(torch.rand(1, device=self.device))
        except RuntimeError:
            return False
        return True

    def _failed_in(self, cell: Cell) -> Sequence[str]:
        """Return the tokens of the calls in which a cell failed."""
        return (self.failure(cell) or {}).get("calls", ())

    def _is_open(self, cell: Cell) -> bool:
        """Return whether a cell has no result yet and did not fail in this call."""
        return self.token not in self._failed_in(cell) and bool(self.left([cell]))

    def _failed_path(self, cell: Cell) -> Path:
        return self.folder / "failed" / cell.file.replace("/", "_")


@contextmanager
def claimed(file: int, name: str) -> Iterator[bool]:
    """Try to lock a name among the processes that open the same file; yields whether we hold it.

    The lock is one byte of the file, which stays empty. The system drops the locks of a killed
    process.
    """
    offset = int.from_bytes(hashlib.sha256(name.encode()).digest()[:3], "big")
    try:
        _lock(file, offset, hold=True)
    except (BlockingIOError, PermissionError):  # held by another process
        yield False
        return
    try:
        yield True
    finally:
        _lock(file, offset, hold=False)


if sys.platform == "win32":
    import msvcrt

    def _lock(file: int, offset: int, *, hold: bool) -> None:
        os.lseek(file, offset, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK if hold else msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(file: int, offset: int, *, hold: bool) -> None:
        how = fcntl.LOCK_EX | fcntl.LOCK_NB if hold else fcntl.LOCK_UN
        fcntl.lockf(file, how, 1, offset)


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
    differ = [
        _difference(key, found.get(key), now[key]) for key in now if found.get(key) != now[key]
    ]
    if differ:
        raise UsageError(f"{what} with different {', '.join(differ)}; choose {instead}")


def _difference(key: str, there: Any, here: Any) -> str:
    """Return what differs: a key, or what of its value where that has keys, too.

    >>> _difference("settings", {"epochs": 20, "seed": 0}, {"epochs": 5, "seed": 0})
    'settings (epochs: 20 there, 5 here)'
    """
    if not (isinstance(there, Mapping) and isinstance(here, Mapping)):
        return key
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    words = [f"{name}: {there.get(name)} there, {here.get(name)} here" for name in names]
    return f"{key} ({'; '.join(words)})"


def _result(row: Mapping[str, Any]) -> str:
    """Return what became of a run, in a few words."""
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
