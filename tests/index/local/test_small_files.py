"""The contract's random changes on an index whose files are tiny: many of them, many tables."""

import sys
from pathlib import Path

import pytest

from fisherhash.index.local import change, segments

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from test_contract import run_machine


@pytest.mark.parametrize("length", [4, 1000])
@pytest.mark.parametrize("tail", [2, 100_000])
def test_random_changes_in_small_files(length, tail, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(change, "MAX_LENGTH", length)
    monkeypatch.setattr(segments, "TAIL", tail)
    run_machine(lambda: tmp_path_factory.mktemp("machine") / "index", 5, 15)
