"""Heads: the scale they start with, and what is needed to build them again."""

import inspect

import pytest
import torch

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.heads import HEADS, LinearHead, restore

kinds = pytest.mark.parametrize("kind", sorted(HEADS))
# These give the bits of a class or of a word, as -1 and 1.
CHOOSING = {"argmax", "product"}


def made(kind, bits):
    """A head on 24 features, whatever else its kind needs."""
    head = HEADS[kind]
    needs = inspect.signature(head).parameters
    return head(24, bits, **({"classes": 5} if "classes" in needs else {}))


def skewed_features(count=400, width=24):
    """Scales from a thousandth to a thousand, means far from 0, one feature that never varies."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.logspace(-3, 3, width)
    features = torch.randn(count, width, generator=generator) * scales + 5 * scales
    features[:, 3] = 7.0
    return features


@kinds
def test_logits_have_unit_scale_at_the_start(kind):
    torch.manual_seed(0)
    head = made(kind, 16)
    features = skewed_features()
    head.start(features)
    logits = head.eval().logits(features)
    assert logits.shape == (400, 16)
    if kind in CHOOSING:
        assert set(logits.unique().tolist()) <= {-1.0, 1.0}
        return
    torch.testing.assert_close(logits.mean(0), torch.zeros(16), atol=1e-3, rtol=0)
    torch.testing.assert_close(logits.std(0), torch.ones(16), atol=1e-2, rtol=0)


@kinds
def test_every_feature_counts_alike_and_a_constant_one_not_at_all(kind):
    head = made(kind, 16)
    features = skewed_features()
    head.start(features)
    prepared = head.eval().prepare(features)
    varied = [i for i in range(24) if i != 3]
    torch.testing.assert_close(prepared[:, varied].std(0), torch.ones(23), atol=1e-2, rtol=0)
    moved = features.clone()
    moved[:, 3] = 1e6
    assert torch.equal(head.logits(moved), head.logits(features))


@kinds
def test_starting_twice_from_one_seed_gives_one_head(kind):
    heads = []
    for _ in range(2):
        torch.manual_seed(3)
        heads.append(made(kind, 8))
        heads[-1].start(skewed_features())
    assert all(
        torch.equal(a, b) for a, b in zip(*(h.state_dict().values() for h in heads), strict=True)
    )


@kinds
def test_dropout_acts_while_training_and_never_while_encoding(kind):
    head = made(kind, 8)
    features = skewed_features()
    head.start(features)
    head.dropout.p = 0.5
    head.train()
    zeros = (head.prepare(features)[:, 0] == 0).float().mean()
    assert 0.35 < zeros < 0.65
    head.eval()
    assert torch.equal(head.logits(features), head.logits(features))
    assert not (head.prepare(features)[:, 0] == 0).any()


@kinds
def test_start_leaves_the_mode_as_it_was(kind):
    for training in (True, False):
        head = made(kind, 8).train(training)
        head.start(skewed_features())
        assert head.training is training


@kinds
def test_a_restored_head_gives_the_same_logits(kind):
    head = made(kind, 11)
    features = skewed_features()
    head.start(features)
    other = restore(head.config())
    assert type(other) is type(head)
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.eval().logits(features), head.eval().logits(features))


def test_a_linear_head_is_one_matrix_after_standardising():
    head = LinearHead(24, 8)
    features = skewed_features()
    head.start(features)
    varies = features.std(0) > 0
    standard = torch.where(varies, (features - features.mean(0)) / features.std(0, correction=0), 0)
    expected = standard @ head.linear.weight.T + head.linear.bias
    torch.testing.assert_close(head.eval()(features), expected, atol=2e-3, rtol=1e-3)


def test_from_matrix_is_the_matrix():
    weight, shift = torch.randn(5, 7), torch.randn(7)
    features = torch.randn(20, 7)
    head = LinearHead.from_matrix(weight, shift)
    assert (head.in_features, head.bits) == (7, 5)
    torch.testing.assert_close(head.eval()(features), (features - shift) @ weight.T)


def test_configs_that_describe_no_head():
    with pytest.raises(UsageError, match=r"unknown head 'liner'\. Did you mean 'linear'"):
        restore({"kind": "liner", "in_features": 4, "bits": 8})
    with pytest.raises(UsageError, match="unknown head ''"):
        restore({})
    with pytest.raises(FisherhashError, match="the head 'linear' cannot be built"):
        restore({"kind": "linear", "in_features": 4, "bits": 8, "slices": 2})
    with pytest.raises(UsageError, match="between 1 and 1024"):
        restore({"kind": "linear", "in_features": 4, "bits": 0})
