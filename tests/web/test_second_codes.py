"""An index with second codes: the API, the client and the page order by both codes."""

from __future__ import annotations

import re

import pytest
import torch

import fisherhash
from fisherhash import backbones
from fisherhash.errors import UsageError
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.index.images.nearest import FINE_WEIGHT
from fisherhash.model.heads import LinearHead
from fisherhash.model.torch_hasher import TorchHasher

from .conftest import serving


@pytest.fixture(scope="module")
def double(collection, tmp_path_factory):
    """A server of an index whose codes of few bits leave ties."""
    network = backbones.create("tiny", image_size=32)
    torch.manual_seed(0)
    features = torch.randn(64, network.features).abs() * 0.1
    first, second = (LinearHead(network.features, bits) for bits in (6, 40))
    for head in (first, second):
        head.start(features)
    hasher = TorchHasher(network, first, "lsh", fine=second)
    path = tmp_path_factory.mktemp("double") / "double.index"
    with ImageIndex.create(path, hasher) as images:
        images.sync(collection.folder, workers=0)
    with serving(path, hasher, seconds=20.0) as served:
        yield served


def rows(found):
    return [(getattr(one, "item", one).id, one.distance, one.fine, one.combined) for one in found]


def approximately(wanted):
    return [
        (*row[:3], None if row[3] is None else pytest.approx(row[3], abs=1e-6)) for row in wanted
    ]


def test_the_api_returns_what_the_index_does(double, png):
    client, images, key = fisherhash.Client(double.url), double.images, "cats/03.jpg"
    for weight in (FINE_WEIGHT, None, 0, 0.5):
        for radius in (None, 0, 2, 6):
            how = {"k": 9, "radius": radius, "fine_weight": weight}
            by_image, by_key = client.search(png, keys=key, **how)
            same = images.search([png], keys=[key], **how)
            assert rows(by_image) == approximately(rows(same[0]))
            assert rows(by_key) == approximately(rows(same[1]))
    assert rows(client.search(png, k=9)[0]) == approximately(rows(images.search([png], k=9)[0]))
    (by_key,) = images.search(keys=[key], k=9)
    found = double.json("/api/search?key=cats/03.jpg&k=9")
    assert found["fine_weight"] == FINE_WEIGHT
    assert [one["id"] for one in found["results"]] == [match.item.id for match in by_key]
    ties = double.json("/api/search?key=cats/03.jpg&k=9&fine_weight=ties")
    order = [(one["distance"], one["fine"], one["id"]) for one in ties["results"]]
    assert order == sorted(order)
    assert "fine_weight" not in ties
    assert not any("combined" in one for one in ties["results"])
    # a code alone has no second one
    code = double.json(f"/api/search?code={found['code']}&k=9")
    assert not any("fine" in one for one in code["results"])
    real = client.search(png, k=9, ranking="real")[0]
    assert [one.combined for one in real] == sorted(one.combined for one in real)
    assert all(one.combined == pytest.approx(one.distance + one.fine / 6, abs=1e-6) for one in real)


def test_the_page_shows_the_order_of_both_codes(double):
    item = double.images.index.get("cats/03.jpg").id
    (wanted,) = double.images.search(keys=["cats/03.jpg"], k=12)
    page = double.ask(f"/?like={item}&k=12").text
    assert "nearest first by both codes (first + 1/6 second)" in page
    assert re.findall(r"/images/(\d+)/medium", page) == [str(one.item.id) for one in wanted]
    shown = re.findall(r"both codes </span>([\d.]+) <small>.*?</span>(\d+) bits?</small>", page)
    assert shown == [(f"{one.combined:.1f}", str(one.distance)) for one in wanted]
    near = double.ask(f"/?like={item}&radius=1").text
    (inside,) = double.images.search(keys=["cats/03.jpg"], radius=1, k=24)
    assert re.findall(r"/images/(\d+)/medium", near) == [str(one.item.id) for one in inside]
    # the other order stays while sliders are moved and filters are chosen
    ties = double.ask(f"/?like={item}&fine_weight=ties").text
    assert "both codes" not in ties
    assert '<input type="hidden" name="fine_weight" value="ties">' in ties
    assert f"/?like={wanted[0].item.id}&amp;fine_weight=ties" in ties


def test_weights_that_cannot_be(double, server):
    for text in ("x", "-1", "nan", "2000", "1_0"):
        answer = double.ask(f"/api/search?like=1&fine_weight={text}")
        assert answer.status == 400
        assert "ine_weight must be" in answer.json["error"]
    with pytest.raises(UsageError, match="has no second codes"):
        fisherhash.Client(server.url).search(keys="cats/03.jpg", fine_weight=0.5)
    plain = server.json("/api/search?key=cats/03.jpg&fine_weight=ties")
    assert plain["results"] == server.json("/api/search?key=cats/03.jpg")["results"]
    assert not {"fine", "combined"} & plain["results"][0].keys()
    assert "both codes" not in server.ask("/?like=1").text
