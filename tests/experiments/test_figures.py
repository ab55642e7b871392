"""Figures: drawn from results, and from the illustration's own small training."""

import numpy as np
import pytest
import torch

from fisherhash.experiments import figures, report
from fisherhash.experiments.cells import OpenSetup, Setup
from fisherhash.experiments.figures import center_moves, illustration_points
from fisherhash.experiments.runner import Runner

pytest.importorskip("matplotlib")


def evaluation(value):
    return {
        "map": value,
        "precision_at": {"100": value, "5000": value / 2},
        "recall_at": {"100": value / 10, "5000": value / 3},
        "pr_by_rank": {"at": [1, 100], "recall": [0.1, 1.0], "precision": [value, 0.1]},
    }


def part(names, bits):
    return {
        "title": "CIFAR-10",
        "data": "cifar10",
        "bits": bits,
        "rows": [{"name": name, "method": "dfh"} for name in names],
        "runs": [
            {"row": name, "bits": length, "seed": seed, "evaluation": evaluation(0.5 + seed / 10)}
            for name in names
            for length in bits
            for seed in (0, 1)
        ],
    }


def test_every_figure_is_drawn_as_png_and_svg(tmp_path):
    modules = part(["P", "C", "P+C", "P+M", "P+M+C"], [12, 24])
    margins = part(["m = 0", "m = 0.5"], [12, 48])
    curves = part(["DFH (paper)", "DSDH"], [48])
    points = {
        "classes": ["cat", "dog"],
        "labels": [0, 0, 1],
        "panels": {name: [[1, 1], [1, 2], [-1, 1]] for name in ("a", "b", "c")},
    }
    moves = {"a": {"bits": 8, "classes": 4, **{key: [3.0, 0.0] for key in figures.MOVES}}}
    for name, draw in {
        "separable": figures.draw_separable,
        "loss": figures.draw_margin_loss,
        "modules": lambda f: figures.draw_modules(f, [modules]),
        "margin": lambda f: figures.draw_margins(f, margins),
        "curves": lambda f: figures.draw_curves(f, curves),
        "centres": lambda f: figures.draw_centres(f, points),
        "moves": lambda f: figures.draw_moves(f, moves),
    }.items():
        svg = figures.save_figure(tmp_path / name, (4, 3), draw)
        assert "<svg" in svg.read_text()
        assert svg.with_suffix(".png").stat().st_size > 1000
    again = figures.save_figure(
        tmp_path / "again", (4, 3), lambda f: figures.draw_margins(f, margins)
    )
    assert again.read_text() == (tmp_path / "margin.svg").read_text()
    assert figures._mean(modules, "P", 12, "recall_at", ranked=True) == pytest.approx(0.55 / 3)
    assert "1 bit apart" in (tmp_path / "centres.svg").read_text()


def test_every_figure_has_a_caption(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "_trained", lambda *arguments: {"cifar10": {}})
    monkeypatch.setattr(figures, "save_figure", lambda path, size, draw: path)
    parts = [part(["P", "C"], [12]), part(["m = 0"], [12]), part(["DSDH"], [48])]
    runner = Runner(tmp_path, device=torch.device("cpu"))
    drawn = [path.name for path in figures.draw_all({"parts": parts}, [], runner)]
    assert drawn == list(report.CAPTIONS)


def test_results_find_their_figure():
    modules = part(["P", "C"], [12])
    margins = part(["m = 0"], [12])
    curves = part(["DSDH"], [48])
    parts = [modules, margins, curves]
    assert figures._matching(parts, figures.MODULE_PARTS[0]) == [modules]
    assert figures._matching(parts, figures.MARGIN_PART) == [margins]
    assert figures._matching(parts, figures.CURVE_PART) == [curves]


def test_centres_are_learned_as_the_paper_says():
    """Neighbouring codes with the intra term alone, opposite ones with the inter term."""
    opened = OpenSetup(Setup("sample", None, "tiny", image_size=32), torch.device("cpu"))
    found = illustration_points(opened)
    labels = np.array(found["labels"])
    assert np.bincount(labels).tolist() == [100, 100]
    apart = []
    for name in ("intra", "intra + inter"):
        values = np.array(found["panels"][name])
        common = []
        for kind in (0, 1):
            codes, counts = np.unique(values[labels == kind] > 0, axis=0, return_counts=True)
            common.append(codes[counts.argmax()])
        apart.append(int((common[0] != common[1]).sum()))
    assert apart == [1, 2]


def test_printed_centres_stop_after_their_first_step():
    opened = OpenSetup(Setup("sample", None, "tiny", image_size=32), torch.device("cpu"))
    first, *later = center_moves(opened)["flips"]
    assert first > 0
    assert sum(later) <= 0.05 * first
