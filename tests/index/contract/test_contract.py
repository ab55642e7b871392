"""What every index promises, checked on every back-end; see conftest.py for the list of them."""

import json
import os
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fisherhash.codes import code_bytes, hamming
from fisherhash.errors import UsageError
from fisherhash.index import Entry, Index, Item, Match
from fisherhash.index.filters import OPERATORS, Condition, parse_filter, select


def random_codes(count, bits=16, seed=0):
    rng = np.random.default_rng(seed)
    return np.packbits(rng.integers(0, 2, (count, bits), dtype=np.uint8), axis=1)


def entries(keys, codes, **columns):
    """One entry per key; each column holds one value per key."""
    return [
        Entry(key, codes[i], **{name: values[i] for name, values in columns.items()})
        for i, key in enumerate(keys)
    ]


def brute(items, queries, k):
    """Nearest (ids, distances) by (distance, id) among {id: code}."""
    ids = np.array(sorted(items), dtype=np.int64)
    codes = np.array([items[i] for i in ids], dtype=np.uint8).reshape(len(ids), queries.shape[1])
    distances = hamming(queries, codes).astype(np.int64)
    order = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return ids[order], np.take_along_axis(distances, order, axis=1)


def assert_found(index, items, queries, k, **where):
    ids, distances = brute(items, queries, k)
    found = index.search(queries, k, **where)
    assert found.ids.dtype == found.distances.dtype == np.int64
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(found.distances, distances)
    every_id, every_distance = brute(items, queries, len(items))
    radius = int(np.median(every_distance)) if every_distance.size else 0
    near = index.within(queries, radius, **where)
    assert near.to_list() == [
        [(int(i), int(d)) for i, d in zip(*row, strict=True) if d <= radius]
        for row in zip(every_id, every_distance, strict=True)
    ]


def everything(index):
    """All that an index returns, as plain data."""
    return (
        list(index.items()),
        index.ids().tolist(),
        index.files(),
        index.notes("sync"),
        index.notes("skipped"),
        index.info()["fingerprint"],
    )


@pytest.fixture
def index(new_uri):
    with Index.create(new_uri(), bits=16) as index:
        yield index


@pytest.fixture
def filled(index):
    """Forty items with keys, labels and metadata, then ten codes in bulk."""
    numbers = range(40)
    index.add(
        entries(
            [f"k{i}" for i in numbers],
            random_codes(40),
            path=[f"/images/k{i}.jpg" for i in numbers],
            size=numbers,
            mtime_ns=[10**18 + i for i in numbers],
            labels=[["even", "all"] if i % 2 == 0 else "odd" for i in numbers],
            metadata=[{"year": 2000 + i, "exif": {"camera": f"C{i % 3}"}} for i in numbers],
        )
    )
    index.add_codes(random_codes(10, seed=1))
    return index


def test_a_reader_returns_what_was_added(filled):
    expected = dict(enumerate(np.concatenate([random_codes(40), random_codes(10, seed=1)])))
    queries = random_codes(5, seed=2)
    with Index.open(filled.uri) as reader:
        for one in (filled, reader):
            assert len(one) == one.count() == 50
            assert_found(one, expected, queries, 7)
            assert one.get("k3") == Item(
                3,
                expected[3].tobytes(),
                "k3",
                "/images/k3.jpg",
                3,
                10**18 + 3,
                ("odd",),
                {"year": 2003, "exif": {"camera": "C0"}},
            )
            assert one.get("k3").name == "k3"
            assert one.get([45, 3]) == [Item(45, expected[45].tobytes()), one.get("k3")]
            assert one.get(np.int64(45)).name == "id 45"
            assert one.get(["k3", "k1"]) == one.get([3, 1])
            assert one.get([]) == []
            assert one.get_items(["k3", "nobody"]) == [one.get("k3"), None]
            assert one.get_items(np.array([99, 45])) == [None, one.get(45)]
            assert "k3" in one
            assert "nobody" not in one
            assert 3 not in one
            assert one.keys() == [f"k{i}" for i in range(40)]
            assert one.files()["k7"] == (7, 10**18 + 7, 7)
            assert one.ids().tolist() == list(range(50))
            assert [item.id for item in one.items()] == list(range(50))
            assert list(one.items("label=odd")) == one.get(range(1, 40, 2))
            np.testing.assert_array_equal(one.codes([45, 3]), [expected[45], expected[3]])
            assert one.verify() == []
        assert (reader.writable, filled.writable) == (False, True)
    assert Index.examine(filled.uri) == []


def test_results_behave_like_lists(filled):
    found = filled.search(filled.codes([3, 4]), 2)
    assert len(found) == 2
    assert found[0][0] == Match(3, 0)
    assert found[-1] == found[1] == list(map(Match, found.ids[1], found.distances[1]))
    assert found[:1] == [found[0]]
    assert found.to_list() == [list(map(tuple, hits)) for hits in found]
    assert isinstance(found.to_list()[0][0][0], int)
    json.dumps(found.to_list())
    with pytest.raises(IndexError):
        found[2]
    near = filled.within(filled.codes([3, 4]), 0)
    assert (len(near), near[1]) == (2, [Match(4, 0)])
    assert near.to_list() == [[(3, 0)], [(4, 0)]]


@pytest.mark.parametrize("bits", [1, 7, 8, 12, 64, 100, 1024])
def test_every_length_of_code(bits, new_uri):
    codes = random_codes(30, bits)
    with Index.create(new_uri(), bits=bits) as index:
        assert index.add_codes(codes[:20]) == range(20)
        assert index.add_codes(iter([codes[20:25], codes[25:]])) == range(20, 30)
        index.remove(ids=[3, 29])
        expected = {i: code for i, code in enumerate(codes) if i not in (3, 29)}
        assert_found(index, expected, codes[:6], 40)
        assert index.codes([28]).shape == (1, code_bytes(bits))
        if bits % 8:
            with pytest.raises(UsageError, match="bits of every"):
                index.add([Entry("padded", b"\xff" * code_bytes(bits))])


def test_an_empty_index(index):
    found = index.search(random_codes(3), 5)
    assert found.ids.shape == found.distances.shape == (3, 0)
    assert found.to_list() == [[], [], []]
    near = index.within(random_codes(3), 16)
    assert near.offsets.tolist() == [0, 0, 0, 0]
    assert len(near.ids) == 0
    assert index.search(random_codes(0), 5).ids.shape == (0, 0)
    assert list(index.scan()) == list(index.items()) == index.keys() == []
    assert index.files() == index.notes("sync") == {}
    assert index.ids("anything=1").tolist() == []
    assert index.add([]).tolist() == []
    assert index.add_codes(np.zeros((0, 2), dtype=np.uint8)) == range(0)
    assert index.remove([]) == 0
    assert index.codes([]).shape == (0, 2)
    assert index.verify() == []
    index.add([Entry("a", [1, 2])])
    index.remove(["a"])
    assert index.search(random_codes(3), 5).ids.shape == (3, 0)
    assert index.add([Entry("a", b"\x01\x02")]).tolist() == [1]
    assert index.search(random_codes(1), 5).ids.tolist() == [[1]]


def test_an_update_keeps_the_id_and_its_place_in_ties(index):
    """The new code may be stored behind the others; order is still by (distance, id)."""
    zero, far = np.zeros(2, dtype=np.uint8), np.full(2, 255, dtype=np.uint8)
    index.add(
        entries("abcdef", [zero] * 6, labels=["old"] * 6, metadata=[{"n": i} for i in range(6)])
    )
    changes = [Entry("c", zero, labels="new"), Entry("a", zero, labels=())]
    assert index.upsert(changes).tolist() == [2, 0]
    assert index.search([zero], 6).ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert index.search([zero], 2).ids.tolist() == [[0, 1]]
    assert [hit.id for hit in index.within([zero], 0)[0]] == [0, 1, 2, 3, 4, 5]
    assert index.get("c").labels == ("new",)
    assert index.get("a").labels == ()
    assert index.get("c").metadata == {"n": 2}
    assert index.upsert(entries("bgc", [far] * 3)).tolist() == [1, 6, 2]
    assert index.get("c").labels == ("new",)
    assert index.search([far], 3).ids.tolist() == [[1, 2, 6]]
    assert index.upsert([Entry("b", metadata={"m": 1}), Entry("d", far)]).tolist() == [1, 3]
    assert index.get("b").metadata == {"m": 1}
    assert index.get("b").labels == index.get("d").labels == ("old",)
    assert index.search([far], 4).ids.tolist() == [[1, 2, 3, 6]]
    assert index.search([far], 4).ids.tolist() == [[1, 2, 3, 6]]
    assert [ids.tolist() for ids, _ in index.scan()] == [[0, 1, 2, 3, 4, 5, 6]]
    assert index.verify() == []


def test_fields_that_are_none_are_empty_at_first_and_stay_later(index):
    index.add([Entry("a", [0, 0])])
    assert index.get("a") == Item(0, b"\0\0", "a")
    full = Entry("a", [0, 1], "/a.jpg", 5, 7, ["x"], {"y": [1, (2, 3)]})
    index.upsert([full])
    item = Item(0, b"\0\1", "a", "/a.jpg", 5, 7, ("x",), {"y": [1, [2, 3]]})
    assert index.get("a") == item
    index.upsert([Entry("a")])
    assert index.get("a") == item
    index.upsert([Entry("a", labels=(), metadata={})])
    assert index.get("a") == Item(0, b"\0\1", "a", "/a.jpg", 5, 7)


def test_bad_requests_change_nothing(filled):
    code = [0, 0]
    before = everything(filled)
    notes = {"sync": {"never": 1}}
    for message, request in {
        "already has an item with the key 'k1'": lambda: filled.add(
            entries(["new", "k1"], [code] * 2), notes=notes
        ),
        "the key 'x' occurs twice": lambda: filled.add(entries("xx", [code] * 2), notes=notes),
        "the new item 'x' has no code": lambda: filled.upsert(
            [Entry("k1", labels="changed"), Entry("x")], notes=notes
        ),
        "no item with the key 'none'; nothing": lambda: filled.remove(["k1", "none"], notes=notes),
        "no item with the id 99; nothing": lambda: filled.remove(ids=[3, 99], notes=notes),
        "no item with the key 'who'": lambda: filled.get("who"),
        "no item with the id 98": lambda: filled.codes([98]),
        "no item with the id 97": lambda: filled.get([97]),
        "ids must be a list of whole numbers": lambda: filled.remove(ids=[1.5]),
        "must have 2 bytes": lambda: filled.add([Entry("x", [0]), Entry("y", [0, 0])]),
        r"codes of 16 bits must have shape": lambda: filled.add_codes(random_codes(2, 24)),
        "codes must be uint8": lambda: filled.add([Entry("x", [0, 256])]),
        "a key must be a text": lambda: filled.add([Entry(3, code)]),
        "a key must be a text that is not empty": lambda: filled.add([Entry("", code)]),
        "got one text": lambda: filled.remove("k1"),
        "a list of Entry": lambda: filled.add(Entry("x", code)),
        "must be Entry objects": lambda: filled.add(["x"]),
        "cannot be written as JSON": lambda: filled.add([Entry("x", code, metadata={"a": {1}})]),
        "must be a mapping": lambda: filled.add([Entry("x", code, metadata="text")]),
        "a label of 'x' must be a text": lambda: filled.add([Entry("x", code, labels=[1])]),
        "the path of 'x' must be a path": lambda: filled.add([Entry("x", code, path=1)]),
        "the size of 'x' must be a whole": lambda: filled.add([Entry("x", code, size="big")]),
        "too large": lambda: filled.add([Entry("x", code, size=2**70)]),
        "neither text nor the name of a file": lambda: filled.add([Entry("\ud800", code)]),
        "k must be a whole number of at least 1": lambda: filled.search([code], 0),
        "radius must be a whole number": lambda: filled.within([code], -1),
        "block must be a whole number": lambda: filled.scan(0),
        "the note 'a' of the kind 'sync'": lambda: filled.write_notes({"sync": {"a": {1}}}),
        "a note's kind and name": lambda: filled.write_notes({"sync": {"": 1, "b": 2}}),
    }.items():
        with pytest.raises(UsageError, match=message):
            request()
    assert everything(filled) == before
    assert filled.verify() == []
    assert filled.remove(["k1", "none"], ids=[99, 1, 2], missing_ok=True) == 2
    assert filled.count() == 48


def test_a_stream_that_breaks_off_adds_nothing(filled):
    def blocks():
        yield random_codes(100)
        raise RuntimeError("no more")

    before = everything(filled)
    with pytest.raises(RuntimeError, match="no more"):
        filled.add_codes(blocks())
    assert everything(filled) == before
    assert filled.add_codes(random_codes(3)) == range(50, 53)
    assert filled.verify() == []


def test_ids_are_never_reused(index):
    assert index.add(entries("ab", random_codes(2))).tolist() == [0, 1]
    index.remove(["b"])
    assert index.upsert([Entry("b", [0, 0])]).tolist() == [2]
    index.remove(["a", "b"])
    index.close()
    with Index.open(index.uri, write=True) as again:
        assert again.add([Entry("c", [0, 0])]).tolist() == [3]
        assert again.add_codes(random_codes(2)) == range(4, 6)


def test_items_are_removed_by_key_by_id_and_by_both(filled):
    assert filled.remove(["k1", "k1", "k2"], ids=[2, 3, 45]) == 4
    assert filled.count() == 46
    assert filled.get_items([1, 2, 3, 45]) == [None] * 4
    assert "k1" not in filled
    assert filled.ids("id<6").tolist() == [0, 4, 5]
    assert filled.remove(ids=range(0, 100, 5), missing_ok=True) == 9
    assert filled.ids().tolist() == [i for i in range(50) if i % 5 and i not in (1, 2, 3)]
    assert filled.keys() == [f"k{i}" for i in range(40) if i % 5 and i not in (1, 2, 3)]


def test_names_that_are_not_utf_8_and_other_odd_texts(index):
    keys = [os.fsdecode(b"caf\xe9.jpg"), "漢字", "quote'\"", "a\x00b", "line\nend"]
    index.add(
        entries(keys, random_codes(5), path=keys, labels=[[key] for key in keys]),
        notes={"skipped": {key: {"name": key} for key in keys}},
    )
    assert index.keys() == keys
    assert index.notes("skipped") == {key: {"name": key} for key in keys}
    for number, key in enumerate(keys):
        item = index.get(key)
        assert (item.id, item.path, item.labels) == (number, key, (key,))
        for field in ("key", "path", "label"):
            assert index.ids({field: key}).tolist() == [number], (field, key)
    index.write_notes({"skipped": dict.fromkeys(keys[1:])})
    assert index.notes("skipped") == {keys[0]: {"name": keys[0]}}
    assert index.verify() == []


# Notes


def test_notes_are_committed_with_the_change(filled):
    filled.write_notes({"sync": {"folder": {"folder": "/images"}}, "skipped": {"a": 1, "b": [2]}})
    assert filled.notes("sync") == {"folder": {"folder": "/images"}}
    assert filled.notes("nothing") == {}
    filled.add([Entry("x", [0, 0])], notes={"skipped": {"a": None, "c": {"reason": "é"}}})
    filled.upsert([Entry("x", labels="y")], notes={"skipped": {"d": 4}})
    filled.upsert([Entry("x")], notes={"skipped": {"d": 5, "never there": None}})
    filled.remove(["x"], notes={"sync": {"folder": {"folder": "/other"}}})
    filled.remove([], notes={"sync": {"more": True}})
    skipped = {"b": [2], "c": {"reason": "é"}, "d": 5}
    with Index.open(filled.uri) as reader:
        for one in (filled, reader):
            assert one.notes("skipped") == skipped
            assert one.notes("sync") == {"folder": {"folder": "/other"}, "more": True}
            assert one.verify() == []
    filled.close()
    with Index.open(filled.uri, write=True) as again:
        assert again.notes("skipped") == skipped
        again.write_notes({"skipped": dict.fromkeys(skipped), "sync": {}})
        assert again.notes("skipped") == {}
        assert again.count() == 50


# Filters


def test_filters_apply_before_the_top_k(filled):
    codes, queries = random_codes(40), random_codes(4, seed=3)

    def check(where, kept):
        kept = sorted(kept)
        expected = {i: codes[i] for i in kept}
        assert_found(filled, expected, queries, 100, where=where)
        assert_found(filled, expected, queries, 3, where=where)
        assert filled.ids(where).tolist() == kept
        assert filled.count(where) == len(kept)
        assert list(filled.items(where)) == filled.get(kept)

    numbers = range(40)
    check("label=odd", numbers[1::2])
    check({"label": "odd"}, numbers[1::2])
    check("label!=odd", numbers[::2])
    check({"label": ["odd", "all"]}, numbers)
    check(["label=even", "year>=2030"], range(30, 40, 2))
    check({"label": "even", "year >=": 2030}, range(30, 40, 2))
    check([Condition("year", "<", (2003, 2005), typed=True)], range(5))
    check(parse_filter("year=2007"), [7])
    check("year=2007", [7])
    check("year!=2007", [i for i in numbers if i != 7])
    check("exif.camera=C1", numbers[1::3])
    check({"exif.camera": ["C1", "C2"]}, [i for i in numbers if i % 3])
    check("key=k12", [12])
    check("id<3", [0, 1, 2])
    check("size>37", [38, 39])
    check("path=/images/k5.jpg", [5])
    check("year=text", [])
    check({"year": "2007"}, [])
    check({"year": []}, [])
    check({"year !=": []}, numbers)
    for where in ("yaer!=2007", "yaer=2007", {"yaer": 1}, ["label=odd", "yaer<3"]):
        for request in (filled.ids, filled.count, lambda w: filled.search(queries, where=w)):
            with pytest.raises(UsageError, match=r"has the field 'yaer'\. Did you mean 'year'\?"):
                request(where)
        with pytest.raises(UsageError, match="has the field 'yaer'"):
            list(filled.items(where))
    for where in ({}, (), None):
        assert filled.search(queries, 100, where=where).ids.shape[1] == 50
        assert filled.count(where) == len(list(filled.items(where))) == 50
    for message, where in {
        "write FIELD=VALUE": "label",
        "labels have no order": "label>a",
        "size is a number": "size=big",
        "cannot contain": {'a"b': 1},
        "needs a number or a text": {"year <": None},
        "cannot be parsed": {"year=2": 1},
    }.items():
        with pytest.raises(UsageError, match=message):
            filled.search(queries, where=where)
    filled.upsert([Entry("k1", labels=["even"])])
    check("label=even", [1, *numbers[::2]])
    filled.remove(["k0"])
    check("label=even", [1, *numbers[2::2]])
    filled.upsert([Entry("k2", labels=())])
    check("label=", [2])
    check("label!=", [i for i in numbers if i not in (0, 2)])


def test_filters_with_thousands_of_values(index):
    count = 1300
    numbers = range(count)
    index.add(
        entries(
            [f"k{i}" for i in numbers],
            random_codes(count),
            labels=[f"l{i}" for i in numbers],
            metadata=[{"n": i, "a": {"b": f"t{i}"}} for i in numbers],
        )
    )
    some = range(100, 1200)
    for field, values in {
        "key": [f"k{i}" for i in some],
        "label": [f"l{i}" for i in some],
        "id": list(some),
        "n": [*some, None],
        "a.b": [f"t{i}" for i in some],
    }.items():
        np.testing.assert_array_equal(index.ids({field: values}), some)
        assert index.count({f"{field}!=": values}) == count - len(some)
    with pytest.raises(UsageError, match="the most is"):
        index.ids({"id": list(range(10_001))})


def test_filters_know_types(index):
    values = [1, 1.0, "1", True, None, False, [1], "true", 0.5, "b"]
    keys = [str(i) for i in range(10)]
    index.add(entries(keys, random_codes(10), metadata=[{"v": v} for v in values]))
    for where, matching in (
        ("v=1", [0, 1, 2]),
        ({"v": 1}, [0, 1]),
        ({"v": "1"}, [2]),
        ({"v": True}, [3]),
        ("v=true", [3, 7]),
        ({"v": None}, [4]),
        ("v=null", [4]),
        ("v<1", [8]),
        ("v>a", [7, 9]),
        ({"v": [1, "b"]}, [0, 1, 9]),
    ):
        assert index.ids(where).tolist() == matching, where


SCALAR_VALUES = [-3, 0, 1, 1.0, 0.5, 2**62, "", "1", "0.5", "x", "X", "é", "caf\udce9", "true"]
SCALAR_VALUES += ["null", True, False, None]


def test_every_operator_on_every_type(index):
    """The translation of a back-end, against the evaluation of the parsed filter in Python."""
    stored = [*SCALAR_VALUES, [1], {"v": 1}]
    keys = [f"k{i}" for i in range(len(stored))]
    index.add(entries(keys, random_codes(len(keys)), metadata=[{"v": value} for value in stored]))
    index.add([Entry("without", [0, 0])])
    items = list(index.items())
    checked = 0
    for operator in OPERATORS:
        for value in SCALAR_VALUES:
            for typed in (True, False) if isinstance(value, str) else (True,):
                if operator in ("=", "!=") or not (value is None or isinstance(value, bool)):
                    where = [Condition("v", operator, (value,), typed)]
                    expected = [item.id for item in select(items, where, index.uri)]
                    assert index.ids(where).tolist() == expected, where
                    checked += 1
    assert checked > 140


FIELDS = ("a", "b", "a.b", "metadata.key", "metadata.a.b")
OWN = ("label", "key", "path", "id", "size", "mtime_ns")
DATES = [
    "2021",
    "2021-06",
    "2021-06-15",
    "2021-06-15T14:03:22",
    "2021-07-01",
    "20210",
    "2021-06-15x",
]
TEXTS = st.sampled_from(
    ["", "1", "2", "10", "0.5", "true", "null", "x", "X", "é", "caf\udce9", *DATES]
)
NUMBERS = st.sampled_from([-3, 0, 1, 2, 10, 0.5, 2.5, 2**62])
SCALARS = st.one_of(TEXTS, NUMBERS, st.booleans(), st.none())
METADATA = st.dictionaries(
    st.sampled_from(["a", "b", "a.b", "key"]),
    st.one_of(SCALARS, st.lists(NUMBERS, max_size=2), st.dictionaries(st.just("b"), SCALARS)),
)
LABELS = st.lists(TEXTS, max_size=2)
OPTIONAL = st.one_of(st.none(), st.integers(-3, 3))


@st.composite
def conditions(draw):
    field = draw(st.sampled_from(FIELDS + OWN))
    operator = draw(st.sampled_from(["=", "!=", "<", "<=", ">", ">="]))
    ordered = operator not in ("=", "!=")
    typed = draw(st.booleans())
    if field == "label":
        operator, values = ("=" if ordered else operator), TEXTS
    elif field in ("id", "size", "mtime_ns"):
        values = NUMBERS if typed else st.sampled_from(["-1", "0", "1", "2.5"])
    elif typed:
        values = st.one_of(TEXTS, NUMBERS) if ordered else SCALARS
    else:
        values = TEXTS
    return Condition(field, operator, tuple(draw(st.lists(values, max_size=3))), typed)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    items=st.lists(st.tuples(METADATA, LABELS, OPTIONAL, OPTIONAL, TEXTS), min_size=1, max_size=6),
    filters=st.lists(st.lists(conditions(), min_size=1, max_size=2), min_size=10, max_size=10),
)
def test_filters_match_what_their_reference_says(index, items, filters):
    """The translation of a back-end, against the evaluation of the parsed filter in Python."""
    index.remove(ids=index.ids())
    index.add(
        Entry(f"k{i}", [0, 0], path or None, size, time, labels, metadata)
        for i, (metadata, labels, size, time, path) in enumerate(items)
    )
    if len(items) > 1:
        # It has every field, so that the filters are no errors.
        index.add([Entry("all", [0, 0], metadata={"a": {"b": 1}, "b": "x", "key": None})])
    index.add_codes([[0, 0]])
    stored = list(index.items())
    for where in filters:
        assert ids_or_error(lambda w: index.ids(w).tolist(), where) == ids_or_error(
            lambda w: [item.id for item in select(stored, w, index.uri)], where
        ), (where, stored)


def test_a_part_of_a_date_is_compared_with_that_part(index):
    times = ["2020-12-31T23:59:59", "2021-06-01T00:00:00", "2021-06-30", "2021-07-01T08:00:00"]
    others = ["2021", "20210", "2021-06x", 2021]
    keys = [*times, *map(repr, others)]
    values = [{"taken": value} for value in (*times, *others)]
    index.add(entries(keys, random_codes(len(keys)), metadata=values))

    def found(where):
        expected = [item.key for item in select(index.items(), where, index.uri)]
        keys = [item.key for item in index.items(where)]
        assert keys == expected
        return [key for key in keys if key in times]

    assert found("taken=2021-06") == times[1:3]
    assert found("taken=2021") == times[1:]
    assert found("taken!=2021") == times[:1]
    assert found("taken=2021-06-01T00") == times[1:2]
    assert found("taken>=2021-06") == times[1:]
    assert found("taken>2021-06") == times[3:]
    assert found("taken<=2021-06") == times[:3]
    assert found("taken<2021-06") == times[:1]
    assert found("taken<=2020") == times[:1]
    assert found({"taken": ["2020-12", "2021-06", "2021-07-01"]}) == times
    assert found({"taken": [f"{year}" for year in range(1000, 3000)]}) == times
    assert [item.key for item in index.items("taken=20210")] == ["'20210'"]
    assert [item.key for item in index.items("taken=2021-06x")] == ["'2021-06x'"]


def ids_or_error(request, where):
    try:
        return request(where)
    except UsageError as error:
        return str(error)


# Opening, creating, models


def test_the_door(new_uri):
    uri = new_uri()
    assert not Index.exists(uri)
    for request in (Index.open, Index.examine):
        with pytest.raises(UsageError, match="does not exist"):
            request(uri)
    with pytest.raises(UsageError, match="bits must be between 1 and 1024"):
        Index.create(uri, bits=1025)
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        Index.create(uri, bits=8, model={"a": {1}})
    assert not Index.exists(uri)
    with Index.create(uri, bits=8) as index:
        assert index.uri == os.fspath(uri)
        assert repr(index).endswith(f"({index.uri!r}, bits=8)")
    assert Index.exists(uri)
    with pytest.raises(UsageError, match="already"):
        Index.create(uri, bits=8)
    index.close()
    with pytest.raises(UsageError, match="was closed"):
        index.count()
    with pytest.raises(UsageError, match="there is no index of the kind nothing://"):
        Index.open("nothing://host/images")


def test_a_backend_of_another_package_is_found_by_its_entry_point(tmp_path, monkeypatch):
    info = tmp_path / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fisherhash.backends]\ntoy = memory:MemoryIndex\n")
    monkeypatch.syspath_prepend(tmp_path)
    with Index.create("toy://a", bits=8) as index:
        assert index.add_codes([[7]]) == range(1)
    assert Index.exists("toy://a")
    with pytest.raises(UsageError, match=r"memory://… or milvus://… .* or toy://…"):
        Index.open("nothing://a")


def test_an_index_carries_its_model(new_uri):
    uri, files = new_uri(), {"config.json": b"{}", "w.safetensors": bytes(range(256)) * 9, "e": b""}
    with Index.create(uri, bits=8, files=files) as index:
        assert index.model_files() == files
        folder = index.model_folder()
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    with Index.open(uri) as reader:
        assert reader.model_files() == files
        assert reader.model_folder() == folder
        assert reader.verify() == []
    with Index.create(new_uri(), bits=8) as index:
        assert index.model_files() == {}
        assert index.model_folder() is None


def test_a_reader_refuses_every_change(filled):
    before = everything(filled)
    with Index.open(filled.uri) as reader:
        for request in (
            lambda: reader.add([Entry("x", [0, 0])]),
            lambda: reader.upsert([Entry("k1", [0, 0])]),
            lambda: reader.add_codes([[0, 0]]),
            lambda: reader.remove(["k1"]),
            lambda: reader.write_notes({"sync": {"a": 1}}),
        ):
            with pytest.raises(UsageError, match="open for reading only; open it with write=True"):
                request()
        assert everything(reader) == before


def test_a_reader_sees_every_commit(filled):
    queries = random_codes(3, seed=4)
    with Index.open(filled.uri) as reader:
        first = reader.search(queries, 100)
        scanned, items = reader.scan(4), reader.items()
        filled.remove(["k0"])
        assert len(reader) == 49
        assert 0 not in reader.search(queries, 100).ids
        assert sum(len(ids) for ids, _ in scanned) == 50
        assert len(list(items)) == 50
        assert 0 not in reader.search(queries, 100).ids
        assert reader.verify() == []
        filled.add_codes(random_codes(1))
        assert reader.search(queries, 100).ids.shape == (3, 50)
        assert first.ids.shape == (3, 50)


def test_codes_of_another_model_are_refused(new_uri):
    code = [[1, 2]]
    first, second, third = new_uri(), new_uri(), new_uri()
    about = {"builtin": "general"}
    with Index.create(first, bits=16, fingerprint="a" * 64, model=about) as index:
        index.add([Entry("x", code[0])], fingerprint="a" * 64)
        index.add([Entry("y", code[0])])
        for request in (
            lambda: index.add([Entry("z", code[0])], fingerprint="b" * 64),
            lambda: index.upsert([Entry("x", code[0])], fingerprint="b" * 64),
            lambda: index.add_codes(code, fingerprint="b" * 64),
            lambda: index.search(code, fingerprint="b" * 64),
            lambda: index.within(code, 1, fingerprint="b" * 64),
        ):
            with pytest.raises(UsageError, match="codes of model aaaaaaaaaaaa, these are of model"):
                request()
        assert index.search(code, fingerprint="a" * 64).ids.tolist() == [[0, 1]]
    with Index.open(first) as reader:
        assert reader.fingerprint == reader.info()["fingerprint"] == "a" * 64
        assert reader.model == reader.info()["model"] == about
        assert len(reader) == 2
    with Index.create(second, bits=16) as index:
        index.add([Entry("x", code[0])], fingerprint="c" * 64)
        assert index.fingerprint == "c" * 64
    with Index.open(second, write=True) as index:
        assert index.fingerprint == "c" * 64
    with Index.create(third, bits=16) as index:
        index.add([Entry("x", code[0])])
        with pytest.raises(UsageError, match="whose model was not named"):
            index.add([Entry("y", code[0])], fingerprint="c" * 64)
        assert index.search(code, fingerprint="c" * 64).ids.tolist() == [[0]]


def test_info_is_json(filled):
    info = json.loads(json.dumps(filled.info()))
    assert (info["uri"], info["count"], info["keyed"]) == (filled.uri, 50, 40)
    assert (info["bits"], info["fingerprint"], info["model"]) == (16, None, {})


def test_threads_share_one_object(filled, effort):
    queries = random_codes(8, seed=6)
    expected = filled.search(queries, 20).to_list()
    wrong = []

    def read():
        for _ in range(round(50 * effort)):
            if filled.search(queries, 20).to_list() != expected or len(filled.keys()) < 40:
                wrong.append(1)

    def write(number):
        for i in range(10):
            filled.upsert([Entry(f"k{i}")], notes={"thread": {f"{number} {i}": i}})

    threads = [threading.Thread(target=read) for _ in range(4)]
    threads += [threading.Thread(target=write, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(filled.notes("thread")) == 20


def test_what_a_caller_does_to_notes_stays_with_the_caller(filled):
    filled.write_notes({"skipped": {"a": {"size": 1}}})
    filled.notes("skipped")["a"]["size"] = 2
    filled.notes("skipped").clear()
    assert filled.notes("skipped") == {"a": {"size": 1}}


# Random sequences of changes, against a dictionary and brute force

KEYS = st.lists(st.sampled_from([f"k{i}" for i in range(12)]), min_size=1, max_size=6, unique=True)
SEEDS = st.integers(0, 2**32 - 1)
BITS = 10


class ContractMachine(RuleBasedStateMachine):
    """One writer, now and then opened again, and a reader that stays open."""

    new_uri = None

    @initialize()
    def start(self):
        self.index = Index.create(self.new_uri(), bits=BITS)
        self.reader = Index.open(self.index.uri)
        self.stored = {}  # id -> code
        self.named = {}  # key -> (id, label)
        self.noted = {}
        self.next_id = 0

    def teardown(self):
        if hasattr(self, "index"):
            self.index.close()
            self.reader.close()

    def some_codes(self, count, seed):
        """Few different ones, so that ties are common."""
        bits = np.random.default_rng(seed).integers(0, 2, (count, BITS))
        bits[:, 3:] = 0
        return np.packbits(bits.astype(np.uint8), axis=1)

    def assign_ids(self, codes):
        ids = list(range(self.next_id, self.next_id + len(codes)))
        self.next_id += len(codes)
        self.stored |= dict(zip(ids, codes, strict=True))
        return ids

    @rule(keys=KEYS, seed=SEEDS, label=st.sampled_from(["a", "b"]))
    def upsert(self, keys, seed, label):
        codes = self.some_codes(len(keys), seed)
        notes = {"seen": dict.fromkeys(keys[:2], None if seed % 3 == 0 else seed)}
        changes = entries(keys, codes, labels=[label] * len(keys))
        ids = self.index.upsert(changes, notes=notes).tolist()
        self.noted |= notes["seen"]
        fresh = [i for i, key in enumerate(keys) if key not in self.named]
        assigned = dict(zip(fresh, self.assign_ids(codes[fresh]), strict=True))
        for i, key in enumerate(keys):
            id_ = assigned[i] if i in assigned else self.named[key][0]
            self.stored[id_] = codes[i]
            self.named[key] = (id_, label)
            assert ids[i] == id_

    @rule(keys=KEYS)
    def add_or_refuse(self, keys):
        changes = entries(keys, self.some_codes(len(keys), 1), labels=["a"] * len(keys))
        if any(key in self.named for key in keys):
            with pytest.raises(UsageError):
                self.index.add(changes, notes={"seen": {"refused": 1}})
        else:
            ids = self.assign_ids([entry.code for entry in changes])
            assert self.index.add(changes).tolist() == ids
            self.named |= {key: (id_, "a") for key, id_ in zip(keys, ids, strict=True)}

    @rule(count=st.integers(0, 9), seed=SEEDS)
    def add_codes(self, count, seed):
        codes = self.some_codes(count, seed)
        assert list(self.index.add_codes(codes)) == self.assign_ids(codes)

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def remove_ids(self, data):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.stored)), max_size=8))
        assert self.index.remove(ids=ids) == len(set(ids))
        for id_ in set(ids):
            del self.stored[id_]
        self.named = {key: own for key, own in self.named.items() if own[0] in self.stored}

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def remove_keys(self, data):
        keys = data.draw(st.lists(st.sampled_from(sorted(self.named)), unique=True, min_size=1))
        notes = {"seen": {keys[0]: "removed"}}
        assert self.index.remove(keys, notes=notes) == len(keys)
        self.noted |= notes["seen"]
        for key in keys:
            del self.stored[self.named.pop(key)[0]]

    @rule(step=st.integers(1, 5))
    def load(self, step):
        id_, code = self.next_id + step, self.some_codes(1, step)[0]
        self.index.load([Item(id_, code.tobytes())], next_id=id_ + step)
        self.stored[id_], self.next_id = code, id_ + step

    @rule()
    def open_again(self):
        self.index.close()
        self.index = Index.open(self.index.uri, write=True)

    @rule(seed=SEEDS, k=st.integers(1, 30), label=st.sampled_from([None, "a", "b"]))
    def search(self, seed, k, label):
        kept = self.stored
        if label is not None:
            kept = {id_: self.stored[id_] for id_, own in self.named.values() if own == label}
        where = None if label is None else {"label": label}
        for one in (self.index, self.reader):
            assert_found(one, kept, self.some_codes(2, seed), k, where=where)
            assert one.ids(where).tolist() == sorted(kept)

    @invariant()
    def holds_the_same(self):
        if not hasattr(self, "index"):
            return
        ids = sorted(self.stored)
        keys = {id_: key for key, (id_, _) in self.named.items()}
        for one in (self.index, self.reader):
            assert len(one) == len(ids)
            assert {state.id: key for key, state in one.files().items()} == keys
            assert [(item.id, item.key, item.code) for item in one.items()] == [
                (id_, keys.get(id_), self.stored[id_].tobytes()) for id_ in ids
            ]
            scanned = list(one.scan(5))
            assert [id_ for part, _ in scanned for id_ in part.tolist()] == ids
            for part, codes in scanned:
                np.testing.assert_array_equal(codes, [self.stored[id_] for id_ in part.tolist()])
            assert one.notes("seen") == {k: v for k, v in self.noted.items() if v is not None}
        assert self.reader.verify() == []


def run_machine(new_uri, examples, steps):
    class Machine(ContractMachine):
        pass

    Machine.new_uri = staticmethod(new_uri)
    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None),
    )


def test_random_changes(new_uri, effort):
    run_machine(new_uri, round(10 * effort), 15)


@pytest.mark.slow
def test_many_random_changes(new_uri, effort):
    run_machine(new_uri, round(80 * effort), 25)
