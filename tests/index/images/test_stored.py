"""Codes that are known already take their places among new ones."""

import numpy as np
import pytest

from fisherhash.data.computing import Skipped
from fisherhash.index.images.stored import in_order
from fisherhash.model.hasher import EncodedBlock


def code(number):
    return np.array([number % 251], dtype=np.uint8)


def block(numbers, skipped=(), unsure=0, fine=False):
    codes = np.array([code(n) for n in numbers], dtype=np.uint8).reshape(len(numbers), 1)
    return EncodedBlock(
        np.array(numbers, dtype=np.int64),
        codes,
        None,
        [Skipped(n, f"{n}.png", "broken") for n in skipped],
        unsure,
        codes + 1 if fine else None,
    )


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_every_image_once_and_in_order(seed, fine):
    rng = np.random.default_rng(seed)
    images = 300
    is_known = rng.random(images) < rng.choice([0.0, 0.02, 0.5, 0.98, 1.0])
    bad = set(np.flatnonzero(~is_known & (rng.random(images) < 0.1)).tolist())
    rest = np.flatnonzero(~is_known)
    new = []
    for start in range(0, len(rest), 16):
        some = rest[start : start + 16].tolist()
        read = [n for n in some if n not in bad]
        new.append(block(read, [n for n in some if n in bad], unsure=len(some), fine=fine))
    known = {
        int(n): (code(n), code(n) + np.uint8(1) if fine else None) for n in np.flatnonzero(is_known)
    }
    found = list(in_order(known, new, 16))
    numbers = np.concatenate([one.indices for one in found]).tolist()
    assert numbers == [n for n in range(images) if n not in bad]
    codes = np.concatenate([one.codes for one in found])
    assert codes[:, 0].tolist() == [n % 251 for n in numbers]
    if fine:
        assert np.array_equal(
            np.concatenate([one.fine for one in found if len(one.codes)]), codes + 1
        )
    assert max(len(one.indices) for one in found) <= 16
    assert {skip.index for one in found for skip in one.skipped} == bad
    assert sum(one.unsure for one in found) == len(rest)


def test_new_blocks_stay_as_they_are_where_nothing_is_known():
    new = [block([0, 1]), block([2], [3])]
    assert list(in_order({}, new, 1)) == new
