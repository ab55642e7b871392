"""The back-ends that the contract suite runs on: a new one is one more function in BACKENDS."""

import sys
import uuid
from pathlib import Path

import pytest

# So that the back-end "memory" can be imported under the name it registers.
sys.path.insert(0, str(Path(__file__).parent))
import memory  # noqa: F401

BACKENDS = {
    "local": lambda folder: folder / f"{uuid.uuid4().hex}.index",
    "memory": lambda _folder: f"memory://{uuid.uuid4().hex}",
}


@pytest.fixture(params=BACKENDS)
def new_uri(request, tmp_path):
    """A function that returns the URI of an index that does not exist yet."""
    return lambda: BACKENDS[request.param](tmp_path)
