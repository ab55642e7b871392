"""The documentation: links resolve, the site is built, every code block is run.

A block that cannot be run here has a comment before it, ``<!-- not run: REASON -->``. The reason is
one of REASONS, and the commands of the block are checked all the same.
"""

import ast
import contextlib
import doctest
import importlib.util
import io
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
    "needs CIFAR-10",
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
    shutil.copy(builtin.folder("general-64") / "model.onnx", desk / "general-64.onnx")
    return desk


@pytest.fixture
def desk(full_desk, tmp_path, monkeypatch):
    """A folder with what the examples name: photos, a model, an exported model."""
    shutil.copytree(full_desk, tmp_path, dirs_exist_ok=True, copy_function=os.link)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_command(line):
    words = shlex.split(line, comments=True)
    if words[0] != "fisherhash":
        subprocess.run(["bash", "-ec", line], check=True)
        return
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
    elif first == "make":
        targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M).group(1)
        assert set(words[1:]) <= set(targets.split()), line
    elif first == "pip":
        extras = re.search(r"\[(.*?)\]", " ".join(words))
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        named = extras.group(1).split(",") if extras else []
        assert set(named) <= set(known["optional-dependencies"]), line
    elif first == "docker":
        assert (ROOT / "Dockerfile").is_file()
        if words[1] == "run" and words[-1] != "fisherhash":
            check_command(" ".join(words[words.index("fisherhash") :]))
    elif first == "python":
        assert (ROOT / words[1]).is_file(), line
    elif first == "uvx":
        check_command(f"pip install {words[words.index('--from') + 1]}")
        check_command(" ".join(words[words.index("fisherhash") :]))
    elif first == "torchrun":
        check_command(" ".join(words[words.index("fisherhash") :]))
    elif first == "git":
        assert words[1:3] == ["clone", "…"], line
    else:
        pytest.fail(f"nobody checks: {line}")


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
        else:
            pytest.fail(f"{block}: nobody runs {block.language}")


def test_no_block_is_hidden_by_indentation():
    """Indented blocks would escape the test above; only generated pages have them."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.S | re.M)
        assert not re.search(r"\n\n    (fisherhash|pip|python|import|from) ", text), page


def test_commands_on_generated_pages_exist(site_source):
    pages = sorted((site_source / "docs" / "methods").glob("*.md"))
    commands = [
        line.strip()
        for page in pages
        for line in page.read_text("utf-8").splitlines()
        if line.startswith("    fisherhash ")
    ]
    assert len(commands) == len(fisherhash.methods.registry())
    for line in commands:
        check_command(line)


def test_every_reason_is_used():
    assert {block.reason for page in PAGES for block in blocks_of(page)} == {None, *REASONS}


def test_a_wrong_command_would_be_noticed():
    for line in (
        "fisherhash serach photo.jpg",
        "fisherhash train photos --out model --bit 48",
        "fisherhash reproduce table2 --quik",
    ):
        with pytest.raises((Exception, SystemExit)), contextlib.redirect_stderr(io.StringIO()):
            check_command(line)
    with pytest.raises(AssertionError):
        check_command("pip install '.[trian]'")
    with pytest.raises(AssertionError):
        check_command("make demos")


def test_the_example_without_fisherhash_sets_the_same_bits(desk):
    (block,) = [one for one in blocks_of("docs/deploy.md") if one.language == "python"]
    imported = re.findall(r"^(?:import|from) (\w+)", block.text, re.M)
    assert set(imported) == {"json", "numpy", "onnxruntime", "PIL"}
    assert sum(1 for line in block.text.splitlines() if line.strip()) <= 32
    names = {}
    exec(block.text, names)
    sample, files = open_data("sample"), []
    for number in range(40):
        image = sample.reader.open(number).resize((48, 32) if number % 2 else (31, 57))
        files.append(desk / (f"{number}.jpg" if number % 4 == 0 else f"{number}.png"))
        image.save(files[-1])
    codes = np.stack([names["encode"](path) for path in files])
    np.testing.assert_array_equal(codes, Hasher.load("general-64").encode(files))


def test_the_example_without_fisherhash_reduces_large_images_as_we_do(desk):
    (block,) = [one for one in blocks_of("docs/deploy.md") if one.language == "python"]
    sample, files = open_data("sample"), []
    for number, size in enumerate([(700, 680), (1500, 1400), (3000, 2700), (2700, 3001)]):
        files.append(desk / f"large {number}.jpg")
        sample.reader.open(number).resize(size).save(files[-1])
    model = builtin.folder("general2-256") / builtin.HEAD_ONNX
    names = {}
    exec(block.text.replace('"general-64.onnx"', repr(str(model))), names)
    codes = np.stack([names["encode"](path) for path in files])
    np.testing.assert_array_equal(codes, Hasher.load("general2-256").encode(files))


CODES = np.random.default_rng(0).integers(0, 256, (1000, 8), np.uint8)


def test_what_the_readme_says_of_faiss():
    faiss = pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    index = faiss.IndexBinaryFlat(64)
    index.add(CODES)
    some = faiss.SearchParameters(sel=faiss.IDSelectorRange(5, 10))
    _, ids = index.search(CODES[:1], 3, params=some)
    assert set(ids[0]) <= set(range(5, 10))
    assert len(faiss.serialize_index_binary(index)) < 9 * len(CODES)
    distances, _ = index.search(CODES[:5], 7)
    ours = np.bitwise_count(CODES[:5, None] ^ CODES).sum(axis=2, dtype=np.int64)
    np.testing.assert_array_equal(distances, np.sort(ours, axis=1)[:, :7])
    index.remove_ids(np.array([3]))
    assert index.search(CODES[4:5], 1)[1] == 3


def test_what_the_readme_says_of_usearch():
    usearch = pytest.importorskip("usearch.index", reason="usearch is not installed")
    index = usearch.Index(ndim=64, metric="hamming", dtype="b1")
    index.add(np.arange(len(CODES)), CODES)
    assert len(index.save()) > 16 * len(CODES)
    found = index.search(CODES[:5], 7, exact=True)
    ours = np.bitwise_count(CODES[:5, None] ^ CODES).sum(axis=2, dtype=np.int64)
    np.testing.assert_array_equal(found.distances, np.sort(ours, axis=1)[:, :7])
    assert not {"filter", "where", "predicate"} & set(index.search.__code__.co_varnames)
    index.remove(3)
    assert index.search(CODES[4], 1).keys[0] == 4


def test_numbers_of_the_readme_are_those_of_the_run():
    speed = (ROOT / "docs" / "search.md").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    for kind in ("clustered", "uniform"):
        start = f"| {kind} | 1,000,000 | 64 | 100 |"
        (row,) = [line for line in speed.splitlines() if line.startswith(start)]
        rates = " | ".join(cell.strip() for cell in row.split("|")[6:10])
        assert f"| queries per second, {kind} codes [^speed] | {rates} |" in readme
    shallow = importlib.import_module("fisherhash.training.estimators").TRANSFORMERS
    assert f"[{len(fisherhash.methods.registry())} methods]" in readme
    assert f"The {len(shallow)} shallow ones" in readme


def test_doctests_are_found():
    """docs/evaluation.md is run as doctests; no other page has any."""
    pages = [
        page
        for page in PAGES
        if doctest.DocTestParser().get_examples((ROOT / page).read_text("utf-8"))
    ]
    assert pages == ["docs/evaluation.md"]
