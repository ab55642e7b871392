"""The back-ends that the contract suite runs on: a new one is one more function in BACKENDS."""

import sys
import uuid
from pathlib import Path

import pytest

from fisherhash.index import base

# So that the module "memory" can be imported by its name.
sys.path.insert(0, str(Path(__file__).parent))
base.BACKENDS["memory"] = "memory:MemoryIndex"


def _folder(request):
    return request.getfixturevalue("tmp_path") / f"{uuid.uuid4().hex}.index"


def _on_ray(request):
    request.getfixturevalue("ray_cluster")
    return f"ray://{_folder(request)}?shards=3"


BACKENDS = {
    "local": _folder,
    "memory": lambda _request: f"memory://{uuid.uuid4().hex}",
    "milvus": lambda request: request.getfixturevalue("milvus").new_uri(),
    "postgres": lambda request: request.getfixturevalue("postgres").new_uri(),
    "ray": _on_ray,
}


# With pytest-xdist, each server is started by one worker only.
@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in BACKENDS])
def new_uri(request):
    """A function that returns the URI of an index that does not exist yet."""
    return lambda: BACKENDS[request.param](request)


@pytest.fixture
def effort(request):
    """The share of random examples that a back-end is worth: a server takes longer for each."""
    return 1.0 if request.node.callspec.params["new_uri"] in ("local", "memory") else 0.2
