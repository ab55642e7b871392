"""CIFAR-10: its files, the built-in sample, and the download from a server on this machine."""

from __future__ import annotations

import hashlib
import http.server
import os
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest

from fisherhash.data.cifar import download_cifar10, open_cifar10
from fisherhash.data.sources import open_data
from fisherhash.errors import FisherhashError, UsageError


class Handler(http.server.BaseHTTPRequestHandler):
    content = b""
    stop_after: int | None = None
    requests: list[str] = []  # noqa: RUF012

    def do_GET(self):
        if self.path != "/cifar.tar.gz":
            self.send_error(404)
            return
        self.requests.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content[: self.stop_after])

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


def test_download(server, tmp_path):
    dest = tmp_path / "cache" / "data"
    assert len(open_cifar10(fetch(server, dest))) == 120
    assert left(dest) == ["cifar-10-batches-bin"]


def test_open_data_downloads_only_when_told(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "fisherhash.data.sources.download_cifar10", lambda dest: fetch(server, dest)
    )
    with pytest.raises(FisherhashError, match="not on this machine"):
        open_data("cifar10")
    assert server.requests == []
    assert len(open_data("cifar10", download=True)) == 120
    assert len(open_data("cifar10")) == 120
    assert len(server.requests) == 1


def test_a_download_that_broke_off(server, tmp_path):
    server.stop_after = 1000
    with pytest.raises(FisherhashError, match=r"broken off after 1,000 of .* again"):
        fetch(server, tmp_path / "d")
    assert left(tmp_path / "d") == []


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


def test_cifar(tmp_path, pictures):
    folder = pictures.cifar(tmp_path / "cifar-10-batches-bin")
    for spec in (tmp_path, folder):
        data = open_data(spec)
        assert len(data) == 120
        assert data.names[0] == "data_batch_1/00000"
        assert data.names[-1] == "test_batch/00019"
        assert data.labels[43].argmax() == 3
        assert data.kind == "cifar10"
        record = np.fromfile(folder / "data_batch_3.bin", np.uint8).reshape(-1, 3073)[5]
        found = np.asarray(data.reader.open(45))
        assert np.array_equal(found, record[1:].reshape(3, 32, 32).transpose(1, 2, 0))


def test_damaged_cifar(tmp_path, pictures):
    folder = pictures.cifar(tmp_path / "c")
    (folder / "data_batch_4.bin").write_bytes(b"\0" * 5000)
    with pytest.raises(UsageError, match=r"data_batch_4\.bin has 5,000 bytes.*truncated"):
        open_data(folder)
    (folder / "data_batch_4.bin").unlink()
    with pytest.raises(UsageError, match=r"not data_batch_4\.bin.*unpack"):
        open_data(folder)
    pictures.cifar(folder)
    content = np.fromfile(folder / "test_batch.bin", np.uint8)
    content[0] = 77
    content.tofile(folder / "test_batch.bin")
    with pytest.raises(UsageError, match=r"labels up to 77.*CIFAR-100"):
        open_data(folder)


def test_named_cifar10(tmp_path, pictures, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"not on this machine.*download.*FISHERHASH_DATA"):
        open_data("cifar10")
    pictures.cifar(tmp_path / "sets" / "cifar-10-batches-bin")
    monkeypatch.setenv("FISHERHASH_DATA", f"{tmp_path / 'none'}{os.pathsep}{tmp_path / 'sets'}")
    assert len(open_data("cifar10")) == 120
    monkeypatch.delenv("FISHERHASH_DATA")
    pictures.cifar(Path(os.environ["FISHERHASH_CACHE"]) / "data" / "cifar-10-batches-bin")
    assert len(open_data("cifar10")) == 120


def test_sample():
    data = open_data("sample")
    assert len(data) == 2000
    assert data.labels.sum(axis=0).tolist() == [200] * 10
    assert (data.labels.sum(axis=1) == 1).all()
    assert len(set(data.names)) == 2000
    assert all(name.startswith("data_batch_") for name in data.names)
    assert data.reader.open(0).size == (32, 32)
    # The pixels are CIFAR-10's, bit for bit: compared with the official files when it was built.
    assert data.reader.fingerprint().startswith("53e0218cdff5c755")
