"""A process that changes an index until it is killed; used by test_crash.py.

It reads lines of JSON (one per run) and forks a child for each, so that Python starts once. The
child does random operations. Before each it says what it is about to do, and after it that it is
done. With ``call`` it is killed at the system call of that kind and number, see faults.c.
"""

import hashlib
import itertools
import json
import os
import random
import sys

import numpy as np

from fisherhash.index import Entry, Index, Item
from fisherhash.index.local import backup

BITS = 44
WIDTH = 6


def codes_of(texts):
    """The codes that belong to texts."""
    digests = [bytearray(hashlib.sha256(text.encode()).digest()[:WIDTH]) for text in texts]
    codes = np.array(digests, dtype=np.uint8).reshape(-1, WIDTH)
    codes[:, -1] &= 0xF0
    return codes


class Run:
    """What the operations know: the index and what is in it."""

    def __init__(self, path, rng):
        self.path, self.rng = path, rng
        self.index = Index.open(path, write=True)
        self.versions, self.bulk = {}, []
        for item in self.index.items():
            if item.key is None:
                self.bulk.append(item.id)
            else:
                self.versions[item.key] = item.metadata["version"]
        self.fresh = (f"{os.getpid()}-{number}" for number in itertools.count())

    def some(self, values, most):
        values = sorted(values)
        return self.rng.sample(values, min(len(values), self.rng.randint(1, most)))


def put(run, verb, keys):
    """Add or upsert keys, each one version further; the note of every key must fit the item."""
    new = {key: run.versions.get(key, 0) + 1 for key in keys}
    say({"begin": "put", "items": new})
    codes = codes_of(f"{key} {version}" for key, version in new.items())
    entries = [
        Entry(key, code, f"/{key}", version, metadata={"version": version})
        for (key, version), code in zip(new.items(), codes, strict=True)
    ]
    getattr(run.index, verb)(entries, notes={"version": new})
    run.versions |= new


def add(run):
    put(run, "add", [next(run.fresh) for _ in range(run.rng.randint(1, 40))])


def upsert(run):
    put(run, "upsert", [*run.some(run.versions, 20), next(run.fresh)])


def remove(run):
    keys = run.some(run.versions, 15)
    say({"begin": "remove", "keys": keys})
    run.index.remove(keys, notes={"version": dict.fromkeys(keys)})
    for key in keys:
        del run.versions[key]


def _new_ids(run):
    first = run.index.info()["next_id"]
    ids = list(range(first, first + run.rng.choice([3, 300, 5000])))
    say({"begin": "bulk", "ids": ids})
    run.bulk += ids
    return ids, codes_of(f"bulk {id_}" for id_ in ids)


def add_codes(run):
    _, codes = _new_ids(run)
    run.index.add_codes(iter([codes[:50], codes[50:]]))


def load(run):
    ids, codes = _new_ids(run)
    run.index.load(Item(id_, code.tobytes()) for id_, code in zip(ids, codes, strict=True))


def remove_ids(run):
    ids = run.some(run.bulk, 3000)
    say({"begin": "remove bulk", "ids": ids})
    run.index.remove(ids=ids)
    run.bulk = sorted(set(run.bulk) - set(ids))


def write_notes(run):
    say({"begin": "nothing"})
    run.index.write_notes({"other": {"a": run.rng.random()}})


def vacuum(run):
    say({"begin": "nothing"})
    run.index._file.db.execute("VACUUM")


def back_up(run):
    say({"begin": "nothing"})
    target = f"{run.path}-{next(run.fresh)}"
    backup(run.path, target)
    os.unlink(target)


def open_again(run):
    say({"begin": "nothing"})
    run.index.close()
    run.index = Index.open(run.path, write=True)


OPERATIONS = [add, add, upsert, remove, add_codes, load, remove_ids]
OPERATIONS += [write_notes, vacuum, back_up, open_again]


def say(message):
    os.write(1, json.dumps(message).encode() + b"\n")


def work(task):
    rng = random.Random(task["seed"])
    run = Run(task["path"], rng)
    if task["call"]:
        # The library asks for these at every call.
        wanted = {"PATH": task["path"], "CALL": task["call"], "SKIP": task["skip"], "KILL": 1}
        os.environ |= {f"FAULT_{name}": str(value) for name, value in wanted.items()}
    for _ in range(task["operations"]):
        operation = rng.choice(OPERATIONS)
        if operation in (upsert, remove) and not run.versions:
            operation = add
        if operation is remove_ids and not run.bulk:
            operation = add_codes
        operation(run)
        say({"done": operation.__name__})
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
