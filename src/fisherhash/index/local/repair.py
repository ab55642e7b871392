"""Repair: everything that verifies of a damaged index, in a new folder; the old one is only read.

An item survives if its code and its row verify. Codes without a key survive by themselves. What is
lost is named: by its key where that is known, else by its id.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import check_bits
from fisherhash.errors import FisherhashError, UsageError, counted
from fisherhash.index.base import Index
from fisherhash.index.items import Codes, Ids
from fisherhash.index.local.folder import MODEL_FOLDER, is_taken
from fisherhash.index.local.lock import is_held
from fisherhash.index.local.records import RecordForm
from fisherhash.index.local.rows import ItemRow, decode_text
from fisherhash.index.local.salvage import Salvage, copy_readable, salvage_catalogue
from fisherhash.index.local.schema import CATALOGUE, REMOVED_BLOCK, FileRow
from fisherhash.index.local.verified import VerifiedCodes, read_verified
from fisherhash.system.storage import draft_folder

_STEP = 1 << 16


@dataclass(frozen=True)
class LostItem:
    """An item that could not be saved.

    Attributes:
        key: its key.
        id: its id.
        reason: what of it is damaged.
    """

    key: str
    id: int
    reason: str


@dataclass
class RepairReport:
    """What a repair saved and what it could not.

    Attributes:
        out: the new index.
        kept: items in it.
        lost: items with a key that are lost, by ascending id.
        lost_codes: (first, last) ids of lost codes without a key.
        without_key: how many items at most are saved as a code alone, because their rows are lost.
        lost_notes: how many notes (the synced folder, skipped files) are lost.
        remarks: sentences about what was damaged and what was done about it.
    """

    out: str
    kept: int = 0
    lost: list[LostItem] = field(default_factory=list)
    lost_codes: list[tuple[int, int]] = field(default_factory=list)
    without_key: int = 0
    lost_notes: int = 0
    remarks: list[str] = field(default_factory=list)

    @property
    def lost_count(self) -> int:
        """How many items are lost, with and without a key."""
        return len(self.lost) + sum(last - first + 1 for first, last in self.lost_codes)

    def __str__(self) -> str:
        nameless = f" (up to {self.without_key:,} without their keys)" if self.without_key else ""
        return f"{counted(self.kept, 'item')} saved{nameless}, {self.lost_count:,} lost"

    def to_json(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        return asdict(self) | {"lost_count": self.lost_count}


def repair_index(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> RepairReport:
    """Save everything that verifies of a local index into a new one; ids stay.

    Args:
        source: the damaged index; it is only read.
        out: the new folder.

    Raises:
        UsageError: there is no index, or ``out`` exists.
        FisherhashError: the index is being written, or not even its description is left.
    """
    folder, place = Path(source), Path(out)
    if not folder.is_dir() or not _looks_like_index(folder):
        raise UsageError(f"{folder} is not an index: it holds neither {CATALOGUE} nor codes")
    if is_taken(place):
        raise UsageError(f"{place} exists already; give another folder with --out")
    if is_held(folder / "lock"):
        raise FisherhashError(
            f"{folder} is being written. Wait until the writer has finished, then run this again"
        )
    found = salvage_catalogue(folder)
    facts = _facts(folder, found)
    width = RecordForm.from_facts(facts).width
    files = [read_verified(folder, row, width) for row in found.files.values()]
    report = RepairReport(str(place), remarks=list(found.remarks))
    for file in files:
        report.remarks += [f"{name} {what}" for name, what in file.damage.items()]
    ids, codes = _choose(files, found, report)
    _write(folder, place, facts, found, (ids, codes), report)
    return report


def _looks_like_index(folder: Path) -> bool:
    return (folder / CATALOGUE).is_file() or (folder / "codes").is_dir()


def _facts(folder: Path, found: Salvage) -> dict[str, Any]:
    """What the index is: from the catalogue, its spare copy, or the model that it carries."""
    facts = found.facts
    if facts is None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            config = json.loads((folder / MODEL_FOLDER / "config.json").read_bytes())
            facts = {"bits": config["bits"], "fingerprint": config["fingerprint"], "model": {}}
            if config.get("fine_bits"):
                facts["fine_bits"] = config["fine_bits"]
            found.remarks.append("the length of the codes was taken from the index's model")
    try:
        check_bits(facts["bits"])  # type: ignore[index]
        if facts.get("fine_bits"):  # type: ignore[union-attr]
            check_bits(facts["fine_bits"])  # type: ignore[index]
        return dict(facts)  # type: ignore[arg-type]
    except (TypeError, KeyError, UsageError):
        raise FisherhashError(
            f"{folder} cannot be repaired: what says how long its codes are is lost, in "
            f"{CATALOGUE} and in its spare copy. Restore it from a copy, or create it again"
        ) from None


# Which codes count


def _choose(files: list[VerifiedCodes], found: Salvage, report: RepairReport) -> tuple[Ids, Codes]:
    """Ids and codes of what survives, ascending; what does not goes into the report."""
    # An updated item's new code lies in a loose file, the latest one last.
    files = sorted(files, key=lambda file: (file.row.kind == "loose", file.row.number))
    taken: dict[str, list[NDArray[Any]]] = {"ids": [], "codes": [], "lost": []}
    rows = np.fromiter(found.items, dtype=np.int64)
    named = np.fromiter(found.keys, dtype=np.int64)
    for file in files:
        alive, sure = _alive(file.row, found)
        doubtful = np.flatnonzero(alive & ~sure)
        if len(doubtful):
            # Removing an item deletes its row. Without a key nothing tells, and it is kept.
            known = np.isin(file.ids[doubtful], np.concatenate([rows, named]))
            kept = int((~known).sum())
            if kept:
                report.remarks.append(
                    f"which codes of file {file.row.number} were removed is partly lost: up to "
                    f"{counted(kept, 'code')} without a key may have been removed before"
                )
        taken["ids"].append(file.ids[alive & file.good])
        taken["codes"].append(file.records[alive & file.good])
        taken["lost"].append(file.ids[alive & ~file.good])
    width = files[0].records.shape[1] if files else 1
    ids = np.concatenate([np.zeros(0, np.int64), *taken["ids"]])
    codes = np.concatenate([np.zeros((0, width), np.uint8), *taken["codes"]])
    # The last of several codes of one id is the newest.
    ids, last = np.unique(ids[::-1], return_index=True)
    codes = codes[::-1][last]
    lost = np.concatenate([np.zeros(0, np.int64), *taken["lost"]])
    unsure = (lost < 0).any() or not found.knows_files()
    lost = np.setdiff1d(lost, ids)
    if not unsure and not found.is_exact():
        # A row without a code is then an old one, of an item that was removed.
        for id_ in set(found.items).difference(ids.tolist(), lost.tolist()):
            del found.items[id_]
    keep = _name_lost(ids, lost, found, report)
    return ids[keep], codes[keep]


def _alive(row: FileRow, found: Salvage) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which positions of a file count, and for which of them that is known."""
    alive = np.ones(row.length, dtype=bool)
    known = np.zeros(row.length, dtype=bool)
    for block in range(-(-row.length // REMOVED_BLOCK)):
        marked = found.removed.get((row.number, block))
        if marked is not None:
            start = block * REMOVED_BLOCK
            end = min(start + REMOVED_BLOCK, row.length)
            bits = np.frombuffer(marked.bits, dtype=np.uint8)
            alive[start:end] = np.unpackbits(bits, bitorder="little")[: end - start] == 0
            known[start:end] = True
    if row.removed <= int((~alive).sum()):
        known[:] = True
    return alive, known


def _name_lost(ids: Ids, lost: Ids, found: Salvage, report: RepairReport) -> NDArray[np.bool_]:
    """Report what is lost; returns which of the ids survive."""
    have = set(ids.tolist())
    for id_, columns in sorted(found.items.items()):
        if id_ not in have:
            key = decode_text(columns[1])
            report.lost.append(LostItem(key, id_, "its code is damaged"))
    codes_only = [id_ for id_ in lost.tolist() if id_ >= 0 and id_ not in found.items]
    without_row = {
        id_: key for id_, key in found.keys.items() if id_ not in found.items and id_ in have
    }
    both = {id_: found.keys[id_] for id_ in codes_only if id_ in found.keys}
    for reason, some in (
        ("its row is damaged", without_row),
        ("its row and its code are damaged", both),
    ):
        report.lost += [LostItem(key, id_, reason) for id_, key in some.items()]
    report.lost.sort(key=lambda item: item.id)
    report.lost_codes = list(_ranges([id_ for id_ in codes_only if id_ not in both]))
    # Rows of which nothing is left, neither here nor in the list of keys. Where their codes are
    # damaged, too, nothing tells them from codes that never had a key.
    unnamed = found.missing_rows() - len(without_row) - len(both)
    codes_alone = len(have - found.items.keys() - without_row.keys())
    report.without_key = max(0, min(unnamed, codes_alone))
    if report.without_key:
        surely = unnamed - (len(codes_only) - len(both)) >= report.without_key
        report.remarks.append(
            f"{'' if surely else 'up to '}{counted(report.without_key, 'item')} lost everything "
            "but the code, the key included; their codes are kept without a key, and index sync "
            "adds their images again"
        )
    return ~np.isin(ids, np.fromiter(without_row, dtype=np.int64))


def _ranges(ids: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of ascending ids as (first, last)."""
    array = np.array(ids, dtype=np.int64)
    for run in np.split(array, np.flatnonzero(np.diff(array) != 1) + 1):
        if len(run):
            yield int(run[0]), int(run[-1])


# The new index


def _write(
    folder: Path,
    place: Path,
    facts: dict[str, Any],
    found: Salvage,
    codes: tuple[Ids, Codes],
    report: RepairReport,
) -> None:
    model = folder / MODEL_FOLDER
    ids, packed = codes
    have = set(ids.tolist())
    rows = [ItemRow.from_stored(row) for id_, row in sorted(found.items.items()) if id_ in have]
    notes = {(decode_text(k), decode_text(n)): v for k, n, v, _ in found.notes.values()}
    report.lost_notes = found.missing_notes()
    report.kept = len(ids)
    next_id = max([found.state.next_id if found.state else 0, *(ids[-1:] + 1).tolist()])
    with draft_folder(place) as draft:
        inside = draft / "index"
        with Index.create(
            inside,
            bits=facts["bits"],
            fine_bits=facts.get("fine_bits", 0),
            fingerprint=facts.get("fingerprint"),
            model=facts.get("model") or {},
            save_model=(lambda to: _copy_model(model, to, report)) if model.is_dir() else None,
        ) as index:
            index.load_items(ids, packed, rows, notes, next_id=next_id)  # type: ignore[attr-defined]
        if problems := Index.examine(inside):
            raise FisherhashError(f"the repaired index is not right: {problems[0]}")
        for path in list(inside.iterdir()):
            shutil.move(path, draft / path.name)
        inside.rmdir()


def _copy_model(model: Path, to: Path, report: RepairReport) -> None:
    to.mkdir()
    for path in sorted(model.iterdir()):
        wrong = copy_readable(path, to / path.name)
        if wrong:
            report.remarks.append(f"{MODEL_FOLDER}/{path.name} {wrong}")
