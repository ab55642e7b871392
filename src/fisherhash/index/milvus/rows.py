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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.base import Files, Uri
from fisherhash.index.uris import Option, read_uri

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
_START_SECONDS, _PAUSE = 60, 0.2
_OPTIONS: dict[str, Option] = {
    "index": "",
    "search": ("exact", "ivf"),
    "nlist": 1024,
    "nprobe": 64,
    "token": "",
}


class Address(NamedTuple):
    """An index on Milvus, as its URI says.

    Attributes:
        uri: as messages show it, without the token.
        server: the URL of the server, or the path of a local file.
        database: of the server; empty for its default.
        collection: the collection of the index.
        search: ``exact``, or ``ivf`` for approximate searches by an inverted file.
        nlist: lists of that file.
        nprobe: lists that a search reads.
        token: for the server.
    """

    uri: str
    server: str
    database: str
    collection: str
    search: str
    nlist: int
    nprobe: int
    token: str

    @property
    def is_local(self) -> bool:
        """Whether it is a local file, which only one process can open."""
        return self.server.startswith("/")


def read_address(uri: Uri) -> Address:
    """Parse ``milvus://HOST:PORT/DATABASE?index=NAME`` or ``milvus:///FILE.db?index=NAME``."""
    shown, rest, options = read_uri(str(uri), _OPTIONS)
    name = options.pop("index").replace("-", "_")
    host, _, path = rest.removeprefix("milvus://").partition("/")
    if host:
        return Address(shown, f"http://{host}", path, name, **options)
    if not path.endswith(".db"):
        raise UsageError(f"{shown}: the local file of an index on Milvus must end in .db")
    if options["search"] == "ivf":
        raise UsageError(f"{shown}: search=ivf needs a Milvus server; a local file is exact only")
    if not Path(f"/{path}").parent.is_dir():
        raise UsageError(f"{shown}: there is no folder {Path(f'/{path}').parent}")
    return Address(shown, f"/{path}", "", name, **options)


@dataclass(frozen=True)
class State:
    """The last commit.

    Attributes:
        bits: length of the codes.
        fingerprint: of the model that made them.
        model: a description of that model.
        digest: of the files of that model, if the index carries it.
        commit: the number of the commit.
        next_row: the first row number that was never used.
        next_id: the id of the next item.
        cleaned: how often ended rows were removed.
    """

    bits: int
    fingerprint: str | None
    model: dict[str, Any]
    digest: str | None
    commit: int = 0
    next_row: int = 0
    next_id: int = 0
    cleaned: int = 0


@dataclass
class Row:
    """One row; the fields are those of the collection."""

    row: int
    id: int
    hash: int
    born: int
    died: int
    code: bytes
    text: str


_FIELDS = list(Row.__annotations__)


@contextlib.contextmanager
def milvus_errors(uri: str) -> Iterator[None]:
    """Turn errors of Milvus into errors that say what to do."""
    try:
        yield
    except MilvusException as error:
        what = first_line(error)
        raise FisherhashError(f"{uri}: Milvus says: {what}. Is the server running?") from error


def first_line(error: MilvusException) -> str:
    """The first line of what Milvus says."""
    return str(error.message).splitlines()[0]


def text_hash(text: str) -> int:
    """A number of 62 bits that stands for a key or the kind of a note, never 0."""
    data = text.encode(errors="surrogateescape")
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) >> 2) | 1


def visible(commit: int) -> str:
    """The expression for rows that a commit has."""
    return f"born <= {commit} and died > {commit}"


def one_of(name: str, values: Iterable[int]) -> str:
    """The expression for rows whose field is one of some numbers."""
    return f"{name} in [{','.join(map(str, values))}]"


_LOCKS: dict[tuple[str, str], Any] = {}


class Rows:
    """The rows of a collection, by number.

    Attributes:
        guard: held while a collection in a local file is read or changed, because a row that is
            written again is gone for a moment there. A server writes it again at once.
    """

    def __init__(self, address: Address) -> None:
        self.address, self._name = address, address.collection
        lock = _LOCKS.setdefault((address.server, self._name), threading.RLock())
        self.guard = lock if address.is_local else contextlib.nullcontext()
        with milvus_errors(address.uri), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._client = self._connect()

    def _connect(self) -> MilvusClient:
        """A client; the server of a local file starts with it, which takes a while."""
        address = self.address
        # It also hangs up on clients that ping it while nothing happens.
        quiet = {"grpc.keepalive_permit_without_calls": False} if address.is_local else {}
        deadline = time.monotonic() + (_START_SECONDS if address.is_local else 0)
        while True:
            try:
                return MilvusClient(
                    address.server,
                    token=address.token,
                    db_name=address.database,
                    grpc_options=quiet,
                )
            except MilvusException:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE)

    def exists(self) -> bool:
        """Whether there is a collection of that name."""
        with milvus_errors(self.address.uri):
            return bool(self._client.has_collection(self._name))

    def create(self, state: State, files: Files, width: int) -> None:
        """Create the collection; without a state row it is no index yet."""
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("row", DataType.INT64, is_primary=True)
        for name in ("id", "hash", "born", "died"):
            schema.add_field(name, DataType.INT64)
        schema.add_field("code", DataType.BINARY_VECTOR, dim=8 * width)
        schema.add_field("text", DataType.VARCHAR, max_length=MAX_TEXT)
        kinds = {
            "exact": {"index_type": "BIN_FLAT"},
            "ivf": {"index_type": "BIN_IVF_FLAT", "params": {"nlist": self.address.nlist}},
        }
        index = self._client.prepare_index_params()
        index.add_index("code", metric_type="HAMMING", **kinds[self.address.search])
        step = MAX_TEXT // 2
        parts = [
            json.dumps([name, base64.b64encode(data[start : start + step]).decode()])
            for name, data in files.items()
            for start in range(0, max(len(data), 1), step)
        ]
        with milvus_errors(self.address.uri):
            try:
                self._client.create_collection(
                    self._name, schema=schema, index_params=index, consistency_level="Strong"
                )
                self.insert(
                    Row(i, MODEL, 0, 0, FOREVER, bytes(width), text) for i, text in enumerate(parts)
                )
                self.insert_state(replace(state, next_row=len(parts)), width)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._client.drop_collection(self._name)
                raise

    def state(self) -> State | None:
        """The last commit; None where there is none."""
        states = [State(**json.loads(row.text)) for row in self.query(f"id == {STATE}")]
        return max(states, key=lambda one: one.commit, default=None)

    def insert_state(self, state: State, width: int) -> None:
        """Make a commit."""
        number, text = state.commit, json.dumps(asdict(state))
        self.insert([Row(-1 - number, STATE, 0, number, FOREVER, bytes(width), text)])

    def insert(self, rows: Iterable[Row]) -> None:
        """Add rows; none of them is seen before its commit."""
        for some in _batches(rows):
            self._client.insert(self._name, [vars(row) for row in some])

    def replace(self, rows: Iterable[Row]) -> None:
        """Write rows again."""
        for some in _batches(rows):
            self._client.upsert(self._name, [vars(row) for row in some])

    def delete(self, rows: Iterable[int]) -> None:
        """Remove rows for good."""
        for some in _batches(rows):
            self._client.delete(self._name, ids=some)

    def query(self, expression: str) -> list[Row]:
        """Rows that match an expression, a page of them at most."""
        with milvus_errors(self.address.uri):
            found = self._client.query(
                self._name,
                filter=expression,
                output_fields=_FIELDS,
                limit=PAGE,
                consistency_level="Strong",
            )
        return [Row(**{**row, "code": bytes(row["code"][0])}) for row in found]

    def count(self, expression: str) -> int:
        """How many rows match an expression."""
        with milvus_errors(self.address.uri):
            found = self._client.query(
                self._name,
                filter=expression,
                output_fields=["count(*)"],
                consistency_level="Strong",
            )
        return int(found[0]["count(*)"])

    def all(self, state: State, expression: str) -> Iterator[Row]:
        """All rows of a commit that match an expression, page by page."""
        first = self.query(f"{visible(state.commit)} and {expression}")
        if len(first) < PAGE:
            yield from first
            return
        for start in range(0, state.next_row, PAGE):
            numbers = f"row >= {start} and row < {start + PAGE}"
            yield from self.query(f"{numbers} and {visible(state.commit)} and {expression}")

    def search(
        self, queries: Sequence[bytes], limit: int, expression: str, **params: int
    ) -> list[list[tuple[int, int]]]:
        """(id, distance) of the nearest rows of each query; ties may come in any order."""
        if self.address.search == "ivf":
            params = {"nprobe": self.address.nprobe} | params
        with milvus_errors(self.address.uri):
            found = self._client.search(
                self._name,
                list(queries),
                limit=limit,
                filter=expression,
                output_fields=["id"],
                anns_field="code",
                search_params={"metric_type": "HAMMING", "params": params},
                consistency_level="Strong",
            )
        return [[(hit["entity"]["id"], int(hit["distance"])) for hit in hits] for hits in found]

    def recover(self, width: int) -> State | None:
        """Undo what a writer that ended before its commit left, and return the last commit."""
        state = self.state()
        if state is None:
            return None
        with milvus_errors(self.address.uri):
            while rows := self.query(f"born > {state.commit} and id != {STATE}"):
                self.delete([row.row for row in rows])
            while rows := self.query(f"died > {state.commit} and died < {FOREVER}"):
                self.replace([replace(row, died=FOREVER) for row in rows])
            if self.query(f"died <= {state.commit}"):
                # Announced first: who is reading an older commit reads again.
                state = replace(state, commit=state.commit + 1, cleaned=state.cleaned + 1)
                self.insert_state(state, width)
            old = f"died <= {state.commit} or (id == {STATE} and born < {state.commit})"
            while rows := self.query(old):
                self.delete([row.row for row in rows])
        return state


def _batches(rows: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(rows)
    return iter(lambda: list(itertools.islice(rest, _INSERT)), [])
