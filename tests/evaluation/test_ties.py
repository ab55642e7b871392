"""Every metric against its definition, over all orders inside ties."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from fisherhash.evaluation import evaluate, metrics
from fisherhash.evaluation.groups import TieGroups
from fisherhash.evaluation.ties import average_precision_bounds, expected_average_precision

BITS = 8
DENOMINATORS = ("found", "min(K, relevant)")


def code(distance: int) -> list[int]:
    """A code at this Hamming distance from the code 0."""
    return [(1 << distance) - 1]


def all_orders(distances, grades):
    """Grades in rank order, once for each order of the items; ties take every order."""
    for order in itertools.permutations(range(len(distances))):
        ranked = sorted(order, key=lambda i: distances[i])
        yield [grades[i] for i in ranked]


def average_precision(ranked, top, denominator, weighted=False):
    relevant = sum(g > 0 for g in ranked)
    total, found, gained = 0.0, 0, 0
    for rank, grade in enumerate(ranked[:top], start=1):
        gained += grade
        if grade:
            found += 1
            total += (gained if weighted else found) / rank
    divisor = found if denominator == "found" else min(top, relevant)
    return total / divisor if divisor else 0.0


def dcg(ranked, n):
    return sum((2**g - 1) / math.log2(1 + r) for r, g in enumerate(ranked[:n], start=1))


def mean_over_orders(distances, grades, value):
    values = [value(ranked) for ranked in all_orders(distances, grades)]
    return sum(values) / len(values)


rows = st.lists(st.integers(0, 1), min_size=3, max_size=3)


@st.composite
def cases(draw, most=6):
    n = draw(st.integers(1, most))
    distances = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    query = draw(rows.filter(any))
    labels = draw(st.lists(rows, min_size=n, max_size=n))
    grades = [sum(a * b for a, b in zip(query, row, strict=True)) for row in labels]
    if not any(grades):
        labels[0], grades[0] = query, sum(query)
    top = draw(st.integers(1, n))
    return distances, query, labels, grades, top


def run(case, denominator="found", **options):
    distances, query, labels, _, top = case
    return evaluate(
        [[0]], [code(d) for d in distances], [query], labels,
        top=top, denominator=denominator, **options,
    )  # fmt: skip


@given(case=cases(), denominator=st.sampled_from(DENOMINATORS))
@settings(max_examples=60, deadline=None)
def test_average_precision_is_the_mean_over_all_orders(case, denominator):
    distances, _, _, grades, top = case
    result = run(case, denominator, graded=True)
    values = [average_precision(r, top, denominator) for r in all_orders(distances, grades)]
    assert result.map_expected == pytest.approx(sum(values) / len(values), abs=1e-12)
    assert result.map_lower == pytest.approx(min(values), abs=1e-12)
    assert result.map_upper == pytest.approx(max(values), abs=1e-12)
    assert result.weighted_map == pytest.approx(
        mean_over_orders(
            distances, grades, lambda r: average_precision(r, top, denominator, weighted=True)
        ),
        abs=1e-12,
    )


@given(case=cases())
@settings(max_examples=40, deadline=None)
def test_every_other_metric_is_the_mean_over_all_orders(case):
    distances, _, _, grades, _ = case
    n = len(grades)
    relevant = sum(g > 0 for g in grades)
    result = run(case, precision_at=list(range(1, n + 1)), graded=True, radius=[0, 1, 3])
    best = sorted(grades, reverse=True)
    for k in range(1, n + 1):
        found = mean_over_orders(distances, grades, lambda r: sum(g > 0 for g in r[:k]))  # noqa: B023
        gained = mean_over_orders(distances, grades, lambda r: sum(r[:k]))  # noqa: B023
        discounted = mean_over_orders(distances, grades, lambda r: dcg(r, k))  # noqa: B023
        assert result.precision_at[k] == pytest.approx(found / k)
        assert result.recall_at[k] == pytest.approx(found / relevant)
        assert result.acg_at[k] == pytest.approx(gained / k)
        assert result.ndcg_at[k] == pytest.approx(discounted / dcg(best, k))
    curve = result.pr_by_rank
    for k, precision, recall in zip(curve.at, curve.precision, curve.recall, strict=True):
        assert precision == result.precision_at[k]
        assert recall == result.recall_at[k]
    for radius in (0, 1, 3):
        inside = [i for i in range(n) if distances[i] <= radius]
        hits = sum(grades[i] > 0 for i in inside)
        near = ([distances[i] for i in inside], [grades[i] for i in inside])
        assert result.precision_within[radius] == pytest.approx(hits / max(len(inside), 1))
        assert result.pr_by_radius.recall[radius] == pytest.approx(hits / relevant)
        assert result.empty_within[radius] == (not inside)
        assert result.map_within[radius] == pytest.approx(
            mean_over_orders(*near, lambda r: average_precision(r, len(r), "found"))
        )
    similar = [
        sum(d == k and g > 0 for d, g in zip(distances, grades, strict=True)) for k in range(4)
    ]
    assert result.distances.similar[:4] == similar
    assert sum(result.distances.similar) + sum(result.distances.dissimilar) == n


@given(case=cases(most=30), denominator=st.sampled_from(DENOMINATORS))
@settings(max_examples=60, deadline=None)
def test_stable_is_a_stable_argsort(case, denominator):
    distances, _, _, grades, top = case
    ranked = [grades[i] for i in np.argsort(distances, kind="stable")]
    result = run(case, denominator, ties="stable")
    assert result.map == result.map_stable
    assert result.map == pytest.approx(average_precision(ranked, top, denominator), abs=1e-12)
    assert result.map_lower - 1e-12 <= result.map <= result.map_upper + 1e-12


@given(case=cases(most=30), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_the_order_of_the_database_does_not_matter(case, seed):
    distances, query, labels, grades, top = case
    order = np.random.default_rng(seed).permutation(len(distances))
    shuffled = (
        [distances[i] for i in order], query, [labels[i] for i in order], grades, top
    )  # fmt: skip
    one, two = run(case).to_json(), run(shuffled).to_json()
    assert one.pop("map_stable") <= one["map_upper"] + 1e-12
    two.pop("map_stable")
    assert one == two


@given(
    scores=st.lists(st.floats(0, 1, width=32), min_size=2, max_size=40, unique=True),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_without_ties_scikit_learn_agrees(scores, data):
    marks = data.draw(
        st.lists(st.integers(0, 1), min_size=len(scores), max_size=len(scores)).filter(any)
    )
    result = metrics([[scores]], [[1]], np.array(marks)[:, None])
    expected = average_precision_score(marks, -np.array(scores))
    for value in (result.map, result.map_stable, result.map_lower, result.map_upper):
        assert value == pytest.approx(expected)


group_lists = st.lists(
    st.integers(0, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    min_size=1, max_size=5,
).filter(lambda groups: sum(r for _, r in groups) > 0)  # fmt: skip


@given(groups=group_lists, share=st.floats(0.01, 1))
@settings(max_examples=200, deadline=None)
def test_bounds_at_a_cut_are_the_ends_over_every_number_found(groups, share):
    """Bigger ties than permutations allow: every number found, in its best and worst order."""
    items = sum(n for n, _ in groups)
    top = max(1, int(items * share))
    best, worst = [], []
    for first in (True, False):
        above: list[int] = []
        for n, r in groups:
            ties = [1] * r + [0] * (n - r) if first else [0] * (n - r) + [1] * r
            room = top - len(above)
            if n <= room:
                above += ties
                continue
            for x in range(max(0, room - (n - r)), min(room, r) + 1):
                ones, zeros = [1] * x, [0] * (room - x)
                ranked = above + (ones + zeros if first else zeros + ones)
                (best if first else worst).append(average_precision(ranked, top, "found"))
            break
        else:
            (best if first else worst).append(average_precision(above, top, "found"))
    counts = TieGroups.from_counts(
        np.array([[n for n, _ in groups]]), np.array([[[r] for _, r in groups]])
    )
    lower, upper = average_precision_bounds(counts, np.array([top]), "found")
    assert lower[0] == pytest.approx(min(worst), abs=1e-12)
    assert upper[0] == pytest.approx(max(best), abs=1e-12)


@pytest.mark.parametrize(("n", "r", "top"), [(3000, 40, 1200), (3000, 2900, 1500), (900, 450, 12)])
def test_a_large_tie_at_the_cut_against_exact_fractions(n, r, top):
    """One tie of n items: the mean over the number found, in whole numbers."""
    before = 7
    m = top - before
    total = math.comb(n, m)
    harmonic = [Fraction(0)]
    for rank in range(1, top + 1):
        harmonic.append(harmonic[-1] + Fraction(1, rank))
    ranks = harmonic[top] - harmonic[before]
    expected = 0.0
    for x in range(max(0, m - (n - r)), min(m, r) + 1):
        chance = float(Fraction(math.comb(r, x) * math.comb(n - r, m - x), total))
        pair = Fraction(x - 1, max(m - 1, 1))
        inside = Fraction(x, m) * (m * pair + (2 + 1 - pair * (before + 1)) * ranks)
        above = Fraction(1, 1) + Fraction(2, 2)
        expected += chance * float((above + inside) / (2 + x))
    counts = TieGroups.from_counts(np.array([[2, 5, n]]), np.array([[[2], [0], [r]]]))
    value = expected_average_precision(counts, np.array([top]), "found")[0]
    assert value == pytest.approx(expected, rel=1e-11)


@given(case=cases(most=12), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_query_never_finds_itself(case, data):
    distances, query, labels, grades, _ = case
    at = data.draw(st.integers(0, len(distances)))
    with_self = [*distances[:at], 0, *distances[at:]]
    with_labels = [*labels[:at], query, *labels[at:]]
    ranks = [1, len(distances)]
    options = {"precision_at": ranks, "graded": True}
    without = run((distances, query, labels, grades, None), **options)
    result = run((with_self, query, with_labels, grades, None), self_index=[at], **options)
    for name in ("map_expected", "map_stable", "map_lower", "map_upper", "weighted_map"):
        assert getattr(result, name) == pytest.approx(getattr(without, name), abs=1e-12)
    assert result.precision_at == pytest.approx(without.precision_at)
    assert result.distances == without.distances


def test_empty_queries_are_skipped_or_zero_and_counted():
    arguments = ([[0], [0]], [[0], [1]], [[1, 0, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 0]])
    skipped = evaluate(*arguments)
    zero = evaluate(*arguments, empty="zero")
    assert (skipped.map, zero.map) == (1.0, 0.5)
    assert skipped.empty_queries == zero.empty_queries == 1
    assert (skipped.precision_at[1], zero.precision_at[1]) == (1.0, 0.5)
    assert np.isnan(skipped.average_precision[1])
