"""A small folder that passes for coco21, and requests for it."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fisherhash.experiments.request import Request

CLASSES = 21


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    """A data folder with 'coco21': 84 images of 16 px, one or two labels each."""
    root = tmp_path_factory.mktemp("named")
    folder = root / "coco21"
    folder.mkdir()
    rng = np.random.default_rng(0)
    lines = []
    for number in range(84):
        flags = np.zeros(CLASSES, dtype=int)
        flags[number % CLASSES] = 1
        flags[rng.integers(CLASSES)] = 1
        tint = np.array([number % 3, number % 5, number % 7]) * 30
        pixels = np.clip(tint + rng.normal(40, 20, (16, 16, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03d}.png")
        lines.append(f"{number:03d}.png " + " ".join(map(str, flags)))
    (folder / "query.txt").write_text("\n".join(lines[:20]) + "\n")
    (folder / "train.txt").write_text("\n".join(lines[20:]) + "\n")
    (folder / "database.txt").write_text("\n".join(lines[20:]) + "\n")
    return root


@pytest.fixture
def make_request(data_folder, tmp_path, monkeypatch):
    """A function that makes a rehearsal's request, with its own output folder."""
    monkeypatch.setenv("FISHERHASH_DATA", str(data_folder))

    def make(**changes):
        given = {
            "target": "table2",
            "out": str(tmp_path / "out"),
            "rehearse": True,
            "jobs": 1,
            "only": ["coco21", "12", "dpsh", "dfh-paper"],
            "device": "cpu",
            "split_seed": 0,  # too few images to draw others than the listed queries
        }
        return Request(**(given | changes))

    return make
