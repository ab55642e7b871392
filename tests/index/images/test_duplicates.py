"""Groups of likely duplicates, compared with brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherhash import codes
from fisherhash.errors import UsageError
from fisherhash.index.images.duplicates import duplicates, find_duplicates, same_bytes
from fisherhash.index.local.index import LocalIndex


def brute_force(rows, radius):
    """Connected components by walking from item to item."""
    distances = codes.hamming(rows, rows)
    left, groups = set(range(len(rows))), []
    while left:
        group, waiting = set(), [min(left)]
        while waiting:
            item = waiting.pop()
            if item not in group:
                group.add(item)
                waiting += np.flatnonzero(distances[item] <= radius).tolist()
        left -= group
        if len(group) > 1:
            groups.append(sorted(group))
    return sorted(groups, key=lambda group: (-len(group), group[0]))


class Codes:
    """As much of an index as the search for duplicates needs."""

    def __init__(self, rows, bits, ids=None):
        self.rows, self.bits = rows, bits
        self.ids = np.arange(len(rows)) if ids is None else ids

    def scan(self, block):
        for start in range(0, len(self.rows), 7):
            yield self.ids[start : start + 7], self.rows[start : start + 7]


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([1, 5, 8, 12, 24, 33, 64, 70, 200]),
    count=st.integers(0, 60),
    centres=st.integers(1, 12),
    radius=st.integers(0, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_groups_are_those_of_brute_force(bits, count, centres, radius, seed):
    radius = min(radius, bits)
    rng = np.random.default_rng(seed)
    middle = rng.random((centres, bits)) < 0.5
    rows = codes.pack(middle[rng.integers(0, centres, count)] ^ (rng.random((count, bits)) < 0.02))
    found = find_duplicates(Codes(rows, bits), radius)
    assert [group.ids.tolist() for group in found] == brute_force(rows, radius)
    for group in found:
        own = codes.hamming(rows[group.ids], rows[group.ids])[0]
        np.testing.assert_array_equal(group.distances, own)


def test_a_chain_is_one_group_and_ids_need_not_be_positions():
    rows = codes.pack(np.tri(9, 8, -1))
    ids = np.array([90, 5, 70, 11, 3, 1, 2, 40, 1000])
    (group,) = find_duplicates(Codes(rows, 8, ids), 1)
    assert group.ids.tolist() == sorted(ids.tolist())
    assert find_duplicates(Codes(rows, 8, ids), 0) == []


def test_thousands_of_copies_are_one_group_at_once():
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.integers(0, 256, (3, 8), dtype=np.uint8), 40_000, axis=0)
    found = find_duplicates(Codes(rows, 64), 4)
    assert [len(group) for group in found] == [40_000] * 3


@pytest.mark.parametrize("radius", [-1, 25])
def test_a_radius_that_no_code_has(radius):
    with pytest.raises(UsageError, match="radius must be between 0 and 24 bits"):
        find_duplicates(Codes(np.zeros((2, 3), np.uint8), 24), radius)


def test_files_of_the_same_bytes_are_marked(tmp_path):
    files = {"a": b"one", "b": b"two", "c": b"one", "d": b"longer", "e": b"two", "f": b"six"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    paths = [str(tmp_path / name) for name in files] + [None, str(tmp_path / "missing")]
    assert same_bytes(paths) == [0, 1, 0, None, 1, None, None, None]


def test_a_report_from_an_index(tmp_path):
    rows = np.array([[1], [1], [2], [2], [2], [255]], np.uint8)
    for name in "abc":
        (tmp_path / name).write_bytes(b"same")
    with LocalIndex.create(tmp_path / "i.index", bits=8) as index:
        paths = [str(tmp_path / name) for name in ("a", "b", "x", "c", "y", "z")]
        index.add(list("abxcyz"), rows, paths=paths)
        index.add_codes(rows[2:3])
    found = duplicates(tmp_path / "i.index", compare_files=True)
    assert [[answer.name for answer in group] for group in found.groups] == [
        ["x", "c", "y", "id 6"],
        ["a", "b"],
    ]
    assert found.same == [[None] * 4, [0, 0]]
    assert "4 items\n     0  x\n" in str(found)
    assert "     0  b  same bytes (1)\n" in str(found)
    assert (
        "2 groups of equal codes, 6 of 7 items; byte for byte copies of another file: 1"
        in found.summary()
    )
    assert "not a proof" in found.summary()
    listed = found.to_json()
    assert [group["size"] for group in listed["groups"]] == [4, 2]
    assert listed["groups"][1]["items"][1]["same_bytes"] == 0
    near = duplicates(tmp_path / "i.index", radius=2)
    assert len(near.groups) == 1
    assert "Equal or near codes are candidates" in near.summary()


def test_items_that_vanish_meanwhile_are_left_out(tmp_path, monkeypatch):
    rows = np.array([[0], [1], [3], [255], [254], [15], [15]], dtype=np.uint8)
    find = find_duplicates
    with LocalIndex.create(tmp_path / "a.index", bits=8) as index:
        index.add(list("abcdefg"), rows)

        def late(*arguments):
            found = find(*arguments)
            index.remove(["a", "e"])
            return found

        monkeypatch.setattr("fisherhash.index.images.duplicates.find_duplicates", late)
        found = duplicates(tmp_path / "a.index", radius=1)
    assert [[(a.name, a.distance) for a in group] for group in found.groups] == [
        [("b", 0), ("c", 1)],
        [("f", 0), ("g", 0)],
    ]
