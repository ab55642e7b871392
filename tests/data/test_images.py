"""Every awkward file becomes the right picture, or an error that says why not."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fisherhash.data.images import MAX_PIXELS, UnreadableImage, load_image
from fisherhash.errors import FisherhashError, UsageError


def test_every_good_file_reads_as_the_same_picture(tmp_path, pictures):
    expected = np.asarray(pictures.quarters()).astype(int)
    names = pictures.good(tmp_path)
    assert len(names) >= 17
    for name in names:
        image = load_image(tmp_path / name)
        assert image.mode == "RGB", name
        assert image.size == (40, 24), name
        found = np.asarray(image).astype(int)
        # Away from the borders of the quarters, which JPEG blurs.
        for rows, columns in ((4, 6), (4, 34), (20, 6), (20, 34)):
            difference = np.abs(found[rows, columns] - expected[rows, columns]).max()
            assert difference < 25, (name, rows, columns, found[rows, columns])


def test_broken_exif_does_not_cost_the_picture(tmp_path, pictures):
    pictures.quarters().save(tmp_path / "a.jpg", exif=b"Exif\0\0garbage that is no tiff")
    assert load_image(tmp_path / "a.jpg").size == (40, 24)


def test_transparency_is_laid_on_white(tmp_path):
    half = np.zeros((2, 2, 4), dtype=np.uint8)
    half[..., 3] = [[0, 255], [128, 64]]
    Image.fromarray(half).save(tmp_path / "a.png")
    assert np.asarray(load_image(tmp_path / "a.png"))[..., 0].tolist() == [[255, 0], [127, 191]]


def test_rgb_with_a_transparent_colour(tmp_path):
    pixels = np.array([[[1, 2, 3], [4, 5, 6]]], dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png", transparency=(1, 2, 3))
    assert np.asarray(load_image(tmp_path / "a.png")).tolist() == [[[255, 255, 255], [4, 5, 6]]]


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_sixteen_bits_are_scaled(tmp_path, name):
    deep = np.array([[0, 257, 32_896, 65_535]], dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / name)
    assert np.asarray(load_image(tmp_path / name))[0, :, 1].tolist() == [0, 1, 128, 255]
    assert np.asarray(load_image(deep))[0, :, 1].tolist() == [0, 1, 128, 255]


def test_float_and_integer_greys():
    unit = Image.fromarray(np.array([[0, 0.5, 1]], dtype=np.float32))
    assert np.asarray(load_image(unit))[0, :, 0].tolist() == [0, 128, 255]
    wide = Image.fromarray(np.array([[-10, 0, 10]], dtype=np.int32))
    assert np.asarray(load_image(wide))[0, :, 0].tolist() == [0, 128, 255]
    broken = Image.fromarray(np.array([[np.nan, np.inf, 200]], dtype=np.float32))
    assert np.asarray(load_image(broken))[0, :, 0].tolist() == [0, 0, 200]


def test_bytes_pil_and_arrays_agree(tmp_path, pictures):
    picture = pictures.quarters()
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    expected = np.asarray(picture)
    for source in (buffer.getvalue(), picture, expected, np.asarray(picture.convert("RGBA"))):
        assert np.array_equal(np.asarray(load_image(source)), expected)
    assert load_image(expected[:, :, :1]).mode == "RGB"


@pytest.mark.parametrize(
    "source",
    [np.zeros((2, 2, 3)), np.zeros((2, 2, 2), np.uint8), np.zeros(3, np.uint8), 7, None],
    ids=["float", "two channels", "flat", "a number", "None"],
)
def test_what_is_no_image_is_a_usage_error(source):
    with pytest.raises(UsageError, match=r"uint8|cannot read an image"):
        load_image(source)


def test_bad_files_say_why(tmp_path, pictures):
    reasons = pictures.bad(tmp_path)
    for name, word in reasons.items():
        with pytest.raises(UnreadableImage, match=word) as caught:
            load_image(tmp_path / name)
        assert isinstance(caught.value, FisherhashError)
        assert caught.value.exit_code == 1


def test_missing_folder_and_pipe(tmp_path):
    with pytest.raises(UnreadableImage, match="does not exist"):
        load_image(tmp_path / "gone.jpg")
    with pytest.raises(UnreadableImage, match="folder"):
        load_image(tmp_path)
    with pytest.raises(UnreadableImage):
        load_image("a\0b.jpg")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.jpg")
        with pytest.raises(UnreadableImage, match="pipe"):
            load_image(tmp_path / "pipe.jpg")


def test_permission_denied(tmp_path, monkeypatch):
    path = tmp_path / "secret.jpg"
    path.write_bytes(b"x")
    path.chmod(0)
    if os.access(path, os.R_OK):  # root may read everything

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(UnreadableImage, match="permission denied"):
        load_image(path)


def test_limit_holds_for_images_in_memory_and_without_pillows_own(tmp_path, pictures, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    (tmp_path / "a.png").write_bytes(pictures.png_header(10_000, 10_000))
    with pytest.raises(UnreadableImage, match=r"10000 x 10000 pixels"):
        load_image(tmp_path / "a.png")
    assert MAX_PIXELS < 10_000 * 10_000


def _encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    noise = np.random.default_rng(5).integers(0, 256, (17, 23, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, kind)
    return buffer.getvalue()


KINDS = {kind: _encoded(kind) for kind in ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP")}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.data())
def test_damage_gives_a_picture_or_unreadable_image(kind, data):
    content = bytearray(KINDS[kind])
    cut = data.draw(st.integers(0, len(content)))
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=6)):
        content[place] = data.draw(st.integers(0, 255))
    try:
        image = load_image(bytes(content[:cut]))
    except UnreadableImage:
        return
    assert image.mode == "RGB"
