"""Encoding on a Ray cluster: the same codes as one process makes, from folders, lists and URLs."""

import threading

import pytest

from fisherhash.errors import UsageError
from fisherhash.index import Index
from fisherhash.index.images import encoding
from fisherhash.index.images.creating import sync_index
from fisherhash.index.images.options import SyncOptions

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def source(write_photos, tmp_path_factory):
    root = write_photos(tmp_path_factory.mktemp("ingest") / "photos", {"a": 9, "b": 9})
    (root / "a" / "broken.jpg").write_bytes(b"no image at all")
    (root / "notes.txt").write_text("not an image")
    return root


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    """Codes and labels by key, as one process makes them."""
    place = tmp_path_factory.mktemp("expected") / "a.index"
    sync_index(place, source, workers=0)
    return contents(place)


def contents(uri):
    with Index.open(uri) as index:
        return {item.key: (item.code, item.labels) for item in index.items()}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(encoding, "CHUNK", 2)


def test_a_folder(ray_cluster, source, expected, tmp_path, small_chunks):
    report = sync_index(tmp_path / "a.index", source, cluster="", workers=2)
    assert (len(report.added), report.new_skipped) == (18, 1)
    assert contents(tmp_path / "a.index") == expected
    again = sync_index(tmp_path / "a.index", source, cluster="", workers=2)
    assert (again.added, again.updated, again.unchanged, again.new_skipped) == ([], [], 18, 0)
    assert [skip.name for skip in again.skipped] == ["a/broken.jpg"]


def test_a_url_and_a_list(ray_cluster, bucket, source, expected, tmp_path):
    bucket.put(str(source), f"{bucket.bucket}/photos", recursive=True)
    for unchanged in (0, 18):
        report = sync_index(tmp_path / "a", f"{bucket.bucket}/photos", cluster="", workers=2)
        assert (len(report.added), report.unchanged) == (18 - unchanged, unchanged)
        assert contents(tmp_path / "a") == expected
    with Index.open(tmp_path / "a") as index:
        assert index.get("a/00.png").path == f"{bucket.bucket}/photos/a/00.png"
    lines = [f"{bucket.bucket}/photos/b/01.png", str(source / "a" / "02.png"), "gone.png"]
    (tmp_path / "list.txt").write_text("\n".join([*lines, ""]))
    # The same without a cluster.
    report = sync_index(tmp_path / "b", tmp_path / "list.txt", workers=0)
    assert sorted(report.added) == sorted(lines[:2])
    assert [skip.name for skip in report.skipped] == ["gone.png"]
    report = sync_index(tmp_path / "b", tmp_path / "list.txt", SyncOptions(dry_run=True))
    assert (report.added, report.unchanged) == ([], 2)
    found = contents(tmp_path / "b")
    assert found[lines[0]][0] == expected["b/01.png"][0]
    assert found[lines[1]][0] == expected["a/02.png"][0]


def test_what_is_refused(ray_cluster, tmp_path):
    (tmp_path / "empty").mkdir()
    for source, message in {
        tmp_path / "empty": "holds no images",
        tmp_path / "nothing": "there is no folder",
        "nothing://a/b": "cannot be read",
    }.items():
        with pytest.raises(UsageError, match=message):
            sync_index(tmp_path / "a.index", source, cluster="")
    with pytest.raises(UsageError, match="the cluster has no GPU"):
        encoding.ClusterEncoder(encoding.FileEncoder(lambda: None), "", device="cuda")
    assert not Index.exists(tmp_path / "a.index")


@pytest.mark.slow
def test_a_node_that_ends_while_encoding(ray_cluster, source, expected, tmp_path, monkeypatch):
    """Its chunks go to other workers; every image is there once."""
    place, reports = tmp_path / "a.index", []
    monkeypatch.setattr(encoding, "CHUNK", 1)
    work = threading.Thread(
        target=lambda: reports.append(sync_index(place, source, cluster="", workers=3)), daemon=True
    )
    work.start()
    while not (Index.exists(place) and len(Index.open(place))):
        work.join(0.1)
        assert work.is_alive(), "it was too fast to be interrupted"
    ray_cluster.kill_node(ray_cluster.others[0])
    work.join(120)
    assert not work.is_alive(), "it waits for a node that ended"
    ray_cluster.others.append(ray_cluster.add_node())
    assert len(reports[0].added) == 18
    assert contents(place) == expected
