"""From a picture of any shape to the square of pixels a backbone takes."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from fisherhash.data.images import load_image
from fisherhash.data.preprocessing import Preprocessing
from fisherhash.errors import UsageError


def ramp(width, height):
    """Red grows with the column, green with the row."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[:, :, 0] = np.linspace(0, 255, width)[None, :]
    pixels[:, :, 1] = np.linspace(0, 255, height)[:, None]
    return Image.fromarray(pixels)


@pytest.mark.parametrize("size", [(64, 64), (200, 64), (64, 200), (1, 1), (3, 500), (40, 41)])
@pytest.mark.parametrize("crop", [1.0, 0.875, 0.1])
def test_any_picture_becomes_the_square(size, crop):
    pixels = Preprocessing(size=32, crop=crop).pixels(ramp(*size))
    assert pixels.shape == (32, 32, 3)
    assert pixels.dtype == np.uint8


def test_the_centre_is_kept():
    """Of 200 columns the middle 100 remain; with a crop of one half, 50 of them."""
    wide = Preprocessing(size=50, interpolation="bilinear").pixels(ramp(200, 100))
    assert wide[25, 0, 0] == pytest.approx(255 * 50 / 200, abs=3)
    assert wide[25, -1, 0] == pytest.approx(255 * 150 / 200, abs=3)
    assert wide[0, 25, 1] < 5
    assert wide[-1, 25, 1] > 250
    cropped = Preprocessing(size=50, crop=0.5, interpolation="bilinear").pixels(ramp(200, 100))
    assert cropped[25, 0, 0] == pytest.approx(255 * 75 / 200, abs=3)
    assert cropped[0, 25, 1] == pytest.approx(255 * 25 / 100, abs=5)


def test_a_long_strip_does_not_become_longer():
    """Resized first, this strip would be 22 million pixels wide."""
    pixels = Preprocessing(size=224).pixels(ramp(100_000, 1))
    assert pixels.shape == (224, 224, 3)
    assert np.ptp(pixels[:, :, 0]) <= 1


def test_config_round_trip_through_json():
    chosen = Preprocessing(
        size=96, crop=0.9, interpolation="nearest", mean=(1, 2.5, 3), std=(4, 5, 6)
    )
    again = Preprocessing.from_config(json.loads(json.dumps(chosen.to_config())))
    assert again == chosen
    assert hash(again) == hash(chosen)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"size": 7}, "between 8 and 4096 pixels, got 7"),
        ({"size": 5000}, "between 8 and 4096 pixels, got 5000"),
        ({"crop": 0.0}, "crop must be between"),
        ({"crop": float("nan")}, "crop must be between"),
        ({"interpolation": "cubic"}, "one of nearest, bilinear, bicubic, lanczos"),
        ({"draft": 0.5}, "draft must be 0, or between 1 and 8, got 0.5"),
        ({"crop": 0.9, "whole": True}, "crop must be 1"),
        ({"draft": 9.0}, "draft must be 0, or between 1 and 8, got 9.0"),
    ],
)
def test_values_out_of_range(wrong, sentence):
    with pytest.raises(UsageError, match=sentence):
        Preprocessing(**wrong)


def test_the_whole_image_is_squashed_into_the_square():
    wide = np.zeros((20, 80, 3), dtype=np.uint8)
    wide[:, :10] = 255  # outside the centre square
    image = Image.fromarray(wide)
    assert Preprocessing(size=16).pixels(image).max() == 0
    squashed = Preprocessing(size=16, whole=True).pixels(image)
    assert squashed.shape == (16, 16, 3)
    assert squashed[:, 0].min() > 200
    assert squashed[:, 8:].max() == 0


@pytest.mark.parametrize(("side", "scale"), [(191, 2), (192, 4), (383, 4), (384, 8), (1000, 8)])
def test_a_large_jpeg_is_reduced_by_its_decoder(side, scale):
    """At 32 pixels and 1.5 times as many, 48 must be left."""
    draft = Preprocessing(size=32, draft=1.5)
    assert draft.enough == 48
    assert Preprocessing(size=32, crop=0.5, draft=1.5).enough == 96
    noise = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    photo = Image.fromarray(noise).resize((side + 90, side), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    photo.save(file, "JPEG", quality=95)
    small, whole = load_image(file.getvalue(), enough=draft.enough), load_image(file.getvalue())
    assert small.size == (-(-whole.width // scale), -(-whole.height // scale))
    # Nearly what becomes of the whole image: its sides are rounded up, so it is shifted a little.
    apart = draft.pixels(small).astype(int) - draft.pixels(whole)
    assert np.abs(apart).mean() < 6
