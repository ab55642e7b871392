"""The version, where every package can read it without importing the package's front page."""

__version__ = "0.1.0.dev0"
