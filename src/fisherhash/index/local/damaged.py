"""A damaged code file as it is searched by explicit wish: without what does not verify."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fisherhash.index.local.records import RecordForm
from fisherhash.index.local.schema import FileRow
from fisherhash.index.local.segments import Segment
from fisherhash.index.local.verified import VerifiedCodes, read_verified

logger = logging.getLogger(__name__)


class RestSegment(Segment):
    """What verifies of a code file, in memory.

    Attributes:
        committed: the file as committed, before anything was left out.
        unavailable: items that were left out.
    """

    def __init__(
        self,
        folder: Path,
        verified: VerifiedCodes,
        form: RecordForm,
        removed: NDArray[np.uint8] | None,
    ) -> None:
        row = self.committed = verified.row
        alive = np.ones(row.length, dtype=bool)
        if removed is not None:
            alive = np.unpackbits(removed, count=row.length, bitorder="little") == 0
        kept = alive & verified.good
        self.unavailable = int((alive & ~verified.good).sum())
        self.folder, self.form, self.removed = folder, form, None
        self._marks = removed
        self._records, self._ids = verified.records[kept], verified.ids[kept]
        kind = "loose" if row.kind == "loose" else "sorted"
        self.row = FileRow(row.number, kind, row.first_id, len(self.records))
        self.files = []
        self._table_file = None
        self._base, self._base_length = None, 0
        # Tables over these codes belong to no file.
        self._kept = True
        self._tail = self._order = self._gathered = None

    @property
    def marks(self) -> NDArray[np.uint8] | None:
        """The removed bits of the whole file."""
        return self._marks

    def fits(self, row: FileRow, removed: NDArray[np.uint8] | None) -> bool:
        """Whether it still shows a file of the same state."""
        return self.committed == row and np.array_equal(self._marks, removed)  # type: ignore[arg-type]


def rest_of(
    folder: Path,
    row: FileRow,
    form: RecordForm,
    removed: NDArray[np.uint8] | None,
    before: Segment | None,
) -> Segment:
    """A code file; where it is damaged, what verifies of it."""
    if isinstance(before, RestSegment):
        if before.fits(row, removed):
            return before
    elif before is not None and before.row.length == row.length:
        return Segment(folder, row, form, removed, before)
    verified = read_verified(folder, row, form.width)
    if not verified.damage:
        return Segment(folder, row, form, removed, before if type(before) is Segment else None)
    for name, what in verified.damage.items():
        logger.warning("%s/%s %s; its items are left out", folder, name, what)
    return RestSegment(folder, verified, form, removed)
