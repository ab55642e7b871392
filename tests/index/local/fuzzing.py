"""Mutated folders of indexes and models, opened in processes with limits.

A mutation changes one file of a copy: blindly (bits, blocks, lengths, kinds of file), or knowing
what the file is (JSON, SQLite, tables, safetensors), with the checksums around it recomputed or
not. A child process then does everything that a user can do with the copy. It may return the right
answers or raise a :class:`FisherhashError`. Where the mutation recomputed a checksum, as a forger
would, other answers are allowed, too. Nothing else is: no crash, no hang, no traceback.

    python tests/index/local/fuzzing.py SEED COUNT    prints the outcomes
"""

from __future__ import annotations

import collections
import json
import logging
import os
import random
import resource
import select
import shutil
import signal
import sqlite3
import struct
import sys
import tempfile
import time
import traceback
import zlib
from pathlib import Path

BLOCK = 4096
WALL_SECONDS = 5.0
MORE_MEMORY = 2 << 30
BITS, WIDTH = 32, 4


# What is mutated


def make_index(path, seed):
    """Every kind of code file, rows, notes, removed items, tables."""
    import numpy as np

    from fisherhash.index import Entry, Index
    from fisherhash.index.local import segments

    segments.TAIL = 100
    rng = np.random.default_rng(seed)

    def codes(count):
        return rng.integers(0, 256, (count, WIDTH), dtype=np.uint8)

    with Index.create(path, bits=BITS, fingerprint=f"{seed:064d}", model={"method": "x"}) as index:
        index.add(
            [
                Entry(f"{i}.jpg", c, f"/d/{i}", i, i, ["cat", "dog"][i % 2], {"year": i})
                for i, c in enumerate(codes(160))
            ],
            notes={"skipped": {f"bad {i}.jpg": {"reason": "damaged"} for i in range(8)}},
        )
        index.remove([f"{i}.jpg" for i in range(0, 60, 7)])
        index.compact()
        index.add_codes(codes(300))
        index.update(Entry(f"{i}.jpg", c) for i, c in enumerate(codes(20), 100))
        index.remove(ids=range(200, 230))
        index.build()


def make_model(path, seed):
    import torch

    from fisherhash import backbones
    from fisherhash.model.heads import LinearHead
    from fisherhash.model.torch_hasher import TorchHasher

    network = backbones.create("tiny", image_size=32)
    torch.manual_seed(seed)
    head = LinearHead(network.features, 24)
    head.start(torch.randn(64, network.features).abs() * 0.1)
    TorchHasher(network, head, "lsh", ("cat", "dog")).save(path)


def files_of(folder):
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    )


# Mutations of any file


def flip(rng, path, _other):
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 3])):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(rng, path, _other):
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def extend(rng, path, _other):
    with path.open("ab") as file:
        file.write(rng.choice([rng.randbytes(50), bytes(5000)]))


def _blocks(rng, path):
    data = path.read_bytes()
    size = rng.choice([16, 64, 512, BLOCK])
    return size, [data[i : i + size] for i in range(0, len(data), size)]


def zero_block(rng, path, _other):
    _, blocks = _blocks(rng, path)
    if blocks:
        number = rng.randrange(len(blocks))
        blocks[number] = bytes(len(blocks[number]))
    path.write_bytes(b"".join(blocks))


def swap_blocks(rng, path, _other):
    _, blocks = _blocks(rng, path)
    rng.shuffle(blocks) if len(blocks) < 3 else None
    if len(blocks) > 2:
        a, b = rng.sample(range(len(blocks)), 2)
        blocks[a], blocks[b] = blocks[b], blocks[a]
    path.write_bytes(b"".join(blocks))


def repeat_block(rng, path, _other):
    _, blocks = _blocks(rng, path)
    if blocks:
        blocks.insert(rng.randrange(len(blocks)), rng.choice(blocks))
    path.write_bytes(b"".join(blocks))


def from_other(_rng, path, other):
    if other.is_file():
        shutil.copyfile(other, path)


def delete(_rng, path, _other):
    path.unlink()


def pipe(_rng, path, _other):
    path.unlink()
    os.mkfifo(path)


def link(rng, path, other):
    path.unlink()
    path.symlink_to(rng.choice([other, "/dev/zero", path, "/etc/passwd", "nowhere"]))


def folder(_rng, path, _other):
    path.unlink()
    path.mkdir()


def huge(_rng, path, _other):
    os.truncate(path, 1 << 40)


ANY = (flip, flip, flip, truncate, extend, zero_block, swap_blocks, repeat_block)
KINDS = (from_other, delete, pipe, link, folder, huge)

# Mutations that know what the file is; each returns whether it recomputed a checksum

STRANGE = (0, -1, 1, 2**31, 2**63 - 1, -(2**63), 10**30, 0.5, "", "x", None, True, [], {}, [[]])


def strange(rng, value):
    """Another value, near or far."""
    if isinstance(value, bool) or value is None or rng.random() < 0.4:
        return rng.choice(STRANGE)
    if isinstance(value, int):
        return value + rng.choice([-1, 1, 2, -value * 2, 2**32])
    if isinstance(value, str):
        return value[: rng.randrange(len(value) + 1)] + rng.choice(["", "\0", "\x1b[2J", "é" * 9])
    if isinstance(value, list):
        return rng.choice([[], value * 3, [strange(rng, one) for one in value]])
    if isinstance(value, dict):
        return change_value(rng, value)
    return rng.choice(STRANGE)


def change_value(rng, document):
    document = dict(document)
    if document:
        name = rng.choice(sorted(document))
        how = rng.random()
        if how < 0.15:
            del document[name]
        elif how < 0.25:
            document[f"{name}x"] = document.pop(name)
        elif how < 0.3:
            for _ in range(3000):
                document = {name: document}
        else:
            document[name] = strange(rng, document[name])
    return document


def dump(document):
    sys.setrecursionlimit(20_000)
    return json.dumps(document)


def change_head(rng, path):
    text = f"commit {max(0, rng.choice([0, 3, 2**40, 10**19])):020d}"
    line = f"{text} {zlib.crc32(text.encode()):08x}".ljust(47).encode() + b"\n"
    path.write_bytes(line * 2)
    return True


def change_sums(rng, path):
    text = dump(change_value(rng, json.loads(path.read_bytes().partition(b"\n")[0]))).encode()
    path.write_bytes(text + f"\n{zlib.crc32(text):08x}\n".encode())
    return True


def change_spare(rng, path):
    text = zlib.decompress(path.read_bytes().partition(b"\n")[2])
    data = zlib.compress(dump(change_value(rng, json.loads(text))).encode())
    path.write_bytes(b"fisherhash spare 1 " + f"{zlib.crc32(data):08x}\n".encode() + data)
    return True


CELLS = {
    "facts": ("value", "crc", "name"),
    "files": ("kind", "first_id", "length", "removed", "code_sums", "id_sums", "crc", "number"),
    "removed": ("file", "block", "changed", "bits", "crc"),
    "items": ("id", "key", "path", "size", "mtime_ns", "labels", "metadata", "crc"),
    "notes": ("kind", "name", "value", "crc"),
}


def change_cell(rng, path):
    """Any value in any cell, with the checksums as they are."""
    table = rng.choice(sorted(CELLS))
    column = rng.choice(CELLS[table])
    values = (0, -1, 7, 2**62, 0.5, None, "", "x", "[]", b"", b"\xff" * 9, "[" * 5000)
    _execute(path, f"UPDATE OR IGNORE {table} SET {column} = ?", (rng.choice(values),))
    return False


def forge_rows(rng, path):
    """Change a cell of an item or of a code file, and all checksums that cover it."""
    from fisherhash.index.local.rows import item_crc
    from fisherhash.index.local.schema import FileRow

    db = sqlite3.connect(path, isolation_level=None)
    try:
        names = [row[1] for row in db.execute("PRAGMA table_info(items)")][:-1]
        files = [row[1] for row in db.execute("PRAGMA table_info(files)")][:-1]
        if rng.random() < 0.5:
            rows = db.execute(f"SELECT {', '.join(names)} FROM items").fetchall()
            row = list(rng.choice(rows))
            texts = ("[", "{}", "[1]", '{"a":' * 900, "x", '["\x1b[2J"]', None, 7, b"\xff")
            row[rng.randrange(2, len(row))] = rng.choice(texts)
            new = (*row, item_crc(row))
            db.execute(f"REPLACE INTO items VALUES ({','.join('?' * len(new))})", new)
        else:
            rows = db.execute(f"SELECT {', '.join(files)} FROM files").fetchall()
            row = list(rng.choice(rows))
            place = rng.randrange(1, len(row))
            values = (0, 1, -1, 2**40, 2**62, "implied", "sorted", "loose", "runs", b"", b"\0" * 8)
            row[place] = rng.choice(values)
            new = (*row, FileRow(*row).crc())
            db.execute(f"REPLACE INTO files VALUES ({','.join('?' * len(new))})", new)
        state = json.loads(db.execute("SELECT value FROM facts WHERE name = 'state'").fetchone()[0])
        for count, table in (("rows", "items"), ("files", "files")):
            crcs = [crc for (crc,) in db.execute(f"SELECT crc FROM {table}")]
            state |= {count: len(crcs), f"{count}_sum": sum(crcs) % 2**64}
        put_fact(db, "state", state)
    except (TypeError, ValueError, AttributeError, sqlite3.Error):
        pass  # a value that no checksum can cover
    finally:
        db.close()
    (path.parent / "catalogue.sums").unlink(missing_ok=True)
    return True


def put_fact(db, name, value):
    text = dump(value)
    db.execute("REPLACE INTO facts VALUES (?, ?, ?)", (name, text, zlib.crc32(text.encode())))


def forge_facts(rng, path):
    """Change what the index is, or the state of the commit, with the right checksum."""
    db = sqlite3.connect(path, isolation_level=None)
    try:
        name = rng.choice(["index", "state"])
        text = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()[0]
        put_fact(db, name, change_value(rng, json.loads(text)))
    finally:
        db.close()
    (path.parent / "catalogue.sums").unlink(missing_ok=True)
    return True


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n) SELECT"
SCHEMES = (
    f"CREATE VIEW items AS {ENDLESS} i AS id, 'k' || i AS key, NULL AS path, NULL AS size, "
    "NULL AS mtime_ns, '[]' AS labels, '{}' AS metadata, 0 AS crc FROM n",
    f"CREATE VIEW facts AS {ENDLESS} 'x' AS name, 'y' AS value, 0 AS crc FROM n",
    f"CREATE VIEW notes AS {ENDLESS} 'x' AS kind, i AS name, 'y' AS value, 0 AS crc FROM n",
    "CREATE TABLE items (id INTEGER PRIMARY KEY)",
    "CREATE VIEW files AS SELECT randomblob(900000000) AS number",
)


def forge_schema(rng, path):
    """Replace a table by a view that never ends, or by another table."""
    statement = rng.choice(SCHEMES)
    table = statement.split()[2]
    _execute(path, f"ALTER TABLE {table} RENAME TO old_{table}")
    _execute(path, statement)
    return True


def _execute(path, statement, values=()):
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute(statement, values)
    except (sqlite3.Error, OverflowError):
        pass
    finally:
        db.close()
    (path.parent / "catalogue.sums").unlink(missing_ok=True)


def forge_table(rng, path):
    """Change the header or the arrays of search tables, with the right checksums."""
    data = path.read_bytes()
    magic, _, rest = data.partition(b"\n")
    line, _, rest = rest.partition(b"\n")
    length = int(line.split()[0])
    header, body = json.loads(rest[:length]), bytearray(rest[length:])
    head = len(magic) + len(line) + 2 + length
    start = -head % 64
    if rng.random() < 0.4:
        part = rng.choice(["facts", "arrays", "size"])
        if part == "arrays":
            number = rng.randrange(len(header["arrays"]))
            header["arrays"][number] = change_value(rng, header["arrays"][number])
        else:
            header[part] = strange(rng, header[part])
    else:
        for _ in range(rng.choice([1, 4, 64])):
            place = rng.randrange(start, len(body))
            body[place] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        for place in header["arrays"]:
            import numpy as np

            count = int(np.prod(place["shape"])) * np.dtype(place["type"]).itemsize
            part = bytes(body[start + place["offset"] :][:count])
            place["sums"] = [zlib.crc32(part[i : i + (1 << 20)]) for i in range(0, count, 1 << 20)]
    text = dump(header).encode()
    head = magic + b"\n" + f"{len(text):012d} {zlib.crc32(text):08x}\n".encode() + text
    path.write_bytes(head + bytes(-len(head) % 64) + bytes(body[start:]))
    return True


def change_json(rng, path):
    path.write_text(dump(change_value(rng, json.loads(path.read_text()))))
    return True


def deep_json(rng, path):
    path.write_text('{"a":' * rng.choice([900, 100_000]) + "1")
    return True


def change_tensors(rng, path):
    """Change names, types, shapes and places in the header of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = rng.choice(sorted(header))
    header[name] = strange(rng, header[name])
    text = dump(header).encode()
    size = rng.choice([len(text)] * 4 + [2**63, 0, len(text) + 1, 2**30])
    path.write_bytes(struct.pack("<Q", size) + text + data[8 + length :])
    return True


KNOWING = {
    "head": (change_head,),
    "catalogue.sums": (change_sums,),
    "catalogue.spare": (change_spare,),
    "catalogue.sqlite": (change_cell, forge_rows, forge_rows, forge_facts, forge_schema),
    ".table": (forge_table,),
    "config.json": (change_json, change_json, deep_json),
    "model.safetensors": (change_tensors,),
}


def mutate(rng, folder_, other):
    """Change one file of a folder; returns how, and whether a checksum was recomputed."""
    names = files_of(folder_)
    # Every kind of file as often as any other: there are many small ones.
    kinds = collections.defaultdict(list)
    for name in names:
        kinds[Path(name).suffix or name].append(name)
    name = rng.choice(kinds[rng.choice(sorted(kinds))])
    path = folder_ / name
    knowing = KNOWING.get(path.name, KNOWING.get(path.suffix, ()))
    if knowing and rng.random() < 0.5:
        mutation = rng.choice(knowing)
        return f"{mutation.__name__} {name}", mutation(rng, path)
    mutation = rng.choice(ANY if rng.random() < 0.75 else KINDS)
    mutation(rng, path, other / name)
    return f"{mutation.__name__} {name}", False


# What a user does with it, in a child process


def use_index(path, rng):
    """Everything that a user can do; what it returned, or None where an error was raised."""
    import numpy as np

    from fisherhash.errors import FisherhashError
    from fisherhash.index import Index
    from fisherhash.index.engine import planner

    queries = np.random.default_rng(9).integers(0, 256, (3, WIDTH), dtype=np.uint8)
    found = {}

    def attempt(name, call):
        try:
            found[name] = call()
        except FisherhashError as error:
            found[name] = None
            str(error).encode(errors="surrogateescape")

    def read():
        with Index.open(path) as index:
            attempt("search", lambda: index.search(queries, 9).to_list())
            # With the kernels, which use the tables.
            planner.loaded |= {f"{kind} in 8 bits" for kind in ("search", "within")}
            planner._TINY = 0
            attempt("kernels", lambda: index.search(queries, 9).to_list())
            attempt("within", lambda: index.within(queries, 9).to_list())
            planner.loaded.clear()
            attempt("where", lambda: index.search(queries, 5, where="label=cat").to_list())
            attempt("year", lambda: index.ids("year>50").tolist())
            attempt("items", lambda: [repr(item) for item in index.items()])
            attempt("codes", lambda: [item.code.hex() for item in index.items()])
            attempt("files", lambda: sorted(map(repr, index.files().items())))
            attempt("notes", lambda: sorted(map(repr, index.notes("skipped").items())))
            attempt("info", lambda: (index.info(), None)[1])

    attempt("open", read)
    attempt("examine", lambda: (Index.examine(path), None)[1])
    if rng.random() < 0.15:
        from fisherhash.index.local.repair import repair_index

        attempt("repair", lambda: (repair_index(path, path.with_name("repaired")), None)[1])
        shutil.rmtree(path.with_name("repaired"), ignore_errors=True)
    if rng.random() < 0.15:

        def write():
            with Index.open(path, write=True) as index:
                index.add_codes(queries)
                index.remove(ids=index.ids()[:1])
                index.compact()

        attempt("write", write)
    return found


def use_model(path, _rng):
    import numpy as np

    from fisherhash.errors import FisherhashError
    from fisherhash.model.hasher import Hasher

    image = np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    try:
        hasher = Hasher.load(path)
        return {"code": hasher.encode(image).tolist()}
    except FisherhashError:
        return {"code": None}


def in_child(use, path, seed, wall):
    """Run in a forked process with limits: its result, or how it ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reading)
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            logging.disable(logging.CRITICAL)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (int(wall) + 1, int(wall) + 2))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            try:
                result = {"found": use(path, random.Random(seed))}
            except BaseException:
                result = {"traceback": traceback.format_exc()}
            data = json.dumps(result).encode()
            while data:
                data = data[os.write(writing, data) :]
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    parts, end = [], time.monotonic() + wall
    try:
        while True:
            ready, _, _ = select.select([reading], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                os.kill(child, signal.SIGKILL)
                return {"hang": wall}
            part = os.read(reading, 1 << 20)
            if not part:
                break
            parts.append(part)
    finally:
        os.close(reading)
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"signal": signal.Signals(os.WTERMSIG(status)).name}
    return json.loads(b"".join(parts)) if parts else {"exit": status}


# Many


def load_kernels(path):
    """Load what every child needs before any is forked, without leaving a thread behind."""
    import fisherhash.model.hasher  # noqa: F401
    from fisherhash.index.engine import engine

    engine.available_cores = lambda: 1
    use_index(path, random.Random(1))


class Fuzzer:
    """Undamaged folders and what they answer, and a place for mutated copies."""

    def __init__(self, root, *, wall=WALL_SECONDS):
        self.root, self.wall = Path(root), wall
        self.sources = {}
        for kind, make, use in (("index", make_index, use_index), ("model", make_model, use_model)):
            paths = [self.root / f"{kind} {number}" for number in (0, 1)]
            for number, path in enumerate(paths):
                make(path, number)
            self.sources[kind] = (*paths, use)
        load_kernels(self.sources["index"][0])
        self.expected = {}
        for kind, (path, _, use) in self.sources.items():
            result = in_child(use, path, 1, 60)
            if "found" not in result or None in result["found"].values():
                result = in_child(use, path, 1, 60)
            self.expected[kind] = result["found"]

    def one(self, seed):
        """One mutation; what is wrong with its outcome (None: nothing), and what it was."""
        rng = random.Random(seed)
        kind = "model" if rng.random() < 0.2 else "index"
        source, other, use = self.sources[kind]
        path = self.root / f"copy {os.getpid()}"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(source, path)
        how, forged = mutate(rng, path, other)
        result = in_child(use, path, seed, self.wall)
        what = f"seed {seed}: {kind}: {how}"
        if "found" not in result:
            return f"{what}: {result.get('traceback') or result}", "broken"
        # The right answer or an error, to every question.
        differs = [
            name
            for name, value in result["found"].items()
            if value is not None and value != self.expected[kind].get(name)
        ]
        if differs and not (forged or self._edited(kind, how)):
            return f"{what}: another answer to {differs}", "wrong"
        if differs:
            return None, "forged"
        refused = any(
            value is None and self.expected[kind].get(name) is not None
            for name, value in result["found"].items()
        )
        return None, "refused" if refused else "same"

    def _edited(self, kind, how):
        """A model's config may be edited by hand: it is then another model, and says so."""
        return kind == "model" and how.endswith("config.json")

    def run(self, seeds):
        """Problems, and how often each outcome occurred."""
        problems, outcomes = [], collections.Counter()
        for seed in seeds:
            problem, outcome = self.one(seed)
            outcomes[outcome] += 1
            if problem:
                problems.append(problem)
        return problems, outcomes


def main():
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="fisherhash-fuzz-") as root:
        start = time.monotonic()
        fuzzer = Fuzzer(root)
        problems, outcomes = fuzzer.run(range(seed, seed + count))
        for problem in problems:
            print(" | ".join(problem.splitlines()), flush=True)
        seconds = time.monotonic() - start
        print(json.dumps({"outcomes": outcomes, "problems": len(problems), "seconds": seconds}))


if __name__ == "__main__":
    main()
