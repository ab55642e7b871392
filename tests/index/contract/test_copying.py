"""Copies between back-ends: ids, keys, fields, notes and the model; interrupted and continued."""

import uuid

import numpy as np
import pytest

from fisherhash.errors import UsageError
from fisherhash.index import Entry, Index
from fisherhash.index import copying as copying_module
from fisherhash.index.copying import copy_index


def fill(uri):
    rng = np.random.default_rng(0)

    def codes(count):
        return rng.integers(0, 256, (count, 2), dtype=np.uint8)

    about = {"fingerprint": "a" * 64, "model": {"method": "x"}, "files": {"config.json": b"{}"}}
    with Index.create(uri, bits=16, **about) as index:
        index.add(
            [
                Entry(f"k{i}", c, f"/p/{i}", i, i + 5, ["a", "b"], {"n": {"m": i}})
                for i, c in enumerate(codes(30))
            ],
            notes={"sync": {"folder": {"folder": "/p"}}, "skipped": {"x": {"reason": "y"}}},
        )
        index.add_codes(codes(40))
        index.remove(["k3", "k4", "k29"], ids=range(50, 60))
        index.add([Entry("caf\udce9", codes(1)[0])])
        index.add_codes(codes(5))
        index.remove(ids=[75])


def content(uri):
    with Index.open(uri) as index:
        return (
            list(index.items()),
            {kind: index.notes(kind) for kind in ("sync", "skipped", "copy")},
            (index.bits, index.fingerprint, index.model),
            index.model_files(),
        )


@pytest.fixture(params=["local", "memory"])
def target(request, tmp_path):
    return tmp_path / "copy" if request.param == "local" else f"memory://{uuid.uuid4().hex}"


def test_a_copy_is_the_index_with_its_ids(new_uri, target):
    source = new_uri()
    fill(source)
    report = copy_index(source, target)
    assert content(target) == content(source)
    assert report.count == report.copied == 62
    assert report.checked == 2 * 62
    # Ids are never used again, in the copy either, if the original says which is the next one.
    with Index.open(target, write=True) as copy:
        first = 75 if str(source).startswith("memory") else 76
        assert copy.add_codes(np.zeros((1, 2), np.uint8))[0] == first
    assert Index.examine(target) == []


def test_an_interrupted_copy_is_continued(new_uri, target, monkeypatch):
    source = new_uri()
    fill(source)
    monkeypatch.setattr(copying_module, "STEP", 10)
    calls, load = [], Index.load

    def interrupted(self, items, **named):
        calls.append(items)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return load(self, items, **named)

    monkeypatch.setattr(Index, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy_index(source, target)
    with Index.open(target) as copy:
        assert len(copy) == 20
    report = copy_index(source, target)
    assert (report.count, report.copied) == (62, 42)
    assert content(target) == content(source)


def test_what_is_refused(new_uri, target):
    source = new_uri()
    fill(source)
    with Index.create(target, bits=16):
        pass
    with pytest.raises(UsageError, match="exists already"):
        copy_index(source, target)
    with pytest.raises(UsageError, match="does not exist"):
        copy_index(new_uri(), new_uri())


def test_items_must_ascend_and_be_new(tmp_path):
    fill(tmp_path / "a")
    with Index.open(tmp_path / "a") as old, Index.create(tmp_path / "b", bits=16) as new:
        items = list(old.items())
        for bad in (items[::-1], [items[0], items[0]], [*items[5:], items[0]]):
            with pytest.raises(UsageError, match=r"ascend|occurs twice"):
                new.load(bad)
        new.load(items[:10])
        with pytest.raises(UsageError, match="ascend"):
            new.load(items[5:12])
        assert list(new.items()) == items[:10]
