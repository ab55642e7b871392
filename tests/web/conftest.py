"""A collection of images, and a real server over it on a free port."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import uvicorn
from PIL import Image

from fisherhash import Hasher
from fisherhash.index.images.image_index import ImageIndex
from fisherhash.web.guard import GuardedProtocol
from fisherhash.web.options import ServeOptions
from fisherhash.web.server import create_app

EVIL = "<img src=x onerror=alert(1)>.png"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
JSON = {"Accept": "application/json"}


def write_image(path: Path, seed: int, *, taken: str = "", camera: str = "") -> None:
    """An image of coloured tiles, the same for the same seed."""
    rng = np.random.default_rng(seed)
    tiles = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    image = Image.fromarray(tiles).resize((160, 128), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    if taken:
        exif.get_ifd(0x8769)[0x9003] = taken
    if camera:
        exif[0x0110] = camera
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, quality=90, exif=exif) if path.suffix == ".jpg" else image.save(path)


@dataclass(frozen=True)
class Collection:
    folder: Path
    index: Path


@pytest.fixture(scope="session")
def hasher():
    return Hasher.load("general-64")


@pytest.fixture(scope="session")
def new_collection(hasher):
    """Makes a folder of images and an index of it."""

    def make(root: Path) -> Collection:
        folder = root / "photos"
        for number in range(14):
            year, month = 2019 + number % 3, 1 + number % 12
            camera = ("One", "Two")[number % 2]
            date = f"{year}:{month:02d}:10 12:00:00"
            write_image(folder / "cats" / f"{number:02d}.jpg", number, taken=date, camera=camera)
        for number in range(14, 26):
            write_image(folder / "dogs" / f"{number:02d}.png", number)
        # Two copies of one image, byte for byte, and one that was saved again.
        write_image(folder / "copies" / "a.png", 100)
        write_image(folder / "copies" / "b.png", 100)
        with Image.open(folder / "copies" / "a.png") as image:
            small = image.crop((8, 6, 152, 122)).resize((48, 38))
            small.save(folder / "copies" / "small.jpg", quality=40)
        write_image(folder / EVIL, 200)
        (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no image at all")
        with ImageIndex.create(root / "photos.index", hasher) as images:
            images.sync(folder, workers=0)
        return Collection(folder, root / "photos.index")

    return make


@pytest.fixture(scope="session")
def collection(new_collection, tmp_path_factory):
    """Not to be changed by a test."""
    return new_collection(tmp_path_factory.mktemp("web"))


@dataclass
class Answered:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self):
        return json.loads(self.body)


@dataclass
class Served:
    """A running server."""

    url: str
    port: int
    images: ImageIndex

    def ask(self, path, *, method="GET", body=None, headers=None) -> Answered:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            for name, value in {"Accept": "text/html, */*", **(headers or {})}.items():
                connection.putheader(name, value)
            if body is not None and "Content-Length" not in (headers or {}):
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answered(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def json(self, path, **options):
        answer = self.ask(path, **options)
        assert answer.status == 200, answer.body
        return answer.json


@contextlib.contextmanager
def serving(index, hasher, **options):
    """Serve an index in a thread of this process."""
    images = ImageIndex.open(index)
    images = ImageIndex(images.index, hasher)
    chosen = ServeOptions(str(index), port=0, **options)
    app = create_app(images, chosen)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http=GuardedProtocol, log_level="warning", ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", port, images)
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="session")
def serve(hasher):
    return lambda index, **options: serving(index, hasher, **options)


@pytest.fixture(scope="session")
def server(collection, serve):
    """The collection, served for reading."""
    with serve(collection.index, seconds=20.0) as served:
        assert urlsplit(served.url).port == served.port
        yield served


@pytest.fixture(scope="session")
def id_of(server):
    """The id of an item by its key."""
    found = {item.key: item.id for item in server.images.index.items()}
    return found.__getitem__


@pytest.fixture
def png(tmp_path):
    """The bytes of an image that is in the collection."""
    write_image(tmp_path / "query.png", 17)
    return (tmp_path / "query.png").read_bytes()
