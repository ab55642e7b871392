"""Groups of likely duplicates, compared with brute force."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherhash import codes
from fisherhash.errors import UsageError
from fisherhash.index import Entry
from fisherhash.index.images.duplicates import duplicates_of, find_duplicates, same_bytes


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
    assert [group.tolist() for group in found] == brute_force(rows, radius)


def test_a_chain_is_one_group_and_ids_need_not_be_positions():
    rows = codes.pack(np.tri(9, 8, -1))
    ids = np.array([90, 5, 70, 11, 3, 1, 2, 40, 1000])
    (group,) = find_duplicates(Codes(rows, 8, ids), 1)
    assert group.tolist() == sorted(ids.tolist())
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


def test_a_report_from_an_index(new_index, tmp_path):
    rows = [[1], [1], [2], [2], [2], [255]]
    for name in "abc":
        (tmp_path / name).write_bytes(b"same")
    new_index.add(
        [
            Entry(key, row, path=tmp_path / file)
            for key, row, file in zip("abxcyz", rows, "abxcyz", strict=True)
        ]
    )
    new_index.add_codes(np.array(rows[2:3], np.uint8))
    found = duplicates_of(new_index, compare_files=True)
    assert [[match.name for match in group] for group in found.groups] == [
        ["x", "c", "y", "id 6"],
        ["a", "b"],
    ]
    assert [[m.same_bytes for m in group] for group in found.groups] == [[None] * 4, [0, 0]]
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
    near = duplicates_of(new_index, radius=2)
    assert [[m.distance for m in group] for group in near.groups] == [[0, 0, 2, 2, 2, 2]]
    assert "Equal or near codes are candidates" in near.summary()
    assert "same_bytes" not in near.to_json()["groups"][0]["items"][0]


def test_items_that_vanish_meanwhile_are_left_out(new_index, monkeypatch):
    rows = [[0], [1], [3], [255], [254], [15], [15]]
    new_index.add([Entry(key, row) for key, row in zip("abcdefg", rows, strict=True)])
    find = find_duplicates

    def late(*arguments):
        found = find(*arguments)
        new_index.remove(["a", "e"])
        return found

    monkeypatch.setattr("fisherhash.index.images.duplicates.find_duplicates", late)
    found = duplicates_of(new_index, radius=1)
    assert [[(m.name, m.distance) for m in group] for group in found.groups] == [
        [("b", 0), ("c", 1)],
        [("f", 0), ("g", 0)],
    ]


def test_pipes_and_devices_are_never_read(tmp_path):
    """It would wait forever for the pipes, and never come to the end of the devices."""
    os.mkfifo(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes(b"")
    paths = [tmp_path / "a.png", tmp_path / "b.png", tmp_path / "c.png", tmp_path / "c.png"]
    marks = same_bytes([*map(str, paths), "/dev/zero", "/dev/zero", "a\0b"])
    assert marks == [None, None, 0, 0, None, None, None]
