"""What one row of a code file holds: the code of an item and, behind it, its second code if any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fisherhash.codes import code_bytes
from fisherhash.index.engine import Engine
from fisherhash.index.items import Codes

Records = NDArray[np.uint8]
"""(n, bytes) rows of a code file."""


class RecordForm(NamedTuple):
    """The form of all records of an index.

    Attributes:
        bits: length of a code.
        fine_bits: length of a second code; 0 without them.
    """

    bits: int
    fine_bits: int = 0

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> RecordForm:
        """The form that the facts of an index name."""
        return cls(facts["bits"], facts.get("fine_bits", 0))

    @property
    def code_width(self) -> int:
        """Bytes of a code."""
        return code_bytes(self.bits)

    @property
    def width(self) -> int:
        """Bytes of a record."""
        return self.code_width + (code_bytes(self.fine_bits) if self.fine_bits else 0)

    def codes(self, records: Records) -> Codes:
        """(n, code bytes) the codes of records."""
        return records[:, : self.code_width]

    def fine(self, records: Records) -> Codes | None:
        """(n, fine bytes) their second codes."""
        return records[:, self.code_width :] if self.fine_bits else None

    def split(self, record: bytes) -> tuple[bytes, bytes | None]:
        """The code and the second code of one record."""
        if not self.fine_bits:
            return record, None
        return record[: self.code_width], record[self.code_width :]

    def empty(self, count: int = 0) -> Records:
        """Records of zeros."""
        return np.zeros((count, self.width), dtype=np.uint8)

    def joined(self, records: Iterable[bytes]) -> Records:
        """Records as an array."""
        return np.frombuffer(b"".join(records), np.uint8).reshape(-1, self.width)

    def engine(self, records: Records, tables: Mapping[str, NDArray[Any]] | None = None) -> Engine:
        """An engine over records."""
        return Engine(self.codes(records), self.bits, tables=tables, fine=self.fine(records))
