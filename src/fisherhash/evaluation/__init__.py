"""Evaluation: tie-aware metrics of rankings, the rules of other evaluators, and plots."""

from fisherhash.evaluation.bit_statistics import describe_bits
from fisherhash.evaluation.metric import MeanAt, Metric, QueryMean, RankedQueries
from fisherhash.evaluation.peers import EVALUATORS, compat
from fisherhash.evaluation.plots import plot
from fisherhash.evaluation.results import Evaluation
from fisherhash.evaluation.scoring import evaluate, evaluate_reranked, metrics, rerank

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
    "evaluate_reranked",
    "metrics",
    "plot",
    "rerank",
]
