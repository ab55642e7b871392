"""Codes cut from outputs: the map they start from, and what lies between two classes."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from fisherhash.methods import _centers
from fisherhash.methods._cutting import cut, least_squares

BITS, CLASSES, WIDTH = 24, 5, 8


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def collapsed(noise=0.02):
    """Classes as training leaves them: each in one point, all equally far from each other."""
    corners = F.pad(torch.eye(CLASSES) - 1 / CLASSES, (0, WIDTH - CLASSES))
    corners = 3 * F.normalize(corners) @ torch.linalg.qr(random(WIDTH, WIDTH))[0]
    numbers = torch.arange(200) % CLASSES
    outputs = corners[numbers] + noise * random(200, WIDTH, seed=1)
    means = corners.T.double().numpy()
    book = _centers.code_book(_centers.graded(means, BITS, 0.5), means)
    return corners, numbers, outputs, torch.from_numpy(book).T.float()[numbers]


@pytest.fixture(scope="module")
def found():
    """The corners, each image's class and output, and a function to codes in {0, 1}."""
    corners, numbers, outputs, targets = collapsed()
    mixing, offsets = cut(outputs, targets)
    return corners, numbers, outputs, lambda points: points @ mixing.T + offsets > 0


def distance(one, other):
    return (one != other).sum(-1)


@pytest.mark.parametrize(("width", "bits"), [(8, 5), (5, 8), (1, 1)])
def test_least_squares_recovers_an_affine_map(width, bits):
    outputs = random(400, width) + 0.5
    mixing, offsets = random(bits, width, seed=1), random(bits, seed=2)
    got = least_squares(outputs, outputs @ mixing.T + offsets)
    assert got[0].shape == (bits, width)
    torch.testing.assert_close(got[0], mixing, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(got[1], offsets, atol=1e-2, rtol=1e-2)


def test_a_cut_is_always_the_same_and_changes_nothing_else(monkeypatch):
    monkeypatch.setattr("fisherhash.methods._cutting.STEPS", 20)
    _, _, outputs, targets = collapsed()
    cuts = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with torch.no_grad():  # as finish() is called
            cuts.append(cut(outputs, targets))
        assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one, other) for one, other in zip(*cuts, strict=True))
    assert [tuple(values.shape) for values in cuts[0]] == [(BITS, WIDTH), (BITS,)]
    assert not any(values.requires_grad for values in cuts[0])
    _, _, untouched, _ = collapsed()
    assert torch.equal(outputs, untouched)


def test_every_class_keeps_one_code_of_its_own(found):
    corners, numbers, outputs, code = found
    own = code(corners)
    assert len(own.unique(dim=0)) == CLASSES
    assert torch.equal(code(outputs), own[numbers])


def test_half_way_between_two_classes_is_nearer_to_both_than_they_are_to_each_other(found):
    corners, _, _, code = found
    own = code(corners)
    for a, b in itertools.combinations(range(CLASSES), 2):
        between = code((corners[a] + corners[b]) / 2)
        apart = int(distance(own[a], own[b]))
        assert 0 < int(distance(between, own[a])) < apart
        assert 0 < int(distance(between, own[b])) < apart
