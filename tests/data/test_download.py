"""The download of CIFAR-10 against a server on this machine: whole, broken off, wrong, refused."""

from __future__ import annotations

import hashlib
import http.server
import tarfile
import threading
from pathlib import Path

import pytest

from fisherhash.data.cifar import open_cifar10
from fisherhash.data.download import CIFAR10_MD5, CIFAR10_URL, download_cifar10
from fisherhash.data.sources import open_data
from fisherhash.errors import FisherhashError


class Handler(http.server.BaseHTTPRequestHandler):
    content = b""
    ranges = True
    stop_after: int | None = None
    requests: list[str | None] = []  # noqa: RUF012

    def do_GET(self):
        if self.path != "/cifar.tar.gz":
            self.send_error(404)
            return
        wanted = self.headers.get("Range")
        self.requests.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.ranges else 0
        if start >= len(self.content):
            self.send_error(416)
            return
        body = self.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.stop_after is None else body[: self.stop_after])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, pictures):
    folder = pictures.cifar(tmp_path / "made" / "cifar-10-batches-bin")
    with tarfile.open(tmp_path / "made.tar.gz", "w:gz") as pack:
        pack.add(folder, "cifar-10-batches-bin")
    content = (tmp_path / "made.tar.gz").read_bytes()
    handler = type("Own", (Handler,), {"content": content, "requests": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        handler.url = f"http://127.0.0.1:{running.server_port}/cifar.tar.gz"
        handler.md5 = hashlib.md5(content).hexdigest()
        yield handler
        running.shutdown()


def fetch(server: type, dest: Path) -> Path:
    return download_cifar10(dest, url=server.url, md5=server.md5, timeout=5)


def left(dest: Path) -> list[str]:
    return sorted(path.name for path in dest.iterdir())


def test_the_official_address_and_checksum():
    assert CIFAR10_URL == "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    assert CIFAR10_MD5 == "c32a1d4ab5d03f1284b67883e8d87530"


def test_download(server, tmp_path):
    dest = tmp_path / "cache" / "data"
    assert len(open_cifar10(fetch(server, dest))) == 120
    assert left(dest) == ["cifar-10-batches-bin"]


def test_open_data_downloads_only_when_told(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "fisherhash.data.download.download_cifar10", lambda dest: fetch(server, dest)
    )
    with pytest.raises(FisherhashError, match="not on this machine"):
        open_data("cifar10")
    assert server.requests == []
    assert len(open_data("cifar10", download=True)) == 120
    assert len(open_data("cifar10")) == 120
    assert len(server.requests) == 1


@pytest.mark.parametrize("ranges", [True, False], ids=["resumed", "started again"])
def test_a_download_that_broke_off(server, tmp_path, ranges):
    server.stop_after = 1000
    with pytest.raises(FisherhashError, match=r"broken off after 1,000 of .* again"):
        fetch(server, tmp_path / "d")
    assert left(tmp_path / "d") == ["cifar-10-binary.tar.gz.part"]
    server.stop_after, server.ranges = None, ranges
    assert len(open_cifar10(fetch(server, tmp_path / "d"))) == 120
    assert server.requests[-1] == "bytes=1000-"
    assert left(tmp_path / "d") == ["cifar-10-batches-bin"]


def test_a_whole_part_file_is_taken(server, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "cifar-10-binary.tar.gz.part").write_bytes(server.content)
    assert len(open_cifar10(fetch(server, tmp_path / "d"))) == 120


def test_a_wrong_file_is_removed(server, tmp_path):
    server.md5 = "0" * 32
    with pytest.raises(FisherhashError, match=r"MD5 .* instead of 0000"):
        fetch(server, tmp_path / "d")
    assert left(tmp_path / "d") == []


def test_no_such_page_and_no_server(server, tmp_path):
    with pytest.raises(FisherhashError, match="answered 404"):
        download_cifar10(tmp_path, url=server.url + "x", md5=server.md5)
    with pytest.raises(FisherhashError, match=r"could not be fetched.*FISHERHASH_DATA"):
        download_cifar10(tmp_path, url="http://127.0.0.1:9/x", md5=server.md5, timeout=2)


def test_a_place_that_cannot_be_written(server, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FisherhashError, match="could not be written"):
        fetch(server, tmp_path / "file" / "data")
