"""Thousands of damaged image files: each is in the index or in the list of skipped ones."""

import io

import numpy as np
import pytest
from PIL import Image, ImageDraw

from fisherhash.index.images.creating import sync_index
from fisherhash.index.images.image_index import ImageIndex

FORMATS = {
    "jpeg": {"quality": 80},
    "progressive.jpeg": {"quality": 60, "progressive": True},
    "png": {},
    "gif": {},
    "webp": {"quality": 70},
    "lossless.webp": {"lossless": True},
    "bmp": {},
    "tiff": {},
    "lzw.tiff": {"compression": "tiff_lzw"},
    "jp2": {},
    "ico": {},
    "tga": {},
    "ppm": {},
}


def originals():
    """Real files of every format: a drawing with edges, a gradient and some noise."""
    rng = np.random.default_rng(0)
    found = {}
    for name, options in FORMATS.items():
        kind = name.split(".")[-1].replace("jp2", "jpeg2000")
        for number in range(2):
            width, height = rng.integers(24, 96, 2).tolist()
            across = np.linspace(0, 255, width)[None, :, None] * np.ones((height, 1, 3))
            noisy = np.clip(across + rng.normal(0, 12, across.shape), 0, 255).astype(np.uint8)
            image = Image.fromarray(noisy)
            ImageDraw.Draw(image).ellipse((4, 4, width - 8, height - 8), fill=(200, 30, 60))
            if number and kind in ("gif", "png", "tiff"):
                image = image.convert("P")
            file = io.BytesIO()
            image.save(file, kind, **options)
            found[f"{number}.{name}"] = file.getvalue()
    return found


def mutate(data, rng, other):
    """One to four faults of different kinds."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        if len(data) < 8:
            break
        kind, at = rng.integers(0, 6), int(rng.integers(0, len(data)))
        if kind == 0:
            data[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:] = other[int(rng.integers(0, len(other))) :]
        elif kind == 3:
            data[at : at + int(rng.integers(1, 200))] = rng.bytes(int(rng.integers(1, 200)))
        elif kind == 4:
            # A size, a count or an offset in the header that is not true.
            lie = int(rng.choice([0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF]))
            data[at % 64 : at % 64 + 4] = lie.to_bytes(4, str(rng.choice(["big", "little"])))
        else:
            data[at:at] = data[at : at + 100] * int(rng.integers(1, 20))
    return bytes(data)


def write_mutants(folder, count, seed):
    rng = np.random.default_rng(seed)
    found = originals()
    names = sorted(found)
    for number in range(count):
        name = names[number % len(names)]
        other = found[names[int(rng.integers(0, len(names)))]]
        place = folder / f"{number % 7}"
        place.mkdir(parents=True, exist_ok=True)
        ending = name.split(".")[-1]
        (place / f"{number:05d}.{ending}").write_bytes(mutate(found[name], rng, other))
    for name, data in found.items():
        (folder / f"good {name}").write_bytes(data)


def check(tmp_path, model, count, seed):
    folder, path = tmp_path / "mutants", tmp_path / "mutants.index"
    write_mutants(folder, count, seed)
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    good = {name for name in files if name.startswith("good ")}
    assert len(files) == count + len(good)

    report = sync_index(path, folder, model=model)
    with ImageIndex.open(path) as images:
        indexed = set(images.index.keys())
        assert images.index.verify() == []
        rows = dict(images.skipped())
    assert indexed | rows.keys() == files
    assert not indexed & rows.keys()
    assert good <= indexed
    assert all(rows.values())
    # Both kinds must be there, or the test shows nothing.
    assert len(indexed) > count / 20
    assert len(rows) > count / 20
    assert (len(report.added), len(report.skipped)) == (len(indexed), len(rows))
    again = sync_index(path, folder)
    assert (again.unchanged, len(again.skipped), again.new_skipped) == (len(indexed), len(rows), 0)


def test_sixty_mutated_files(tmp_path, model):
    check(tmp_path, model, 60, seed=1)


@pytest.mark.slow
def test_two_thousand_mutated_files(tmp_path, model):
    check(tmp_path, model, 2000, seed=2)
