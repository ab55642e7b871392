"""The documentation: generated parts are up to date, links resolve, Python examples run."""

import importlib.util
import re
from pathlib import Path

import pytest

from fisherhash.data.sources import open_data

ROOT = Path(__file__).parents[1]


def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_up_to_date():
    stale = [
        str(path.relative_to(ROOT))
        for path, content in generate().generated().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != content
    ]
    assert not stale, "run: python docs/generate.py"


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", ["README.md", "docs/search.md"])
def test_python_examples_run(page, tmp_path, monkeypatch, capsys):
    """In one namespace, as a reader who copies one block after the other runs them."""
    monkeypatch.chdir(tmp_path)
    sample = open_data("sample")
    for number in range(12):
        folder = tmp_path / "photos" / ("cats" if number < 6 else "others")
        folder.mkdir(parents=True, exist_ok=True)
        sample.reader.open(number).save(folder / f"{number}.png")
    for number, name in enumerate(("photo.jpg", "holiday.jpg", "harbour.jpg")):
        sample.reader.open(number).save(name)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    names = {}
    for block in blocks:
        exec(block, names)
    printed = capsys.readouterr().out
    assert printed.startswith("12 added, 0 updated, 0 removed, 0 unchanged\n")
    assert printed.count(str(tmp_path / "photos")) == 5
    for claim in re.findall(r"print\(.*  # ([\[H].*?)(?:: .*)?$", "".join(blocks), re.M):
        assert claim in printed
