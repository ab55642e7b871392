"""Pictures of every awkward kind, made when a test asks for them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

RED, GREEN, BLUE = (220, 30, 30), (30, 200, 40), (30, 40, 210)


def quarters(width: int = 40, height: int = 24) -> Image.Image:
    """Red, green / blue, white quarters: shows any turn or flip."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[: height // 2, : width // 2] = RED
    pixels[: height // 2, width // 2 :] = GREEN
    pixels[height // 2 :, : width // 2] = BLUE
    pixels[height // 2 :, width // 2 :] = 255
    return Image.fromarray(pixels)


def png_header(width: int, height: int) -> bytes:
    """A grey PNG that claims a size and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


def write_good(folder: Path) -> list[str]:
    """Files that must all read as :func:`quarters`, up to compression; returns their names."""
    picture = quarters()
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.transpose(Image.Transpose.ROTATE_90).save(folder / "turned.jpg", exif=exif, quality=95)
    picture.transpose(Image.Transpose.ROTATE_90).save(folder / "turned.tif", exif=exif)
    picture.convert("CMYK").save(folder / "cmyk.jpg", quality=95)
    picture.quantize(8).save(folder / "palette.png")
    picture.quantize(8).save(folder / "still.gif")
    picture.save(folder / "windows.bmp")
    picture.save(folder / "plain.tiff")
    picture.save(folder / "UPPER.JPEG", quality=95)
    picture.save(folder / "with two spaces.png")
    picture.save(folder / "Übung – 写真 №1.png")
    picture.save(folder / "lossless.webp", lossless=True)
    picture.save(folder / "portable.ppm")
    other = Image.new("RGB", picture.size)
    for name in ("moving.gif", "moving.webp", "moving.png"):
        options = {"lossless": True} if name.endswith("webp") else {}
        picture.save(folder / name, save_all=True, append_images=[other], **options)
    picture.save(folder / "pair.mpo", save_all=True, append_images=[other], quality=95)
    clear = picture.convert("RGBA")
    hole = np.asarray(clear).copy()
    hole[12:, 20:] = (9, 9, 9, 0)
    Image.fromarray(hole).save(folder / "alpha.png")
    return sorted(entry.name for entry in folder.iterdir())


def write_bad(folder: Path) -> dict[str, str]:
    """Files that cannot be read, with a word of the reason each must give."""
    noise = np.random.default_rng(3).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "cut.jpg", quality=90)
    Image.fromarray(noise).save(folder / "cut.png")
    for name in ("cut.jpg", "cut.png"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.jpg").write_text("this is no picture\n")
    (folder / "drawing.png").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    (folder / "phone.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    (folder / "bomb.png").write_bytes(png_header(50_000, 50_000))
    (folder / "large.png").write_bytes(png_header(10_000, 10_000))
    return {
        "cut.jpg": "truncated",
        "cut.png": "truncated",
        "empty.jpg": "empty",
        "text.jpg": "not an image",
        "drawing.png": "not an image",
        "phone.heic": "an? (HEIC )?image",
        "bomb.png": "limit of 89,478,485",
        "large.png": "limit of 89,478,485",
    }


def write_classes(root: Path, sizes: dict[str, int], *, seed: int = 0) -> Path:
    """A folder with one sub-folder of small PNG files a class, every picture its own."""
    rng = np.random.default_rng(seed)
    for name, count in sizes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number:03d}.png")
    return root


def write_cifar(folder: Path, records: int = 20) -> Path:
    """CIFAR-10's binary layout with few records a file."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        content = rng.integers(0, 256, (records, 3073), dtype=np.uint8)
        content[:, 0] = np.arange(records) % 10
        content.tofile(folder / f"{name}.bin")
    return folder


@pytest.fixture
def pictures():
    """The functions above, for tests (which cannot import a conftest)."""

    class Pictures:
        quarters = staticmethod(quarters)
        good = staticmethod(write_good)
        bad = staticmethod(write_bad)
        classes = staticmethod(write_classes)
        cifar = staticmethod(write_cifar)
        png_header = staticmethod(png_header)

    return Pictures


@pytest.fixture(autouse=True)
def no_data_of_this_machine(tmp_path_factory, monkeypatch):
    """Tests must not see the data or the cache of the machine they run on."""
    monkeypatch.delenv("FISHERHASH_DATA", raising=False)
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path_factory.mktemp("cache")))
