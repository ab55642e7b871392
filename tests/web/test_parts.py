"""The parts below the pages: map, columns, thumbnails, what is derived, counters, options."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fisherhash.codes import code_bytes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.items import Item
from fisherhash.web import derived
from fisherhash.web.columns import read_columns
from fisherhash.web.derived import Derived
from fisherhash.web.layout import lay_out, load_layout, save_layout
from fisherhash.web.metrics import RequestMetrics
from fisherhash.web.options import ServeOptions
from fisherhash.web.thumbnails import ThumbnailCache

from .conftest import write_image


def clustered(count, bits=64, centres=4, seed=0):
    rng = np.random.default_rng(seed)
    middle = rng.integers(0, 2, (centres, bits))
    which = rng.integers(0, centres, count)
    codes = middle[which] ^ (rng.random((count, bits)) < 0.05)
    return which, np.packbits(codes.astype(np.uint8), axis=1)


def test_near_codes_are_near_on_the_map():
    which, codes = clustered(900)
    layout = lay_out([(np.arange(900), codes)], 64)
    places = layout.places.astype(float)
    centres = np.array([places[which == c].mean(axis=0) for c in range(4)])
    apart = np.linalg.norm(places[:, None] - centres[None], axis=2)
    assert (apart.argmin(axis=1) == which).mean() > 0.97


def test_the_map_is_the_same_again_and_survives_the_disk(tmp_path):
    _, codes = clustered(300)
    blocks = [(np.arange(200), codes[:200]), (np.arange(200, 300), codes[200:])]
    first, second = lay_out(blocks, 64), lay_out([(np.arange(300), codes)], 64)
    assert np.array_equal(first.places, second.places)
    (tmp_path / "map-old.npz").write_bytes(b"old")
    save_layout(tmp_path / "map-1.npz", first)
    assert [path.name for path in tmp_path.iterdir()] == ["map-1.npz"]
    assert np.array_equal(load_layout(tmp_path / "map-1.npz").places, first.places)
    (tmp_path / "map-1.npz").write_bytes(b"damaged")
    assert load_layout(tmp_path / "map-1.npz") is None


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(0, 12), bits=st.integers(1, 70), same=st.booleans(), seed=st.integers(0, 9)
)
def test_every_collection_has_a_map(count, bits, same, seed):
    rng = np.random.default_rng(seed)
    rows = np.packbits(rng.integers(0, 2, (count, bits), dtype=np.uint8), axis=1)
    codes = rows[:1].repeat(count, axis=0) if same and count else rows
    ids = np.arange(count) * 7
    layout = lay_out([(ids, codes)] if count else [], bits)
    assert layout.ids.tolist() == ids.tolist()
    assert layout.places.shape == (count, 2)
    assert codes.shape[1] == code_bytes(bits)


def item(number, labels=(), key="", **metadata):
    return Item(number, b"\0", key or f"{number}.jpg", labels=labels, metadata=metadata)


def test_columns_count_labels_months_and_fields():
    items = [
        item(1, ("a",), taken="2020-01-02T00:00:00", camera="X", rating=1),
        item(4, ("a", "b"), taken="2020-02-02", camera="X", rating=True),
        item(6, (), taken="nonsense", place={"x": 1}),
        Item(7, b"\0"),
    ]
    columns = read_columns(items)
    assert columns.ids.tolist() == [1, 4, 6]
    assert columns.count_labels_of(None) == {"a": 2, "b": 1, "": 1}
    assert columns.count_months(None) == {"2020-01": 1, "2020-02": 1}
    rows = columns.rows(np.array([4, 5, 6, 9]))
    assert rows.tolist() == [1, 2]
    assert columns.count_labels_of(rows) == {"a": 1, "b": 1, "": 1}
    assert columns.fields["camera"].count(rows) == [("X", 1)]
    # 1 and True are equal, but two values.
    assert [(repr(v), n) for v, n in columns.fields["rating"].count(None)] == [
        ("1", 1),
        ("True", 1),
    ]
    assert "place" not in columns.fields
    assert read_columns([]).rows(np.array([1])).tolist() == []


def test_a_field_with_many_values_is_no_filter():
    columns = read_columns(item(i, serial=f"{i}", kind="x") for i in range(300))
    assert list(columns.fields) == ["kind"]


def test_thumbnails_follow_their_file_and_stay_within_the_bound(tmp_path):
    cache = ThumbnailCache(tmp_path / "cache", 60_000)
    write_image(tmp_path / "one.png", 1)
    first = cache.thumbnail(str(tmp_path / "one.png"), "small")
    assert cache.thumbnail(str(tmp_path / "one.png"), "small") == first
    write_image(tmp_path / "one.png", 2)
    os.utime(tmp_path / "one.png", ns=(1, 1))
    assert cache.thumbnail(str(tmp_path / "one.png"), "small") != first

    def size():
        return sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.jpg"))

    for number in range(60):
        cache.write(f"{number:040x}", b"x" * 3000)
        os.utime(cache._path(f"{number:040x}"), (number, number))
        assert size() <= 60_000 + 60_000 // 16 + 3000
    assert cache.read(f"{59:040x}") is not None
    assert cache.read(f"{0:040x}") is None
    # Another process finds the folder full, and makes room.
    ThumbnailCache(tmp_path / "cache", 20_000).write("f" * 40, b"x")
    assert size() <= 20_000


def test_a_thumbnail_that_cannot_be_stored_is_shown_all_the_same(tmp_path):
    write_image(tmp_path / "one.png", 1)
    (tmp_path / "file").write_text("")
    cache = ThumbnailCache(tmp_path / "file" / "cache", 1000)
    data = cache.thumbnail(str(tmp_path / "one.png"), "small")
    (tmp_path / "out.jpg").write_bytes(data)
    with Image.open(tmp_path / "out.jpg") as image:
        assert image.size == (128, 102)


def test_a_derived_value_is_computed_once_per_version(monkeypatch):
    monkeypatch.setattr(derived, "REST", 0.0)
    version, calls = [1], []

    def compute():
        calls.append(version[0])
        return version[0] * 10

    value = Derived(lambda: (version[0],), compute)
    assert value.get(5.0) == 10
    assert value.get(5.0) == 10
    version[0] = 2
    assert value.get(5.0) == 20
    assert calls == [1, 2]


def test_readers_of_a_slow_value_get_the_old_one():
    version, go = [1], threading.Event()
    go.set()

    def compute():
        go.wait(5)
        return version[0]

    value = Derived(lambda: (version[0],), compute)
    assert value.get(5.0) == 1
    go.clear()
    version[0] = 2
    time.sleep(0.05)
    assert value.get() == 1
    go.set()


def test_beside_a_busy_writer_values_are_computed_now_and_then(monkeypatch):
    monkeypatch.setattr(derived, "REST", 1000.0)
    calls = []

    def compute():
        time.sleep(0.02)
        calls.append(1)
        return len(calls)

    versions = iter(range(1000))
    value = Derived(lambda: (next(versions),), compute)
    for _ in range(20):
        value.get(0.05)
    assert len(calls) == 1


def test_a_value_that_cannot_be_computed_is_an_error():
    def compute():
        raise ValueError("no way")

    value = Derived(lambda: (1,), compute)
    with pytest.raises(FisherhashError, match="no way"):
        value.get(5.0)


def test_counters_of_several_processes_are_summed(tmp_path):
    one = RequestMetrics(["/a", "other"], str(tmp_path))
    one.observe("/a", 200, 0.004)
    one.observe("/unknown", 404, 0.3)
    (tmp_path / "1.counts").write_bytes((tmp_path / f"{os.getpid()}.counts").read_bytes())
    text = one.render({"fisherhash_items": ("Items.", 3)})
    assert 'fisherhash_requests_total{route="/a",status="2xx"} 2' in text
    assert 'fisherhash_requests_total{route="other",status="4xx"} 2' in text
    assert 'fisherhash_request_seconds_bucket{route="/a",le="0.005"} 2' in text
    assert 'fisherhash_request_seconds_bucket{route="/a",le="0.0025"} 0' in text
    assert "fisherhash_items 3" in text


def test_options_refuse_an_open_door():
    for bad in (
        {"host": "0.0.0.0"},
        {"host": "192.0.2.1"},
        {"writable": True},
        {"token": "short"},
        {"port": 70_000},
        {"max_upload": 0},
    ):
        with pytest.raises(UsageError):
            ServeOptions("photos.index", **bad)
    assert ServeOptions("photos.index", host="::1").local
    assert not ServeOptions("photos.index", host="0.0.0.0", token="x" * 8).local
