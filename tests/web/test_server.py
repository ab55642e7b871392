"""The verb serve, as a process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import fisherhash
from fisherhash.cli import main
from fisherhash.errors import FisherhashError
from fisherhash.web.options import ServeOptions
from fisherhash.web.server import _listen, list_addresses


def wait_for(url, seconds=60.0):
    until = time.monotonic() + seconds
    while True:
        try:
            return urllib.request.urlopen(url, timeout=5).read().decode()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("workers", "stop"), [("2", signal.SIGINT), ("2", signal.SIGTERM), ("1", signal.SIGINT)]
)
def test_workers_share_an_index_and_end_together(collection, workers, stop):
    words = ("serve", collection.index, "--port", "0", "--workers", workers, "--no-open")
    process = subprocess.Popen(
        [sys.executable, "-m", "fisherhash", *map(str, words)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        url = re.search(r"http://\S+", process.stderr.readline())[0]
        wait_for(f"{url}healthz")
        client = fisherhash.Client(url)
        for _ in range(20):
            assert client.info()["count"] == 30
        # Whichever worker answers, it knows what all of them did.
        text = wait_for(f"{url}metrics")
        assert 'fisherhash_requests_total{route="/api/info",status="2xx"} 20' in text
        assert "fisherhash_items 30" in text
        process.send_signal(stop)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def refused(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["serve", *map(str, words)])
    return ended.value.code, capsys.readouterr().err


def test_bad_use_is_explained(collection, server, tmp_path, capsys):
    for code, hint, *words in (
        (2, "nothing", tmp_path / "nothing"),
        (2, "fisherhash index sync photos.index", collection.folder),
        (2, "--workers", collection.index, "--workers", 0),
        (2, "8 characters", collection.index, "--token", "short"),
        (1, "--port 0", collection.index, "--port", server.port),
    ):
        found, said = refused(capsys, *words)
        assert (found, hint in said) == (code, True), said


def test_without_the_extra_its_name_is_said(collection, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else 1)
    code, said = refused(capsys, collection.index)
    assert code == 1
    assert "pip install 'fisherhash[web]'" in said


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_answers_are_sent_at_once(host):
    """asyncio turns the waiting for full packets off only if a socket says that it is TCP's."""
    try:
        listener = _listen(ServeOptions("i", host=host, port=0))
    except FisherhashError:
        pytest.skip("this machine has no such address")
    with listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_an_address_that_this_machine_can_open_comes_first():
    everywhere = ServeOptions("i", host="0.0.0.0", token="of this test")
    here, there = list_addresses(everywhere)
    assert here == "http://127.0.0.1:8765/?token=of%20this%20test"
    assert there == here.replace("127.0.0.1", socket.gethostname())
    assert list_addresses(ServeOptions("i", host="::1")) == ["http://[::1]:8765/"]


def test_the_image_runs_commands_or_serves_a_folder(tmp_path):
    """The entry point of the Dockerfile, with a program that only prints what it is given."""
    text = (Path(__file__).parents[2] / "Dockerfile").read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.M)[1])
    (tmp_path / "fisherhash").write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    (tmp_path / "fisherhash").chmod(0o755)
    path = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(*arguments):
        return subprocess.run([*entry, *arguments], env=path, capture_output=True, text=True).stdout

    assert run("search", "a b.jpg", "--help") == "<search><a b.jpg><--help>"
    assert run() == "<index><sync><photos.index></photos><serve><photos.index><--host><0.0.0.0>"
