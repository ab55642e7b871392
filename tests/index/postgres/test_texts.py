"""Texts and documents survive PostgreSQL, and sort there as filters say."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fisherhash.index.filters import _order
from fisherhash.index.postgres.sql import loaded_json, loaded_text, stored_json, stored_text

ODD = st.sampled_from("\0\x01\x02\ud7ff\ue000\uffff\U0010ffff\U0001f600a")
NAMES = st.text(st.one_of(ODD, st.characters(exclude_categories=["Cs"])), max_size=6)
FILES = st.binary(max_size=6).map(lambda data: data.decode(errors="surrogateescape"))
TEXTS = st.one_of(NAMES, FILES)
INNER = st.text(st.one_of(ODD, st.sampled_from("\ud800\udbff\udce9\udfff")), max_size=6)


@given(TEXTS)
def test_a_text_comes_back(text):
    stored = stored_text(text)
    assert loaded_text(stored) == text
    assert "\0" not in stored
    stored.encode()


@given(TEXTS, TEXTS)
def test_texts_keep_their_order(left, right):
    stored = stored_text(left).encode(), stored_text(right).encode()
    assert (stored[0] < stored[1]) == (_order(left) < _order(right))
    assert (stored[0] == stored[1]) == (left == right)


@given(INNER, INNER)
def test_texts_in_documents_keep_their_order(left, right):
    left, right = json.loads(json.dumps([left, right]))  # two halves become one character
    both = [json.loads(stored_json(json.dumps(text))) for text in (left, right)]
    points = [text.encode(errors="surrogatepass") for text in (left, right)]
    assert (both[0].encode() < both[1].encode()) == (points[0] < points[1])


@given(
    st.recursive(
        st.one_of(INNER, st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(INNER, inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_a_document_comes_back(value):
    value = json.loads(json.dumps(value))
    stored = stored_json(json.dumps(value))
    assert "\\u0000" not in stored
    again = loaded_json(stored)
    assert again == value
    assert repr(again).replace("-0.0", "0.0") == repr(value).replace("-0.0", "0.0")


@pytest.mark.parametrize("text", ["cat", "漢字", "a'b\"c", "line\nend", "{}", "%s"])
def test_usual_texts_are_stored_unchanged(text):
    assert stored_text(text) == text
    document = json.dumps({text: [text, 1, 2.5, None, True]})
    assert stored_json(document) == document
