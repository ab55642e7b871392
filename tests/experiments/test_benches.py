"""Cells are named after what decides them; a thinned split has its own checksum."""

import dataclasses

import numpy as np

from fisherhash.data.protocols import resolve
from fisherhash.data.sources import open_data
from fisherhash.experiments.benches import Bench, Cell, locate, thinned
from fisherhash.training.settings import Settings

BENCH = Bench("cifar10", "cifar10-small", image_size=128)


def test_a_cell_is_named_after_all_that_decides_it():
    cell = Cell(BENCH, "dfh", 12, Settings())
    assert cell.file.startswith("runs/cifar10-small-efficientnet-lite0-128-frozen/dfh-12-0-")
    same = [
        Cell(BENCH, "dfh", 12, Settings(), {"margin": 1.0}, title="another name"),
        Cell(dataclasses.replace(BENCH, weights="elsewhere"), "dfh", 12, Settings()),
    ]
    assert {one.file for one in same} == {cell.file}
    other = [
        Cell(BENCH, "dfh", 12, Settings(), {"margin": 2.0}),
        Cell(BENCH, "dfh", 12, Settings(seed=1)),
        Cell(BENCH, "dfh", 12, Settings(epochs=7)),
        Cell(BENCH, "dfh", 24, Settings()),
        Cell(BENCH, "dfh", 12, Settings(), measured=False),
        Cell(dataclasses.replace(BENCH, finetune=True), "dfh", 12, Settings()),
        Cell(dataclasses.replace(BENCH, thin=9), "dfh", 12, Settings()),
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
