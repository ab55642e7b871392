"""A metric is one class: its value is in the result, the JSON and the table."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from fisherhash.errors import UsageError
from fisherhash.evaluation import Evaluation, MeanAt, Metric, QueryMean, evaluate, metrics
from fisherhash.evaluation.standard_metrics import STANDARD

QUERIES, DATABASE = 7, 60


class Hit(QueryMean):
    """1 where a relevant item is among the nearest group."""

    name = "hit"

    def values(self, queries):
        first = (queries.groups.items > 0).argmax(axis=1)
        return (queries.groups.relevant[np.arange(len(first)), first] > 0).astype(float)


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    codes = [np.packbits(rng.random((n, 8)) < 0.4, axis=1) for n in (QUERIES, DATABASE)]
    labels = [(rng.random((n, 4)) < 0.15).astype(int) for n in (QUERIES, DATABASE)]
    labels[0][:2] = 0
    labels[0][2:, 0] = 1
    return (*codes, *labels)


def hits(case):
    query, database, query_labels, database_labels = case
    distances = np.bitwise_count(query[:, None] ^ database[None]).sum(axis=2)
    relevant = query_labels @ database_labels.T > 0
    return [float(relevant[q][distances[q] == distances[q].min()].any()) for q in range(2, QUERIES)]


def test_a_toy_metric_is_in_the_result_the_json_and_the_table(case):
    result = evaluate(*case, extra_metrics=[Hit])
    assert 0 < np.mean(hits(case)) < 1
    assert result.extra == {"hit": pytest.approx(np.mean(hits(case)))}
    assert json.loads(json.dumps(result.to_json()))["hit"] == result.extra["hit"]
    assert any(line.split() == ["hit", f"{np.mean(hits(case)):.4f}"] for line in
               str(result).splitlines())  # fmt: skip
    zero = evaluate(*case, extra_metrics=[Hit], empty="zero")
    assert zero.extra["hit"] == pytest.approx(sum(hits(case)) / QUERIES)


def test_means_at_ranks_and_radii(case):
    class FoundAt(MeanAt):
        """Expected relevant items among the first N."""

        name = "found_at"

        def sums(self, queries):
            return queries.found.sum(axis=0)[: len(self.at)]

    class ItemsWithin(MeanAt):
        """Items within a radius."""

        name = "items_within"
        by_radius = True

        def sums(self, queries):
            return queries.within.items.sum(axis=0)[self.at]

    extra = [FoundAt, ItemsWithin]
    result = evaluate(*case, extra_metrics=extra, precision_at=[1, 10], radius=[0, 8])
    assert result.extra["found_at"] == pytest.approx(
        {n: n * result.precision_at[n] for n in (1, 10)}
    )
    assert result.extra["items_within"][8] == pytest.approx(DATABASE)
    assert result.to_json()["found_at"]["10"] == result.extra["found_at"][10]
    assert "found_at 10" in str(result)


def test_a_metric_sees_what_it_needs_or_is_none(case):
    class Labels(Hit):
        name = "needs labels"
        needs_shared_labels = True

    class Hamming(Hit):
        name = "needs hamming"
        needs_hamming = True

    extra = [Labels, Hamming]
    assert evaluate(*case, extra_metrics=extra, graded=False).extra["needs labels"] is None
    both = evaluate(*case, extra_metrics=extra, graded=True).extra
    assert both == pytest.approx(dict.fromkeys(both, np.mean(hits(case))))
    distances = np.bitwise_count(case[0][:, None] ^ case[1][None]).sum(axis=2)
    blocks = metrics([distances], *case[2:], extra_metrics=extra, graded=True).extra
    assert blocks == {"needs labels": pytest.approx(np.mean(hits(case))), "needs hamming": None}


def test_a_metric_may_count_the_empty_queries(case):
    class Rows(Metric):
        """Numbers of the queries it was given."""

        name = "rows"
        counts_empty = True

        def __init__(self, task):
            super().__init__(task)
            self.rows = []

        def add(self, queries):
            self.rows += queries.rows.tolist()

        def result(self, share):
            return sorted(self.rows)

    class Counted(Rows):
        name = "counted"
        counts_empty = False

    result = evaluate(*case, extra_metrics=[Rows, Counted])
    assert result.extra == {"rows": list(range(QUERIES)), "counted": list(range(2, QUERIES))}
    assert result.empty_queries == 2


def test_a_name_is_used_once(case):
    class Again(Hit):
        name = "map"

    with pytest.raises(UsageError, match="already has the entry 'map'; give the metric Again"):
        evaluate(*case, extra_metrics=[Again])
    with pytest.raises(UsageError, match="already has the entry 'hit'"):
        evaluate(*case, extra_metrics=[Hit, Hit])


def test_every_standard_metric_has_a_formula_and_its_field():
    names = [metric.name for metric in STANDARD]
    assert len(set(names)) == len(names)
    assert set(names) <= {field.name for field in dataclasses.fields(Evaluation)}
    assert all(metric.__doc__ for metric in STANDARD)
