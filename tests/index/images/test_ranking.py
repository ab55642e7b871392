"""Images ranked by real-valued queries, and items at the same distance."""

import numpy as np
import pytest

from fisherhash.codes import unpack
from fisherhash.errors import UsageError
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.results import SearchResult

BITS = 6


@pytest.fixture
def hasher(make_hasher):
    """A hasher of few bits, which leaves ties."""
    return make_hasher(bits=BITS)


@pytest.fixture
def images(tmp_path, album, hasher):
    with ImageIndex.create(tmp_path / "i", hasher) as opened:
        assert len(opened.sync(album).added) == 14
        yield opened


def brute_force(images, code, weights):
    """(distance, id) of every item, in order."""
    rows = []
    for item in images.index.items():
        own = np.frombuffer(item.code, np.uint8)[None]
        apart = unpack(own, BITS)[0] != unpack(code[None], BITS)[0]
        rows.append((round(float((apart * weights).sum() / weights.mean()), 5), item.id))
    return sorted(rows)


def found(result):
    return [(round(hit.distance, 5), hit.id) for hit in result]


def test_real_valued_queries_weigh_the_bits(images, album, hasher):
    query = album / "cats" / "01.png"
    block = next(iter(hasher.encode_blocks([str(query)], queries=True)))
    plain = brute_force(images, block.codes[0], np.ones(BITS))
    real = brute_force(images, block.codes[0], np.abs(block.queries[0]))
    assert plain != real
    for ranking, expected in (("hamming", plain), ("real", real)):
        by_image = images.search(query, ranking=ranking, k=14, count_ties=True)[0]
        assert found(by_image) == expected
        assert by_image.ranking == by_image.to_json()["ranking"] == ranking
        # All are shown, so no more are tied than there are hits.
        assert (sum(by_image.ties.values()), by_image.tied()) == (14, [])
        rows = next(hasher.row_blocks([str(query)])).values
        assert found(images.search(features=rows, ranking=ranking, k=14)[0]) == expected
    cats = {item.id for item in images.index.items("label=cats")}
    (some,) = images.search(query, k=14, where="label=cats", ranking="real")
    assert found(some) == [row for row in real if row[1] in cats]


def test_how_many_are_tied_is_said(images, album):
    query = album / "cats" / "01.png"
    everything = [hit.distance for hit in images.search(query, k=14)[0]]
    (one,) = images.search(query, k=1, count_ties=True)
    assert one.ties == {everything[0]: everything.count(everything[0])}
    assert one.to_json()["ties"] == [{"distance": d, "items": n} for d, n in one.ties.items()]
    (some,) = images.search(query, k=6, count_ties=True)
    assert some.ties == {hit.distance: everything.count(hit.distance) for hit in some}
    many = SearchResult("q", hits=[one[0]], ties={one[0].distance: 697})
    assert many.tied() == [f"697 images are at distance {one[0].distance}; the first is shown"]
    assert SearchResult("q", hits=[one[0]], ties={one[0].distance: 1}).tied() == []


def test_real_values_need_images_and_no_radius(images, album):
    query = album / "dogs" / "02.png"
    assert images.search(query)[0].ranking == "hamming"
    both = images.search([query, query], ranking="real")
    assert [one.ranking for one in both] == ["real", "real"]
    for bad in ({"keys": "dogs/02.png"}, {"radius": 3}):
        with pytest.raises(UsageError, match="'real' needs images"):
            images.search(query, ranking="real", **bad)
