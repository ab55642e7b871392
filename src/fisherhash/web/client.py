"""A client of the server's API, with the methods of an index of images. Needs no extra package."""

from __future__ import annotations

import json
import os
import secrets
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index.images.duplicates import DuplicateGroup
from fisherhash.index.images.options import DuplicateCode, Ranking
from fisherhash.index.images.results import Hit, SearchResult

_MOST_ANSWER = 1 << 30
ImageFile = str | os.PathLike[str] | bytes


@dataclass(frozen=True)
class RemoteHit(Hit):
    """A hit of a served index.

    Attributes:
        image: the address of its image.
    """

    image: str = ""


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
        images: ImageFile | Sequence[ImageFile] = (),
        *,
        keys: str | Sequence[str] = (),
        k: int = 10,
        radius: int | None = None,
        where: str | Sequence[str] = (),
        ranking: Ranking = "hamming",
    ) -> list[SearchResult]:
        """Search with images and with items of the index; one result per query, in this order.

        Args:
            images: one or several, as paths or as the bytes of files.
            keys: one or several items of the index.
            k: the most hits per query.
            radius: only items whose codes differ in at most this many bits.
            where: filters such as ``label=cat``; all must match.
            ranking: of images: ``hamming``, ``real``, or what the model's card says is better.
        """
        wanted = {"k": k, "radius": radius, "where": _several(where)}
        if ranking == "real" and keys:
            raise UsageError("the ranking 'real' needs images: an item has its code only")
        given = [images] if isinstance(images, str | os.PathLike | bytes) else images
        found = []
        for number, image in enumerate(given):
            data = image if isinstance(image, bytes) else Path(image).read_bytes()
            kind = {"Content-Type": "application/octet-stream"}
            answer = self._call("POST", "/api/search", {**wanted, "ranking": ranking}, data, kind)
            name = f"image {number}" if isinstance(image, bytes) else os.fspath(image)
            found.append(self._result(name, answer))
        for key in _several(keys):
            answer = self._call("GET", "/api/search", {**wanted, "key": key})
            found.append(replace(self._result(key, answer), by_key=True))
        return found

    def get(self, number: int) -> RemoteHit:
        """The item of an id."""
        return self._hit(self._call("GET", f"/api/items/{int(number)}"))

    def items(self, where: str | Sequence[str] = ()) -> Iterator[RemoteHit]:
        """All items that match a filter, by ascending id."""
        wanted: dict[str, Any] = {"where": _several(where), "limit": 1000}
        while True:
            answer = self._call("GET", "/api/items", wanted)
            yield from map(self._hit, answer["items"])
            if answer["next"] is None:
                return
            wanted["after"] = answer["next"]

    def add(
        self, image: str | os.PathLike[str], *, labels: Sequence[str] | None = None
    ) -> RemoteHit:
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
        return self._hit(self._call("POST", "/api/items", {}, body + f"--{mark}--".encode(), kind))

    def remove(
        self, keys: str | Sequence[str] = (), *, where: str | Sequence[str] | None = None
    ) -> int:
        """Remove items by key, and those that match a filter; returns how many.

        No image file is touched.

        Raises:
            UsageError: there is no item with one of the keys, or a filter is empty; nothing is
                removed.
        """
        filters = None if where is None else _several(where)
        if filters is not None and not (filters and all(filters)):
            raise UsageError("an empty filter matches every item")
        calls = [self._call("GET", "/api/search", {"key": k, "k": 1}) for k in _several(keys)]
        ids = [answer["query"]["id"] for answer in calls]
        ids += [] if filters is None else [hit.id for hit in self.items(filters)]
        numbers = dict.fromkeys(ids)
        return sum(self._call("DELETE", f"/api/items/{number}")["removed"] for number in numbers)

    def duplicates(
        self, *, radius: int | None = None, code: DuplicateCode = "auto"
    ) -> list[DuplicateGroup]:
        """Groups of images that are likely copies of each other, the surest first.

        Args:
            radius: bits in which any two of a group may differ; by default the server chooses.
            code: compare ``copy`` codes, which are made for copies, or the index's ``own``;
                ``auto`` takes copy codes where the server has them or soon has.

        Raises:
            FisherhashError: they are still being computed.
        """
        answer = self._call("GET", "/api/duplicates", {"radius": radius, "code": code})
        return [
            DuplicateGroup(tuple(map(self._hit, one["items"])), one["span"], one["confirmed"])
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

    def _result(self, query: str, answer: Mapping[str, Any]) -> SearchResult:
        hits: list[Hit] = [self._hit(row) for row in answer["results"]]
        code = bytes.fromhex(answer["code"])
        return SearchResult(query, code=code, hits=hits, ranking=answer["ranking"])

    def _hit(self, row: Mapping[str, Any]) -> RemoteHit:
        return RemoteHit(
            row["id"],
            row["key"],
            row.get("distance"),
            labels=tuple(row["labels"]),
            metadata=row["metadata"],
            size=row["size"],
            mtime_ns=row["mtime_ns"],
            code=bytes.fromhex(row["code"]),
            image=self.url + row["image"],
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
        url = f"{self.url}{path}?{query}" if query else self.url + path
        sent = {"Accept": "application/json", **(headers or {})}
        if self._token:
            sent["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(url, data, sent, method=method)
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


def _several(texts: str | Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def _error(error: urllib.error.HTTPError) -> FisherhashError:
    """What the server said went wrong."""
    try:
        said = json.loads(error.read(1 << 20))["error"]
    except (ValueError, KeyError, TypeError, OSError):
        said = f"the server answered {error.code}"
    kind = UsageError if error.code in (400, 404, 405) else FisherhashError
    return kind(said)
