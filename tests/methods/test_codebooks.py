"""Far-apart code books: Hadamard matrices, known optima, brute force, and large books."""

import hashlib
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherhash.errors import UsageError
from fisherhash.methods._codebooks import distance_bound, far_apart, hadamard, minimum_distance


def loop_minimum_distance(codes):
    """Pair by pair, bit by bit."""
    rows = codes.tolist()
    return min(
        sum(a != b for a, b in zip(rows[i], rows[j], strict=True))
        for i in range(len(rows))
        for j in range(i)
    )


@pytest.mark.parametrize(
    "order", [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 100, 244, 1024]
)
def test_hadamard_rows_are_orthogonal(order):
    matrix = hadamard(order).astype(int)
    np.testing.assert_array_equal(matrix @ matrix.T, order * np.eye(order, dtype=int))
    assert (matrix[0] == 1).all()
    assert (matrix[:, 0] == 1).all()


@pytest.mark.parametrize("bits", [8, 12, 16, 24, 32, 48, 64, 128])
def test_fewer_classes_than_bits_get_orthogonal_balanced_codes(bits):
    codes = far_apart(bits - 1, bits)
    torch.testing.assert_close(codes @ codes.T, bits * torch.eye(bits - 1))
    assert codes.sum(1).abs().max() == 0


@pytest.mark.parametrize(
    ("classes", "bits", "distance"),
    [
        (10, 12, 6),  # Plotkin's bound
        (10, 10, 5),  # the best there is: A(10, 5) = 12, A(10, 6) = 6
        (10, 48, 24),
        (3, 48, 32),  # Plotkin's bound
        (21, 12, 6),
        (80, 48, 24),
        (100, 12, 4),  # as the best linear code of dimension 7, here and in the next two
        (100, 16, 6),
        (100, 24, 10),
        (100, 32, 12),
        (100, 48, 22),
        (100, 64, 32),
        (1000, 64, 23),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_minimum_distances(classes, bits, distance, seed):
    assert minimum_distance(far_apart(classes, bits, seed=seed).numpy()) >= distance


@given(classes=st.integers(1, 70), bits=st.integers(1, 40), seed=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_book(classes, bits, seed):
    codes = far_apart(classes, bits, seed=seed)
    assert codes.shape == (classes, bits)
    assert codes.dtype == torch.float32
    assert set(codes.unique().tolist()) <= {-1.0, 1.0}
    different = len(codes.unique(dim=0))
    assert different == min(classes, 2**bits)
    if classes >= 2 and different == classes:
        found = loop_minimum_distance(codes)
        assert found == minimum_distance(codes.numpy())
        assert found <= distance_bound(classes, bits)
        # Rows of a Hadamard matrix may agree in a bit; they are bits / 2 apart nevertheless.
        assert codes.sum(0).abs().max() < classes or found >= bits / 2
    torch.testing.assert_close(far_apart(classes, bits, seed=seed), codes)


@pytest.mark.parametrize(("classes", "bits"), [(3, 12), (10, 12), (10, 14), (100, 16)])
def test_seeds_differ_and_no_global_generator_is_used(classes, bits):
    before = torch.get_rng_state()
    books = [far_apart(classes, bits, seed=seed) for seed in (0, 1, 0)]
    assert torch.equal(books[0], books[2])
    assert not torch.equal(books[0], books[1])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("classes", "bits", "digest"),
    [
        (3, 12, "731210d26924"),
        (10, 12, "a3d19cff8ab3"),
        (10, 14, "a913c318b633"),
        (100, 16, "a9a838eba63f"),
        (40, 5, "18089dbb6924"),
    ],
)
def test_books_are_the_same_on_every_machine(classes, bits, digest):
    codes = far_apart(classes, bits).numpy() > 0
    assert hashlib.sha256(np.packbits(codes).tobytes()).hexdigest()[:12] == digest


def test_too_many_classes_share_codes_evenly_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        codes = far_apart(11, 2)
    assert "2 bits have only 4 codes and cannot tell 11 classes apart" in caplog.text
    _, counts = codes.unique(dim=0, return_counts=True)
    assert sorted(counts.tolist()) == [2, 3, 3, 3]
    caplog.clear()
    far_apart(4, 2)
    assert not caplog.text


@pytest.mark.parametrize(("classes", "bits"), [(0, 8), (-1, 8), (3, 0), (3, 2000)])
def test_impossible_sizes_are_refused(classes, bits):
    with pytest.raises(UsageError):
        far_apart(classes, bits)
