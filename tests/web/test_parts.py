"""The parts below the pages: map, columns, thumbnails, what is derived, options."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.items import Item
from fisherhash.web import derived
from fisherhash.web.columns import read_columns
from fisherhash.web.derived import Derived
from fisherhash.web.layout import lay_out
from fisherhash.web.options import ServeOptions
from fisherhash.web.thumbnails import ThumbnailCache

from .conftest import write_image


def test_near_codes_are_near_on_the_map():
    rng = np.random.default_rng(0)
    middle, which = rng.integers(0, 2, (4, 64)), rng.integers(0, 4, 900)
    codes = np.packbits(middle[which] ^ (rng.random((900, 64)) < 0.05), axis=1)
    layout = lay_out(np.arange(900), codes, 64)
    points = layout.points.astype(float)
    centres = np.array([points[which == c].mean(axis=0) for c in range(4)])
    apart = np.linalg.norm(points[:, None] - centres[None], axis=2)
    assert (apart.argmin(axis=1) == which).mean() > 0.97
    assert np.array_equal(lay_out(np.arange(900), codes, 64).points, layout.points)


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(0, 12), bits=st.integers(1, 70), same=st.booleans(), seed=st.integers(0, 9)
)
def test_every_collection_has_a_map(count, bits, same, seed):
    rows = np.random.default_rng(seed).integers(0, 2, (count, bits), dtype=np.uint8)
    codes = np.packbits(rows[:1].repeat(count, axis=0) if same and count else rows, axis=1)
    layout = lay_out(np.arange(count) * 7, codes, bits)
    assert layout.ids.tolist() == list(range(0, 7 * count, 7))
    assert layout.points.shape == (count, 2)


def item(number, labels=(), key="", **metadata):
    return Item(number, b"\0", key or f"{number}.jpg", labels=labels, metadata=metadata)


def test_columns_count_labels_months_and_fields():
    items = [
        item(1, ("a",), taken="2020-01-02T00:00:00", camera="X", rating=1),
        item(4, ("a", "b"), taken="2020-02-02", camera="X", rating=True),
        item(6, (), taken="nonsense", position={"x": 1}),
        Item(7, b"\0"),
    ]
    columns = read_columns(items)
    assert columns.ids.tolist() == [1, 4, 6]
    assert columns.labels.count() == [("a", 2), ("b", 1), ("", 1)]
    assert columns.count_months() == [("2020-01", 1), ("2020-02", 1)]
    chosen = columns.chosen(np.array([4, 5, 6, 9]))
    assert chosen.tolist() == [False, True, True]
    assert sorted(columns.labels.count(chosen)) == [("", 1), ("a", 1), ("b", 1)]
    assert columns.fields["camera"].count(chosen) == [("X", 1)]
    # 1 and True are equal, but two values.
    assert [(repr(v), n) for v, n in columns.fields["rating"].count()] == [("1", 1), ("True", 1)]
    assert "position" not in columns.fields
    assert read_columns([]).labels.count() == []
    # A field with many values is no filter.
    many = read_columns(item(i, serial=f"{i}", kind="x") for i in range(300))
    assert list(many.fields) == ["kind"]


def test_thumbnails_follow_their_file_and_stay_within_the_bound(tmp_path):
    folder, path = tmp_path / "cache", str(tmp_path / "one.png")
    cache = ThumbnailCache(folder, 60_000)
    write_image(tmp_path / "one.png", 1)
    first = cache.thumbnail(path, 128)
    assert cache.thumbnail(path, 128) == first
    write_image(tmp_path / "one.png", 2)
    os.utime(path, ns=(1, 1))
    assert cache.thumbnail(path, 128) != first

    def size():
        return sum(file.stat().st_size for file in folder.rglob("*.jpg"))

    for number in range(60):
        name = f"{number:040x}"
        cache.write(name, b"x" * 3000)
        os.utime(folder / name[:2] / f"{name}.jpg", (number, number))
        assert size() <= 60_000 + 60_000 // 16 + 3000
    assert cache.read(f"{59:040x}") is not None
    assert cache.read(f"{0:040x}") is None
    # Another process finds the folder full, and makes room.
    ThumbnailCache(folder, 20_000).write("f" * 40, b"x")
    assert size() <= 20_000
    # Where nothing can be stored, images are shown all the same.
    (tmp_path / "file").write_text("")
    assert ThumbnailCache(tmp_path / "file" / "cache", 1000).thumbnail(path, 128)[:2] == b"\xff\xd8"


def test_a_derived_value_is_computed_once_per_version(monkeypatch):
    monkeypatch.setattr(derived, "REST", 0.0)
    version, calls = [1], []

    def compute():
        calls.append(version[0])
        return version[0] * 10

    value = Derived(lambda: version[0], compute)
    assert [value.get(5.0), value.get(5.0)] == [10, 10]
    version[0] = 2
    assert value.get(5.0) == 20
    assert calls == [1, 2]


def test_readers_of_a_slow_value_get_the_old_one():
    version, go = [1], threading.Event()
    go.set()
    value = Derived(lambda: version[0], lambda: go.wait(5) and version[0])
    assert value.get(5.0) == 1
    go.clear()
    version[0] = 2
    time.sleep(0.05)
    assert value.get() == 1
    go.set()


def test_beside_a_busy_writer_values_are_computed_now_and_then(monkeypatch):
    monkeypatch.setattr(derived, "REST", 1000.0)
    calls, versions = [], iter(range(1000))

    def compute():
        time.sleep(0.02)
        calls.append(1)
        return len(calls)

    value = Derived(lambda: next(versions), compute)
    for _ in range(20):
        value.get(0.05)
    assert len(calls) == 1


def test_a_value_that_cannot_be_computed_is_an_error():
    with pytest.raises(FisherhashError, match="division by zero"):
        Derived(lambda: 1, lambda: 1 / 0).get(5.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"host": "0.0.0.0"},
        {"host": "192.0.2.1"},
        {"writable": True},
        {"token": "short"},
        {"port": 70_000},
        {"max_upload": 0},
    ],
)
def test_options_refuse_an_open_door(bad):
    with pytest.raises(UsageError):
        ServeOptions("photos.index", **bad)
    assert ServeOptions("photos.index", host="::1").local
    assert not ServeOptions("photos.index", host="0.0.0.0", token="x" * 8).local
