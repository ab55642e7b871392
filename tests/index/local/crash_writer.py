"""A process that changes an index until it is killed; used by test_crash.py.

It reads lines of JSON (one per run) and forks a child for each, so that Python starts once. The
child does random operations. Before each it says what it is about to do, and after it that it is
done. With ``point`` it kills itself at the call of that number that writes, flushes, renames,
deletes or runs SQL.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import sqlite3
import sys

import numpy as np

from fisherhash.index import Entry, Index
from fisherhash.index.local import catalogue_writer, change

BITS = 44
WIDTH = 6
FINE_BITS = 24


def code_of(text):
    """The code that belongs to a text."""
    digest = bytearray(hashlib.sha256(text.encode()).digest()[:WIDTH])
    digest[-1] &= 0xF0
    return list(digest)


def codes_of(texts):
    return np.array([code_of(text) for text in texts], dtype=np.uint8).reshape(-1, WIDTH)


def fine_of(texts):
    """Their second codes, in an index that has those."""
    return codes_of(f"fine {text}" for text in texts)[:, : FINE_BITS // 8]


class Run:
    """What the operations know: the index and what is in it."""

    def __init__(self, path, rng):
        self.path, self.rng = path, rng
        self.index = Index.open(path, write=True)
        self.versions = {}
        self.bulk = []
        for item in self.index.items():
            if item.key is None:
                self.bulk.append(item.id)
            else:
                self.versions[item.key] = item.metadata["version"]
        self.fresh = (f"{os.getpid()}-{number}" for number in itertools.count())

    def some(self, values, most):
        values = sorted(values)
        return self.rng.sample(values, min(len(values), self.rng.randint(1, most)))


def notes_of(versions):
    """The note of every key: it must always fit the item."""
    return {"version": dict(versions)}


def put(run, verb, keys):
    """Add, update or upsert keys, each one version further."""
    new = {key: run.versions.get(key, 0) + 1 for key in keys}
    say({"begin": "put", "items": new})
    texts = [f"{key} {version}" for key, version in new.items()]
    fines = fine_of(texts) if run.index.fine_bits else [None] * len(texts)
    getattr(run.index, verb)(
        [
            Entry(key, code, f"/{key}", version, metadata={"version": version}, fine=fine)
            for (key, version), code, fine in zip(new.items(), codes_of(texts), fines, strict=True)
        ],
        notes=notes_of(new),
    )
    run.versions |= new


def add(run):
    put(run, "add", [next(run.fresh) for _ in range(run.rng.randint(1, 40))])


def update(run):
    put(run, "update", run.some(run.versions, 20))


def upsert(run):
    put(run, "upsert", [*run.some(run.versions, 10), next(run.fresh)])


def remove(run):
    keys = run.some(run.versions, 15)
    say({"begin": "remove", "keys": keys})
    run.index.remove(keys, notes={"version": dict.fromkeys(keys)})
    for key in keys:
        del run.versions[key]


def add_codes(run):
    first = run.index.info()["next_id"]
    ids = list(range(first, first + run.rng.randint(1, 300)))
    say({"begin": "bulk", "ids": ids})
    codes = codes_of(f"bulk {id_}" for id_ in ids)
    fine = fine_of(f"bulk {id_}" for id_ in ids)
    fine = {"fine": iter([fine[:50], fine[50:]])} if run.index.fine_bits else {}
    run.index.add_codes(iter([codes[:50], codes[50:]]), **fine)
    run.bulk += ids


def remove_ids(run):
    ids = run.some(run.bulk, 100)
    say({"begin": "remove bulk", "ids": ids})
    run.index.remove(ids=ids)
    run.bulk = sorted(set(run.bulk) - set(ids))


def compact(run):
    say({"begin": "nothing"})
    run.index.compact()


def open_again(run):
    say({"begin": "nothing"})
    run.index.close()
    run.index = Index.open(run.path, write=True)


OPERATIONS = {
    "add": add,
    "update": update,
    "upsert": upsert,
    "remove": remove,
    "add_codes": add_codes,
    "remove_ids": remove_ids,
    "compact": compact,
    "open_again": open_again,
}
WEIGHTS = {"add": 4, "compact": 1, "open_again": 1}


def say(message):
    os.write(1, json.dumps(message).encode() + b"\n")


def kill_at(point):
    """Die at the ``point``-th call from now on that changes something; a write is cut in half."""
    left = itertools.count(1)

    def passes():
        if next(left) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def guarded(function):
        def call(*arguments, **named):
            passes()
            return function(*arguments, **named)

        return call

    real_write = os.write

    def half_write(fd, data):
        if fd > 2 and next(left) == point:
            real_write(fd, memoryview(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real_write(fd, data)

    class Connection(sqlite3.Connection):
        execute = guarded(sqlite3.Connection.execute)
        executemany = guarded(sqlite3.Connection.executemany)

    os.write = half_write
    for name in ("fsync", "ftruncate", "replace", "unlink"):
        setattr(os, name, guarded(getattr(os, name)))
    connect = sqlite3.connect
    sqlite3.connect = lambda *arguments, **named: connect(*arguments, **named, factory=Connection)


def migrate(task):
    """The first write to an index of format 1."""
    kill_at(task["point"])
    with Index.open(task["path"], write=True) as index:
        say({"begin": "nothing"})
        index.add([Entry("new", bytes(index.codes([0])[0]))], notes={"skipped": {"new": 1}})
        say({"done": "add"})


def work(task):
    if task.get("migrate"):
        return migrate(task)
    rng = random.Random(task["seed"])
    catalogue_writer.WAL_BYTES = rng.choice([1, 100_000, 8 << 20])
    change.MAX_LENGTH = rng.choice([150, 1 << 27])
    if task["point"]:
        kill_at(task["point"])
    run = Run(task["path"], rng)
    names = list(OPERATIONS)
    weights = [WEIGHTS.get(name, 2) for name in names]
    for _ in range(task["operations"]):
        (name,) = rng.choices(names, weights)
        if name in ("update", "upsert", "remove") and not run.versions:
            continue
        if name == "remove_ids" and not run.bulk:
            continue
        OPERATIONS[name](run)
        say({"done": name})
    say({"begin": "nothing"})
    run.index.close()


def main():
    for line in sys.stdin:
        task = json.loads(line)
        child = os.fork()
        if not child:
            status = 1
            try:
                work(task)
                status = 0
            finally:
                sys.stderr.flush()
                if status:
                    sys.excepthook(*sys.exc_info())
                os._exit(status)
        say({"pid": child})
        _, status = os.waitpid(child, 0)
        say({"ended": status})


if __name__ == "__main__":
    main()
