"""Mutated folders of indexes and models: the right answer or an error, in time and in bounds."""

import random
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fuzzing

WALL_SECONDS = 20.0
"""Longer than in the soak test: other tests run at the same time."""

# What was found by hand once: kind, file, mutation (see fuzzing.py).
FOUND = [
    *(("index", name, fuzzing.pipe) for name in ("head", "catalogue.sums", "catalogue.spare")),
    *(("index", name, fuzzing.pipe) for name in ("catalogue.sqlite", ".codes", ".ids", ".table")),
    *(("index", name, fuzzing.link) for name in ("head", "catalogue.sqlite", ".codes", ".table")),
    *(("index", name, fuzzing.huge) for name in ("head", "catalogue.sums", ".codes", ".table")),
    ("index", "catalogue.sqlite", fuzzing.huge),
    *(("index", ".codes", mutation) for mutation in (fuzzing.truncate, fuzzing.delete)),
    *(("index", "catalogue.sqlite", fuzzing.forge_schema) for _ in fuzzing.SCHEMES),
    *(("index", "catalogue.sqlite", fuzzing.forge_facts) for _ in range(3)),
    *(("index", "catalogue.sqlite", fuzzing.forge_rows) for _ in range(6)),
    *(("index", ".table", fuzzing.forge_table) for _ in range(6)),
    *(("model", name, fuzzing.pipe) for name in ("config.json", "model.safetensors")),
    *(("model", name, fuzzing.huge) for name in ("config.json", "model.safetensors")),
    *(("model", "config.json", fuzzing.deep_json) for _ in range(2)),
    *(("model", "config.json", fuzzing.change_json) for _ in range(4)),
    *(("model", "model.safetensors", fuzzing.change_tensors) for _ in range(4)),
]


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    return fuzzing.Fuzzer(tmp_path_factory.mktemp("fuzz"), wall=WALL_SECONDS)


@pytest.mark.slow
def test_what_was_found_stays_closed(fuzzer):
    problems = []
    for seed, (kind, name, mutation) in enumerate(FOUND):
        source, other, use = fuzzer.sources[kind]
        path = fuzzer.root / "copy"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(source, path)
        file = next(n for n in fuzzing.files_of(path) if n == name or Path(n).suffix == name)
        rng = random.Random(seed)
        if mutation in (*fuzzing.ANY, *fuzzing.KINDS):
            mutation(rng, path / file, other / file)
        else:
            mutation(rng, path / file)
        result = fuzzing.in_child(use, path, seed, WALL_SECONDS)
        if "found" not in result:
            problems.append((mutation.__name__, file, seed, result))
    assert problems == []


# Of the first 10,000 mutations: a catalogue of a terabyte, facts and a config without a field.
SEEDS = (4138916222, 1329687, 1330485, 1330274, 1331032, 1331651, 1333170)


@pytest.mark.slow
def test_seeds_that_were_found_stay_closed(fuzzer):
    problems, _ = fuzzer.run(SEEDS)
    assert problems == []


@pytest.mark.slow
def test_mutated_folders(fuzzer):
    # Always the same ones: tests/soak.py looks at others.
    problems, outcomes = fuzzer.run(range(150))
    assert problems == []
    assert outcomes["refused"] > 10
    assert outcomes["same"] > 10
