"""The collection of an index on Milvus: rows that are visible from one commit to another.

Milvus has no transactions. Every row therefore says which commit made it and which one ended it,
and the last state row says which commit is the current one: inserting that row is the commit.
A process that ends before it leaves rows that nobody sees; the next writer removes them.

A row is an item (its id), a note (:data:`NOTE`), a part of the model (:data:`MODEL`) or a state
(:data:`STATE`). Texts are JSON in ASCII. Keys are found by a hash, so no text of a caller is ever
part of an expression.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Uri
from fisherhash.index.uris import read_choice, read_count, read_index_name, read_uri

with warnings.catch_warnings():
    # It looks for its own version in a way that Python is about to drop.
    warnings.simplefilter("ignore")
    from pymilvus import DataType, MilvusClient, MilvusException

NOTE, MODEL, STATE = -1, -2, -3
"""In place of the id."""
FOREVER = 2**62
"""The commit that ends a row which is still there."""
PAGE = 16_384
"""Rows that Milvus returns at most."""
MAX_TEXT = 65_535
_INSERT = 1 << 13
_START_SECONDS, _PAUSE = 60, 0.2
ALL_FIELDS = ("row", "id", "hash", "born", "died", "code", "text")
_READERS = {
    "index": read_index_name,
    "search": read_choice("exact", "ivf"),
    "nlist": read_count,
    "nprobe": read_count,
    "token": lambda _, text: text,
}
_DEFAULTS = {"search": "exact", "nlist": 1024, "nprobe": 64, "token": ""}


class MilvusPlace(NamedTuple):
    """An index on Milvus, as its URI says."""

    uri: str
    server: str
    database: str
    name: str
    search: str
    nlist: int
    nprobe: int
    token: str


def read_milvus_place(uri: Uri) -> MilvusPlace:
    """Parse ``milvus://HOST:PORT/DATABASE?index=NAME`` or ``milvus:///FILE.db?index=NAME``."""
    shown, rest, options = read_uri(str(uri), _READERS, _DEFAULTS, strict=True)
    if "index" not in options:
        raise UsageError(f"{shown} does not say which index: end it with ?index=NAME")
    name = options.pop("index").replace("-", "_")
    host, _, path = rest.removeprefix("milvus://").partition("/")
    if host:
        return MilvusPlace(shown, f"http://{host}", path, name, **options)
    if not path.endswith(".db"):
        raise UsageError(f"{shown}: the local file of an index on Milvus must end in .db")
    if options["search"] == "ivf":
        raise UsageError(f"{shown}: search=ivf needs a Milvus server; a local file is exact only")
    return MilvusPlace(shown, f"/{path}", "", name, **options)


@dataclass(frozen=True)
class MilvusState:
    """The last commit.

    Attributes:
        commit: its number.
        next_row: the first row number that was never used.
        next_id: the id of the next item.
        dead: rows that ended and are still there.
        compacted: how often ended rows were removed.
    """

    bits: int
    fingerprint: str | None
    model: dict[str, Any]
    archive: str | None
    commit: int = 0
    next_row: int = 0
    next_id: int = 0
    dead: int = 0
    compacted: int = 0


@dataclass
class MilvusRow:
    """One row; the fields are those of the collection."""

    row: int
    id: int
    hash: int
    born: int
    died: int
    code: bytes
    text: str = field(default="", repr=False)


@contextlib.contextmanager
def milvus_errors(uri: str) -> Iterator[None]:
    """Turn errors of Milvus into errors that say what to do."""
    try:
        yield
    except MilvusException as error:
        what = str(error.message).splitlines()[0]
        raise FisherhashError(f"{uri}: Milvus says: {what}. Is the server running?") from error


def key_hash(key: str) -> int:
    """A number of 62 bits that stands for a key, never 0."""
    data = key.encode(errors="surrogateescape")
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) >> 2) | 1


_LOCKS: dict[tuple[str, str], Any] = {}


class RowStore:
    """Rows on a server, by number.

    Attributes:
        guard: held while a collection in a local file is read or changed. Only one process can
            open such a file, and a row that is written again is gone for a moment there. A server
            writes it again at once.
    """

    def __init__(self, place: MilvusPlace) -> None:
        self.place = place
        self.is_local = place.server.startswith("/")
        lock = _LOCKS.setdefault((place.server, place.name), threading.RLock())
        self.guard = lock if self.is_local else contextlib.nullcontext()
        if self.is_local:
            parent = Path(place.server).parent
            if not parent.is_dir():
                raise UsageError(f"{place.uri}: there is no folder {parent}")
        with milvus_errors(place.uri), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.client = self._connect()

    def _connect(self) -> MilvusClient:
        """A client; the server of a local file starts with it, which takes a while."""
        place = self.place
        # It also hangs up on clients that ping it while nothing happens.
        quiet = {"grpc.keepalive_permit_without_calls": False} if self.is_local else {}
        deadline = time.monotonic() + (_START_SECONDS if self.is_local else 0)
        while True:
            try:
                return MilvusClient(
                    place.server, token=place.token, db_name=place.database, grpc_options=quiet
                )
            except MilvusException:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE)

    def exists(self) -> bool:
        """Whether there is a collection of that name."""
        with milvus_errors(self.place.uri):
            return bool(self.client.has_collection(self.place.name))

    def create(self, state: MilvusState, width: int) -> None:
        """Create the collection; without a state row it is no index yet."""
        schema = self.client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("row", DataType.INT64, is_primary=True)
        for name in ("id", "hash", "born", "died"):
            schema.add_field(name, DataType.INT64)
        schema.add_field("code", DataType.BINARY_VECTOR, dim=8 * width)
        schema.add_field("text", DataType.VARCHAR, max_length=MAX_TEXT)
        kinds = {
            "exact": {"index_type": "BIN_FLAT"},
            "ivf": {"index_type": "BIN_IVF_FLAT", "params": {"nlist": self.place.nlist}},
        }
        index = self.client.prepare_index_params()
        index.add_index("code", metric_type="HAMMING", **kinds[self.place.search])
        with milvus_errors(self.place.uri):
            self.client.create_collection(
                self.place.name, schema=schema, index_params=index, consistency_level="Strong"
            )
            self.insert([state_row(state, width)])

    def state(self) -> MilvusState | None:
        """The last commit; None where there is none."""
        with milvus_errors(self.place.uri):
            rows = self.client.query(
                self.place.name,
                filter=f"id == {STATE}",
                output_fields=["text"],
                consistency_level="Strong",
            )
        states = [MilvusState(**json.loads(row["text"])) for row in rows]
        return max(states, key=lambda one: one.commit, default=None)

    def insert(self, rows: Sequence[MilvusRow]) -> None:
        """Add rows; none of them is seen before its commit."""
        for some in _batches(rows):
            self.client.insert(self.place.name, [vars(row) for row in some])

    def replace(self, rows: Sequence[MilvusRow]) -> None:
        """Write rows again."""
        for some in _batches(rows):
            self.client.upsert(self.place.name, [vars(row) for row in some])

    def delete(self, rows: Sequence[int]) -> None:
        """Remove rows for good."""
        for some in _batches(rows):
            self.client.delete(self.place.name, ids=list(some))

    def query(self, expression: str, fields: Sequence[str] = ALL_FIELDS) -> list[Any]:
        """Rows that match an expression; there must not be more than a page of them."""
        with milvus_errors(self.place.uri):
            found = self.client.query(
                self.place.name,
                filter=expression,
                output_fields=list(fields),
                limit=PAGE,
                consistency_level="Strong",
            )
        return [
            MilvusRow(**{**row, "code": bytes(row["code"][0])}) if "code" in row else dict(row)
            for row in found
        ]

    def pages(self, end: int, expression: str, fields: Sequence[str]) -> Iterator[list[Any]]:
        """Rows below ``end`` that match an expression, page by page."""
        for start in range(0, end, PAGE):
            yield self.query(f"row >= {start} and row < {start + PAGE} and {expression}", fields)

    def search(
        self, queries: list[bytes], limit: int, expression: str, **ranges: int
    ) -> list[list[tuple[int, int]]]:
        """(id, distance) of the nearest rows of each query, in any order among ties."""
        params: dict[str, Any] = dict(ranges)
        if self.place.search == "ivf":
            params.setdefault("nprobe", self.place.nprobe)
        with milvus_errors(self.place.uri):
            found = self.client.search(
                self.place.name,
                queries,
                limit=limit,
                filter=expression,
                output_fields=["id"],
                anns_field="code",
                search_params={"metric_type": "HAMMING", "params": params},
                consistency_level="Strong",
            )
        return [[(hit["entity"]["id"], int(hit["distance"])) for hit in hits] for hits in found]


def _batches(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (rows[start : start + _INSERT] for start in range(0, len(rows), _INSERT))


def visible(commit: int) -> str:
    """The expression for rows that a commit has."""
    return f"born <= {commit} and died > {commit}"


def one_of(name: str, values: Iterable[int]) -> str:
    """The expression for rows whose field is one of some numbers."""
    return f"{name} in [{','.join(map(str, values))}]"


def state_row(state: MilvusState, width: int) -> MilvusRow:
    """The row whose insertion is a commit."""
    text = json.dumps(asdict(state))
    return MilvusRow(-1 - state.commit, STATE, 0, state.commit, FOREVER, bytes(width), text)
