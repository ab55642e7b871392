"""Codes against a plain loop over bits, for every length a code can have."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherhash.codes import (
    MAX_BITS,
    check_bits,
    check_codes,
    code_bytes,
    from_hex,
    hamming,
    pack,
    to_hex,
    unpack,
)
from fisherhash.errors import FisherhashError, UsageError

lengths = st.one_of(
    st.integers(1, MAX_BITS), st.sampled_from([1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 1023, MAX_BITS])
)


@st.composite
def logits(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.standard_normal((draw(st.integers(0, 5)), draw(lengths)))
    # Exact zeros of both signs, which are bit 0.
    values[rng.random(values.shape) < 0.2] = draw(st.sampled_from([0.0, -0.0]))
    return values.astype(draw(st.sampled_from([np.float16, np.float32, np.float64])))


def loop_pack(values):
    """Bit k is worth 128 >> (k mod 8) in byte k div 8, where the logit is above zero."""
    rows = []
    for row in values:
        code = [0] * -(-len(row) // 8)
        for k, value in enumerate(row):
            if value > 0:
                code[k // 8] += 128 >> (k % 8)
        rows.append(code)
    return rows


@settings(max_examples=60, deadline=None)
@given(logits())
def test_pack_is_the_bit_loop_in_packbits_order(values):
    codes = pack(values)
    bits = values.shape[1]
    assert codes.dtype == np.uint8
    assert codes.shape == (len(values), code_bytes(bits))
    assert codes.tolist() == loop_pack(values)
    np.testing.assert_array_equal(codes, np.packbits(values > 0, axis=1, bitorder="big"))


@settings(max_examples=60, deadline=None)
@given(logits())
def test_unpack_and_hex_are_inverses_and_pad_bits_are_zero(values):
    codes, bits = pack(values), values.shape[1]
    np.testing.assert_array_equal(unpack(codes, bits), values > 0)
    np.testing.assert_array_equal(pack(unpack(codes, bits)), codes)
    texts = to_hex(codes)
    assert all(len(text) == 2 * code_bytes(bits) and text == text.lower() for text in texts)
    assert texts == ["".join(f"{byte:02x}" for byte in row) for row in codes.tolist()]
    np.testing.assert_array_equal(from_hex(texts, bits), codes)
    np.testing.assert_array_equal(from_hex([text.upper() for text in texts], bits), codes)
    assert not np.unpackbits(codes, axis=1)[:, bits:].any()


@settings(max_examples=60, deadline=None)
@given(st.data(), lengths)
def test_hamming_is_the_bit_loop(data, bits):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    queries, database = (rng.integers(0, 2, (n, bits)) for n in (data.draw(st.integers(0, 4)), 5))
    distances = hamming(pack(queries), pack(database))
    assert distances.shape == (len(queries), 5)
    assert distances.tolist() == [
        [sum(int(a) != int(b) for a, b in zip(q, d, strict=True)) for d in database]
        for q in queries
    ]


def test_hamming_of_opposite_codes_of_the_greatest_length_does_not_overflow():
    ones, zeros = np.ones((1, MAX_BITS)), np.zeros((1, MAX_BITS))
    assert hamming(pack(ones), pack(zeros)).tolist() == [[MAX_BITS]]


def test_hamming_takes_codes_that_are_not_contiguous():
    codes = pack(np.random.default_rng(0).integers(0, 2, (6, 70)))
    np.testing.assert_array_equal(
        hamming(codes[::2], codes[::-1]), hamming(codes, codes)[::2, ::-1]
    )


def test_hamming_refuses_other_widths_and_logits():
    with pytest.raises(UsageError, match=r"\(1, 2\) against \(1, 3\)"):
        hamming(pack(np.ones((1, 12))), pack(np.ones((1, 20))))
    with pytest.raises(UsageError, match="uint8, got float32"):
        hamming(np.ones((1, 16), dtype=np.float32), np.ones((1, 16), dtype=np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_logits_have_no_bit_and_infinite_ones_do(value):
    values = np.zeros((4, 3), dtype=np.float32)
    values[2, 1] = value
    if np.isnan(value):
        with pytest.raises(FisherhashError, match="NaN in 1 row, the first is row 2"):
            pack(values)
    else:
        assert pack(values)[2, 0] == (0b0100_0000 if value > 0 else 0)


@pytest.mark.parametrize("bits", [0, -1, 5000, MAX_BITS + 1])
def test_lengths_out_of_range(bits):
    for call in (check_bits, code_bytes, lambda b: unpack(np.zeros((1, 1), np.uint8), b)):
        with pytest.raises(UsageError, match=f"between 1 and 1024, got {bits}"):
            call(bits)


@pytest.mark.parametrize("bits", [True, 8.0, "8", None])
def test_lengths_that_are_no_whole_number(bits):
    with pytest.raises(UsageError, match="whole number"):
        check_bits(bits)


def test_numpy_integers_are_lengths():
    assert type(check_bits(np.int64(12))) is int


@pytest.mark.parametrize("shape", [(0,), (8,), (2, 3, 4), (3, 0), (1, 1025)])
def test_pack_refuses_other_shapes(shape):
    with pytest.raises(UsageError):
        pack(np.zeros(shape))


def test_codes_of_a_wrong_width_type_or_padding():
    with pytest.raises(UsageError, match=r"12 bits must have shape \(n, 2\), got \(1, 3\)"):
        unpack(np.zeros((1, 3), np.uint8), 12)
    with pytest.raises(UsageError, match=r"got \(2,\)"):
        check_codes(np.zeros(2, np.uint8), 12)
    for wrong in (np.zeros((1, 2)), np.array([[256, 0]]), np.array([[-1, 0]])):
        with pytest.raises(UsageError, match="must be uint8"):
            check_codes(wrong, 12)
    with pytest.raises(UsageError, match="the last 4 bits"):
        check_codes(np.array([[0, 0b0000_1000]], np.uint8), 12)
    assert check_codes([[255, 0b1111_0000]], 12).dtype == np.uint8


@pytest.mark.parametrize(
    ("text", "reason"), [("zz", "not hexadecimal"), ("a000", "2 bytes"), ("a1", "must be zero")]
)
def test_hex_that_is_no_code(text, reason):
    with pytest.raises(UsageError, match=reason):
        from_hex(["a0", text], 3)
