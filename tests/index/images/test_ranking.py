"""Images ranked by real-valued queries and by second codes."""

import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherhash import backbones
from fisherhash.codes import hamming, pack, unpack
from fisherhash.errors import UsageError
from fisherhash.index import Entry, Index
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.nearest import FINE_WEIGHT, nearest
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


def brute_force(images, code, fine, logits=None, own=None, weight=Fraction(1, 6)):
    """(distance, fine distance, id) of every item, in order; without a weight inside ties."""
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
    if weight is None:
        return sorted(rows)
    return sorted(rows, key=lambda row: (round(row[0] + weight * row[1], 9), row[0], row[2]))


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


def test_both_codes_order_results_by_default(images, album, double):
    assert images.index.fine_bits == FINE
    query = album / "cats" / "01.png"
    block = next(double.encode_blocks(str(query), queries=True))
    code, fine, logits = block.codes[0], block.fine[0], block.queries[0]
    (by_image, by_key), ties = (
        images.search(query, keys=["cats/01.png"], k=14, count_ties=True, **weight)
        for weight in ({}, {"fine_weight": None})
    )
    assert found(by_image) == brute_force(images, code, fine)
    assert found(by_key) == brute_force(images, code, fine, own="cats/01.png")
    assert found(ties[0]) == brute_force(images, code, fine, weight=None)
    assert found(ties[1]) == brute_force(images, code, fine, own="cats/01.png", weight=None)
    assert len({match.distance for match in by_image}) < len(by_image)
    keys = images.index.keys()
    both, inside = (images.search(keys=keys, fine_weight=weight) for weight in (1, None))
    assert any(found(one) != found(other) for one, other in zip(both, inside, strict=True))
    # 0 leaves the second code out
    (first,) = images.search(query, k=14, fine_weight=0)
    plain = [(match.distance, match.item.id) for match in first]
    assert plain == sorted(plain)
    # the sum is shown, and grows; where ties alone are ordered there is none
    row, summed = by_image.to_json()["results"][1], [match.combined for match in by_image]
    assert row["combined"] == pytest.approx(row["distance"] + row["fine"] / 6, abs=1e-6)
    assert summed == sorted(summed)
    assert by_image.fine_weight == by_image.to_json()["fine_weight"] == FINE_WEIGHT
    assert ties[0].to_json()["results"][1].keys() - {"combined"} == row.keys() - {"combined"}
    assert "combined" not in ties[0].to_json()["results"][1]
    assert "fine_weight" not in ties[0].to_json()
    for real in (
        images.search(query, k=14, ranking="real", count_ties=True),
        images.search(query, k=14, ranking="real", count_ties=True, fine_weight=None),
    ):
        weight = None if real[0].fine_weight is None else Fraction(1, 6)
        assert found(real[0]) == brute_force(images, code, fine, logits, weight=weight)
        assert real[0].ranking == real[0].to_json()["ranking"] == "real"
        # all are shown, so no more are tied than there are matches
        assert sum(by_image.ties.values()) == sum(real[0].ties.values()) == 14
        assert by_image.tied() == ties[0].tied() == real[0].tied() == []
    cats = images.search(query, k=14, where="label=cats", ranking="real")[0]
    assert found(cats) == [
        row
        for row in brute_force(images, code, fine, logits)
        if "cats" in images.index.get(row[2]).labels
    ]
    for bad in (-1, 2000, float("nan")):
        with pytest.raises(UsageError, match="fine_weight must be from 0 to 1024"):
            images.search(query, fine_weight=bad)


@pytest.fixture(scope="module", params=[(3, 4), (10, 24), (48, 128)], ids=str)
def clustered(request, tmp_path_factory):
    """An index without images, whose codes crowd around three centres; and what it holds."""
    (bits, fine_bits), count = request.param, 300
    rng = np.random.default_rng(bits)
    centres = 2 * rng.choice([-1, 1], (3, bits))[rng.integers(0, 3, count)]
    logits = rng.standard_normal((count, bits)) + centres
    codes, fine = pack(logits), pack(rng.standard_normal((count, fine_bits)))
    path = tmp_path_factory.mktemp("clustered") / "i"
    with Index.create(path, bits=bits, fine_bits=fine_bits) as index:
        index.add(
            Entry(str(i), codes[i], labels="odd" if i % 2 else "even", fine=fine[i])
            for i in range(count)
        )
        yield index, logits, codes, fine


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_order_equals_brute_force(data, clustered):
    index, logits, codes, fine = clustered
    count, bits = logits.shape
    k = data.draw(st.sampled_from([None, 1, 4, 25, 400]))
    radius = data.draw(st.sampled_from([None, 0, 1, bits // 4, bits // 2, bits]))
    real = radius is None and data.draw(st.booleans())
    odd = data.draw(st.booleans())
    weight = data.draw(st.sampled_from([FINE_WEIGHT, None, 0.0, 0.2, 0.25, 2.0]))
    if radius is None:
        k = k or 10
    queries = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3))
    got = nearest(
        *(index, codes[queries], k),
        radius=radius,
        where="label=odd" if odd else None,
        fine=fine[queries],
        logits=logits[queries] if real else None,
        **({} if weight == FINE_WEIGHT else {"fine_weight": weight}),
    )
    for q, near in zip(queries, got, strict=True):
        apart = unpack(codes, bits) != unpack(codes[q : q + 1], bits)
        sizes = np.abs(logits[q]) if real else np.ones(bits)
        distances = ((apart * sizes).sum(axis=1) / sizes.mean()).tolist()
        fines = hamming(fine[q : q + 1], fine)[0].tolist()
        rows = [
            (distances[i], fines[i], i)
            for i in range(count)
            if (not odd or i % 2) and (radius is None or distances[i] <= radius)
        ]
        if weight is None:
            rows.sort(key=lambda row: (round(row[0], 6), *row[1:]))
        else:
            rows.sort(
                key=lambda row: (round(row[0] + weight * row[1], 6), round(row[0], 6), row[2])
            )
        rows = rows[:k]
        assert [one.id for one in near] == [row[2] for row in rows]
        assert [one.fine for one in near] == [row[1] for row in rows]
        apart = [one.distance for one in near]
        np.testing.assert_allclose(apart, [row[0] for row in rows], atol=1e-6)
        assert [one.combined for one in near] == [
            pytest.approx(row[0] + weight * row[1], abs=1e-6) if weight else None for row in rows
        ]


def test_a_radius_counts_bits_of_the_first_code(images, album, double):
    query = album / "cats" / "01.png"
    block = next(double.encode_blocks(str(query)))
    everything = brute_force(images, block.codes[0], block.fine[0])
    for radius in range(BITS + 1):
        inside = [row for row in everything if row[0] <= radius]
        assert found(images.search(query, radius=radius)[0]) == inside
        assert found(images.search(query, radius=radius, k=3)[0]) == inside[:3]
        by_key = images.search(keys="cats/01.png", radius=radius, k=2)[0]
        own = images.index.get("cats/01.png").id
        assert found(by_key) == [row for row in inside if row[2] != own][:2]
    assert len(inside) == 14


def test_how_many_are_tied_is_said(images, album):
    query = album / "cats" / "01.png"
    everything = images.search(query, k=14)[0]
    nearest = everything[0].distance
    expected = sum(match.distance == nearest for match in everything)
    (one,) = images.search(query, k=1, count_ties=True)
    assert one.ties == {nearest: expected}
    assert one.to_json()["ties"] == [{"distance": nearest, "items": expected}]
    # far ones may come before near ones
    (some,) = images.search(query, k=6, count_ties=True)
    distances = [match.distance for match in everything]
    assert some.ties == {match.distance: distances.count(match.distance) for match in some}
    (said,) = some.tied()
    assert said.startswith(f"{sum(some.ties.values())} images are at distance 0, ")
    assert said.endswith("; both codes decide which 6 of them are shown")
    many = SearchResult("q", None, b"", [one[0]], ties={0: 697}, fine=b"x")
    assert many.tied() == ["697 images are at distance 0; the first by the second code is shown"]
    many = SearchResult("q", None, b"", [one[0]], ties={0: 697}, fine=b"x", fine_weight=0)
    assert many.tied() == ["697 images are at distance 0; the first is shown"]
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
        assert one[0].combined is one.fine_weight is None
        assert one.to_json().keys() == {"query", "code", "ranking", "results"}
        with pytest.raises(UsageError, match="has no second codes, so they cannot have a weight"):
            images.search(album / "cats" / "01.png", fine_weight=0.5)
        assert found(images.search(one.path, k=14, fine_weight=None)[0]) == found(one)
    with pytest.raises(UsageError, match="cannot hold second codes"):
        Index.create(tmp_path / "other.index", bits=8, fine_bits=8)
