"""A writer that is killed at any moment: what it acknowledged is there, and nothing in parts."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fisherhash.codes import hamming
from fisherhash.index import Entry, Index

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the writer is forked")

sys.path.insert(0, str(Path(__file__).parent))
from crash_writer import BITS, FINE_BITS, codes_of, fine_of  # noqa: E402


class Writer:
    """The process in crash_writer.py."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("crash_writer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def run(self, task, after=None):
        """What a child said; it is killed ``after`` some seconds."""
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        said, timer = [], None
        for line in self.process.stdout:
            message = json.loads(line)
            if "pid" in message:
                if after is not None:
                    timer = threading.Timer(after, kill, [message["pid"]])
                    timer.start()
            elif "ended" in message:
                if timer is not None:
                    timer.cancel()
                return said, message["ended"]
            else:
                said.append(message)
        raise AssertionError("the writer ended")

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Model:
    """What must be in the index: versions of keys, and ids of codes added in bulk."""

    def __init__(self, versions=(), bulk=()):
        self.versions, self.bulk = dict(versions), set(bulk)

    def after(self, change):
        new = Model(self.versions, self.bulk)
        kind = change["begin"]
        if kind == "put":
            new.versions |= change["items"]
        elif kind == "remove":
            for key in change["keys"]:
                del new.versions[key]
        elif kind == "bulk":
            new.bulk |= set(change["ids"])
        elif kind == "remove bulk":
            new.bulk -= set(change["ids"])
        else:
            assert kind == "nothing"
        return new

    def __eq__(self, other):
        return (self.versions, self.bulk) == (other.versions, other.bulk)


def read(index):
    """What is in the index; every code, row and search answer must fit the others."""
    assert index.verify() == []
    items = list(index.items())
    if index.fine_bits:
        names = (f"{i.key} {i.size}" if i.key is not None else f"bulk {i.id}" for i in items)
        assert [item.fine for item in items] == [row.tobytes() for row in fine_of(names)]
    items = [item for item in items if item.key is not None]
    found = Model({item.key: item.metadata["version"] for item in items})
    texts = {item.id: f"{item.key} {item.metadata['version']}" for item in items}
    assert index.notes("version") == found.versions
    for item in items:
        assert (item.path, item.size) == (f"/{item.key}", item.metadata["version"])
    ids, codes = [], []
    for some_ids, some_codes in index.scan():
        ids += some_ids.tolist()
        codes.append(some_codes)
    assert len(ids) == len(set(ids)) == len(index)
    found.bulk = set(ids) - set(texts)
    codes = np.concatenate(codes) if codes else np.zeros((0, 6), dtype=np.uint8)
    np.testing.assert_array_equal(codes, codes_of(texts.get(id_, f"bulk {id_}") for id_ in ids))
    queries = codes_of(["one", "two"])
    answer = index.search(queries, 10)
    order = np.argsort(hamming(queries, codes), axis=1, kind="stable")[:, :10]
    np.testing.assert_array_equal(answer.ids, np.array(ids, dtype=np.int64)[order])
    if index.fine_bits:
        fine = fine_of(texts.get(id_, f"bulk {id_}") for id_ in ids)
        second = fine_of(["one", "two"])
        answer = index.search(queries, 10, fine=second)
        apart = 1000 * hamming(queries, codes).astype(int) + hamming(second, fine)
        order = np.argsort(apart, axis=1, kind="stable")[:, :10]
        np.testing.assert_array_equal(answer.ids, np.array(ids, dtype=np.int64)[order])
    return found


def kills(folder, count, seed):
    """Kill writers until ``count`` of them died at work, half by the clock, half at a call."""
    rng = random.Random(seed)
    writer, done, run = Writer(), 0, 0
    reader = None
    try:
        while done < count:
            if run % 5 == 0:
                if reader is not None:
                    reader.close()
                path, model = folder / f"{run}.index", Model()
                Index.create(path, bits=BITS, fine_bits=FINE_BITS if run % 10 else 0).close()
                # A reader that stays keeps SQLite's shared memory from being made anew.
                reader = Index.open(path) if run % 20 >= 10 else None
            run += 1
            point = rng.randint(1, 400) if run % 2 else 0
            after = None if point else rng.uniform(0.005, 0.4)
            task = {"path": str(path), "seed": rng.random(), "operations": 60, "point": point}
            said, status = writer.run(task, after)
            assert status in (0, signal.SIGKILL), (task, said)
            done += status != 0
            # The operation in flight is there wholly or not at all.
            possible = [model]
            for message in said:
                if "begin" in message:
                    possible = [model, model.after(message)]
                else:
                    model = possible[-1]
                    possible = [model]
            with Index.open(path) as index:
                found = read(index)
            assert found in possible, (task, said[-1:])
            model = found
            if reader is not None:
                assert read(reader) == found
    finally:
        if reader is not None:
            reader.close()
        writer.close()
    return run


def test_ten_kills(tmp_path):
    kills(tmp_path, 10, seed=time.time_ns())


def test_a_writer_that_is_killed_while_it_moves_the_notes_of_format_1(tmp_path):
    """At every call that changes something: the notes are where they were, or in the catalogue."""
    fixture = Path(__file__).parents[2] / "fixtures" / "format-1.tar.xz"
    with tarfile.open(fixture) as archive:
        archive.extractall(tmp_path / "fixture", filter="data")
    source, path = tmp_path / "fixture" / "format-1" / "photos.index", tmp_path / "copy"
    with Index.open(source) as index:
        folder, skipped, count = index.notes("sync"), index.notes("skipped"), len(index)
    assert folder
    assert skipped
    writer, formats = Writer(), []
    try:
        for point in range(1, 500, 2):
            shutil.copytree(source, path)
            said, status = writer.run({"path": str(path), "migrate": True, "point": point})
            done = {"done": "add"} in said
            assert status in (0, signal.SIGKILL)
            for write in (False, True):
                with Index.open(path, write=write) as index:
                    formats.append(index.info()["format"])
                    added = "new" in index
                    assert added or not done
                    assert (len(index), formats[-1]) == ((count + 1, 3) if added else (count, 1))
                    assert index.notes("sync") == folder
                    assert index.notes("skipped") == skipped | ({"new": 1} if added else {})
                    assert index.verify() == []
            left = [(path / name).exists() for name in ("folder.json", "skipped.csv")]
            assert left == [not added] * 2
            shutil.rmtree(path)
            if not status:
                break
    finally:
        writer.close()
    assert set(formats) == {1, 3}


@pytest.mark.slow
def test_two_hundred_kills(tmp_path):
    kills(tmp_path, 200, seed=time.time_ns())


KILLED_IN_A_JOURNAL = """
import os, signal, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_size = 1")
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE items SET path = hex(zeroblob(4000))")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("times", [1, 3])
def test_a_reader_that_stays_open_outlives_a_journal_of_a_killed_writer(tmp_path, times):
    path = tmp_path / "a.index"
    with Index.create(path, bits=BITS) as index:
        index.add([Entry(f"{n}", code) for n, code in enumerate(codes_of(map(str, range(300))))])
    with Index.open(path) as reader:
        before = list(reader.items())
        for _ in range(times):
            catalogue = path / "catalogue.sqlite"
            died = subprocess.run([sys.executable, "-c", KILLED_IN_A_JOURNAL, str(catalogue)])
            assert died.returncode == -signal.SIGKILL
            assert (path / "catalogue.sqlite-journal").stat().st_size
            assert list(reader.items()) == before
            assert reader.search(codes_of(["7"]), 1)[0][0].distance == 0
            with Index.open(path, write=True) as writer:
                assert writer.get("7").code == before[7].code
            assert list(reader.items()) == before
