"""Servers and copies that are killed: nothing is lost, nothing is there twice, and it goes on."""

import signal
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pytest

from fisherhash.errors import FisherhashError
from fisherhash.index import Entry, Index, copying
from fisherhash.index.copying import copy_index

pytestmark = pytest.mark.slow


def fill(place, count):
    codes = np.random.default_rng(0).integers(0, 256, (count, 6), dtype=np.uint8)
    with Index.create(place, bits=48) as index:
        index.add(Entry(f"k{i}", code, labels="a") for i, code in enumerate(codes[:1000]))
        index.add_codes(codes[1000:])
    return codes


@pytest.fixture
def own_postgres(request):
    PostgresServer = type(request.getfixturevalue("postgres"))

    server = PostgresServer()
    yield server
    server.stop()


def durable(server):
    return f"{server.uri}&index=i{uuid.uuid4().hex}"


@pytest.mark.xdist_group("postgres")
def test_postgres_is_killed_during_a_bulk_load(own_postgres):
    uri = durable(own_postgres)
    codes = np.random.default_rng(0).integers(0, 256, (50_000, 6), dtype=np.uint8)
    killed = threading.Event()

    def blocks():
        yield codes[:20_000]
        own_postgres.kill()
        killed.set()
        yield codes[20_000:]

    with Index.create(uri, bits=48) as index:
        index.add([Entry("before", codes[0])])
        with pytest.raises(FisherhashError, match="Nothing was added or changed"):
            index.add_codes(blocks())
        assert killed.is_set()
        with pytest.raises(FisherhashError, match="Is the server running"):
            index.count()
        own_postgres.start()
        # The same object goes on.
        assert index.count() == 1
        assert index.get("before").code == codes[0].tobytes()
        assert index.add_codes(codes) == range(1, 50_001)
        assert index.count() == 50_001
        assert index.verify() == []


@pytest.mark.xdist_group("postgres")
def test_postgres_is_killed_during_a_copy(own_postgres, tmp_path, monkeypatch):
    fill(tmp_path / "a", 20_000)
    uri = durable(own_postgres)
    monkeypatch.setattr("fisherhash.index.copying.STEP", 1000)
    # Slowly, so that it is still under way when the server is killed.
    add = copying._Sample.add
    monkeypatch.setattr(copying._Sample, "add", lambda *given: (time.sleep(0.1), add(*given)))
    failed = []

    def copy():
        try:
            copy_index(tmp_path / "a", uri)
        except FisherhashError as error:
            failed.append(str(error))

    thread = threading.Thread(target=copy)
    thread.start()
    while thread.is_alive():
        if Index.exists(uri):
            with Index.open(uri) as index:
                if len(index) > 3000:
                    break
        time.sleep(0.01)
    own_postgres.kill()
    thread.join()
    own_postgres.start()
    assert failed, "it was too fast to be interrupted"
    with Index.open(uri) as index:
        before = len(index)
    report = copy_index(tmp_path / "a", uri)
    assert (report.count, report.copied) == (20_000, 20_000 - before)
    with Index.open(tmp_path / "a") as old, Index.open(uri) as new:
        assert list(old.items()) == list(new.items())


COPY = """
import sys, time
from fisherhash.index import copying
copying.STEP = 200
copying._Sample.add = lambda *_: time.sleep(0.05)
copying.copy_index(sys.argv[1], sys.argv[2])
"""


def test_a_copy_is_killed(tmp_path, new_uri, request):
    """By SIGKILL, at some moment, several times."""
    if request.node.callspec.params["new_uri"] in ("memory", "milvus", "ray"):
        pytest.skip("lives in this process")
    fill(tmp_path / "a", 6000)
    target = str(new_uri())
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", COPY, str(tmp_path / "a"), target])
        start = len(Index.open(target)) if Index.exists(target) else 0
        while process.poll() is None:
            if Index.exists(target) and len(Index.open(target)) > start + 500:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    report = copy_index(tmp_path / "a", target)
    assert report.count == 6000
    assert report.copied < 6000
    with Index.open(tmp_path / "a") as old, Index.open(target) as new:
        assert list(old.items()) == list(new.items())
        assert new.verify() == []
