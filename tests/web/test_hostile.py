"""Hostile requests: each gets an answer of the 4xx kind with a sentence, and the server lives."""

from __future__ import annotations

import io
import os
import socket
import struct
import time
import zlib

import pytest

from fisherhash.index import Entry, Index
from fisherhash.index.images.folders import remember_folders
from fisherhash.web.served import ServedIndex

from .conftest import JSON, write_image


def raw(served, data, *, wait=5.0):
    """What the server answers to some bytes.

    A server that refuses what it has not read to the end resets the connection, and its answer may
    be lost on the way: then the bytes are sent again.
    """
    for _ in range(20):
        answer = b""
        try:
            with socket.create_connection(("127.0.0.1", served.port), timeout=wait) as connection:
                connection.sendall(data)
                while part := connection.recv(65536):
                    answer += part
                    if b"\r\n\r\n" in answer and b"content-length: 0" in answer:
                        break
        except TimeoutError:
            return answer
        except (ConnectionResetError, BrokenPipeError):
            if not answer:
                continue
        return answer
    raise AssertionError("the server answered nothing in 20 attempts")


def refused(answer):
    """Whether an answer is a refusal with a sentence."""
    assert 400 <= answer.status < 500, (answer.status, answer.body[:300])
    error = answer.json["error"]
    assert len(error) > 10
    assert error.endswith((".", "?"))
    assert "Traceback" not in error
    return True


@pytest.fixture(autouse=True)
def still_alive(server):
    yield
    assert server.json("/healthz")["status"] == "ok"


FOREIGN = {"Sec-Fetch-Site": "cross-site"}
OUTSIDE = """
/images/1/../../../../etc/passwd /images/..%2f..%2fetc%2fpasswd/original /images/%2e%2e/original
/images//etc/passwd/original /images/1/..%2f..%2fetc%2fpasswd /static/../app.py
/static/..%2fapp.py /static/%2e%2e%2f%2e%2e%2fapp.py /static/%252e%252e%252fapp.py
/static//etc/passwd /static/design.css%00.txt /uploads/..%2f..%2fx
/uploads/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa /uploads/%2fetc%2fpasswd /images/1%00/original
"""


@pytest.mark.parametrize("path", OUTSIDE.split())
def test_no_path_leads_out(server, path):
    answer = server.ask(path, headers=JSON)
    assert answer.status in (400, 404)
    assert b"root:" not in answer.body
    assert refused(answer)


WRONG = """
/images/99999999/medium /images/-1/medium /images/x/medium /images/1/huge
/images/9999999999999999999999/medium /images/%D9%A3/medium /api/items/1e3 /api/items/NaN
/api/items/4611686018427387904 /?like=99999999 /?like=-1 /?like=1&code=00 /?like=0x10 /?k=0
/?k=501 /?k=ten /?radius=65 /?radius=-1 /?code=zz /?code=000000000000000000
/?code=0000000000000000&image=../../x /?where=nonsense /?where=hue%3Dred /?where=label%3Ccat
/?where=id%3Dx
/?ranking=real /?seed=99999999999999 /api/search /api/search?key=%00 /api/search?key=nobody
/api/items?limit=0 /api/items?limit=1001 /api/items?after=x /api/duplicates?radius=257
/api/duplicates?radius=9999 /api/duplicates?code=both /histogram /duplicates?radius=9999
/duplicates?code=both /duplicates?start=-1 /buckets /model /nowhere
"""


@pytest.mark.parametrize("path", WRONG.split())
def test_wrong_parameters(server, path):
    assert refused(server.ask(path, headers=JSON))


METHODS = (
    "POST /",
    "DELETE /images/1/medium",
    "PUT /api/search",
    "GET /search",
    "GET /duplicates/export",
    "PATCH /api/items/1",
    "BREW /",
)


def test_wrong_methods(server):
    for method, path in map(str.split, METHODS):
        answer = server.ask(path, method=method, headers=JSON)
        assert answer.status == 405
        assert refused(answer)


def test_changes_and_requests_of_other_sites_are_refused(server):
    count = len(server.images.index)
    for method, path in (("POST", "/api/items"), ("DELETE", "/api/items/1")):
        answer = server.ask(path, method=method, body=b"", headers=JSON)
        assert answer.status == 403
        assert refused(answer)
    assert len(server.images.index) == count
    # A page of another site may not even search.
    answer = server.ask("/search", method="POST", body=b"", headers=JSON | FOREIGN)
    assert answer.status == 403
    assert refused(answer)


def bomb(width, height):
    """A PNG of a few kilobytes whose header promises many pixels."""

    def chunk(name, data):
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * (1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "body",
    [
        b"\0" * 5000,
        b"GIF89a",
        b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        bomb(50_000, 50_000),
        bomb(2**31 - 1, 2**31 - 1),
        bomb(4000, 4000)[:500],
    ],
    ids=["zeros", "short gif", "svg", "eps", "bomb", "huge bomb", "truncated"],
)
def test_bad_uploads(server, body):
    for path in ("/search", "/api/search"):
        assert refused(server.ask(path, method="POST", body=body, headers=JSON))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/x-www-form-urlencoded", b"image=x"),
        ("multipart/form-data", b"no boundary"),
        ("multipart/form-data; boundary=x", b"--y\r\n"),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"A: " + b"b" * 100_000),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="image"\r\n\r\ntext\r\n--x--\r\n',
        ),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n\r\n--x--',
        ),
        ("application/json", b""),
    ],
)
def test_forms_that_are_none(server, kind, body):
    headers = JSON | {"Content-Type": kind}
    assert refused(server.ask("/search", method="POST", body=body, headers=headers))


def get(path="/", *, host="127.0.0.1", more=b""):
    head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    return head.encode() + more + b"\r\n"


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        (get(more=b"".join(b"a%d: b\r\n" % n for n in range(10_000))), b"4", b""),
        (get(more=b"a: b\r\n" * 300), b"431", b"more than 100 headers"),
        (get("/?" + "a" * 20_000), b"414", b"longer than"),
        (b"\x16\x03\x01 this is no HTTP\r\n\r\n", b"400", b""),
        # Another name for this machine, which a page of another site could choose.
        *((get(host=h), b"403", b"this machine only") for h in ("evil.example", "", "evil:80")),
        (get(host="127.0.0.1.evil.example"), b"403", b"this machine only"),
        *((get(host=h), b"200", b"") for h in ("127.0.0.1", "localhost:1234", "[::1]:80")),
    ],
)
def test_headers_are_bounded_and_checked(server, data, status, said):
    answer = raw(server, data, wait=2)
    assert answer.split(b" ")[1].startswith(status)
    assert said in answer


def test_uploads_are_bounded_in_size_and_time(collection, serve, png):
    with serve(collection.index, max_upload=2000, seconds=1.0) as served:
        answer = served.ask("/search", method="POST", body=b"x" * 5000, headers=JSON)
        assert answer.status == 413
        assert "2,000 bytes" in answer.json["error"]
        # Without a length, in pieces.
        head = b"POST /search HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        pieces = b"".join(b"3e8\r\n" + b"x" * 1000 + b"\r\n" for _ in range(5)) + b"0\r\n\r\n"
        assert b" 413 " in raw(served, head + pieces, wait=4).split(b"\r\n")[0]
        # Slowly.
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
            head = b"POST /search HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"
            connection.sendall(head + b"x")
            answer = connection.recv(65536)
        assert b" 408 " in answer.split(b"\r\n")[0]
        assert served.json("/healthz")["status"] == "ok"


def test_an_answer_that_takes_too_long_is_given_up(collection, serve, monkeypatch):
    find = ServedIndex.find

    def slow(served, query):
        time.sleep(1.0 if query.k == 7 else 0.0)
        return find(served, query)

    with serve(collection.index, seconds=0.4) as served:
        monkeypatch.setattr(ServedIndex, "find", slow)
        began = time.monotonic()
        answer = served.ask("/api/search?like=1&k=7")
        assert time.monotonic() - began < 0.9
        assert answer.status == 503
        assert "longer than 0.4 seconds" in answer.json["error"]
        assert served.ask("/api/search?like=1").status == 200
        time.sleep(1.0)
        assert served.ask("/healthz", method="HEAD").status == 200


def test_slow_headers_end(server, monkeypatch):
    monkeypatch.setattr("fisherhash.web.guard.HEADER_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        began = time.monotonic()
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert time.monotonic() - began < 8
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert b"did not arrive in time" in answer


def test_a_link_in_the_folder_leads_nowhere(hasher, serve, tmp_path):
    folder, secret = tmp_path / "photos", tmp_path / "secret"
    write_image(folder / "own.png", 1)
    write_image(secret / "private.png", 2)
    (folder / "link.png").symlink_to(secret / "private.png")
    (folder / "out").symlink_to(secret)
    os.mkfifo(folder / "pipe.png")
    code = hasher.encode(folder / "own.png")[0]
    paths = {
        "own.png": folder / "own.png",
        "link": folder / "link.png",
        "through a folder": folder / "out" / "private.png",
        "dots": folder / ".." / "secret" / "private.png",
        "elsewhere": secret / "private.png",
        "passwd": "/etc/passwd",
        "pipe": folder / "pipe.png",
        "device": "/dev/zero",
    }
    # As a stranger may have written it.
    with Index.create(tmp_path / "odd.index", bits=64) as index:
        index.add([Entry(key, code, path=os.fspath(path)) for key, path in paths.items()])
    remember_folders(tmp_path / "odd.index", [folder])
    with serve(tmp_path / "odd.index") as served:
        ids = {item.key: item.id for item in served.images.index.items()}
        for key, number in ids.items():
            for size in ("medium", "original"):
                answer = served.ask(f"/images/{number}/{size}", headers=JSON)
                if key == "own.png":
                    assert answer.status == 200
                else:
                    assert answer.status == 404
                    assert refused(answer)


def test_on_any_other_address_everything_needs_the_token(collection, serve):
    token = "of this test only"
    with serve(collection.index, host="0.0.0.0", token=token, writable=True) as served:
        for path in ("/", "/api/info", "/images/1/medium", "/static/design.css", "/metrics"):
            answer = served.ask(path, headers=JSON)
            assert answer.status == 401
            assert refused(answer)
            assert served.ask(path, headers=JSON | {"Authorization": "Bearer no"}).status == 401
        assert served.ask("/healthz").status == 200
        known = {"Authorization": f"Bearer {token}"}
        assert served.ask("/api/info", headers=known).status == 200
        assert served.ask("/?token=wrong").status == 401
        answer = served.ask(f"/?token={token.replace(' ', '%20')}&k=7")
        assert answer.status == 303
        assert answer.headers["location"] == "/?k=7"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=lax" in cookie
        given = {"Cookie": cookie.partition(";")[0]}
        assert served.ask("/", headers=given).status == 200
        # A browser sends the cookie on its own, so it changes nothing.
        answer = served.ask("/api/items/1", method="DELETE", headers=given | JSON)
        assert answer.status == 401
        assert refused(answer)


def test_a_failure_inside_says_nothing_about_the_machine(server, monkeypatch):
    def fail(_):
        raise RuntimeError("a secret path /home/user")

    monkeypatch.setattr("fisherhash.web.served.ServedIndex.find", lambda self, query: fail(query))
    answer = server.ask("/api/search?like=1")
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert answer.json["error"].endswith(".")


def test_images_that_are_broken_or_gone(new_collection, serve, tmp_path):
    made = new_collection(tmp_path)
    with serve(made.index) as served:
        ids = {item.key: item.id for item in served.images.index.items()}
        (made.folder / "dogs" / "14.png").unlink()
        (made.folder / "dogs" / "15.png").write_bytes(b"damaged")
        for key in ("dogs/14.png", "dogs/15.png"):
            answer = served.ask(f"/images/{ids[key]}/medium", headers=JSON)
            assert answer.status == 404
            assert refused(answer)
            assert served.ask(f"/?like={ids[key]}").status == 200
        assert io.BytesIO(served.ask(f"/images/{ids['dogs/16.png']}/medium").body).read(2)
