"""Scripts in a process of their own, in which some system calls fail; see faults.c."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

START = """
import os, sys
import numpy as np
from pathlib import Path
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.index import Entry, Index, Item
path = Path(sys.argv[1])
def codes(count, seed=0, width=8):
    return np.random.default_rng(seed).integers(0, 256, (count, width), dtype=np.uint8)
"""


def build_library(folder):
    """The library that makes system calls fail."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux")
    library = Path(folder) / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def _command(script, index, arguments, library, faults):
    env = dict(os.environ)
    if library is not None:
        env |= {"LD_PRELOAD": str(library)}
        env |= {f"FAULT_{name.upper()}": str(value) for name, value in faults.items()}
    command = [sys.executable, "-c", START + dedent(script), str(index), *map(str, arguments)]
    return {"args": command, "env": env, "text": True}


def run_script(script, index, *arguments, library=None, timeout=120, **faults):
    """Run a script on an index; ``call="read"`` and so on are the variables of faults.c."""
    command = _command(script, index, arguments, library, faults)
    return subprocess.run(**command, capture_output=True, check=False, timeout=timeout)


def start_script(script, index, *arguments):
    """Start a script on an index, with pipes to it and from it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(**_command(script, index, arguments, None, {}), **pipes)
