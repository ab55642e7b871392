"""The JSON API and its client."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from PIL import Image

import fisherhash
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Index

from .conftest import EVIL, FORM, write_image

TOKEN = "a token of this test"


def test_info_says_no_path(server, collection):
    facts = server.json("/api/info")
    assert facts["bits"] == 64
    assert facts["count"] == 30
    assert facts["skipped"] == 1
    assert facts["writable"] is False
    assert str(collection.folder) not in json.dumps(facts)


def test_the_client_finds_what_the_index_finds(server, collection, png):
    with fisherhash.Client(server.url) as client:
        by_bytes, by_path, by_key = client.search(
            [png, collection.folder / "dogs" / "17.png"], keys="cats/03.jpg", k=5
        )
        same = server.images.search([png], keys=["cats/03.jpg"], k=5)
        assert [(m.id, m.distance) for m in by_bytes] == [(m.id, m.distance) for m in same[0]]
        assert by_path.hits == by_bytes.hits
        assert [m.key for m in by_key] == [m.name for m in same[1]]
        (few,) = client.search(keys="cats/03.jpg", k=30, where=["label=dogs"], radius=30)
        assert all(one.labels == ("dogs",) and one.distance <= 30 for one in few)
        assert client.get(few[0].id).code == few[0].code
        assert client.info()["count"] == 30
        assert len(list(client.items())) == 30
        assert len(list(client.items("label=dogs"))) == 12
        assert [one["name"] for one in client.skipped()] == ["broken.jpg"]
        groups = client.duplicates(radius=0, code="own")
        assert {"copies/a.png", "copies/b.png"} in [{one.name for one in g} for g in groups]
        found = server.images.duplicates()
        assert [(g.confirmed, g.span, [one.key for one in g]) for g in client.duplicates()] == [
            (group.confirmed, group.span, [hit.name for hit in group]) for group in found.groups
        ]
        image = Image.open(io.BytesIO(server.ask(few[0].image[len(server.url) :]).body))
        assert image.size == (160, 128)


def test_the_client_says_what_went_wrong(server, tmp_path):
    client = fisherhash.Client(server.url)
    with pytest.raises(UsageError, match="no item with the key 'nobody'"):
        client.search(keys="nobody")
    with pytest.raises(UsageError, match="k should be greater"):
        client.search(keys="cats/03.jpg", k=0)
    with pytest.raises(UsageError, match="has the field 'hue'"):
        client.search(keys="cats/03.jpg", where="hue=red")
    with pytest.raises(FisherhashError, match=r"(?i)not an image"):
        client.search(b"no image")
    with pytest.raises(FisherhashError, match="served for reading"):
        client.remove("cats/03.jpg")
    with pytest.raises(FisherhashError, match="does not answer"):
        fisherhash.Client("http://127.0.0.1:9", seconds=2).info()
    with pytest.raises(UsageError, match="is not the address"):
        fisherhash.Client("photos.index")


def test_items_come_in_pages(server):
    first = server.json("/api/items?limit=20")
    rest = server.json(f"/api/items?limit=20&after={first['next']}")
    ids = [one["id"] for one in first["items"] + rest["items"]]
    assert ids == server.images.index.ids().tolist()
    assert rest["next"] is None
    assert first["count"] == 30
    evil = next(one for one in first["items"] + rest["items"] if one["key"] == EVIL)
    assert server.json(f"/api/items/{evil['id']}") == evil


def test_facets(server):
    found = server.json("/api/facets")
    assert dict(found["labels"]) == {"cats": 14, "dogs": 12, "copies": 3, "": 1}
    assert sum(count for _, count in found["months"]) == 14
    assert found["fields"] == {"camera": [["One", 7], ["Two", 7]]}
    some = server.json("/api/facets?where=camera%3DOne")
    assert dict(some["labels"]) == {"cats": 7}


def test_health_and_metrics(server):
    assert server.json("/healthz") == {"status": "ok", "items": 30}
    server.ask("/nowhere")
    text = server.ask("/metrics").text
    assert re.search(r'fisherhash_requests_total\{route="/healthz",status="2xx"\} [1-9]', text)
    assert re.search(r'fisherhash_requests_total\{route="other",status="4xx"\} [1-9]', text)
    assert "fisherhash_items 30" in text
    buckets = re.findall(r'seconds_bucket\{route="/healthz",le="[^"]+"\} (\d+)', text)
    assert list(map(int, buckets)) == sorted(map(int, buckets))


def test_changes_need_a_writable_server_and_the_token(new_collection, serve, tmp_path):
    made = new_collection(tmp_path)
    write_image(tmp_path / "new one.png", 4242)
    with serve(made.index, writable=True, token=TOKEN) as served:
        stranger = fisherhash.Client(served.url)
        for attempt in (
            lambda: stranger.add(tmp_path / "new one.png"),
            lambda: stranger.remove("cats/03.jpg"),
            lambda: fisherhash.Client(served.url, token="wrong token").remove("cats/03.jpg"),
        ):
            with pytest.raises(FisherhashError, match="Changes need the header"):
                attempt()
        client = fisherhash.Client(served.url, token=TOKEN)
        added = client.add(tmp_path / "new one.png", labels=["new", "mine"])
        assert added.labels == ("new", "mine")
        assert (made.folder / "new one.png").read_bytes() == (tmp_path / "new one.png").read_bytes()
        (found,) = client.search(tmp_path / "new one.png", k=1)
        assert (found[0].id, found[0].distance) == (added.id, 0)
        # The same name again is another file, and nothing is overwritten.
        again = client.add(tmp_path / "new one.png")
        assert again.key == "new one-1.png"
        write_image(tmp_path / 'Grüße "1".png', 77)
        assert client.add(tmp_path / 'Grüße "1".png').key == "Grüße %221%22.png"
        assert client.remove(["Grüße %221%22.png", added.key]) == 2
        (made.folder / "Grüße %221%22.png").unlink()
        assert client.info()["count"] == 31
        for nothing in ("", [], ["label=dogs", ""]):
            with pytest.raises(UsageError, match="an empty filter"):
                client.remove(where=nothing)
        assert client.remove("dogs/14.png", where=["label=dogs", "key=dogs/15.png"]) == 2
        assert (made.folder / "new one.png").exists()
        (tmp_path / "bad.png").write_bytes(b"no image")
        with pytest.raises(FisherhashError, match=r"(?i)not an image"):
            client.add(tmp_path / "bad.png")
        (tmp_path / "script.sh").write_bytes((tmp_path / "new one.png").read_bytes())
        with pytest.raises(UsageError, match="not the name of an image"):
            client.add(tmp_path / "script.sh")
        names = sorted(path.name for path in made.folder.iterdir() if path.is_file())
        assert names == [EVIL, "broken.jpg", "new one-1.png", "new one.png"]


def test_another_writer_may_be_open(new_collection, serve, tmp_path):
    made = new_collection(tmp_path)
    with (
        serve(made.index, writable=True, token=TOKEN) as served,
        Index.open(made.index, write=True) as index,
    ):
        assert fisherhash.Client(served.url, token=TOKEN).remove("cats/03.jpg") == 1
        assert "cats/03.jpg" not in index


def test_bulk_codes_without_keys_are_served_too(serve, tmp_path):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (500, 8), dtype=np.uint8)
    with Index.create(tmp_path / "codes.index", bits=64) as index:
        index.add_codes(codes)
    with serve(tmp_path / "codes.index") as served:
        found = served.json("/api/search?like=7&k=3")
        assert found["query"]["key"] is None
        apart = np.bitwise_count(codes ^ codes[7]).sum(axis=1)
        nearest = [i for i in np.argsort(apart, kind="stable") if i != 7][:3]
        assert [one["id"] for one in found["results"]] == [int(i) for i in nearest]
        assert served.ask("/?like=7").status == 200
        assert served.ask("/images/7/medium").status == 404
        for path in ("/map", "/timeline", "/duplicates", "/api/facets"):
            assert served.ask(path).status == 200


def test_uploaded_images_may_be_ranked_by_real_values(server, png):
    client = fisherhash.Client(server.url)
    for ranking in ("real", "hamming"):
        (found,) = client.search(png, k=10, ranking=ranking)
        (same,) = server.images.search([png], k=10, ranking=ranking)
        assert [hit.id for hit in found] == [hit.id for hit in same]
        assert [hit.distance for hit in found] == [hit.distance for hit in same]
        assert found.ranking == same.ranking

    # As curl sends an image: "--data-binary @photo.jpg" calls every body a form.
    plain = server.ask("/api/search?k=2", method="POST", body=png)
    form = server.ask("/api/search?k=2", method="POST", body=png, headers=FORM)
    assert (form.status, form.json["results"]) == (200, plain.json["results"])
    with pytest.raises(UsageError, match="its code only"):
        client.search(keys="cats/03.jpg", ranking="real")
    with pytest.raises(UsageError, match="needs the ranking hamming"):
        client.search(png, ranking="real", radius=3)


def test_an_unknown_parameter_gets_the_nearest_one(server):
    answer = server.ask("/api/search?like=1&radios=3")
    assert answer.status == 400
    assert "'radios'. Did you mean 'radius'?" in answer.json["error"]


@pytest.mark.parametrize("path", ["/api/facets?", "/api/items?", "/api/search?like=1&", "/?"])
def test_filters_past_the_twentieth_are_refused(server, path):
    """The facets dropped them before, and counted more than what matches."""
    filters = ["where=label%3Dcats"] * 20
    assert server.ask(path + "&".join(filters)).status == 200
    answer = server.ask(path + "&".join([*filters, "where=label%3Ddogs"]))
    assert answer.status == 400
