"""Views of images: every kind of change by itself, against a slow reading of it."""

import colorsys
import dataclasses

import pytest
import torch

from fisherhash.data.augment import PLAIN, Strength, augment, blur, masked

STILL = Strength(smallest=1.0, flip=0.0)
"""Changes nothing."""


def images(count=6, size=16):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)


def test_nothing_changes_nothing():
    torch.testing.assert_close(augment(images(), STILL), images().float(), atol=1e-2, rtol=0)


def test_the_default_draws_what_it_always_drew():
    """Frozen before there were strengths: trainings with one view keep their numbers."""
    torch.manual_seed(0)
    found = augment(torch.arange(2 * 3 * 8 * 8).remainder(251).to(torch.uint8).view(2, 3, 8, 8))
    assert found.mean().item() == pytest.approx(104.23428, abs=1e-4)
    assert found[1, 2, 3, 4].item() == pytest.approx(97.5458, abs=1e-3)
    assert augment(images(), PLAIN).shape == (6, 3, 16, 16)


@pytest.mark.parametrize(
    "change",
    [
        {"jitter": (0.4, 0.8, 0.8, 0.2), "jittered": 1.0},
        {"grey": 1.0},
        {"blur": 1.0},
        {"solarise": 1.0},
        {"smallest": 0.3},
        {"flip": 1.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_change_affects_the_share_it_is_given(change):
    torch.manual_seed(0)
    pixels = images(40, 128) if "blur" in change else images(200, 8)
    all_changed = augment(pixels, dataclasses.replace(STILL, **change))
    assert all_changed.min() >= 0
    assert all_changed.max() <= 255.01
    same = ((all_changed - pixels).abs() < 0.02).flatten(1).all(1)
    assert same.float().mean() < 0.05
    key = {"jitter": "jittered", "smallest": "crop"}.get(next(iter(change)), next(iter(change)))
    half = dataclasses.replace(STILL, **(change | {key: 0.5}))
    same = ((augment(pixels, half) - pixels).abs() < 0.02).flatten(1).all(1)
    assert 0.35 < same.float().mean() < 0.65


def test_grey_solarised_and_mirrored_pixels():
    pixels = images()
    grey = augment(pixels, dataclasses.replace(STILL, grey=1.0))
    expected = (pixels * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1)
    for channel in range(3):
        torch.testing.assert_close(grey[:, channel], expected, atol=1e-2, rtol=0)
    inverted = augment(pixels // 10 * 10, dataclasses.replace(STILL, solarise=1.0))
    expected = [v if v < 128 else 255 - v for v in (pixels // 10 * 10).flatten().tolist()]
    torch.testing.assert_close(
        inverted.flatten(), torch.tensor(expected).float(), atol=0.01, rtol=0
    )
    mirrored = augment(pixels, dataclasses.replace(STILL, flip=1.0))
    torch.testing.assert_close(mirrored, pixels.flip(3).float(), atol=1e-2, rtol=0)


def test_only_the_hue_turns():
    """The hue moves, up to what was asked for; the mean of red, green and blue stays."""
    torch.manual_seed(1)
    pixels = torch.tensor([150.0, 110.0, 100.0]).byte()[None, :, None, None].expand(50, 3, 4, 4)
    strength = dataclasses.replace(STILL, jitter=(0.0, 0.0, 0.0, 0.2), jittered=1.0)
    found = augment(pixels, strength)[:, :, 1, 1]
    torch.testing.assert_close(found.mean(1), torch.full((50,), 120.0), atol=1e-2, rtol=0)
    hues = [colorsys.rgb_to_hsv(*row)[0] for row in (found / 255).tolist()]
    start = colorsys.rgb_to_hsv(150 / 255, 110 / 255, 100 / 255)[0]
    moved = [abs((hue - start + 0.5) % 1 - 0.5) for hue in hues]
    assert 0.1 < max(moved) < 0.23


def test_a_blur_keeps_the_mean_and_flattens():
    torch.manual_seed(0)
    constant = blur(torch.full((2, 3, 32, 32), 77.0))
    torch.testing.assert_close(constant, torch.full_like(constant, 77.0))
    sharp = images(4, 128).float()
    assert (blur(sharp).std((1, 2, 3)) < sharp.std((1, 2, 3))).all()
    point = torch.zeros(2, 3, 129, 129)
    point[:, :, 64, 64] = 1.0
    spread = blur(point)
    torch.testing.assert_close(spread.sum((2, 3)), torch.ones(2, 3))
    torch.testing.assert_close(spread, spread.flip(2))
    torch.testing.assert_close(spread, spread.transpose(2, 3))
    assert not torch.allclose(spread[0], spread[1])  # a width per image


def test_two_views_of_one_seed_differ():
    torch.manual_seed(0)
    strength = Strength(jitter=(0.4, 0.4, 0.4, 0.1), jittered=1.0, blur=0.5, grey=0.2)
    first, second = augment(images(), strength), augment(images(), strength)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(augment(images(), strength), first)


def test_masked_features():
    torch.manual_seed(0)
    features, mean = torch.randn(400, 50) + 3, torch.full((50,), 3.0)
    assert masked(features, mean, 0.0) is features
    found = masked(features, mean, 0.4)
    gone = found == mean
    assert 0.37 < gone.float().mean() < 0.43
    torch.testing.assert_close(found[~gone], (3 + (features - 3) / 0.6)[~gone])
