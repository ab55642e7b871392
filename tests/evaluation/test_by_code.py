"""Distinct codes ranked once give what ranking every image gives."""

import numpy as np
import pytest
import torch

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.evaluation import metrics
from fisherhash.evaluation.by_code import precision_by_code


def case(*, several, seed=0, codes=40, images=300, queries=30, classes=5):
    rng = np.random.default_rng(seed)
    places = rng.integers(codes, size=images)
    places[:codes] = np.arange(codes)
    labels = [
        np.eye(classes, dtype=np.uint8)[rng.integers(classes, size=n)] for n in (queries, images)
    ]
    if several:
        labels = [own | (rng.random(own.shape) < 0.2).astype(np.uint8) for own in labels]
    # Some different codes are at equal distances.
    distances = rng.integers(25, size=(queries, codes)).astype(np.float32) / 8
    return distances, places, *labels


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("top", [None, 1, 7, 50, 299])
def test_as_if_every_image_were_ranked(several, top):
    distances, places, ours, theirs = case(several=several)
    found = precision_by_code([torch.from_numpy(distances)], places, ours, theirs, top=top)
    wanted = metrics([distances[:, places]], ours, theirs, top=top)
    assert np.allclose(found.expected, wanted.average_precision, equal_nan=True, atol=1e-12)
    for name, value in found.means.items():
        assert value == pytest.approx(getattr(wanted, name), abs=1e-12)
    assert found.top == wanted.top


def test_queries_without_a_relevant_item_have_no_value():
    distances, places, ours, theirs = case(several=False)
    theirs[:, 0] = 0
    found = precision_by_code([torch.from_numpy(distances)], places, ours, theirs)
    assert np.array_equal(np.isnan(found.expected), ours[:, 0] == 1)
    with pytest.raises(FisherhashError, match="no query has a relevant item"):
        precision_by_code([torch.from_numpy(distances)], places, ours, 0 * theirs)


def test_what_does_not_fit_is_named():
    distances, places, ours, theirs = case(several=False)
    block = torch.from_numpy(distances)
    with pytest.raises(UsageError, match="one column per distinct code"):
        precision_by_code([block[:, 1:]], places, ours, theirs)
    with pytest.raises(UsageError, match="29 rows of distances for 30 queries"):
        precision_by_code([block[1:]], places, ours, theirs)
    with pytest.raises(UsageError, match="299 numbers of codes for 300"):
        precision_by_code([block], places[1:], ours, theirs)
    with pytest.raises(FisherhashError, match="NaN"):
        precision_by_code([block * float("nan")], places, ours, theirs)
