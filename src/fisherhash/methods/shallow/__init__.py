"""Methods fitted on features, without a network to train."""

from fisherhash.methods.shallow import itq, lsh

__all__ = ["itq", "lsh"]
