"""How search tables are laid out in memory and on disk; a change here is a new table version."""

TABLES_VERSION = 1
PLANE_BLOCK = 256
"""Codes of one block of planes."""
WORD_GROUP = 16
"""Words of a bucket that are compared at once."""
MOST_TABLES = 6
"""Parts of a code by which buckets are addressed."""
