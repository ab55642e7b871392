"""A writer that is killed at any moment: what it acknowledged is there, and nothing in parts."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fisherhash.codes import hamming
from fisherhash.index import Entry, Index

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the writer is forked")

sys.path.insert(0, str(Path(__file__).parent))
from crash_writer import BITS, codes_of  # noqa: E402
from faults import build_library, run_script, start_script  # noqa: E402


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build_library(tmp_path_factory.mktemp("faults"))


class Writer:
    """The process in crash_writer.py."""

    def __init__(self, library):
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("crash_writer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "LD_PRELOAD": str(library)},
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
    items = [item for item in index.items() if item.key is not None]
    found = Model({item.key: item.metadata["version"] for item in items})
    texts = {item.id: f"{item.key} {item.metadata['version']}" for item in items}
    assert index.notes("version") == found.versions
    for item in items:
        assert (item.path, item.size) == (f"/{item.key}", item.metadata["version"])
    parts = [(np.zeros(0, np.int64), np.zeros((0, 6), np.uint8)), *index.scan()]
    ids, codes = (np.concatenate(part) for part in zip(*parts, strict=True))
    assert len(np.unique(ids)) == len(ids) == len(index)
    found.bulk = set(ids.tolist()) - set(texts)
    expected = codes_of(texts.get(id_, f"bulk {id_}") for id_ in ids.tolist())
    np.testing.assert_array_equal(codes, expected)
    queries = codes_of(["one", "two"])
    order = np.argsort(hamming(queries, codes), axis=1, kind="stable")[:, :10]
    np.testing.assert_array_equal(index.search(queries, 10).ids, ids[order])
    return found


def kills(folder, library, count, seed):
    """Kill writers until ``count`` of them died at work: by the clock, or at a system call."""
    rng = random.Random(seed)
    writer, done, run, reader = Writer(library), 0, 0, None
    try:
        while done < count:
            if run % 5 == 0:
                if reader is not None:
                    reader.close()
                path, model = folder / f"{run}.index", Model()
                Index.create(path, bits=BITS).close()
                # A reader that stays keeps SQLite's shared memory from being made anew.
                reader = Index.open(path) if run % 10 else None
            run += 1
            task = {"path": str(path), "seed": rng.random(), "operations": 60, "call": None}
            after = rng.uniform(0.005, 0.4)
            if run % 3:
                call = rng.choice(["write", "write", "sync", "sync", "truncate"])
                most = {"write": 400, "sync": 40, "truncate": 4}[call]
                task, after = task | {"call": call, "skip": rng.randrange(most)}, None
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


def test_ten_kills(tmp_path, library):
    kills(tmp_path, library, 10, seed=time.time_ns())


@pytest.mark.slow
def test_two_hundred_kills(tmp_path, library):
    kills(tmp_path, library, 200, seed=time.time_ns())


# The writer is killed between the flush of its commit and its publication in shared memory

VERBS = {
    "add": "index.add([Entry('second', codes(1, 2)[0])])",
    "upsert": "index.upsert([Entry('first', codes(1, 2)[0], labels='new')])",
    "add_codes": "index.add_codes(codes(5000, 2))",
    "load": "index.load([Item(9000, codes(1, 2)[0].tobytes())])",
    "remove": "index.remove(['first'], ids=range(10, 30))",
    "write_notes": "index.write_notes({'sync': {'a': 2}})",
    "vacuum": "index._file.db.execute('VACUUM')",
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_commit_that_is_flushed_and_not_published_takes_nothing_with_it(tmp_path, library, verb):
    path = tmp_path / "a.index"
    with Index.create(path, bits=64) as index:
        index.add_codes(np.zeros((6000, 8), np.uint8))
    reader = start_script(
        """
        index = Index.open(path)
        index.count()
        items = index.items()
        next(items)
        print("inside", flush=True)
        sys.stdin.readline()
        print(sum(1 for _ in items), len(index), "first" in index, "third" in index,
              index.notes("sync"), index.verify(), flush=True)
        """,
        path,
    )
    assert reader.stdout.readline() == "inside\n"
    script = f"""
    index = Index.open(path, write=True)
    index.add([Entry("first", codes(1, 1)[0])], notes={{"sync": {{"a": 1}}}})
    print("acknowledged", flush=True)
    os.environ |= {{"FAULT_PATH": "a.index-wal", "FAULT_CALL": "sync", "FAULT_KILL": "1"}}
    {VERBS[verb]}
    """
    died = run_script(script, path, library=library)
    assert (died.returncode, died.stdout) == (-signal.SIGKILL, "acknowledged\n"), died.stderr
    with Index.open(path, write=True) as index:
        before = len(index), index.notes("sync")
        assert before == (6001, {"a": 1})
        assert index.get("first").labels == ()
        index.add([Entry("third", bytes(8))])
        assert index.verify() == []
    said, _ = reader.communicate("\n", timeout=60)
    assert said == "5999 6002 True True {'a': 1} []\n"
    with Index.open(path) as index:
        assert (len(index), index.verify()) == (6002, [])
    assert os.listdir(tmp_path) == ["a.index"]


# Power cuts: of what was not flushed, any part may be in the log


def test_a_log_that_was_cut_off_or_garbled_ends_at_a_commit(tmp_path):
    path, counts = tmp_path / "a.index", []
    script = """
    index = Index.create(path, bits=64)
    for number in range(12):
        index.add([Entry(f"k{number}", codes(1, number)[0])], notes={"n": {"last": number}})
        print(os.path.getsize(f"{path}-wal"), flush=True)
    os._exit(0)
    """
    done = run_script(script, path)
    assert done.returncode == 0, done.stderr
    ends = [int(line) for line in done.stdout.split()]
    log = Path(f"{path}-wal").read_bytes()
    assert len(log) == ends[-1]
    rng = random.Random(1)
    for trial in range(40):
        folder = tmp_path / f"{trial}"
        folder.mkdir()
        cut = rng.randrange(len(log))
        shutil.copy(path, folder / "a.index")
        tail = rng.choice([b"", bytes(len(log) - cut), rng.randbytes(len(log) - cut)])
        (folder / "a.index-wal").write_bytes(log[:cut] + tail)
        with Index.open(folder / "a.index", write=trial % 2 == 1) as index:
            assert index.verify() == []
            # A tail of zeros may be what was there.
            counts.append(len(index))
            assert len(index) >= sum(end <= cut for end in ends)
            assert index.keys() == [f"k{number}" for number in range(len(index))]
            assert index.notes("n") == ({"last": len(index) - 1} if len(index) else {})
    assert len(set(counts)) > 5
