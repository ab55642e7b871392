"""Cells are named after what decides them, and measured in both rankings."""

import dataclasses

import numpy as np
import pytest

from fisherhash.data.protocols import resolve
from fisherhash.data.sources import open_data
from fisherhash.experiments.cells import Cell, Setup, locate, measure_rankings, thinned
from fisherhash.training.fitting import fit
from fisherhash.training.settings import Settings

SETUP = Setup("cifar10", "cifar10-small", image_size=128)
STEP = {"step_weight": 2.0, "step_sharpness": 0.5}


def test_a_cell_is_named_after_all_that_decides_it():
    cell = Cell(SETUP, "dfh", 12, Settings())
    assert cell.file.startswith("runs/cifar10-small-efficientnet-lite0-128-frozen/dfh-12-0-")
    same = [
        Cell(SETUP, "dfh", 12, Settings(), {"margin": 1.0}, title="another name"),
        Cell(dataclasses.replace(SETUP, weights="elsewhere"), "dfh", 12, Settings()),
    ]
    assert {one.file for one in same} == {cell.file}
    other = [
        Cell(SETUP, "dfh", 12, Settings(), {"margin": 2.0}),
        Cell(SETUP, "dfh", 12, Settings(seed=1)),
        Cell(SETUP, "dfh", 12, Settings(epochs=7)),
        Cell(SETUP, "dfh", 24, Settings()),
        Cell(SETUP, "dfh", 12, Settings(), measured=False),
        Cell(dataclasses.replace(SETUP, finetune=True), "dfh", 12, Settings()),
        Cell(dataclasses.replace(SETUP, thin=9), "dfh", 12, Settings()),
    ]
    assert len({one.file for one in [cell, *other]}) == len(other) + 1


def test_a_thinned_split():
    split = resolve(open_data("sample"))
    small = thinned(split, 100)
    for part in ("train", "query", "database"):
        whole, few = getattr(split, part), getattr(small, part)
        assert 50 <= len(few) <= 100
        assert np.isin(few, whole).all()
    assert small.checksum != split.checksum
    assert "rehearsal" in small.notes[-1]


def test_where_data_is(data_folder, monkeypatch):
    monkeypatch.setenv("FISHERHASH_DATA", str(data_folder))
    assert locate("coco21") == "coco21"
    assert locate("sample") == "sample"
    assert locate("nuswide21") is None
    (data_folder / "coco21").rename(data_folder / "nuswide21")
    try:
        assert locate("nuswide21") == data_folder / "nuswide21"
        assert locate("coco21") is None
    finally:
        (data_folder / "nuswide21").rename(data_folder / "coco21")


def trained(method, **settings):
    chosen = Settings(epochs=1, **settings)
    made = fit("sample", method=method, bits=12, backbone="tiny", settings=chosen, finetune=False)
    return made, chosen


def test_every_number_is_that_of_the_training():
    made, settings = trained("csq", **STEP)
    found = measure_rankings([(made, settings)])[0]
    plain = dataclasses.replace(made, hasher=made.hasher.with_head(made.plain_head))
    wanted = {
        "hamming": plain.evaluate(),
        "real": plain.evaluate(real_queries=True),
        "step_hamming": made.evaluate(),
        "step_real": made.evaluate(real_queries=True),
    }
    names = {
        "hamming": found["evaluation"],
        "real": found["real_queries"],
        "step_hamming": found["class_step"]["evaluation"],
        "step_real": found["class_step"]["real_queries"],
    }
    for name, one in wanted.items():
        for key in ("map", "map_lower", "map_upper", "top", "ranking"):
            expected = getattr(one, key)
            close = pytest.approx(expected, abs=1e-9) if isinstance(expected, float) else expected
            assert names[name][key] == close
    assert len({round(one["map"], 6) for one in names.values()}) == 4
    plain = measure_rankings([trained("csq")])[0]
    assert plain.keys() == {"evaluation", "real_queries"}
    assert plain["evaluation"]["map"] == pytest.approx(found["evaluation"]["map"])


def test_codes_without_a_hamming_distance_have_one_ranking_and_no_step():
    found = measure_rankings([trained("dqn")])[0]
    assert found.keys() == {"evaluation"}
    assert measure_rankings([trained("dqn", **STEP)])[0].keys() == {"evaluation"}
