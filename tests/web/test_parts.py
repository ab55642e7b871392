"""The parts below the pages: map, columns, small copies of images, what is derived, options."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.images.results import Hit
from fisherhash.index.items import Item
from fisherhash.web import derived
from fisherhash.web.derived import Derived, lay_out, read_columns
from fisherhash.web.files import ImageFiles
from fisherhash.web.options import ServeOptions

from .conftest import write_image


def test_near_codes_are_near_on_the_map():
    rng = np.random.default_rng(0)
    middle, which = rng.integers(0, 2, (4, 64)), rng.integers(0, 4, 900)
    codes = np.packbits(middle[which] ^ (rng.random((900, 64)) < 0.05), axis=1)
    points = lay_out(codes, 64).astype(float)
    centres = np.array([points[which == c].mean(axis=0) for c in range(4)])
    apart = np.linalg.norm(points[:, None] - centres[None], axis=2)
    assert (apart.argmin(axis=1) == which).mean() > 0.97
    assert np.array_equal(lay_out(codes, 64), points)


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(0, 12), bits=st.integers(1, 70), same=st.booleans(), seed=st.integers(0, 9)
)
def test_every_collection_has_a_map(count, bits, same, seed):
    rows = np.random.default_rng(seed).integers(0, 2, (count, bits), dtype=np.uint8)
    codes = np.packbits(rows[:1].repeat(count, axis=0) if same and count else rows, axis=1)
    assert lay_out(codes, bits).shape == (count, 2)


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
    assert columns.months.count() == [("2020-01", 1), ("2020-02", 1)]
    chosen = np.array([False, True, True])
    assert sorted(columns.labels.count(chosen)) == [("", 1), ("a", 1), ("b", 1)]
    assert columns.fields["camera"].count(chosen) == [("X", 1)]
    # 1 and True are equal, but two values.
    assert [(repr(v), n) for v, n in columns.fields["rating"].count()] == [("1", 1), ("True", 1)]
    assert "position" not in columns.fields
    assert read_columns([]).labels.count() == []
    # A field with many values is no filter.
    many = read_columns(item(i, serial=f"{i}", kind="x") for i in range(300))
    assert list(many.fields) == ["kind"]


def test_small_copies_follow_their_file_and_stay_within_the_bound(tmp_path, monkeypatch):
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "photos" / "one.png"
    hit = Hit(1, "one.png", path=str(path))

    def files(limit, cache=None):
        if cache is not None:
            monkeypatch.setenv("FISHERHASH_CACHE", str(cache))
        shown = (str(path.parent),)
        return ImageFiles("an.index", ServeOptions("an.index", show_from=shown, cache_bytes=limit))

    def size():
        return sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*.jpg"))

    write_image(path, 1)
    one = files(30_000)
    first = one.jpeg(hit, "small")
    assert one.jpeg(hit, "small") == first
    write_image(path, 2)
    os.utime(path, ns=(1, 1))
    assert one.jpeg(hit, "small") != first
    for number in range(40):
        write_image(path, number)
        name = one.preview(path.read_bytes())
        assert one.stored(name)
        assert size() <= 30_000 + 30_000 // 16 + len(one.stored(name))
    # Another process finds the folder full, and makes room.
    files(9000).preview(path.read_bytes() + b" ")
    assert size() <= 9000
    # Where nothing can be stored, images are shown all the same.
    (tmp_path / "file").write_text("")
    assert files(1000, tmp_path / "file" / "cache").jpeg(hit, "small")[:2] == b"\xff\xd8"


def test_a_derived_value_is_computed_once_per_version(monkeypatch):
    monkeypatch.setattr(derived, "REST", 0.0)
    version, calls, go = [1], [], threading.Event()

    def compute():
        go.wait(5)
        calls.append(version[0])
        return version[0] * 10

    go.set()
    value = Derived(lambda: version[0], compute)
    assert [value.get(5.0), value.get(5.0)] == [10, 10]
    # Readers of a slow value get the old one meanwhile.
    go.clear()
    version[0] = 2
    assert value.get(0.05) == 10
    go.set()
    assert value.get(5.0) == 20
    assert calls == [1, 2]
    # Beside a busy writer it rests.
    monkeypatch.setattr(derived, "REST", 1e9)
    versions = iter(range(1000))
    busy = Derived(lambda: next(versions), lambda: time.sleep(0.01) or calls.append(0) or 1)
    assert [busy.get(0.05) for _ in range(10)][-1] == 1
    assert calls == [1, 2, 0]
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
