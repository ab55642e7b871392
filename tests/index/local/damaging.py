"""An index with something of everything, what can be asked of it, and ways to damage its file."""

import sqlite3

import numpy as np

from fisherhash.index import Entry, Index

BITS = 32
QUERIES = np.random.default_rng(9).integers(0, 256, (3, 4), dtype=np.uint8)
FILES = {"config.json": b'{"bits": 32}', "model.safetensors": bytes(range(256)) * 40}


def fill(path):
    """Items with rows in two blocks, codes without keys, removed ones, notes and a model."""
    rng = np.random.default_rng(1)

    def codes(count):
        return rng.integers(0, 256, (count, 4), dtype=np.uint8)

    with Index.create(path, bits=BITS, fingerprint="f" * 64, files=FILES) as index:
        index.add(
            [
                Entry(f"{i}.jpg", code, f"/p/{i}.jpg", i, labels=["cat", "dog"][i % 2])
                for i, code in enumerate(codes(300))
            ],
            notes={"skipped": {f"bad {i}.jpg": {"reason": "odd", "size": i} for i in range(40)}},
        )
        index.upsert([Entry(f"{i}.jpg", metadata={"year": i}) for i in range(300)])
        index.remove([f"{i}.jpg" for i in range(0, 100, 7)])
        index.add_codes(codes(5000))
        index.upsert(Entry(f"{i}.jpg", code) for i, code in enumerate(codes(60), 100))
        index.remove(ids=range(400, 450))
        index.add([Entry(f"late {i}", code, labels="cat") for i, code in enumerate(codes(30))])


ASKED = {
    "count": len,
    "search": lambda index: index.search(QUERIES, 20).to_list(),
    "filtered": lambda index: index.search(QUERIES, 20, where={"label": "cat"}).to_list(),
    "number": lambda index: index.ids("year>=200").tolist(),
    "within": lambda index: index.within(QUERIES, 9).to_list(),
    "files": lambda index: index.files(),
    "items": lambda index: list(index.items()),
    "keys": lambda index: [index.get_items([f"{i}.jpg"])[0] for i in range(0, 305, 3)],
    "ids": lambda index: index.get_items(range(90, 110)),
    "nobody": lambda index: index.get_items(["nobody", "7.jpg"]),
    "notes": lambda index: index.notes("skipped"),
    "no notes": lambda index: index.notes("sync"),
    "files of the model": lambda index: index.model_files(),
    "facts": lambda index: (index.bits, index.fingerprint, index.model, index.info()["next_id"]),
    "scan": lambda index: [(ids.tolist(), codes.tolist()) for ids, codes in index.scan()],
}


def pages_of(path):
    """Which table or index each page of a file belongs to, by its number."""
    db = sqlite3.connect(path)
    try:
        return dict(db.execute("SELECT pageno, name FROM dbstat"))
    finally:
        db.close()


def edit(path, *statements):
    """Change rows behind the back of fisherhash."""
    db = sqlite3.connect(path)
    with db:
        for statement in statements:
            db.execute(statement)
    db.close()
