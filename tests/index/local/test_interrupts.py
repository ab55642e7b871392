"""Interrupts at any moment: nothing acknowledged is lost, and the object works afterwards."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fisherhash.errors import FisherhashError
from fisherhash.index import Entry, Index, Item

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")

CHILD = '''
import json, os, random, signal, sys
import numpy as np
from fisherhash.errors import FisherhashError
from fisherhash.index import Entry, Index

path, role, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
index = Index.open(path, write=role == "writer")
interrupts = done = 0
number = index.info()["next_id"]
known = {item.key: item.metadata["v"] for item in index.items() if item.key}
doubtful = {}


def code(value):
    return np.frombuffer(np.uint64(value * 0x9E3779B97F4A7C15 % 2**64).tobytes(), np.uint8)


def write():
    """A change; what it is about to do is noted first, as it may happen or not."""
    kind = number % 7
    if kind < 4 or len(known) < 10:
        doubtful.update({f"k{number}-{i}": number for i in range(5)})
        entries = [Entry(k, code(v), metadata={"v": v}, labels="x") for k, v in doubtful.items()]
        return lambda: index.add(entries)
    if kind == 4:
        doubtful.update(dict.fromkeys(sorted(known)[:3], number))
        entries = [Entry(k, code(v), metadata={"v": v}) for k, v in doubtful.items()]
        return lambda: index.upsert(entries)
    if kind == 5:
        doubtful.update(dict.fromkeys(sorted(known)[3 : max(6, len(known) - 100)]))
        return lambda: index.remove(list(doubtful))
    return lambda: index.write_notes({"other": {"n": number}})


def read():
    """Everything a reader asks."""

    def ask():
        index.search(code(3)[None], 5)
        index.search(code(3)[None], 5, where="label=x")
        index.search(code(3)[None], 5, where=["label!=y", "v>=0"])
        assert len(index.keys()) == index.count()
        index.notes("skipped")
        index.codes(index.ids()[:5])

    return ask


def handle(*_):
    """As many interrupts as are armed for one call: the next ones meet its cleaning up."""
    global armed, interrupts
    if armed:
        armed -= 1
        interrupts += 1
        raise KeyboardInterrupt


def attempt(call):
    global armed
    finished = False
    try:
        try:
            try:
                armed = rng.choice([1, 1, 2, 3])
                call()
                armed = 0
                finished = True
            except KeyboardInterrupt:
                armed = 0
        except KeyboardInterrupt:
            armed = 0
    except KeyboardInterrupt:
        armed = 0
    return finished


armed, problems, rng = 0, [], random.Random(5)
signal.signal(signal.SIGINT, handle)
print("ready", flush=True)
while interrupts < wanted and not problems:
    number += 1
    doubtful.clear()
    call = write() if role == "writer" else read()
    try:
        finished = attempt(call)
        done += finished
        after = dict(known)
        for key, value in doubtful.items():
            after.pop(key, None)
            after |= {} if value is None else {key: value}
        if finished:
            known = after
        elif role == "writer":
            # What the object says now is the truth: all of the change, or nothing.
            now = {item.key: item.metadata["v"] for item in index.items() if item.key}
            if now not in (known, after):
                problems.append(f"neither before nor after {sorted(doubtful)[:3]}")
            known = now
    except FisherhashError as error:
        armed = 0
        problems.append(str(error))
signal.signal(signal.SIGINT, signal.SIG_IGN)
if not problems:
    problems += map(str, index.verify())
    if role == "writer":
        index.add([Entry("last", code(1), metadata={"v": 1})])
        assert "last" in index
index.close()
print(json.dumps({"interrupts": interrupts, "done": done, "problems": problems}), flush=True)
# Python lets signals end the process while it shuts down.
os._exit(0)
'''


def storm(path, role, interrupts):
    """Interrupt a process that uses an index until it was interrupted that often; its report."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), role, str(interrupts)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "ready\n"
        rng = random.Random(interrupts)
        while child.poll() is None:
            time.sleep(rng.uniform(0.0002, 0.01))
            child.send_signal(signal.SIGINT)
        out, err = child.communicate()
    finally:
        child.kill()
    assert child.returncode == 0, err
    found = json.loads(out)
    assert found["problems"] == []
    assert found["interrupts"] >= interrupts
    assert Index.examine(path) == []
    return found


@pytest.fixture
def path(tmp_path):
    rng = np.random.default_rng(0)
    with Index.create(tmp_path / "a.index", bits=64) as index:
        codes = rng.integers(0, 256, (400, 8), dtype=np.uint8)
        index.add(
            Entry(f"a{i}", code, labels=["x", "y"], metadata={"v": 0})
            for i, code in enumerate(codes)
        )
    return tmp_path / "a.index"


@pytest.mark.parametrize("role", ["writer", "reader"])
def test_a_short_storm(path, role):
    storm(path, role, 60)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["writer", "reader"])
def test_two_thousand_interrupts(path, role):
    assert storm(path, role, 2000)["done"] > 50


def leave_open(index):
    """What an interrupt inside the clean-up of a call leaves: an open transaction."""
    index._file.db.execute("BEGIN")
    index._file.db.execute("SELECT count(*) FROM items").fetchone()


def test_a_reader_does_not_stay_at_an_old_commit(path):
    with Index.open(path) as reader, Index.open(path, write=True) as writer:
        for ask in (
            lambda: reader.count(),
            lambda: len(reader.keys()),
            lambda: reader.count("label=x"),
            lambda: len(reader.ids()),
            lambda: reader.search(np.zeros((1, 8), np.uint8), 10_000).ids.shape[1],
            lambda: sum(len(ids) for ids, _ in reader.scan()),
            lambda: len(list(reader.items())),
        ):
            before = ask()
            leave_open(reader)
            writer.add([Entry(f"new {before}", np.zeros(8, np.uint8), labels="x")])
            assert ask() == before + 1


def test_a_writer_does_not_refuse_everything(path):
    with Index.open(path, write=True) as writer:
        for number, change in enumerate(
            (
                lambda: writer.add([Entry("b", np.zeros(8, np.uint8))]),
                lambda: writer.add_codes(np.zeros((3, 8), np.uint8)),
                lambda: writer.upsert([Entry("b", np.ones(8, np.uint8))]),
                lambda: writer.remove(["b"]),
                lambda: writer.write_notes({"skipped": {"a": 1}}),
                lambda: writer.load([Item(10**6, bytes(8))]),
            )
        ):
            writer._file.db.execute("BEGIN IMMEDIATE" if number % 2 else "BEGIN")
            change()
        assert writer.verify() == []
        assert writer.count() == 404


def test_an_interrupt_inside_a_filter_is_no_damage(path):
    """SQLite hides why a statement ended; the signal arrives while it works."""
    with Index.open(path, write=True) as index:
        index.add(
            Entry(f"m{i}", np.zeros(8, np.uint8), metadata={"v": i}, labels=['l"]'])
            for i in range(20_000)
        )
        old = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        try:
            interrupts = 0
            for delay in np.linspace(0.0005, 0.02, 25).tolist():
                signal.setitimer(signal.ITIMER_REAL, delay)
                try:
                    index.count(["label!=l", "v>=0", "v<100000"])
                except KeyboardInterrupt:
                    interrupts += 1
                except FisherhashError as error:
                    pytest.fail(str(error))
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, old)
        assert interrupts > 5
        assert index.count(["label!=l", "v>=0", "v<100000"]) == 20_400
