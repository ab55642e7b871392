"""Exact Hamming search over an array of codes, by position; it knows neither files nor ids."""

from fisherhash.index.engine.engine import PATHS, Engine

__all__ = ["PATHS", "Engine"]
