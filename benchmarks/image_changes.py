"""Changes that people make to an image, and the images that copy codes are measured on.

A change takes an RGB image and a random generator. The copy codes were fitted on the kinds in
``SEEN``, at random strengths; on those in ``UNSEEN`` nothing was fitted or chosen. All lengths are
shares of the image's side, so that they mean the same on small and on large images.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont, ImageOps

from fisherhash import codes
from fisherhash.data import open_data
from fisherhash.data.splits import hash_order

Rng = np.random.Generator
Change = Callable[[Image.Image, Rng], Image.Image]
Colour = tuple[int, ...]
SETS = {"coco21": (7500, 3000, 4500), "tiny100": (6000, 3000, 4500)}
"""Images that the copy codes were fitted on, chosen on and are reported on, by data set."""
CHANGED = {"coco21": (400, 300), "tiny100": (200, 200)}
"""How many of those to choose and to report on are changed in every way."""
WORDS = ("holiday", "SALE", "me and you", "2024-07-19", "breaking news", "photo by A. Smith", "wow")


def saved(image: Image.Image, kind: str, quality: int) -> Image.Image:
    """The image after it was saved in a lossy format."""
    file = io.BytesIO()
    image.save(file, kind, quality=quality)
    return Image.open(file).convert("RGB")


def scaled(image: Image.Image, share: float, how: Image.Resampling) -> Image.Image:
    """Width and height times a share."""
    size = max(round(image.width * share), 8), max(round(image.height * share), 8)
    return image.resize(size, how)


def cropped(image: Image.Image, share: float, rng: Rng) -> Image.Image:
    """A part with this share of width and height, anywhere."""
    width, height = round(image.width * share), round(image.height * share)
    left = int(rng.integers(0, image.width - width + 1))
    top = int(rng.integers(0, image.height - height + 1))
    return image.crop((left, top, left + width, top + height))


def bordered(image: Image.Image, x: float, y: float, colour: Colour) -> Image.Image:
    """Strips of one colour on two sides or on all four."""
    wide, high = round(image.width * x), round(image.height * y)
    return ImageOps.expand(image, (wide, high, wide, high), fill=colour)


def tinted(image: Image.Image, red: float, blue: float) -> Image.Image:
    """Warmer or colder light."""
    values = np.asarray(image, dtype=np.float32) * np.array([red, 1.0, blue], dtype=np.float32)
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def noisy(image: Image.Image, deviation: float, rng: Rng) -> Image.Image:
    """Gaussian noise on every channel."""
    values = np.asarray(image, dtype=np.float32)
    values = values + rng.normal(0, deviation, values.shape).astype(np.float32)
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def blurred(image: Image.Image, share: float) -> Image.Image:
    """A Gaussian blur; the radius is a share of the longer side."""
    return image.filter(ImageFilter.GaussianBlur(share * max(image.size)))


def rotated(image: Image.Image, degrees: float, *, cut: bool) -> Image.Image:
    """Rotated about the centre; the corners are black, or cut off."""
    turned = image.rotate(degrees, Image.Resampling.BICUBIC)
    if not cut:
        return turned
    share = 1 - abs(np.tan(np.radians(degrees)))
    left, top = (round(side * (1 - share) / 2) for side in image.size)
    return turned.crop((left, top, image.width - left, image.height - top))


def captioned(image: Image.Image, rng: Rng, *, height: float, strip: bool) -> Image.Image:
    """A line of text at the top or the bottom, with a strip behind it or without."""
    made = image.copy()
    draw = ImageDraw.Draw(made)
    high = max(round(height * image.height), 6)
    top = int(rng.choice([0, image.height - high]))
    dark = bool(rng.integers(2))
    if strip:
        draw.rectangle((0, top, image.width, top + high), fill=(0, 0, 0) if dark else (255,) * 3)
    colour = (255, 255, 255) if dark else (0, 0, 0)
    font = ImageFont.load_default(high * 0.8)
    draw.text((image.width * 0.05, top), str(rng.choice(WORDS)), fill=colour, font=font)
    return made


def watermarked(image: Image.Image, rng: Rng, *, opacity: float) -> Image.Image:
    """Text across the whole image, half transparent."""
    layer = Image.new("L", image.size, 0)
    font = ImageFont.load_default(image.height * 0.2)
    text = str(rng.choice(WORDS))
    place = image.width / 2, image.height / 2
    ImageDraw.Draw(layer).text(place, text, fill=255, font=font, anchor="mm")
    layer = layer.rotate(float(rng.uniform(-40, 40)))
    mask = layer.point([round(value * opacity) for value in range(256)])
    return Image.composite(Image.new("RGB", image.size, (255, 255, 255)), image, mask)


def tilted(image: Image.Image, share: float) -> Image.Image:
    """Photographed from a page: the upper edge is nearer, so the sides lean inwards."""
    width, height = image.size
    inset = share * width
    corners = (inset, 0, 0, height, width, height, width - inset, 0)
    return image.transform(
        image.size, Image.Transform.QUAD, corners, resample=Image.Resampling.BICUBIC
    )


def vignetted(image: Image.Image, strength: float) -> Image.Image:
    """Darker towards the corners."""
    y = np.linspace(-1, 1, image.height, dtype=np.float32)[:, None]
    x = np.linspace(-1, 1, image.width, dtype=np.float32)[None, :]
    light = 1 - strength * (x * x + y * y) / 2
    values = np.asarray(image, dtype=np.float32) * light[..., None]
    return Image.fromarray(values.astype(np.uint8))


def sepia(image: Image.Image) -> Image.Image:
    """The browns of an old print."""
    return toned(image, (30, 15, 5), (130, 105, 75), (255, 240, 205))


def pixelated(image: Image.Image, blocks: int) -> Image.Image:
    """A mosaic of this many blocks along each side."""
    return image.resize((blocks, blocks), Image.Resampling.BOX).resize(
        image.size, Image.Resampling.NEAREST
    )


def dithered(image: Image.Image, colours: int) -> Image.Image:
    """Few colours, and patterns of dots between them."""
    palette = image.quantize(colours)
    made = image.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG)
    return made.convert("RGB")


def lined(image: Image.Image, every: int) -> Image.Image:
    """One row in so many at half its brightness, as a photo of a screen shows."""
    values = np.array(image)
    values[::every] //= 2
    return Image.fromarray(values)


def striped(image: Image.Image, every: int, strength: float) -> Image.Image:
    """One column in so many nearer to white, or to black where the strength is negative."""
    values = np.array(image, dtype=np.float32)
    end = 255.0 if strength > 0 else 0.0
    values[:, ::every] += abs(strength) * (end - values[:, ::every])
    return Image.fromarray(values.astype(np.uint8))


def shaded(image: Image.Image, darkest: float, rng: Rng) -> Image.Image:
    """A shadow from one of the four sides: brightness falls to a share of it on the other."""
    values = np.asarray(image, dtype=np.float32)
    axis, turned = int(rng.integers(2)), bool(rng.integers(2))
    light = np.linspace(1, darkest, values.shape[axis], dtype=np.float32)
    light = (light[::-1] if turned else light).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
    return Image.fromarray((values * light).astype(np.uint8))


def toned(image: Image.Image, dark: Colour, middle: Colour, light: Colour) -> Image.Image:
    """A grey image in the tones between three colours."""
    return ImageOps.colorize(image.convert("L"), dark, light, mid=middle)


def _toned_blue(image: Image.Image, share: float) -> Image.Image:
    """From grey (0) to the blues of a cyanotype (1)."""
    dark, middle, light = (
        tuple(round(grey + share * (blue - grey)) for grey, blue in zip(one, other, strict=True))
        for one, other in (
            ((15, 15, 15), (10, 20, 60)),
            ((120, 120, 120), (70, 110, 170)),
            ((235, 235, 235), (220, 235, 255)),
        )
    )
    return toned(image, dark, middle, light)


def rounded(image: Image.Image, radius: float) -> Image.Image:
    """Round corners on white."""
    mask = Image.new("L", image.size, 0)
    corner = radius * min(image.size)
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, *image.size), corner, fill=255)
    return Image.composite(image, Image.new("RGB", image.size, (255, 255, 255)), mask)


def bulged(image: Image.Image, strength: float) -> Image.Image:
    """The barrel distortion of a wide lens."""
    values = np.asarray(image)
    y = np.linspace(-1, 1, image.height)[:, None]
    x = np.linspace(-1, 1, image.width)[None, :]
    stretch = (1 + strength * (x * x + y * y)) / (1 + 2 * strength)
    rows = ((y * stretch + 1) / 2 * (image.height - 1)).round().astype(int)
    columns = ((x * stretch + 1) / 2 * (image.width - 1)).round().astype(int)
    return Image.fromarray(values[rows, columns])


def speckled(image: Image.Image, share: float, rng: Rng) -> Image.Image:
    """Some pixels black, some white."""
    values = np.array(image)
    drawn = rng.random(values.shape[:2])
    values[drawn < share / 2] = 0
    values[drawn > 1 - share / 2] = 255
    return Image.fromarray(values)


def _screenshot(image: Image.Image, rng: Rng, bars: float) -> Image.Image:
    colour = int(rng.choice([0, 30, 245, 255]))
    upright = bool(rng.integers(2))
    return bordered(image, 0 if upright else bars, bars if upright else 0, (colour, colour, colour))


def _random_colour(rng: Rng) -> tuple[int, int, int]:
    """Black or white, often; else any colour."""
    red, green, blue = (int(value) for value in rng.integers(0, 256, 3))
    if rng.random() < 0.4:
        return red, green, blue
    return (0, 0, 0) if red < 128 else (255, 255, 255)


SEEN: dict[str, Change] = {
    "JPEG, quality 90": lambda i, r: saved(i, "jpeg", 90),
    "JPEG, quality 60": lambda i, r: saved(i, "jpeg", 60),
    "JPEG, quality 40": lambda i, r: saved(i, "jpeg", 40),
    "75 % of the size": lambda i, r: scaled(i, 0.75, Image.Resampling.LANCZOS),
    "50 % of the size": lambda i, r: scaled(i, 0.5, Image.Resampling.BICUBIC),
    "cropped to 95 % of each side": lambda i, r: cropped(i, 0.95, r),
    "cropped to 90 % of each side": lambda i, r: cropped(i, 0.90, r),
    "cropped to 80 % of each side": lambda i, r: cropped(i, 0.80, r),
    "border of 5 %": lambda i, r: bordered(i, 0.05, 0.05, _random_colour(r)),
    "bars of 10 %": lambda i, r: _screenshot(i, r, 0.1),
    "brighter by 30 %": lambda i, r: ImageEnhance.Brightness(i).enhance(1.3),
    "darker by 30 %": lambda i, r: ImageEnhance.Brightness(i).enhance(0.7),
    "more contrast": lambda i, r: ImageEnhance.Contrast(i).enhance(1.4),
    "less contrast": lambda i, r: ImageEnhance.Contrast(i).enhance(0.7),
    "colours stronger": lambda i, r: ImageEnhance.Color(i).enhance(1.7),
    "warmer light": lambda i, r: tinted(i, 1.15, 0.85),
    "grey": lambda i, r: i.convert("L").convert("RGB"),
    "caption": lambda i, r: captioned(i, r, height=0.15, strip=True),
    "watermark": lambda i, r: watermarked(i, r, opacity=0.5),
    "blur": lambda i, r: blurred(i, 0.012),
    "noise": lambda i, r: noisy(i, 12, r),
    "rotated by 2°": lambda i, r: rotated(i, 2 * r.choice([-1, 1]), cut=False),
    "rotated by 5°": lambda i, r: rotated(i, 5 * r.choice([-1, 1]), cut=False),
    "mosaic of 24 x 24": lambda i, r: pixelated(i, 24),
    "black and white specks": lambda i, r: speckled(i, 0.03, r),
    "light columns": lambda i, r: striped(i, 5, 0.5),
    "shadow from one side": lambda i, r: shaded(i, 0.4, r),
    "toned blue": lambda i, r: _toned_blue(i, 1.0),
}
UNSEEN: dict[str, Change] = {
    "WebP, quality 50": lambda i, r: saved(i, "webp", 50),
    "3 bits per channel": lambda i, r: ImageOps.posterize(i, 3),
    "histogram equalised": lambda i, r: ImageOps.equalize(i),
    "sepia": lambda i, r: sepia(i),
    "dark corners": lambda i, r: vignetted(i, 0.6),
    "median filter": lambda i, r: i.filter(ImageFilter.MedianFilter(3)),
    "dithered to 8 colours": lambda i, r: dithered(i, 8),
    "fog": lambda i, r: Image.blend(i, Image.new("RGB", i.size, (235, 235, 240)), 0.35),
    "round corners": lambda i, r: rounded(i, 0.15),
    "lens": lambda i, r: bulged(i, 0.06),
    "perspective": lambda i, r: tilted(i, 0.04),
    "narrower by a quarter": lambda i, r: i.resize((i.width * 3 // 4, i.height)),
}
CHOSEN_ON: dict[str, Change] = {"dark lines": lambda i, r: lined(i, 4)}
"""Of the kinds that helped to choose the copy codes, the one that earlier codes missed."""
REPORTED = SEEN | CHOSEN_ON | UNSEEN


class Images:
    """The images of two data sets that nothing was fitted on, in two parts.

    Args:
        cache: a folder for what is computed of them.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        cache.mkdir(parents=True, exist_ok=True)
        self.collections = {name: open_data(name) for name in SETS}
        self.parts: dict[str, dict[str, NDArray[np.int64]]] = {}
        for name, counts in SETS.items():
            names = self.collections[name].names
            order = np.array(hash_order(names, list(range(len(names))), 0))
            _, chosen, reported, _ = np.split(order, np.cumsum(counts))
            self.parts[name] = {"choose": chosen, "report": reported}

    def open(self, name: str, number: int) -> Image.Image:
        """One image of a set."""
        return self.collections[name].reader.open(int(number)).convert("RGB")

    def changed(self, name: str, numbers: Iterable[int], change: Change | None) -> Iterator[Any]:
        """The images, changed; every image has a random generator of its own."""
        for number in numbers:
            image = self.open(name, number)
            yield image if change is None else change(image, np.random.default_rng(int(number)))

    def original_numbers(self, name: str, part: str, *, changed: bool = False) -> NDArray[np.int64]:
        """The images of a part of a set, or the first of them, which are changed."""
        numbers = self.parts[name][part]
        return numbers[: CHANGED[name][("choose", "report").index(part)]] if changed else numbers


def pair_histogram(found: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """How many pairs of different images have each distance 0..bits."""
    counts = np.zeros(bits + 1, dtype=np.int64)
    for start in range(0, len(found), 500):
        distances = codes.hamming(found[start : start + 500], found[start:])
        above = np.triu_indices(*((len(distances), 1, distances.shape[1])))
        counts += np.bincount(distances[above], minlength=bits + 1)
    return counts


def radius_at(counts: NDArray[np.int64], rate: float) -> int:
    """The largest distance up to which at most this share of the pairs lies; -1 if none."""
    return int(np.searchsorted(np.cumsum(counts) / counts.sum(), rate, side="right")) - 1


def pair_distances(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Distances (n,) between codes of the same row."""
    return np.bitwise_count(one ^ other).sum(1, dtype=np.int64)
