"""The default back-end: an index is a folder with a SQLite catalogue and append-only code files."""

from fisherhash.index.local.index import LocalIndex

backend = LocalIndex

__all__ = ["backend"]
