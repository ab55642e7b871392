"""Exact Hamming search over an array of codes, by position; it knows neither files nor ids."""

from fisherhash.index.engine.engine import Engine
from fisherhash.index.engine.weights import real_distances, real_weights

__all__ = ["Engine", "real_distances", "real_weights"]
