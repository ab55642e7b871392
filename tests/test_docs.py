"""The generated parts of the documentation are those that the code and the results give."""

import importlib.util
import re
from pathlib import Path

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
