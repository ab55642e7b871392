"""A reader that stays open learns from ``head`` whether it has seen the last commit."""

import numpy as np
import pytest

from fisherhash.errors import FisherhashError
from fisherhash.index import Entry, Index
from fisherhash.index.local import guards
from fisherhash.index.local.catalogue import Catalogue
from fisherhash.index.local.guards import CommitMark, CommitWatch

CODE = np.arange(2, dtype=np.uint8)


@pytest.fixture
def path(tmp_path):
    with Index.create(tmp_path / "a", bits=16) as index:
        index.add([Entry("a", CODE)])
    return tmp_path / "a"


@pytest.fixture
def views(monkeypatch):
    """Every look at the catalogue."""
    seen, view = [], Catalogue.view

    def counted(self):
        seen.append(self)
        return view(self)

    monkeypatch.setattr(Catalogue, "view", counted)
    return seen


def commit_of(path):
    return CommitMark(path).read()[0]


def test_searches_do_not_look_at_the_catalogue_again(path, views):
    with Index.open(path) as index:
        assert index.get("a").key == "a"
        index.search(CODE[None], 1)
        before = len(views)
        assert index.search(CODE[None], 1).to_list() == [[(0, 0)]]
        assert index.get("a").key == "a"
        assert len(views) == before


def test_another_commit_is_seen_at_once(path):
    with Index.open(path) as reader, Index.open(path, write=True) as writer:
        for count in range(1, 6):
            assert reader.search(CODE[None], 9).ids.shape == (1, count)
            writer.add([Entry(f"b{count}", CODE)])
            assert reader.get(f"b{count}").id == count
        writer.remove(["a"])
        assert reader.get_items(["a"]) == [None]


def test_a_commit_without_its_mark_is_seen_later(path, monkeypatch):
    """As after a writer that was killed between the two."""
    monkeypatch.setattr(guards, "TRUSTED_SECONDS", 1e9)
    with Index.open(path) as reader:
        assert reader.search(CODE[None], 9).ids.shape == (1, 1)
        monkeypatch.setattr(CommitMark, "write", lambda self, commit: None)
        with Index.open(path, write=True) as writer:
            writer.add([Entry("b", CODE)])
        assert reader.search(CODE[None], 9).ids.shape == (1, 1)
        monkeypatch.setattr(reader._watch, "_until", 0.0)  # the time is over
        assert reader.search(CODE[None], 9).ids.shape == (1, 2)


def test_a_deleted_index_is_noticed(path):
    with Index.open(path) as reader:
        reader.search(CODE[None], 1)
        reader.search(CODE[None], 1)
        path.rename(path.with_name("elsewhere"))
        with pytest.raises(FisherhashError, match="was deleted"):
            reader.search(CODE[None], 1)


def test_what_the_mark_must_say(path):
    watch, commit = CommitWatch(path), commit_of(path)
    assert not watch.is_last(commit)
    watch.saw(commit)
    assert watch.is_last(commit)
    assert not watch.is_last(commit + 1)
    CommitMark(path).write(commit + 1)
    assert not watch.is_last(commit)
    watch.saw(commit)  # an old one: the mark names another
    assert not watch.is_last(commit)
    watch.saw(commit + 1)
    assert watch.is_last(commit + 1)
    watch.close()
    assert not watch.is_last(commit + 1)


@pytest.mark.parametrize("damage", ["missing", "shorter", "longer", "changed"])
def test_a_damaged_mark_says_nothing(path, damage):
    watch, commit, head = CommitWatch(path), commit_of(path), path / "head"
    watch.saw(commit)
    data = head.read_bytes()
    if damage == "missing":
        head.unlink()
        watch.close()
    else:
        changed = {"shorter": data[:50], "longer": data + b" ", "changed": b"x" + data[1:]}
        head.write_bytes(changed[damage])
        assert not watch.is_last(commit)
        watch.close()
    watch.saw(commit)
    assert not watch.is_last(commit)


def test_it_is_believed_for_a_while_only(path, monkeypatch):
    watch, commit = CommitWatch(path), commit_of(path)
    now = [100.0]
    monkeypatch.setattr(guards.time, "monotonic", lambda: now[0])
    watch.saw(commit)
    now[0] += 0.9 * guards.TRUSTED_SECONDS
    assert watch.is_last(commit)
    now[0] += 0.2 * guards.TRUSTED_SECONDS
    assert not watch.is_last(commit)
    watch.saw(commit)
    assert watch.is_last(commit)
