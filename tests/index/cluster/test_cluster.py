"""What only the back-end on Ray has: its URI, storage behind a URL, replicas, nodes that end."""

import threading

import numpy as np
import pytest

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index
from fisherhash.index.cluster import storage
from fisherhash.index.cluster.storage import read_cluster_place

pytestmark = pytest.mark.xdist_group("ray")


def some_codes(count, seed=0):
    """Few different ones, so that ties are common."""
    bits = np.random.default_rng(seed).integers(0, 2, (count, 24), dtype=np.uint8)
    bits[:, 6:] = 0
    return np.packbits(bits, axis=1)


@pytest.fixture
def folder(tmp_path):
    with Index.create(tmp_path / "a", bits=24) as index:
        index.add([Entry(f"k{i}", c, labels=f"l{i % 3}") for i, c in enumerate(some_codes(60))])
        index.add_codes(some_codes(500, 1))
        index.remove(ids=range(100, 200, 3))
    return tmp_path / "a"


def assert_same(uri, folder, where=None):
    queries = some_codes(9, 2)
    with Index.open(uri) as cluster, Index.open(folder) as local:
        for k in (1, 7, 1000):
            expected = local.search(queries, k, where=where).to_list()
            assert cluster.search(queries, k, where=where).to_list() == expected
        expected = local.within(queries, 2, where=where).to_list()
        assert cluster.within(queries, 2, where=where).to_list() == expected


def test_the_uri_says_where():
    place = read_cluster_place("ray://head:6379/data/photos.index?shards=8&replicas=2")
    assert (place.address, place.storage) == ("head:6379", "/data/photos.index")
    assert (place.shards, place.replicas) == (8, 2)
    place = read_cluster_place("ray://?storage=s3://bucket/photos&shards=4")
    assert (place.address, place.storage, place.is_remote) == ("", "s3://bucket/photos", True)
    for uri, message in {
        "ray://head:6379": "does not say where the index is stored",
        "ray:///data/a?shard=2": "Did you mean 'shards'",
        "ray:///data/a?shards=0": "must be a whole number",
    }.items():
        with pytest.raises(UsageError, match=message):
            Index.open(uri)


@pytest.mark.parametrize("options", ["shards=1", "shards=4&replicas=2", "shards=7"])
def test_any_number_of_shards_returns_the_same(ray_cluster, folder, options):
    uri = f"ray://{folder}?{options}"
    assert_same(uri, folder)
    assert_same(uri, folder, "label=l1")


def test_more_shards_than_items(ray_cluster, tmp_path):
    with Index.create(f"ray://{tmp_path}/b?shards=5", bits=24) as index:
        assert index.search(some_codes(2), 3).ids.shape == (2, 0)
        index.add_codes(some_codes(2))
        assert index.search(some_codes(1), 3).ids.shape == (1, 2)
        index.build()
        assert index.info()["cluster"]["shards"] == 5


def test_an_index_behind_a_url(ray_cluster, bucket, folder):
    place = f"{bucket.bucket}/photos.index"
    bucket.put(str(folder), place, recursive=True)
    uri = f"ray://?storage={place}&shards=3"
    assert Index.exists(uri)
    assert_same(uri, folder)
    with pytest.raises(UsageError, match="can only be read"):
        Index.open(uri, write=True)
    with pytest.raises(UsageError, match="does not exist"):
        Index.open(f"ray://?storage={bucket.bucket}/nothing")
    # Another upload is another index.
    with Index.open(folder, write=True) as index:
        index.add_codes(some_codes(100, 3))
    bucket.rm(place, recursive=True)
    bucket.put(str(folder), place, recursive=True)
    assert_same(uri, folder)


def test_a_download_that_changes_meanwhile_is_refused(ray_cluster, bucket, folder, monkeypatch):
    place = f"{bucket.bucket}/photos.index"
    bucket.put(str(folder), place, recursive=True)
    real, calls = storage.stored_version, []

    def version(url):
        calls.append(url)
        return real(url) if len(calls) == 1 else "another"

    monkeypatch.setattr(storage, "stored_version", version)
    with pytest.raises(FisherhashError, match="was changed while it was read"):
        storage.downloaded(place, storage.stored_version(place))


def test_an_error_of_a_node_is_told(ray_cluster, folder):
    with Index.open(f"ray://{folder}?shards=2") as index:
        folder.rename(folder.with_name("elsewhere"))
        with pytest.raises(FisherhashError, match=r"was deleted|does not exist|is missing"):
            index.search(some_codes(1), 3)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_node_that_ends_while_serving(ray_cluster, folder, replicas):
    """Every answer during and after the loss is the whole answer."""
    queries = some_codes(9, 2)
    with Index.open(folder) as local:
        expected = local.search(queries, 50).to_list()
    answers, errors = [], []
    # Long enough to start its processes while other tests have the cores.
    with Index.open(f"ray://{folder}?shards=3&replicas={replicas}&timeout=300") as index:
        index.build()

        def serve():
            for _ in range(40):
                try:
                    answers.append(index.search(queries, 50).to_list())
                except FisherhashError as error:
                    errors.append(str(error))

        thread = threading.Thread(target=serve)
        thread.start()
        while len(answers) < 5:
            thread.join(0.05)
        ray_cluster.kill_node(ray_cluster.others[0])
        thread.join()
        ray_cluster.others.append(ray_cluster.add_node())
        answers.append(index.search(queries, 50).to_list())
    assert all(answer == expected for answer in answers)
    assert all("no complete answer" in error for error in errors)
    assert len(answers) > 6
