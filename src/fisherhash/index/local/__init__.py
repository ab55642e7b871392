"""The default back-end: an index is one SQLite file that can be copied, mailed and deleted."""

from fisherhash.index.local.index import LocalIndex
from fisherhash.index.local.upkeep import (
    BackupReport,
    LostItem,
    RepairReport,
    backup,
    repair,
)

__all__ = ["BackupReport", "LocalIndex", "LostItem", "RepairReport", "backup", "repair"]
