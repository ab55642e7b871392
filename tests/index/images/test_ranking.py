"""Images ranked by real-valued queries and by second codes."""

import json

import numpy as np
import pytest
import torch

from fisherhash import backbones
from fisherhash.codes import hamming, unpack
from fisherhash.errors import UsageError
from fisherhash.index import Index
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.results import SearchResult
from fisherhash.model.hasher import Hasher
from fisherhash.model.heads import LinearHead
from fisherhash.model.torch_hasher import TorchHasher

BITS, FINE = 6, 40


@pytest.fixture(scope="module")
def double():
    """A hasher of few bits, which leaves ties, with a second code."""
    network = backbones.create("tiny", image_size=32)
    torch.manual_seed(0)
    features = torch.randn(64, network.features).abs() * 0.1
    heads = [LinearHead(network.features, bits) for bits in (BITS, FINE)]
    for head in heads:
        head.start(features)
    return TorchHasher(network, heads[0], "lsh", fine=heads[1])


@pytest.fixture
def images(new_uri, album, double):
    with ImageIndex.create(new_uri, double) as opened:
        assert len(opened.sync(album).added) == 14
        yield opened


def brute_force(images, code, fine, logits=None, own=None):
    """(distance, fine distance, id) of every item, in order."""
    rows = []
    for item in images.index.items():
        if item.key == own:
            continue
        apart = unpack(np.frombuffer(item.code, np.uint8)[None], BITS)[0] != unpack(
            code[None], BITS
        )
        weights = np.ones(BITS) if logits is None else np.abs(logits)
        distance = float((apart[0] * weights).sum() / weights.mean())
        second = hamming(fine[None], np.frombuffer(item.fine, np.uint8)[None])[0, 0]
        rows.append((round(distance, 5), int(second), item.id))
    return sorted(rows)


def found(result):
    return [(round(match.distance, 5), match.fine, match.item.id) for match in result]


def test_a_hasher_makes_both_codes_in_one_pass(double, album, tmp_path):
    paths = sorted(str(path) for path in album.rglob("*.png"))
    one = double.encode_collection(_collection(paths), queries=True)
    assert one.codes.shape == (len(paths), 1)
    assert one.fine.shape == (len(paths), 5)
    np.testing.assert_array_equal(one.codes, double.encode(paths))
    rows = next(double.row_blocks(paths)).values
    np.testing.assert_array_equal(unpack(one.fine, FINE), double.fine_of_rows(rows) > 0)
    double.save(tmp_path / "model")
    for runtime in ("torch", "auto"):
        again = Hasher.load(tmp_path / "model", runtime=runtime)
        assert (again.fine_bits, again.fingerprint()) == (FINE, double.fingerprint())
        block = again.encode_collection(_collection(paths), queries=True)
        np.testing.assert_array_equal(block.codes, one.codes)
        np.testing.assert_allclose(block.queries, one.queries, atol=1e-4)
        assert (unpack(block.fine, FINE) != unpack(one.fine, FINE)).mean() < 0.01
        assert again.truncated(4).encode_collection(_collection(paths)).fine.shape == one.fine.shape
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["fine_bits"] == FINE
    assert "40 bits, 5 bytes per image" in (tmp_path / "model" / "README.md").read_text()
    plain = TorchHasher(double.backbone, double.head, "lsh")
    assert plain.fingerprint() != double.fingerprint()
    assert (plain.fine_bits, plain.encode_collection(_collection(paths)).fine) == (0, None)


def _collection(paths):
    from fisherhash.data.sources import open_paths

    return open_paths(paths)


def test_second_codes_order_what_is_tied(images, album, double):
    assert images.index.fine_bits == FINE
    query = album / "cats" / "01.png"
    block = next(double.encode_blocks(str(query), queries=True))
    code, fine, logits = block.codes[0], block.fine[0], block.queries[0]
    by_image, by_key = images.search(query, keys=["cats/01.png"], k=14, count_ties=True)
    assert found(by_image) == brute_force(images, code, fine)
    assert len({match.distance for match in by_image}) < len(by_image)
    assert found(by_key) == brute_force(images, code, fine, own="cats/01.png")
    assert by_image.to_json()["results"][0]["fine"] == 0
    (real,) = images.search(query, k=14, ranking="real", count_ties=True)
    assert found(real) == brute_force(images, code, fine, logits)
    assert real.ranking == real.to_json()["ranking"] == "real"
    cats = images.search(query, k=14, where="label=cats", ranking="real")[0]
    assert found(cats) == [
        row
        for row in brute_force(images, code, fine, logits)
        if "cats" in images.index.get(row[2]).labels
    ]
    # all are shown, so no more are tied than there are matches
    assert sum(by_image.ties.values()) == sum(real.ties.values()) == 14
    assert by_image.tied() == real.tied() == []


def test_how_many_are_tied_is_said(images, album):
    query = album / "cats" / "01.png"
    everything = images.search(query, k=14)[0]
    nearest = everything[0].distance
    expected = sum(match.distance == nearest for match in everything)
    (one,) = images.search(query, k=1, count_ties=True)
    assert one.ties == {nearest: expected}
    assert one.to_json()["ties"] == [{"distance": nearest, "items": expected}]
    many = SearchResult("q", None, b"", [one[0]], ties={0: 697}, fine=b"x")
    assert many.tied() == ["697 images are at distance 0; the first 1 by the second code are shown"]
    assert SearchResult("q", None, b"", [one[0]], ties={0: 1}).tied() == []


def test_the_card_decides_the_default(new_uri, album, double):
    better = TorchHasher(double.backbone, double.head, "lsh", fine=double.fine)
    better.details = {"ranking": {"default": "real"}}
    query = album / "dogs" / "02.png"
    with ImageIndex.create(new_uri, better) as images:
        images.sync(album)
        assert images.search(query)[0].ranking == "real"
        assert images.search(query, ranking="hamming")[0].ranking == "hamming"
        assert images.search(query, radius=2)[0].ranking == "hamming"
        both = images.search(query, keys=["dogs/02.png"])
        assert [one.ranking for one in both] == ["real", "hamming"]
        real = images.search(query, ranking="real", k=14)[0]
        assert found(images.search(query, k=14)[0]) == found(real)
        for bad in ({"keys": "dogs/02.png"}, {"radius": 3}):
            with pytest.raises(UsageError, match="'real' needs images"):
                images.search(query, ranking="real", **bad)
        with pytest.raises(UsageError, match="unknown ranking"):
            images.search(query, ranking="best")
    double.details = {"ranking": "spoiled"}
    assert double.ranking == "hamming"
    double.details = {}


def test_vectors_are_ranked_the_same_way(images, album, double):
    path = str(album / "cats" / "02.png")
    rows = next(double.row_blocks([path])).values
    for ranking in ("hamming", "real"):
        by_image = images.search(path, ranking=ranking, k=14)[0]
        by_vector = images.search(features=rows, ranking=ranking, k=14)[0]
        assert found(by_vector) == found(by_image)


def test_a_back_end_without_second_codes_stores_the_first(tmp_path, album, double, monkeypatch):
    from fisherhash.index.local import backend

    monkeypatch.setattr(backend, "can_hold_fine", False)
    with ImageIndex.create(tmp_path / "plain.index", double) as images:
        images.sync(album)
        assert images.index.fine_bits == 0
        (one,) = images.search(album / "cats" / "01.png", k=14)
        assert [m.item.id for m in one] == [
            m.item.id for m in sorted(one, key=lambda m: (m.distance, m.item.id))
        ]
        assert one[0].fine is None
    with pytest.raises(UsageError, match="cannot hold second codes"):
        Index.create(tmp_path / "other.index", bits=8, fine_bits=8)
