"""The one runner of grids: a JSON a run, resumed, shared by processes, stopped cleanly."""

from __future__ import annotations

import dataclasses
import gc
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fisherhash import methods
from fisherhash.errors import FisherhashError, NotDefinedError, UsageError
from fisherhash.experiments.benches import Bench, Cell, Stage
from fisherhash.experiments.claims import Claims
from fisherhash.model.hasher import versions
from fisherhash.system import storage
from fisherhash.system.devices import choose_device, device_name
from fisherhash.training.fitting import fit

logger = logging.getLogger(__name__)

FAILED, LOCK = "failed", "lock"
NOT_DEFINED = "–"
# Seconds a run takes before one was measured, by the kind of device and whether it fine-tunes.
FIRST_GUESS = {("cpu", False): 12.0, ("cuda", False): 6.0, ("cuda", True): 30.0}
SLOW_GUESS = 3600.0
POLL = 0.5


def _run_cell(cell: Cell, stage: Stage) -> dict[str, Any]:
    """Train and measure; what of its row is not known before."""
    trained = fit(
        stage.collection,
        method=cell.method,
        bits=cell.bits,
        options=cell.options,
        backbone=stage.network,
        finetune=stage.finetune,
        protocol=stage.split,
        settings=dataclasses.replace(cell.settings, validation_every=cell.settings.epochs),
        device=str(stage.device),
        bank=stage.bank,
    )
    row: dict[str, Any] = {"options": methods.resolved_options(trained.method)}
    began = time.perf_counter()
    if cell.measured:
        found = trained.evaluations(bank=stage.bank, real_queries=cell.real_queries)
        row["evaluation"] = found[0].to_json()
        if cell.real_queries:
            row["real_queries"] = found[1].to_json()
    elif trained.history:
        row["validation_map"] = trained.history[-1]["validation_map"]
    seconds = trained.seconds | {"measuring": time.perf_counter() - began}
    row["seconds"] = {name: round(value, 3) for name, value in seconds.items()}
    row["history"] = trained.history[-1] if trained.history else None
    return row


class Runner:
    """Runs cells whose result is not in a folder yet; several processes may share the folder.

    Args:
        folder: where the results are.
        device: where the runs compute; None for CUDA where there is one.
        stop_at: the time (of ``time.time``) after which no run is started.
        token: a name for this call, so that what failed in it is not tried again in it.
        jobs: processes that share the folder, for the estimates.
        open_stage: opens a bench.
        say: takes one line a run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: str | None = None,
        stop_at: float | None = None,
        token: str | None = None,
        jobs: int = 1,
        open_stage: Callable[[Bench, torch.device], Stage] = Stage.open,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self.folder = folder
        self.device = choose_device(device)
        self.stop_at = stop_at
        self.token = token or f"{time.time_ns()}"
        self.jobs = jobs
        self.say = say
        self._open_stage = open_stage
        self._stage: tuple[Bench, Stage] | None = None
        self._paces: list[float] = []

    def row(self, cell: Cell) -> dict[str, Any] | None:
        """The finished run of a cell, or None."""
        path = self.folder / cell.file
        return storage.read_json(path) if path.is_file() else None

    def failure(self, cell: Cell) -> dict[str, Any] | None:
        """What a cell's last attempt ended with, or None."""
        path = self._failed_path(cell)
        return storage.read_json(path) if path.is_file() else None

    def ended(self, cell: Cell) -> bool:
        """Whether a cell has a result, or failed at its last attempt."""
        return self.row(cell) is not None or self.failure(cell) is not None

    def left(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells without a result."""
        return [cell for cell in cells if not (self.folder / cell.file).is_file()]

    @property
    def late(self) -> bool:
        """Whether no further run may start."""
        return self.stop_at is not None and time.time() >= self.stop_at

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Before processes share the work: open each bench that is needed, and fill the caches."""
        for bench in dict.fromkeys(cell.bench for cell in self.left(cells)):
            if not self.late:
                self.stage(bench).prepare()
        self.close()

    def run(self, cells: Sequence[Cell]) -> None:
        """Run what is left, and wait for what other processes are running.

        A failed run is recorded, and tried again by the next call. A wrong request is raised: it
        would be wrong for every other cell too.
        """
        claims = Claims(self.folder / LOCK)
        numbers = {cell.file: number for number, cell in enumerate(cells, 1)}
        try:
            while not self.late:
                todo = [cell for cell in self.left(cells) if not self._failed_now(cell)]
                if not todo:
                    break
                worked = False
                for cell in todo:
                    with claims.claim(cell.file) as ours:
                        # Another process may have finished it since the list was made.
                        if ours and not self.late and self.left([cell]):
                            if self._failed_now(cell):
                                continue
                            prefix = f"[{numbers[cell.file]}/{len(cells)}]"
                            self._attempt(cell, prefix, cells)
                            worked = True
                if not worked:
                    time.sleep(POLL)
        finally:
            claims.close()

    def estimate(self, cells: Sequence[Cell]) -> str:
        """One sentence: how many runs are left, and about how long they take."""
        left = self.left(cells)
        done = len(cells) - len(left)
        if not left:
            return f"all {len(cells)} runs are done"
        known = self._measured_paces(cells)
        guess = FIRST_GUESS.get((self.device.type, left[0].bench.finetune), SLOW_GUESS)
        seconds = 0.0
        for cell in left:
            same = known.get((cell.bench.slug, cell.method)) or known.get((cell.bench.slug, ""))
            seconds += statistics.mean(same) if same else guess
        basis = "by the runs done before" if known else "a first guess"
        return (
            f"{len(left)} of {len(cells)} runs left ({done} done), about "
            f"{_duration(seconds / self.jobs)} on {device_name(self.device)} with {self.jobs} "
            f"job{'s' if self.jobs > 1 else ''} ({basis}; computing features comes on top)"
        )

    def stage(self, bench: Bench) -> Stage:
        """The opened bench; the one before it is let go."""
        if self._stage is None or self._stage[0] != bench:
            self.close()
            stage = self._open_stage(bench, self.device)
            self._check_same(bench, stage)
            self._stage = bench, stage
        return self._stage[1]

    def _check_same(self, bench: Bench, stage: Stage) -> None:
        """Results of other images or weights under the same names are never mixed into a table."""
        for kind in ("runs", "trials"):
            for path in sorted((self.folder / kind / bench.slug).glob("*.json"))[:1]:
                row = storage.read_json(path)
                differ = [key for key in stage.identity if row.get(key) != stage.identity[key]]
                if differ:
                    raise UsageError(
                        f"{path.parent} holds runs with another {', '.join(differ)}; choose "
                        "another --out"
                    )

    def close(self) -> None:
        """Let go of the opened bench."""
        self._stage = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _attempt(self, cell: Cell, prefix: str, cells: Sequence[Cell]) -> None:
        what = f"{prefix} {cell.title} {cell.bits} bits, seed {cell.seed}"
        began = time.perf_counter()
        row: dict[str, Any] = {
            "method": cell.method,
            "bits": cell.bits,
            "seed": cell.seed,
            "config": cell.config(),
        }
        try:
            stage = self.stage(cell.bench)
            row |= stage.identity
            row |= _run_cell(cell, stage)
        except NotDefinedError as error:
            row["not_defined"] = str(error)
        except UsageError:
            raise
        except Exception as error:  # one run must not end a night of them
            reason = " ".join(f"{error}".split()) or type(error).__name__
            if isinstance(error, FisherhashError) and not cell.measured:
                # A learning rate that diverges is what a trial was to find out.
                self._finish(cell, what, row | {"gave_up": reason}, began, cells)
                return
            self._write(
                self._failed_path(cell),
                {"config": row["config"], "error": reason, "token": self.token},
            )
            self.say(f"{what}: FAILED: {reason}")
            if not isinstance(error, FisherhashError):
                logger.exception("%s", what)
            self.close()
            return
        self._finish(cell, what, row, began, cells)

    def _finish(
        self, cell: Cell, what: str, row: dict[str, Any], began: float, cells: Sequence[Cell]
    ) -> None:
        total = time.perf_counter() - began
        row["seconds"] = row.get("seconds", {}) | {"total": round(total, 3)}
        row |= {"device": device_name(self.device), "jobs": self.jobs, "versions": versions()}
        self._write(self.folder / cell.file, row)
        self._failed_path(cell).unlink(missing_ok=True)
        self._paces.append(total)
        left = len(self.left(cells))
        rest = _duration(statistics.mean(self._paces) * left / self.jobs)
        self.say(f"{what}: {_result(row)}, {total:.0f} s; about {rest} left")

    def _failed_now(self, cell: Cell) -> bool:
        failure = self.failure(cell)
        return failure is not None and failure.get("token") == self.token

    def _failed_path(self, cell: Cell) -> Path:
        return self.folder / FAILED / cell.file.replace("/", "_")

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        storage.write_files(path.parent, {path.name: storage.write_text(storage.dump_json(value))})

    def _measured_paces(self, cells: Sequence[Cell]) -> dict[tuple[str, str], list[float]]:
        """Seconds of finished runs on this device, by bench and method, and by bench alone."""
        name = device_name(self.device)
        found: dict[tuple[str, str], list[float]] = {}
        for cell in cells:
            row = self.row(cell)
            if row is not None and row.get("device") == name and "total" in row.get("seconds", {}):
                for key in ((cell.bench.slug, cell.method), (cell.bench.slug, "")):
                    found.setdefault(key, []).append(row["seconds"]["total"])
        return found


def _result(row: dict[str, Any]) -> str:
    if "not_defined" in row:
        return f"{NOT_DEFINED} ({row['not_defined']})"
    if "gave_up" in row:
        return row["gave_up"]
    if "evaluation" in row:
        return f"mAP {row['evaluation']['map']:.4f}"
    value = row.get("validation_map")
    return "trained" if value is None else f"validation mAP {value:.4f}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
