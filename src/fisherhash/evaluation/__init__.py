"""Evaluation: tie-aware metrics of rankings, the rules of other evaluators, and plots."""

from fisherhash.evaluation.metric import MeanAt, Metric, QueryMean, RankedQueries
from fisherhash.evaluation.peers import EVALUATORS, compat
from fisherhash.evaluation.plots import plot
from fisherhash.evaluation.results import Evaluation, describe_bits
from fisherhash.evaluation.scoring import evaluate, metrics

__all__ = [
    "EVALUATORS",
    "Evaluation",
    "MeanAt",
    "Metric",
    "QueryMean",
    "RankedQueries",
    "compat",
    "describe_bits",
    "evaluate",
    "metrics",
    "plot",
]
