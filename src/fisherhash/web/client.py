"""A client of the server's API, with the methods of an index of images. Needs no extra package."""

from __future__ import annotations

import json
import os
import secrets
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.images.nearest import FINE_WEIGHT
from fisherhash.web.queries import weight_text

_MOST_ANSWER = 1 << 30


@dataclass(frozen=True)
class RemoteItem:
    """One item of a served index.

    Attributes:
        id: its id.
        key: its key; None for codes that were added in bulk.
        code: its packed code.
        labels: its labels.
        metadata: its other fields.
        image: the address of its image.
        distance: from the query or, in a group of duplicates, from the first; None elsewhere.
        fine: the distance of its second code, where the search compared those.
        combined: the distance of both codes, where that orders the results.
    """

    id: int
    key: str | None
    code: bytes = field(repr=False)
    labels: tuple[str, ...]
    metadata: dict[str, Any]
    image: str
    distance: float | None = None
    fine: int | None = None
    combined: float | None = None

    @property
    def name(self) -> str:
        """Its key; an item without a key is named by its id."""
        return f"id {self.id}" if self.key is None else self.key


class RemoteGroup(list[RemoteItem]):
    """A group of likely duplicates; the first item is the one to keep.

    Attributes:
        span: the largest distance between any two of them.
        confirmed: whether their thumbnails show the same image; None if that was not compared.
    """

    def __init__(self, items: Iterable[RemoteItem], *, span: int, confirmed: bool | None) -> None:
        super().__init__(items)
        self.span, self.confirmed = span, confirmed


class Client:
    """A served index: ``fisherhash.Client("http://127.0.0.1:8765")``. A context manager.

    Args:
        url: the address that the server printed.
        token: needed for changes, and for a server on another machine; by default the one in the
            address.
        seconds: how long to wait for an answer.
    """

    def __init__(self, url: str, *, token: str | None = None, seconds: float = 60.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UsageError(f"{url!r} is not the address of a server, http://HOST:PORT")
        given = urllib.parse.parse_qs(parts.query).get("token", [None])[0]
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._token, self._seconds = token or given, seconds
        # Never through a proxy of the environment: the server is where the address says.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def search(
        self,
        images: str | os.PathLike[str] | bytes | Sequence[str | os.PathLike[str] | bytes] = (),
        *,
        keys: str | Sequence[str] = (),
        k: int | None = None,
        radius: int | None = None,
        where: str | Sequence[str] = (),
        ranking: str | None = None,
        fine_weight: float | None = FINE_WEIGHT,
    ) -> list[list[RemoteItem]]:
        """Search with images and with items of the index; one list per query, nearest first.

        Args:
            images: one or several, as paths or as the bytes of files.
            keys: one or several items of the index.
            k: the most results per query.
            radius: only items whose codes differ in at most this many bits.
            where: filters such as ``label=cat``; all must match.
            ranking: of images: ``hamming`` or, where ``info()["rankings"]`` has it, ``real``.
            fine_weight: what a bit of the second code counts, where the index has those; None lets
                them order only what is at the same distance.
        """
        wanted = {"k": k, "radius": radius, "where": [where] if isinstance(where, str) else where}
        if fine_weight != FINE_WEIGHT:
            wanted["fine_weight"] = weight_text(fine_weight)
        found = []
        several = [images] if isinstance(images, str | os.PathLike | bytes) else images
        for image in several:
            data = image if isinstance(image, bytes) else Path(image).read_bytes()
            kind = {"Content-Type": "application/octet-stream"}
            found.append(
                self._call("POST", "/api/search", {**wanted, "ranking": ranking}, data, kind)
            )
        for key in [keys] if isinstance(keys, str) else keys:
            found.append(self._call("GET", "/api/search", {**wanted, "key": key}))
        return [list(map(self._item, answer["results"])) for answer in found]

    def get(self, number: int) -> RemoteItem:
        """The item of an id."""
        return self._item(self._call("GET", f"/api/items/{int(number)}"))

    def items(self, where: str | Sequence[str] = ()) -> Iterator[RemoteItem]:
        """All items that match a filter, by ascending id."""
        after: int | None = None
        while True:
            wanted = {"where": [where] if isinstance(where, str) else where, "after": after}
            answer = self._call("GET", "/api/items", {**wanted, "limit": 1000})
            yield from map(self._item, answer["items"])
            after = answer["next"]
            if after is None:
                return

    def add(
        self, image: str | os.PathLike[str], *, labels: Sequence[str] | None = None
    ) -> RemoteItem:
        """Send an image file to a writable server, which stores it and adds it to the index."""
        mark = secrets.token_hex(16)
        name = os.path.basename(image)
        for character in '"\r\n':
            name = name.replace(character, urllib.parse.quote(character))
        head = f"--{mark}\r\nContent-Disposition: form-data; name="
        body = f'{head}"image"; filename="{name}"\r\n\r\n'.encode(errors="surrogateescape")
        body += Path(image).read_bytes() + b"\r\n"
        for label in labels or ():
            body += f'{head}"label"\r\n\r\n{label}\r\n'.encode()
        kind = {"Content-Type": f"multipart/form-data; boundary={mark}"}
        return self._item(self._call("POST", "/api/items", {}, body + f"--{mark}--".encode(), kind))

    def remove(
        self, keys: str | Sequence[str] = (), *, where: str | Sequence[str] | None = None
    ) -> int:
        """Remove items by key, and those that match a filter; returns how many.

        No image file is touched.

        Raises:
            UsageError: there is no item with one of the keys, or a filter is empty; nothing is
                removed.
        """
        filters = [where] if isinstance(where, str) else where
        if filters is not None and not (filters and all(filters)):
            raise UsageError("an empty filter matches every item")
        names = [keys] if isinstance(keys, str) else list(keys)
        ids = [
            self._call("GET", "/api/search", {"key": key, "k": 1})["query"]["id"] for key in names
        ]
        if filters is not None:
            ids += [item.id for item in self.items(filters)]
        numbers = dict.fromkeys(ids)
        return sum(self._call("DELETE", f"/api/items/{number}")["removed"] for number in numbers)

    def duplicates(
        self, *, radius: int | None = None, code: str | None = None
    ) -> list[RemoteGroup]:
        """Groups of images that are likely copies of each other, the surest first.

        Args:
            radius: bits in which any two of a group may differ; by default the server chooses.
            code: compare ``copy`` codes, which are made for copies, or the index's ``own``; by
                default copy codes where the server has them or soon has.

        Raises:
            FisherhashError: they are still being computed.
        """
        answer = self._call("GET", "/api/duplicates", {"radius": radius, "code": code})
        return [
            RemoteGroup(map(self._item, one["items"]), span=one["span"], confirmed=one["confirmed"])
            for one in answer["groups"]
        ]

    def skipped(self) -> list[dict[str, str]]:
        """The files that could not be read, with the reasons."""
        return self._call("GET", "/api/skipped")

    def info(self) -> dict[str, Any]:
        """Facts about the index."""
        return self._call("GET", "/api/info")

    def close(self) -> None:
        """Nothing is held between calls; here for code that also takes an ImageIndex."""

    def _item(self, row: Mapping[str, Any]) -> RemoteItem:
        return RemoteItem(
            row["id"],
            row["key"],
            bytes.fromhex(row["code"]),
            tuple(row["labels"]),
            row["metadata"],
            self.url + row["image"],
            row.get("distance"),
            row.get("fine"),
            row.get("combined"),
        )

    def _call(
        self,
        method: str,
        path: str,
        params: Mapping[str, Any] | None = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        given = {name: value for name, value in (params or {}).items() if value is not None}
        query = urllib.parse.urlencode(given, doseq=True, errors="surrogateescape")
        request = urllib.request.Request(
            f"{self.url}{path}?{query}" if query else self.url + path, data, method=method
        )
        request.add_header("Accept", "application/json")
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            with self._opener.open(request, timeout=self._seconds) as answer:
                return json.loads(answer.read(_MOST_ANSWER))
        except urllib.error.HTTPError as error:
            raise _error(error) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise FisherhashError(f"{self.url} does not answer: {reason}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"


def _error(error: urllib.error.HTTPError) -> FisherhashError:
    """What the server said went wrong."""
    try:
        said = json.loads(error.read(1 << 20))["error"]
    except (ValueError, KeyError, TypeError, OSError):
        said = f"the server answered {error.code}"
    kind = UsageError if error.code in (400, 404, 405) else FisherhashError
    return kind(said)
