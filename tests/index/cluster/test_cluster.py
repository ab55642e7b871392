"""What only the back-end on Ray has: its URI, storage behind a URL, replicas, nodes that end."""

import threading

import numpy as np
import pytest

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index
from fisherhash.index.cluster import actors
from fisherhash.index.cluster import index as cluster_index
from fisherhash.index.cluster.index import local_path, read_ray_uri

pytestmark = pytest.mark.xdist_group("ray")


def some_codes(count, seed=0):
    """Few different ones, so that ties are common."""
    bits = np.random.default_rng(seed).integers(0, 2, (count, 24), dtype=np.uint8)
    bits[:, 6:] = 0
    return np.packbits(bits, axis=1)


@pytest.fixture
def file(tmp_path):
    with Index.create(tmp_path / "a", bits=24) as index:
        index.add([Entry(f"k{i}", c, labels=f"l{i % 3}") for i, c in enumerate(some_codes(60))])
        index.add_codes(some_codes(500, 1))
        index.remove(ids=range(100, 200, 3))
    return tmp_path / "a"


def assert_same(uri, file, where=None):
    queries = some_codes(9, 2)
    with Index.open(uri) as cluster, Index.open(file) as local:
        for k in (1, 7, 1000):
            expected = local.search(queries, k, where=where).to_list()
            assert cluster.search(queries, k, where=where).to_list() == expected
        expected = local.within(queries, 2, where=where).to_list()
        assert cluster.within(queries, 2, where=where).to_list() == expected


def test_the_uri_says_where():
    address = read_ray_uri("ray://head:6379/data/photos.index?shards=8&replicas=2")
    assert (address.rest, address.options["storage"]) == ("head:6379", "/data/photos.index")
    assert (address.options["shards"], address.options["replicas"]) == (8, 2)
    address = read_ray_uri("ray://?storage=s3://bucket/photos&shards=4")
    assert (address.rest, address.options["storage"]) == ("", "s3://bucket/photos")
    for uri, message in {
        "ray://head:6379": "does not say where the index is stored",
        "ray:///data/a?shard=2": "Did you mean 'shards'",
        "ray:///data/a?shards=0": "must be a whole number",
    }.items():
        with pytest.raises(UsageError, match=message):
            Index.open(uri)


@pytest.mark.parametrize("options", ["shards=1", "shards=4&replicas=2", "shards=7"])
def test_any_number_of_shards_returns_the_same(ray_cluster, file, options):
    uri = f"ray://{file}?{options}"
    assert_same(uri, file)
    assert_same(uri, file, "label=l1")


def test_more_shards_than_items(ray_cluster, tmp_path):
    with Index.create(f"ray://{tmp_path}/b?shards=5", bits=24) as index:
        assert index.search(some_codes(2), 3).ids.shape == (2, 0)
        index.add_codes(some_codes(2))
        assert index.search(some_codes(1), 3).ids.shape == (1, 2)
        assert index.info()["cluster"]["shards"] == 5


def test_an_index_behind_a_url(ray_cluster, bucket, file):
    place = f"{bucket.bucket}/photos.index"
    bucket.put(str(file), place)
    uri = f"ray://?storage={place}&shards=3"
    assert Index.exists(uri)
    assert_same(uri, file)
    with pytest.raises(UsageError, match="can only be read"):
        Index.open(uri, write=True)
    with pytest.raises(UsageError, match="does not exist"):
        Index.open(f"ray://?storage={bucket.bucket}/nothing")
    # Another upload is another index.
    with Index.open(file, write=True) as index:
        index.add_codes(some_codes(100, 3))
    bucket.rm(place)
    bucket.put(str(file), place)
    assert_same(uri, file)


def test_a_download_that_changes_meanwhile_is_refused(ray_cluster, bucket, file, monkeypatch):
    place = f"{bucket.bucket}/photos.index"
    bucket.put(str(file), place)
    versions = iter(["one", "another"])
    monkeypatch.setattr(cluster_index, "_version", lambda url: next(versions))
    with pytest.raises(FisherhashError, match="was changed while it was read"):
        local_path(place)


def test_changes_are_searched_and_logits_are_weighted(ray_cluster, file):
    logits = np.random.default_rng(3).standard_normal((5, 24))
    with Index.open(f"ray://{file}?shards=3", write=True) as index, Index.open(file) as local:
        for change in (
            lambda: index.add_codes(some_codes(30, 4)),
            lambda: index.upsert([Entry("k3", some_codes(1, 5)[0]), Entry("new", [1, 2, 3])]),
            lambda: index.remove(["k4"], ids=range(200, 260)),
        ):
            change()
            for where in (None, "label=l1"):
                found = index.search(logits=logits, k=20, where=where)
                assert found.to_list() == local.search(logits=logits, k=20, where=where).to_list()


def test_an_actor_that_was_started_again_gets_its_shard_again(ray_cluster, file):
    import ray

    with Index.open(f"ray://{file}?shards=2") as index, Index.open(file) as local:
        expected = local.search(some_codes(3), 9).to_list()
        assert index.search(some_codes(3), 9).to_list() == expected
        for holder in actors._holders:
            ray.kill(holder, no_restart=False)
        assert index.search(some_codes(3), 9).to_list() == expected


def test_an_error_of_an_actor_is_told(ray_cluster, file, monkeypatch):
    with Index.open(f"ray://{file}?shards=2") as index:
        shards = index._answers
        monkeypatch.setattr(
            index, "_answers", lambda _, where, args: shards("nothing", where, args)
        )
        with pytest.raises(FisherhashError, match=r"shard 1 of 2 failed: .*nothing"):
            index.search(some_codes(1), 3)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_node_that_ends_while_serving(ray_cluster, file, replicas):
    """Every answer during and after the loss is the whole answer."""
    queries = some_codes(9, 2)
    with Index.open(file) as local:
        expected = local.search(queries, 50).to_list()
    answers, errors = [], []
    # Long enough to start its processes while other tests have the cores.
    with Index.open(f"ray://{file}?shards=3&replicas={replicas}&timeout=300") as index:
        for _ in range(replicas):
            index.search(queries, 1)

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
