"""Evaluation: rankings → tie-aware metrics, what others would have printed, and plots."""

from fisherhash.evaluation.bit_statistics import describe_bits
from fisherhash.evaluation.peers import EVALUATORS, Compat, compat
from fisherhash.evaluation.plots import plot
from fisherhash.evaluation.rankings import retrieve
from fisherhash.evaluation.results import (
    BitStatistics,
    Curve,
    DistanceHistogram,
    Evaluation,
    Matches,
)
from fisherhash.evaluation.scoring import evaluate, evaluate_reranked, metrics, rerank

__all__ = [
    "EVALUATORS",
    "BitStatistics",
    "Compat",
    "Curve",
    "DistanceHistogram",
    "Evaluation",
    "Matches",
    "compat",
    "describe_bits",
    "evaluate",
    "evaluate_reranked",
    "metrics",
    "plot",
    "rerank",
    "retrieve",
]
