"""Intervals and tests, beside scipy's and by simulation."""

import math

import numpy as np
import pytest

from fisherhash.experiments.significance import (
    difference,
    pack_shares,
    t_interval,
    t_quantile,
    unpack_shares,
)


@pytest.mark.parametrize("freedom", [1, 1.7, 2, 4, 30, 5000])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_student_s_quantiles(freedom, confidence):
    stats = pytest.importorskip("scipy.stats")
    wanted = stats.t.ppf((1 + confidence) / 2, freedom)
    assert t_quantile(confidence, freedom) == pytest.approx(wanted, rel=1e-9)


def test_student_s_quantiles_in_a_table_of_values():
    """As printed: intervals of stored results must not change."""
    table = {1: 12.7062047, 2: 4.3026527, 3: 3.1824463, 4: 2.7764451, 10: 2.2281389, 100: 1.9839715}
    for freedom, wanted in table.items():
        assert t_quantile(0.95, freedom) == pytest.approx(wanted, abs=6e-8)


def test_an_interval_over_seeds():
    assert t_interval([0.80, 0.82, 0.84]) == pytest.approx(4.302653 * 0.02 / math.sqrt(3))
    assert t_interval([0.8]) == math.inf
    assert t_interval([0.8, 0.8]) == 0.0


def test_seeds_alone_are_welch_s_test():
    stats = pytest.importorskip("scipy.stats")
    one, other = [0.80, 0.82, 0.84, 0.83], [0.79, 0.80, 0.80]
    found = difference(one, other)
    wanted = stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
    assert found.mean - found.half == pytest.approx(wanted.low)
    assert found.mean + found.half == pytest.approx(wanted.high)
    assert found.queries == 0


def test_queries_alone_are_a_paired_test():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    one, other = rng.random((2, 200))
    means = [float(one.mean())] * 3, [float(other.mean())] * 3
    found = difference(*means, ([one] * 3, [other] * 3))
    wanted = stats.ttest_rel(one, other).confidence_interval(0.95)
    assert found.half == pytest.approx((wanted.high - wanted.low) / 2)
    assert found.queries == 200


def test_queries_never_make_a_difference_more_certain():
    """With their many degrees of freedom they would narrow the interval of three seeds."""
    rng = np.random.default_rng(0)
    one, other = [0.80, 0.82, 0.84], [0.75, 0.75, 0.75]
    same = rng.normal(0.8, 0.1, 1000)
    near = [same + rng.normal(0.0, 0.001, 1000) for _ in range(6)]
    alone = difference(one, other)
    found = difference(one, other, (near[:3], near[3:]))
    assert found.half == alone.half
    wide = [rng.random(30) for _ in range(6)]
    assert difference(one, other, (wide[:3], wide[3:])).half > alone.half


def test_one_seed_says_nothing():
    found = difference([0.9], [0.1, 0.2])
    assert found.mean == pytest.approx(0.75)
    assert not found.ahead


def test_queries_without_a_relevant_item_do_not_count():
    values = np.array([0.5, np.nan, 0.7])
    assert difference([0.6, 0.6], [0.5, 0.5], ([values] * 2, [values - 0.1] * 2)).queries == 2


def test_a_row_is_called_ahead_of_its_equal_in_few_cases():
    """Both draws matter: seeds move a row as a whole, queries are easy or hard."""
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(400):
        taste = rng.normal(0, 0.05, (2, 1, 300))  # what a method makes of each query
        seeds = rng.normal(0, 0.004, (2, 5, 1))
        values = 0.8 + taste + seeds + rng.normal(0, 0.02, (2, 5, 300))
        found = difference(
            list(values[0].mean(1)), list(values[1].mean(1)), (list(values[0]), list(values[1]))
        )
        wrong += abs(found.mean) > found.half
    assert wrong / 400 <= 0.075  # 5 % and the error of 400 draws


def test_shares_as_text():
    values = np.array([0.0, 1.0, 0.123456, np.nan])
    again = unpack_shares(pack_shares(values))
    assert np.allclose(again, values, atol=8e-6, equal_nan=True)
    assert len(pack_shares(np.zeros(1000))) == 2668
