import numpy as np
import pytest

from fisherhash.data.vectors import (
    check_finite_rows,
    open_vectors,
    read_keys,
    read_labels,
    vector_blocks,
)
from fisherhash.errors import UsageError


def saved(tmp_path, array, **options):
    np.save(tmp_path / "x.npy", array, **options)
    return tmp_path / "x.npy"


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", ">f4"])
def test_vectors_are_mapped_and_read_as_float32(tmp_path, kind):
    expected = np.random.default_rng(0).normal(size=(10, 3)).astype(kind)
    found = open_vectors(saved(tmp_path, expected))
    assert isinstance(found, np.memmap)
    blocks = list(vector_blocks(found, rows=4))
    assert [start for start, _ in blocks] == [0, 4, 8]
    joined = np.concatenate([block for _, block in blocks])
    assert joined.dtype == np.float32
    np.testing.assert_array_equal(joined, expected.astype(np.float32))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(5, np.float32), r"array \(n, d\)"),
        (np.zeros((0, 5), np.float32), r"array \(n, d\)|not an .npy file"),
        (np.zeros((5, 2), np.int64), "float16, float32 or float64, not int64"),
        (np.zeros((5, 2), np.complex64), "not complex64"),
        (np.array([[1, "a"]], dtype=object), "Python objects, which are never unpickled"),
    ],
)
def test_other_arrays_are_refused(tmp_path, array, message):
    with pytest.raises(UsageError, match=message):
        open_vectors(saved(tmp_path, array, allow_pickle=True))


def test_files_that_are_no_arrays_are_refused(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        open_vectors(tmp_path / "none.npy")
    (tmp_path / "text.npy").write_text("1, 2, 3")
    with pytest.raises(UsageError, match=r"not an \.npy file"):
        open_vectors(tmp_path / "text.npy")
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 2), np.float32))
    with pytest.raises(UsageError, match="archive of arrays"):
        open_vectors(tmp_path / "x.npz")
    whole = saved(tmp_path, np.zeros((100, 10), np.float32))
    whole.write_bytes(whole.read_bytes()[:-1000])
    with pytest.raises(UsageError, match=r"not an \.npy file"):
        open_vectors(whole)


def test_rows_that_are_not_finite_are_counted_and_named():
    rows = np.zeros((20, 3))
    check_finite_rows(rows, "x.npy")
    rows[[2, 5], 1] = np.nan
    rows[7] = np.inf
    with pytest.raises(UsageError, match=r"x\.npy holds NaN or infinite values in 3 rows: 2, 5, 7"):
        check_finite_rows(rows, "x.npy")
    rows[:] = 1e300  # finite, but not as float32
    with pytest.raises(UsageError, match="20 rows: 0, 1, 2, 3, 4, …"):
        check_finite_rows(rows, "x.npy")


@pytest.mark.parametrize(
    ("given", "labels", "classes"),
    [
        (np.array([7, -1, 7]), [[0, 1], [1, 0], [0, 1]], ("-1", "7")),
        (np.array(["b", "a", "b"]), [[0, 1], [1, 0], [0, 1]], ("a", "b")),
        (np.array([b"b", b"a", b"b"]), [[0, 1], [1, 0], [0, 1]], ("a", "b")),
        (np.array([[1, 1], [0, 0], [0, 1]]), [[1, 1], [0, 0], [0, 1]], ("0", "1")),
    ],
)
def test_labels(tmp_path, given, labels, classes):
    found, names = read_labels(saved(tmp_path, given), 3)
    assert (found.tolist(), names) == (labels, classes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.array([1, 2]), "2 labels for 3 vectors"),
        (np.array([1.5, 2, 3]), "must hold labels"),
        (np.array([[0, 2]] * 3), "must be 0 or 1"),
        (np.array(["a", None, "b"], dtype=object), "never unpickled"),
    ],
)
def test_other_labels_are_refused(tmp_path, given, message):
    with pytest.raises(UsageError, match=message):
        read_labels(saved(tmp_path, given, allow_pickle=True), 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb\n", "2 keys for 3 vectors"),
        ("a\n\nb\n", "line 2 is empty"),
        ("a\nb\na\n", "'a' occurs more than once"),
    ],
)
def test_keys(tmp_path, text, message):
    path = tmp_path / "keys.txt"
    path.write_text("a\nb c\nä\n", encoding="utf-8")
    assert read_keys(path, 3) == ["a", "b c", "ä"]
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_keys(path, 3)
    path.write_bytes(b"\xff\n\xfe\nx\n")
    with pytest.raises(UsageError, match="UTF-8"):
        read_keys(path, 3)
