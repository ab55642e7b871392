"""Triplets of a batch: all of them while they fit, a bounded choice beyond, never a self."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherhash.methods._pairs import BatchPairs
from fisherhash.methods._triplets import Triplets, sides


def listed(chosen):
    """The triplets as a list of (query, nearer, farther)."""
    found = []
    for q, p, n in torch.nonzero(chosen.valid).tolist():
        found.append((q, int(chosen.near[q, p]), int(chosen.far[q, n])))
    return found


def pairs_of(batch, classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(batch, classes, generator=generator) < 0.4).float()
    return BatchPairs.of(labels), labels


@pytest.mark.parametrize("batch", [1, 2, 3, 17, 40])
def test_a_small_batch_gives_every_triplet_once(batch):
    pairs, labels = pairs_of(batch, 4)
    found = listed(Triplets.of(pairs.similar, pairs.dissimilar))
    expected = [
        (q, p, n)
        for q, p, n in itertools.product(range(batch), repeat=3)
        if q not in (p, n)
        and (labels[q] * labels[p]).sum() > 0
        and (labels[q] * labels[n]).sum() == 0
    ]
    assert len(found) == len(set(found))
    assert sorted(found) == sorted(expected)


@given(batch=st.integers(1, 60), limit=st.integers(60, 5000), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_large_batch_gives_a_bounded_choice_of_true_triplets(batch, limit, seed):
    pairs, _ = pairs_of(batch, 3, seed)
    chosen = Triplets.of(pairs.similar, pairs.dissimilar, limit=limit)
    assert chosen.valid.numel() <= limit
    found = listed(chosen)
    assert len(found) == len(set(found))
    for q, p, n in found:
        assert q not in (p, n)
        assert pairs.similar[q, p]
        assert pairs.dissimilar[q, n]
    near, far = sides(batch, limit)
    for q in range(batch):
        kept = min(near, int(pairs.similar[q].sum())) * min(far, int(pairs.dissimilar[q].sum()))
        assert sum(triplet[0] == q for triplet in found) == kept


@pytest.mark.parametrize("batch", [1, 10, 64, 65, 128, 500, 5000])
@pytest.mark.parametrize("limit", [2**14, 2**18, 2**20])
def test_sides_use_the_limit_and_keep_it(batch, limit):
    near, far = sides(batch, limit)
    assert 1 <= near <= batch
    assert 1 <= far <= batch
    assert batch * near * far <= limit
    if batch**3 <= limit:
        assert near == far == batch


def test_means_are_over_what_is_valid():
    pairs = BatchPairs.of(torch.eye(2)[torch.tensor([0, 0, 1])])
    chosen = Triplets.of(pairs.similar, pairs.dissimilar)
    assert sorted(listed(chosen)) == [(0, 1, 2), (1, 0, 2)]
    values = torch.tensor([[0.0, 1.0, 5.0], [2.0, 0.0, 9.0], [0.0, 0.0, 0.0]])
    assert float(chosen.mean(chosen.gap(values))) == pytest.approx((1 - 5 + 2 - 9) / 2)
    weights = torch.where(torch.arange(3)[:, None, None] == 0, 3.0, 1.0).expand_as(chosen.valid)
    weighted = chosen.mean(chosen.gap(values), weights)
    assert float(weighted) == pytest.approx((3 * (1 - 5) + (2 - 9)) / 4)


def test_no_triplet_gives_zero_and_no_gradient():
    pairs = BatchPairs.of(torch.ones(4, 1))
    chosen = Triplets.of(pairs.similar, pairs.dissimilar)
    values = torch.randn(4, 4, requires_grad=True)
    mean = chosen.mean(chosen.gap(values))
    mean.backward()
    assert float(mean.detach()) == 0.0
    assert not values.grad.any()
