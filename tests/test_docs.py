"""The documentation: links resolve, the site is built, every code block is run.

A block that cannot be run here has a comment before it, ``<!-- not run: REASON -->``. The reason is
one of REASONS, and the commands of the block are checked all the same.
"""

import ast
import contextlib
import doctest
import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import fisherhash
from fisherhash import Hasher
from fisherhash.cli import app, main
from fisherhash.data.sources import open_data
from fisherhash.experiments.request import parse_request
from fisherhash.model import builtin

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(
        f"docs/{path.name}"
        for path in (ROOT / "docs").glob("*.md")
        if path.name not in ("results.md", "searches.md")  # these are generated
    ),
]
REASONS = {
    "a server runs until it is ended",
    "installs packages",
    "needs a cluster",
    "needs a copy of Tiny-ImageNet",
    "needs a GPU",
    "needs a network",
    "needs Docker",
    "needs a server",
    "needs the address of the repository",
    "too slow for the tests",
}
# These languages hold nothing that could be run.
PLAIN = {"text", "bibtex"}
RUN_ELSEWHERE = {
    "docs/evaluation.md": "evaluation/test_docs.py",
    "docs/other-engines.md": "test_other_engines.py",
    "docs/write-your-own-method.md": "test_write_your_own.py",
}
IMAGES = 12


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self):
        return f"{self.page}:{self.line}"

    @property
    def commands(self):
        """The command lines, without comments and with continued lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def blocks_of(page):
    text = (ROOT / page).read_text("utf-8")
    pattern = r"(?:<!-- not run: (.*?) -->\n)?^```(\w*)\n(.*?)^```$"
    for found in re.finditer(pattern, text, re.DOTALL | re.MULTILINE):
        reason, language, content = found.groups()
        yield Block(page, text[: found.start()].count("\n") + 1, language, content, reason)


@pytest.fixture(scope="module")
def site_source(tmp_path_factory):
    """A copy of mkdocs.yml and docs/, with the pages that are generated."""
    root = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", root)
    made = shutil.ignore_patterns("methods", "results.md", "searches.md", "__pycache__")
    shutil.copytree(ROOT / "docs", root / "docs", ignore=made)
    script = [sys.executable, root / "docs" / "generate.py", root / "docs"]
    shutil.copytree(ROOT / "results", root / "results")  # where the script looks for them
    subprocess.run(script, check=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")})
    return root


def anchors(page):
    """The anchors of a page's headings."""
    markdown = importlib.import_module("markdown")
    made = markdown.Markdown(extensions=["fenced_code", "toc"])
    return set(re.findall(r' id="([^"]+)"', made.convert(page.read_text("utf-8"))))


def test_links_lead_somewhere(site_source):
    """Also those of pages that are not part of the site, which cannot lead to generated ones."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(site_source / "docs").rglob("*.md")]
    generated = {ROOT / "docs" / name for name in ("methods/README.md", "results.md")}
    for page in pages:
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\((?!https?:|#)([^)#]+)(?:#([^)]+))?\)", text):
            path = page.parent / target
            assert path.exists(), f"{page.name} links to {target}"
            assert path not in generated, f"{page.name} links to {target}, which is not committed"
            assert not anchor or anchor in anchors(path), f"{page.name}: {target}#{anchor}"


def test_the_site_is_built_without_a_warning(site_source, tmp_path):
    """mkdocs.yml makes a broken link, a broken anchor and a page without a place warnings."""
    pytest.importorskip("material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=site_source,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in tmp_path.rglob("*.html"):
        # What a browser would load by itself; links that a reader may follow are another matter.
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]+src="?(https?:[^">\s]+)', page.read_text("utf-8")
        ) + re.findall(
            r'<link[^>]+rel="?(?:stylesheet|preconnect)"?[^>]+href="?(https?:[^">\s]+)',
            page.read_text("utf-8"),
        )
        assert not loaded, f"{page.name} loads {loaded[0]}"


@pytest.fixture(scope="module")
def full_desk(tmp_path_factory):
    desk = tmp_path_factory.mktemp("desk")
    sample = open_data("sample")
    for number in range(IMAGES):
        folder = desk / "photos" / ("cats" if number < IMAGES // 2 else "others")
        folder.mkdir(parents=True, exist_ok=True)
        sample.reader.open(number).save(folder / (f"{number}.png" if number else "tom.jpg"))
    names = ("photo.jpg", "holiday.jpg", "harbour.jpg", "a.jpg", "b.jpg")
    for number, name in enumerate(names):
        sample.reader.open(number).save(desk / name)
    Hasher.load("general-64").save(desk / "model")
    (desk / "general-64.onnx").write_bytes(Hasher.load("general-64").export()[0])
    return desk


@pytest.fixture
def desk(full_desk, tmp_path, monkeypatch):
    """A folder with what the examples name: photos, a model, an exported model."""
    shutil.copytree(full_desk, tmp_path, dirs_exist_ok=True, copy_function=os.link)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_command(line):
    words = shlex.split(line, comments=True)
    assert words[0] == "fisherhash", line
    with pytest.raises(SystemExit) as ended:
        main(words[1:])
    assert ended.value.code in (None, 0), line


def check_command(line):
    """A command that is not run is still one that exists, with options that exist."""
    words = shlex.split(line, comments=True)
    first = words[0]
    if first == "fisherhash" and words[1] == "reproduce":
        parse_request(words[2:], command="fisherhash reproduce")
    elif first == "fisherhash":
        app.parse_args(words[1:], exit_on_error=False, print_error=False)
    elif first == "torchrun":
        check_command(" ".join(words[words.index("fisherhash") :]))
    elif first == "make":
        targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1]
        assert set(words[1:]) <= set(targets.split()), line
    elif first == "pip":
        extras = re.search(r"\[(.*?)\]", " ".join(words))
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        named = extras[1].split(",") if extras else []
        assert set(named) <= set(known["optional-dependencies"]), line
    elif first == "docker":
        assert (ROOT / "Dockerfile").is_file()
        if words[1] == "run" and words[-1] != "fisherhash":
            check_command(" ".join(words[words.index("fisherhash") :]))
    elif first == "python":
        assert (ROOT / words[1]).is_file(), line
    else:
        assert words[:3] == ["git", "clone", "…"], f"nobody checks: {line}"


def check_names(code):
    """A Python example that is not run still imports what exists."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), node.module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_says_why_not(page, desk, capsys):
    """In order and in one namespace, as a reader who copies one block after the other runs them."""
    names = {}
    for block in blocks_of(page):
        assert block.language, f"{block} names no language"
        assert block.reason is None or block.reason in REASONS, f"{block}: {block.reason}"
        if block.language in PLAIN:
            assert not re.search(r"^(fisherhash|import|pip) ", block.text, re.M), block
        elif block.language == "sh":
            for line in block.commands:
                (check_command if block.reason else run_command)(line)
        elif block.language == "python" and block.reason:
            check_names(block.text)
        elif block.language == "python" and page in RUN_ELSEWHERE:
            test = (ROOT / "tests" / RUN_ELSEWHERE[page]).read_text("utf-8")
            assert Path(page).name in test
        elif block.language == "python":
            capsys.readouterr()
            exec(compile(block.text, str(block), "exec"), names)
            printed = capsys.readouterr().out
            for claim in re.findall(r"^ *print\(.*  # ([\[(H'u].*?)(?:: .*)?$", block.text, re.M):
                assert claim in printed, f"{block}: {claim}"
            if "images.sync(" in block.text:
                assert f"{IMAGES} added, 0 updated, 0 removed, 0 unchanged\n" in printed
        elif block.language == "toml":
            tomllib.loads(block.text)
        else:
            pytest.fail(f"{block}: nobody runs {block.language}")
    # Indented blocks would escape all this.
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.S | re.M)
    assert not re.search(r"\n\n    (fisherhash|pip|python|import|from) ", text), page
    has_doctests = bool(doctest.DocTestParser().get_examples((ROOT / page).read_text("utf-8")))
    assert has_doctests == (page == "docs/evaluation.md")  # which are run with its tests


def test_every_reason_is_used():
    assert {block.reason for page in PAGES for block in blocks_of(page)} == {None, *REASONS}


def test_commands_on_generated_pages_exist(site_source):
    pages = sorted((site_source / "docs" / "methods").glob("*.md"))
    lines = [line for page in pages for line in page.read_text("utf-8").splitlines()]
    commands = [line.strip() for line in lines if line.startswith("    fisherhash ")]
    assert len(commands) == len(fisherhash.methods.registry())
    for line in commands:
        check_command(line)


def test_a_wrong_command_would_be_noticed():
    for line in (
        "fisherhash serach photo.jpg",
        "fisherhash train photos --out model --bit 48",
        "fisherhash reproduce table2 --quik",
        "pip install '.[trian]'",
        "make demos",
    ):
        with pytest.raises((Exception, SystemExit)), contextlib.redirect_stderr(io.StringIO()):
            check_command(line)


def test_the_documentation_stays_small():
    """What is written by hand: a front page, and a guide that can be read in an afternoon."""
    guide = [page for page in PAGES if page.startswith("docs/")]
    words = {page: len((ROOT / page).read_text("utf-8").split()) for page in PAGES}
    assert words["README.md"] <= 900
    assert len(guide) <= 12
    assert sum(words[page] for page in guide) <= 25_000


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("general-64.onnx", [(48, 32), (31, 57), (32, 32)] * 10),
        ("general2-256", [(700, 680), (1500, 1400), (3000, 2700), (2700, 3001)]),
    ],
    ids=["small", "large: reduced by the decoder"],
)
def test_the_example_without_fisherhash_sets_the_same_bits(desk, model, sizes):
    blocks = [block for block in blocks_of("docs/deploy.md") if block.language == "python"]
    (block,) = blocks
    imported = re.findall(r"^(?:import|from) (\w+)", block.text, re.M)
    assert set(imported) == {"json", "numpy", "onnxruntime", "PIL"}
    assert sum(1 for line in block.text.splitlines() if line.strip()) <= 32
    file = model if model.endswith(".onnx") else builtin.folder(model) / "model.onnx"
    names = {}
    exec(block.text.replace('"general-64.onnx"', repr(str(file))), names)
    sample, files = open_data("sample"), []
    for number, size in enumerate(sizes):
        files.append(desk / (f"{number}.png" if number % 4 and max(size) < 99 else f"{number}.jpg"))
        sample.reader.open(number).resize(size).save(files[-1])
    codes = np.stack([names["encode"](path) for path in files])
    np.testing.assert_array_equal(codes, Hasher.load(model.removesuffix(".onnx")).encode(files))


CODES = np.random.default_rng(0).integers(0, 256, (1000, 8), np.uint8)
NEAREST = np.sort(np.bitwise_count(CODES[:5, None] ^ CODES).sum(2, dtype=np.int64))[:, :7]


def test_what_the_readme_says_of_faiss():
    faiss = pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    index = faiss.IndexBinaryFlat(64)
    index.add(CODES)
    some = faiss.SearchParameters(sel=faiss.IDSelectorRange(5, 10))
    assert set(index.search(CODES[:1], 3, params=some)[1][0]) <= set(range(5, 10))
    assert len(faiss.serialize_index_binary(index)) < 9 * len(CODES)
    np.testing.assert_array_equal(index.search(CODES[:5], 7)[0], NEAREST)
    index.remove_ids(np.array([3]))
    assert index.search(CODES[4:5], 1)[1] == 3  # the ids of later ones change


def test_what_the_readme_says_of_usearch():
    usearch = pytest.importorskip("usearch.index", reason="usearch is not installed")
    index = usearch.Index(ndim=64, metric="hamming", dtype="b1")
    index.add(np.arange(len(CODES)), CODES)
    assert len(index.save()) > 16 * len(CODES)
    found = index.search(CODES[:5], 7, exact=True)
    np.testing.assert_array_equal(found.distances, NEAREST)
    assert not {"filter", "where", "predicate"} & set(index.search.__code__.co_varnames)


def test_results_of_the_readme_are_those_of_the_runs():
    assert f"[{len(fisherhash.methods.registry())} methods]" in (ROOT / "README.md").read_text()
    means = {}
    for name in ("table2", "table3"):
        file = ROOT / "results" / f"{name}-efficientnet-lite0-seed1.json"
        for part in json.loads(file.read_text("utf-8"))["parts"]:
            for run in part["runs"]:
                key = (part["title"].split(" ")[0], run["bits"], run["row"])
                if "evaluation" in run:  # else the method is not defined for this data
                    means.setdefault(key, []).append(run["evaluation"]["map"])
    columns = [("CIFAR-10", 12), ("CIFAR-10", 48), ("coco21", 12), ("coco21", 48)]
    columns += [("tiny100", 16), ("tiny100", 48)]
    rows = re.findall(r"^\| (DFH .*|best other .*) \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(rows) == 3
    for name, *cells in (row.split(" | ") for row in rows):
        for (data, bits), cell in zip(columns, cells, strict=True):
            value, _, rival = cell.partition(" (")
            row = rival.rstrip(")") or name
            scores = [means.get((data, bits, row + end), []) for end in ("", " + class step")]
            assert float(value) in [round(float(np.mean(s)), 3) for s in scores if s], (data, row)
