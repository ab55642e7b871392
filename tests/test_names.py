"""One name, one meaning: no two modules define the same public function, class or block size."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import fisherhash

ROOT = Path(fisherhash.__file__).parent


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module but those of the command line and the server, named after verbs and paths."""
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(("cli/", "web/")):
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [] if node.name.startswith("_") else [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if name == "BLOCK"]


def test_public_names_are_unique():
    found: defaultdict[str, list[str]] = defaultdict(list)
    for module, tree in modules():
        for node in tree.body:
            for name in names_of(node):
                found[name].append(module)
    assert len(found) > 300
    clashes = {name: places for name, places in found.items() if len(places) > 1}
    assert not clashes
