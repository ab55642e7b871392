"""An index and its hasher, held open: what it finds, for whom, and from how many threads."""

import io
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from fisherhash import codes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index
from fisherhash.index.images import image_index
from fisherhash.index.images.image_index import ImageIndex


@pytest.fixture
def images(tmp_path, album, make_hasher):
    """An index of the album."""
    with ImageIndex.create(tmp_path / "new.index", make_hasher()) as opened:
        assert len(opened.sync(album).added) == 14
        yield opened


def brute_force(images, code, own=None):
    """(distance, id, key) of every item, in order."""
    items = [item for item in images.index.items() if item.key != own]
    rows = np.frombuffer(b"".join(item.code for item in items), np.uint8).reshape(len(items), -1)
    distances = codes.hamming(np.frombuffer(code, np.uint8)[None], rows)[0].tolist()
    return sorted((d, item.id, item.key) for d, item in zip(distances, items, strict=True))


def found(result):
    return [(hit.distance, hit.id, hit.name) for hit in result]


def test_images_and_keys_find_what_brute_force_finds(images, album, make_hasher):
    query = album / "cats" / "01.png"
    code = make_hasher().encode(query)[0].tobytes()
    by_image, by_key = images.search(query, keys=["cats/01.png"])
    assert (by_image.query, by_key.query) == (str(query), "cats/01.png")
    assert by_image.path == by_key.path == str(query)
    assert by_image.code == by_key.code == code
    everything = brute_force(images, code)
    assert found(by_image) == everything[:10]
    assert found(by_key) == brute_force(images, code, own="cats/01.png")[:10]
    assert found(images.search(query, k=100)[0]) == everything
    radius = everything[5][0]
    within = [row for row in everything if row[0] <= radius]
    assert found(images.search(query, radius=radius)[0]) == within
    assert found(images.search(query, radius=radius, k=2)[0]) == within[:2]
    dogs = [row for row in everything if row[2].startswith("dogs/")]
    assert found(images.search(query, where="label=dogs")[0]) == dogs


def test_a_query_may_be_a_path_an_image_bytes_or_an_array(images, album):
    path = album / "dogs" / "02.png"
    opened = Image.open(path)
    want = found(images.search(path)[0])
    assert want[0][0] == 0
    data = path.read_bytes()
    for query in (str(path), opened, data, io.BytesIO(data), np.asarray(opened)):
        (result,) = images.search(query)
        assert found(result) == want
    with path.open("rb") as file:
        assert found(images.search(file)[0]) == want
    with pytest.raises(UsageError, match="cannot read an image from int"):
        images.search(7)
    several = images.search([opened, path])
    assert [result.query for result in several] == ["image 0", str(path)]
    assert [result.path for result in several] == [None, str(path)]


def test_an_image_that_cannot_be_read_is_an_error_or_a_result_of_its_own(images, album, tmp_path):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"x")
    with pytest.raises(FisherhashError, match=r"bad.jpg: not "):
        images.search([bad, album / "top.png"])
    first, second = images.search([bad, album / "top.png"], skip_unreadable=True)
    assert first.error.startswith(f"{bad}: not ")
    assert len(first) == 0
    assert second.error is None
    assert second[0].distance == 0
    (only,) = images.search(bad, skip_unreadable=True)
    assert only.error
    with pytest.raises(UsageError, match=r"there is no file 'nowhere\.jpg'"):
        images.search("nowhere.jpg", skip_unreadable=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "nothing to search for"),
        ({"keys": "zz"}, "zz"),
        ({"keys": "top.png", "k": 0}, "k must be at least 1"),
        ({"keys": "top.png", "radius": 25}, "between 0 and 24 bits"),
        ({"keys": "top.png", "ranking": "real"}, "'real' needs images"),
        ({"keys": "top.png", "ranking": "best"}, "unknown ranking"),
        ({"keys": "top.png", "where": "labl=a"}, "labl"),
    ],
)
def test_bad_queries(images, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        images.search(**options)


def test_add_remove_and_facts(images, album, tmp_path):
    other = tmp_path / "other.png"
    other.write_bytes((album / "top.png").read_bytes())
    assert images.add(other, labels=["guest"], metadata={"year": 2021}).added == [other.as_posix()]
    assert images.remove(["top.png"]) == 1
    assert images.remove(where="label=dogs") == 4
    with pytest.raises(UsageError, match=r"top\.png"):
        images.remove(["top.png"])
    for empty in ([], (), {}):
        with pytest.raises(UsageError, match="an empty filter matches every item"):
            images.remove(where=empty)
    (album / "bad.png").write_bytes(b"x")
    assert len(images.sync(album).added) == 5
    facts = images.info()
    assert (facts["count"], facts["folder"], facts["skipped"]) == (15, str(album), 1)
    assert [file.name for file in images.skipped()] == ["bad.png"]
    assert images.index.verify() == []
    json.dumps(facts)


def test_a_hasher_of_other_codes_is_refused(images, make_hasher):
    with pytest.raises(UsageError, match="were made by another model"):
        ImageIndex(images.index, make_hasher(seed=1))
    ImageIndex(images.index, make_hasher())


def test_the_hasher_is_loaded_once_and_only_to_encode(images, album, monkeypatch):
    loaded = []
    load = image_index.hasher_of

    def loading(*arguments, **options):
        loaded.append(arguments)
        return load(*arguments, **options)

    monkeypatch.setattr(image_index, "hasher_of", loading)
    with ImageIndex.open(images.index.uri) as opened:
        opened.search(keys=["top.png"])
        opened.duplicates(radius=2, code="own")
        assert loaded == []
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(opened.search, [album / "top.png"] * 8))
        assert len(loaded) == 1


def test_an_index_of_codes_can_be_searched_by_key(tmp_path):
    """One without any model, too, and without loading torch."""
    with Index.create(tmp_path / "i", bits=8) as index:
        index.add([Entry("a", [1]), Entry("b", [3]), Entry("c", [255])])
        index.add_codes(np.array([[1]], np.uint8))
    script = """if True:
        import sys
        from fisherhash import ImageIndex
        with ImageIndex.open(sys.argv[1]) as images:
            assert images.search(keys="a")[0][1].name == "b"
            assert len(images.duplicates(radius=1).groups) == 1
        print("torch" in sys.modules)
    """
    words = [sys.executable, "-c", script, tmp_path / "i"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "False\n"
    with ImageIndex.open(tmp_path / "i") as images:
        (result,) = images.search(keys="a")
        assert [(m.name, m.distance, m.path) for m in result] == [
            ("id 3", 0, None),
            ("b", 1, None),
            ("c", 7, None),
        ]
        with pytest.raises(UsageError, match="does not say which model made its codes"):
            images.search(Image.new("RGB", (8, 8)))


def test_threads_find_what_one_finds_while_another_adds(images, write_photos, tmp_path):
    more = write_photos(tmp_path / "more", {"x": 12}, seed=8)
    keys = sorted(images.index.keys())

    def search(key):
        return found(images.search(keys=key, where="label!=x")[0])

    alone = [search(key) for key in keys]
    with ThreadPoolExecutor(8) as pool:
        together = pool.map(search, keys * 8)
        images.add(more, labels=["x"])
        assert list(together) == alone * 8
    assert len(images.index) == 26


def test_an_open_index_sees_what_another_process_commits(images):
    def names(opened):
        return [(hit.name, hit.labels) for hit in opened.search(keys="cats/01.png")[0]]

    with ImageIndex.open(images.index.uri) as reader:
        before = names(reader)
        assert names(reader) == before == names(images)
        (first, _), (second, _) = before[:2]
        images.remove([first])
        images.index.upsert([Entry(second, labels="new")])
        assert names(reader)[0] == (second, ("new",))
        assert first not in dict(names(reader))
