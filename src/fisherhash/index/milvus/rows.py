"""The collection of an index on Milvus: rows that are visible from one commit to another.

Milvus has no transactions. Every row therefore says which commit made it and which one ended it,
and the last state row says which commit is the current one: inserting that row is the commit.
A writer that is killed before leaves new rows that nobody sees, and old rows that say that they
end in a commit that was never made, so that everybody still sees them. The next writer removes the
former and repairs the latter. It also removes rows that ended before the last commit.

A row is an item (its id), a note (:data:`NOTE`), a part of the model (:data:`MODEL`) or a state
(:data:`STATE`). Texts are JSON in ASCII. Keys are found by a hash, so no text of a caller is ever
part of an expression.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fisherhash.codes import code_bytes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Files, Uri
from fisherhash.index.items import Item
from fisherhash.index.server import Facts
from fisherhash.index.uris import Option, ServerUri, read_uri

with warnings.catch_warnings():
    # It looks for its own version in a way that Python is about to drop.
    warnings.simplefilter("ignore")
    from pymilvus import DataType, MilvusClient, MilvusException

NOTE, MODEL, STATE = -1, -2, -3
"""In place of the id of an item."""
FOREVER = 2**62
"""The commit that ends a row which is still there."""
PAGE = 16_384
"""Rows that Milvus returns at most."""
MAX_TEXT = 65_535
_INSERT = 1 << 13
_NAMES = 1000
"""Keys or ids in one expression."""
_START_SECONDS, _PAUSE = 60, 0.2
_OPTIONS: dict[str, Option] = {
    "index": "",
    "search": ("exact", "ivf"),
    "nlist": 1024,
    "nprobe": 64,
    "token": "",
}


def read_milvus_uri(uri: Uri) -> ServerUri:
    """Parse ``milvus://HOST:PORT/DATABASE?index=NAME`` or ``milvus:///FILE.db?index=NAME``.

    Its ``rest`` is the URL of the server, or the path of a local file. The options have also the
    database.
    """
    shown, rest, options = read_uri(str(uri), _OPTIONS)
    options["index"] = options["index"].replace("-", "_")
    host, _, path = rest.removeprefix("milvus://").partition("/")
    if host:
        return ServerUri(shown, f"http://{host}", options | {"database": path})
    file = Path(f"/{path}")
    if file.suffix != ".db":
        raise UsageError(f"{shown}: the local file of an index on Milvus must end in .db")
    if options["search"] == "ivf":
        raise UsageError(f"{shown}: search=ivf needs a Milvus server; a local file is exact only")
    if not file.parent.is_dir():
        raise UsageError(f"{shown}: there is no folder {file.parent}")
    return ServerUri(shown, str(file), options | {"database": ""})


@dataclass
class MilvusRow:
    """One row; the fields are those of the collection."""

    row: int
    id: int
    hash: int
    born: int
    died: int
    code: bytes
    text: str


_FIELDS = list(MilvusRow.__annotations__)


def milvus_reason(error: MilvusException) -> str:
    """The first line of what Milvus says."""
    return str(error.message).splitlines()[0]


def text_hash(text: str) -> int:
    """A number of 62 bits that stands for a key or the kind of a note, never 0."""
    data = text.encode(errors="surrogateescape")
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) >> 2) | 1


def visible(commit: int) -> str:
    """The expression for rows that a commit has."""
    return f"born <= {commit} and died > {commit}"


_LOCKS: dict[tuple[str, str], Any] = {}


class MilvusRows:
    """The rows of a collection, by number.

    Attributes:
        uri: of the index, as messages show it.
        options: of the URI.
        is_local: whether they are in a local file.
        guard: held while a collection in a local file is read or changed, because a row that is
            written again is gone for a moment there. A server writes it again at once.
    """

    def __init__(self, uri: Uri) -> None:
        self.uri, server, self.options = read_milvus_uri(uri)
        self._name = self.options["index"]
        self.is_local = server.startswith("/")
        lock = _LOCKS.setdefault((server, self._name), threading.RLock())
        self.guard = lock if self.is_local else contextlib.nullcontext()
        # It also hangs up on clients that ping it while nothing happens.
        quiet = {"grpc.keepalive_permit_without_calls": False} if self.is_local else {}
        # The server of a local file starts with its client, which takes a while.
        deadline = time.monotonic() + (_START_SECONDS if self.is_local else 0)
        token, database = self.options["token"], self.options["database"]
        with self.errors(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while True:
                try:
                    self._client = MilvusClient(
                        server, token=token, db_name=database, grpc_options=quiet
                    )
                    return
                except MilvusException:
                    if time.monotonic() > deadline:
                        raise
                time.sleep(_PAUSE)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn errors of Milvus into errors that say what to do."""
        try:
            yield
        except MilvusException as error:
            raise FisherhashError(
                f"{self.uri}: Milvus says: {milvus_reason(error)}. Is the server running?"
            ) from error

    def exists(self) -> bool:
        """Whether there is a collection of that name."""
        with self.errors():
            return bool(self._client.has_collection(self._name))

    def create(self, facts: Facts, files: Files) -> None:
        """Create the collection; without a state row it is no index yet."""
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("row", DataType.INT64, is_primary=True)
        for name in ("id", "hash", "born", "died"):
            schema.add_field(name, DataType.INT64)
        schema.add_field("code", DataType.BINARY_VECTOR, dim=8 * code_bytes(facts.bits))
        schema.add_field("text", DataType.VARCHAR, max_length=MAX_TEXT)
        kinds = {
            "exact": {"index_type": "BIN_FLAT"},
            "ivf": {"index_type": "BIN_IVF_FLAT", "params": {"nlist": self.options["nlist"]}},
        }
        index = self._client.prepare_index_params()
        index.add_index("code", metric_type="HAMMING", **kinds[self.options["search"]])
        step = MAX_TEXT // 2
        parts = [
            json.dumps([name, base64.b64encode(data[start : start + step]).decode()])
            for name, data in files.items()
            for start in range(0, max(len(data), 1), step)
        ]
        with self.errors():
            try:
                self._client.create_collection(
                    self._name, schema=schema, index_params=index, consistency_level="Strong"
                )
                width = code_bytes(facts.bits)
                self.insert(
                    MilvusRow(i, MODEL, 0, 0, FOREVER, bytes(width), text)
                    for i, text in enumerate(parts)
                )
                self.commit(replace(facts, next_row=len(parts)))
            except BaseException:
                with contextlib.suppress(Exception):
                    self._client.drop_collection(self._name)
                raise

    def facts(self) -> str | None:
        """The facts of the last commit, as they are stored; None where there are none."""
        last = max(self.query(f"id == {STATE}"), key=lambda row: row.born, default=None)
        return None if last is None else last.text

    def commit(self, facts: Facts) -> None:
        """Make a commit."""
        number, code = facts.commit, bytes(code_bytes(facts.bits))
        self.insert([MilvusRow(-1 - number, STATE, 0, number, FOREVER, code, facts.to_json())])

    def insert(self, rows: Iterable[MilvusRow]) -> None:
        """Add rows; none of them is seen before its commit."""
        for some in _batches(rows):
            self._client.insert(self._name, [vars(row) for row in some])

    def replace(self, rows: Iterable[MilvusRow]) -> None:
        """Write rows again."""
        for some in _batches(rows):
            self._client.upsert(self._name, [vars(row) for row in some])

    def delete(self, rows: Iterable[int]) -> None:
        """Remove rows for good."""
        for some in _batches(rows):
            self._client.delete(self._name, ids=some)

    def query(self, expression: str) -> list[MilvusRow]:
        """Rows that match an expression, a page of them at most."""
        with self.errors():
            found = self._client.query(
                self._name,
                filter=expression,
                output_fields=_FIELDS,
                limit=PAGE,
                consistency_level="Strong",
            )
        return [MilvusRow(**{**row, "code": bytes(row["code"][0])}) for row in found]

    def count(self, expression: str) -> int:
        """How many rows match an expression."""
        with self.errors():
            found = self._client.query(
                self._name,
                filter=expression,
                output_fields=["count(*)"],
                consistency_level="Strong",
            )
        return int(found[0]["count(*)"])

    def all(self, facts: Facts, expression: str) -> Iterator[MilvusRow]:
        """All rows of a commit that match an expression, page by page."""
        first = self.query(f"{visible(facts.commit)} and {expression}")
        if len(first) < PAGE:
            yield from first
            return
        for start in range(0, facts.next_row, PAGE):
            numbers = f"row >= {start} and row < {start + PAGE}"
            yield from self.query(f"{numbers} and {visible(facts.commit)} and {expression}")

    def by_key(self, facts: Facts, keys: list[str]) -> dict[str, MilvusRow]:
        """The rows of those keys that exist."""
        hashes = {text_hash(key) for key in keys}
        found = {item_of_milvus(row).key: row for row in self._select(facts, "hash", hashes)}
        return {key: found[key] for key in keys if key in found}

    def by_id(self, facts: Facts, ids: Iterable[int]) -> list[MilvusRow]:
        """The rows of those ids that exist."""
        return list(self._select(facts, "id", {id_ for id_ in ids if id_ >= 0}))

    def _select(self, facts: Facts, name: str, values: Iterable[int]) -> Iterator[MilvusRow]:
        wanted = list(map(str, values))
        for start in range(0, len(wanted), _NAMES):
            test = f"{name} in [{','.join(wanted[start : start + _NAMES])}]"
            yield from self.query(f"id >= 0 and {visible(facts.commit)} and {test}")

    def notes(self, facts: Facts, kind: str) -> dict[str, tuple[MilvusRow, str]]:
        """The notes of a kind by name: their rows and JSON texts."""
        known = {}
        for row in self.all(facts, f"id == {NOTE} and hash == {text_hash(kind)}"):
            own, name, text = json.loads(row.text)
            if own == kind:
                known[name] = (row, text)
        return dict(sorted(known.items(), key=lambda one: ascii(one[0])))

    def search(
        self, queries: Sequence[bytes], limit: int, expression: str
    ) -> list[list[tuple[int, int]]]:
        """(id, distance) of the nearest rows of each query; ties may come in any order."""
        ivf = self.options["search"] == "ivf"
        with self.errors():
            found = self._client.search(
                self._name,
                list(queries),
                limit=limit,
                filter=expression,
                output_fields=["id"],
                anns_field="code",
                search_params={
                    "metric_type": "HAMMING",
                    "params": {"nprobe": self.options["nprobe"]} if ivf else {},
                },
                consistency_level="Strong",
            )
        return [[(hit["entity"]["id"], int(hit["distance"])) for hit in hits] for hits in found]

    def recover(self, facts: Facts) -> None:
        """Undo what a writer that ended after the last commit left, and clean up."""
        with self.errors():
            while rows := self.query(f"born > {facts.commit} and id != {STATE}"):
                self.delete([row.row for row in rows])
            while rows := self.query(f"died > {facts.commit} and died < {FOREVER}"):
                self.replace([replace(row, died=FOREVER) for row in rows])
            if self.count(f"died <= {facts.commit}"):
                # Announced first: who is reading an older commit reads again.
                facts = replace(facts, commit=facts.commit + 1, cleaned=facts.cleaned + 1)
                self.commit(facts)
            ended = f"died <= {facts.commit} or (id == {STATE} and born < {facts.commit})"
            while rows := self.query(ended):
                self.delete([row.row for row in rows])


def _batches(rows: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(rows)
    return iter(lambda: list(itertools.islice(rest, _INSERT)), [])


def item_of_milvus(row: MilvusRow) -> Item:
    """The item of a row."""
    if not row.text:
        return Item(row.id, row.code)
    known = json.loads(row.text)
    return Item(row.id, row.code, **(known | {"labels": tuple(known.get("labels", ()))}))
