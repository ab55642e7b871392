"""The examples of docs/evaluation.md are run."""

from __future__ import annotations

import doctest
from pathlib import Path

from fisherhash import evaluation

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


def test_the_page_says_what_the_code_does():
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0


def test_every_public_name_is_explained_on_the_page():
    text = PAGE.read_text()
    for name in ("evaluate", "metrics", "Metric", "compat", "plot"):
        assert name in evaluation.__all__
        assert f"`{name}" in text
