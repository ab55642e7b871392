"""Agreement with the neighbours of float features, compared with an enumeration of ties."""

import itertools

import numpy as np
import pytest

from fisherhash.codes import hamming, pack
from fisherhash.errors import UsageError
from fisherhash.evaluation.looking import neighbour_agreement


def enumerated(distances, cosines, k):
    """The mean overlap over all orders of ties."""
    nearest = set(np.argsort(-cosines)[:k].tolist())
    shares = []
    for order in itertools.permutations(range(len(distances))):
        ranked = sorted(order, key=lambda item: distances[item])
        shares.append(len(nearest.intersection(ranked[:k])) / k)
    return np.mean(shares)


@pytest.mark.parametrize("seed", range(5))
def test_ties_are_in_expectation(seed):
    rng = np.random.default_rng(seed)
    codes = pack(rng.integers(0, 2, (7, 3)))
    features = rng.normal(size=(7, 4))
    labels = np.eye(2)[[0, 0, 0, 0, 0, 0, 1]]
    found = neighbour_agreement(
        codes[:1], codes[1:], features[:1], features[1:], labels[:1], labels[1:], bits=3, k=2
    )
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    # The last image is of another class.
    expected = enumerated(hamming(codes[:1], codes[1:6])[0], (unit[:1] @ unit[1:6].T)[0], 2)
    assert found.value == pytest.approx(expected)
    assert found.chance == pytest.approx(2 / 5)
    assert found.queries == 1


def test_collapsed_codes_agree_by_chance_and_fine_ones_fully():
    rng = np.random.default_rng(0)
    angle = np.sort(rng.random(60)) * 1.5
    features = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    labels = np.ones((60, 1))
    itself = np.arange(60)

    def agreement(codes, bits):
        shared = (codes, codes, features, features, labels, labels)
        return neighbour_agreement(*shared, bits=bits, k=5, self_index=itself)

    collapsed = agreement(np.zeros((60, 1), np.uint8), 8)
    assert collapsed.value == pytest.approx(collapsed.chance)
    # A thermometer of the angle: distances are differences of the angle.
    fine = agreement(pack(angle[:, None] > np.linspace(0, 1.5, 1000)), 1000)
    assert fine.value > 0.95
    assert "0.085" in str(collapsed)


def test_no_class_is_large_enough():
    codes = np.zeros((3, 1), np.uint8)
    found = neighbour_agreement(
        codes, codes, np.ones((3, 2)), np.ones((3, 2)), np.eye(3), np.eye(3), bits=8
    )
    assert found.to_json() == {"k": 10, "value": None, "chance": None, "queries": 0}
    assert "no query has more than 10 images" in str(found)
    with pytest.raises(UsageError, match="features of 2 queries"):
        neighbour_agreement(
            codes, codes, np.ones((2, 2)), np.ones((3, 2)), np.eye(3), np.eye(3), bits=8
        )
