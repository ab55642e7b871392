"""The embedded index: a SQLite catalogue, append-only code files, one commit point."""
