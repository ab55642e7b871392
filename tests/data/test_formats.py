"""Formats people have, with their expected pixels, and files that only claim to be images."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from fisherhash.data import formats, images
from fisherhash.data.images import UnreadableImage, is_one_image, load_image, set_limits
from fisherhash.errors import UsageError

INSIDE = ((4, 6), (4, 34), (20, 6), (20, 34))
"""Places away from the borders of the quarters, which lossy formats blur."""


def assert_quarters(image: Image.Image, expected: Image.Image, *, within: int) -> None:
    assert (image.mode, image.size) == ("RGB", expected.size)
    found, wanted = (np.asarray(one).astype(int) for one in (image, expected))
    for place in INSIDE:
        assert np.abs(found[place] - wanted[place]).max() <= within, (place, found[place])


def fixed(value: float) -> bytes:
    return struct.pack(">i", round(value * 65536))


def rgb_profile(primaries: list[tuple[float, float]]) -> bytes:
    """An ICC profile of three primaries (x, y), white D65 and the curve of sRGB."""
    matrix = xyz_of(primaries)
    bradford = np.array(
        [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
    )
    d65, d50 = np.array([0.95047, 1, 1.08883]), np.array([0.9642, 1, 0.8249])
    adapt = np.linalg.inv(bradford) @ np.diag((bradford @ d50) / (bradford @ d65)) @ bradford
    columns = (adapt @ matrix).T
    curve = b"para\0\0\0\0\0\x03\0\0"
    curve += b"".join(map(fixed, (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)))
    text = b"test profile\0"
    tags = {
        b"desc": b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + bytes(78 + 3),
        b"cprt": b"text\0\0\0\0none\0\0\0\0",
        b"wtpt": b"XYZ \0\0\0\0" + b"".join(map(fixed, d50)),
    }
    for name, column in zip((b"rXYZ", b"gXYZ", b"bXYZ"), columns, strict=True):
        tags[name] = b"XYZ \0\0\0\0" + b"".join(map(fixed, column))
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)
    offset, table, body = 128 + 4 + 12 * len(tags), b"", b""
    for name, content in tags.items():
        content += bytes(-len(content) % 4)
        table += name + struct.pack(">II", offset + len(body), len(content))
        body += content
    head = struct.pack(
        ">I4sI4s4s4s", offset + len(body), b"none", 0x02400000, b"mntr", b"RGB ", b"XYZ "
    )
    head += struct.pack(">6H", 2024, 1, 1, 0, 0, 0) + b"acsp" + bytes(28)
    head += b"".join(map(fixed, d50)) + bytes(48)
    return head[:128] + struct.pack(">I", len(tags)) + table + body


def xyz_of(primaries: list[tuple[float, float]]) -> np.ndarray:
    """The matrix from linear RGB to XYZ, with white D65."""
    columns = np.array([[x / y, 1, (1 - x - y) / y] for x, y in primaries]).T
    return columns * np.linalg.solve(columns, np.array([0.95047, 1, 1.08883]))


SRGB = [(0.64, 0.33), (0.30, 0.60), (0.15, 0.06)]
DISPLAY_P3 = [(0.680, 0.320), (0.265, 0.690), (0.150, 0.060)]


def to_srgb(colours: np.ndarray, primaries: list[tuple[float, float]]) -> np.ndarray:
    """The same colours in sRGB, computed from the definitions."""
    unit = colours / 255
    linear = np.where(unit <= 0.04045, unit / 12.92, ((unit + 0.055) / 1.055) ** 2.4)
    linear = linear @ (np.linalg.inv(xyz_of(SRGB)) @ xyz_of(primaries)).T
    linear = np.clip(linear, 0, 1)
    low = linear <= 0.0031308
    return 255 * np.where(low, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.tif", "a.webp"])
def test_wide_colours_become_srgb(tmp_path, name):
    colours = np.array([[200, 60, 50], [60, 180, 70], [40, 50, 200], [128, 128, 128]], np.uint8)
    picture = Image.fromarray(np.repeat(np.repeat(colours[None], 16, 0), 16, 1))
    options = {".jpg": {"quality": 100, "subsampling": 0}, ".webp": {"lossless": True}}
    profile = rgb_profile(DISPLAY_P3)
    picture.save(tmp_path / name, icc_profile=profile, **options.get(name[1:], {}))
    found = np.asarray(load_image(tmp_path / name)).astype(float)[8, 8::16]
    expected = to_srgb(colours.astype(float), DISPLAY_P3)
    assert np.abs(found - expected).max() <= 3
    assert np.abs(expected - colours).max() > 8, "the profile must matter for this test"


@pytest.mark.parametrize("kind", ["theirs", "ours", "garbage", "cut", "of another kind", "empty"])
def test_profiles_of_srgb_and_broken_ones_change_nothing(tmp_path, pictures, kind):
    theirs = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    profiles = {
        "theirs": theirs,
        "ours": rgb_profile(SRGB),
        "garbage": b"no profile at all",
        "cut": theirs[:200],
        "of another kind": lab,
        "empty": b"",
    }
    pictures.quarters().save(tmp_path / "a.png", icc_profile=profiles[kind])
    plain = np.asarray(pictures.quarters())
    assert np.array_equal(np.asarray(load_image(tmp_path / "a.png")), plain)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tif", "avif"])
def test_every_orientation_of_every_format_of_cameras(tmp_path, pictures, kind, orientation):
    store = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    upright = pictures.quarters(160, 96)
    stored = upright.transpose(store[orientation]) if orientation in store else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / f"a.{kind}", exif=exif, quality=95)
    found = np.asarray(load_image(tmp_path / f"a.{kind}")).astype(int)
    wanted = np.asarray(upright).astype(int)
    assert found.shape == wanted.shape
    for place in ((24, 40), (24, 120), (72, 40), (72, 120)):
        assert np.abs(found[place] - wanted[place]).max() <= 12, (place, found[place])


def test_heic_has_its_pixels_and_avif_too(tmp_path, pictures):
    pytest.importorskip("pillow_heif")
    assert formats.register_heif()
    picture = pictures.quarters(160, 96)
    wanted = np.asarray(picture).astype(int)
    for name in ("a.heic", "a.avif"):
        picture.save(tmp_path / name, quality=100)
        found = np.asarray(load_image(tmp_path / name)).astype(int)
        assert np.abs(found[24, 40] - wanted[24, 40]).max() <= 6, name
        assert np.abs(found[72, 120] - wanted[72, 120]).max() <= 6, name
        assert np.array_equal(np.asarray(load_image((tmp_path / name).read_bytes())), found)


def test_without_the_extra_a_heic_image_names_it(tmp_path, monkeypatch):
    path = tmp_path / "a.heic"
    path.write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(5000))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pillow_heif", None)
        formats.register_heif.cache_clear()
        for source in (path, path.read_bytes()):
            with pytest.raises(UnreadableImage, match=r"fisherhash\[heif\]") as caught:
                load_image(source)
            # It must be tried again once the extra is there.
            assert caught.value.passing
    formats.register_heif.cache_clear()


def test_cmyk(tmp_path, pictures):
    cmyk = pictures.quarters().convert("CMYK")
    cmyk.save(tmp_path / "adobe.jpg", quality=95)
    assert b"Adobe" in (tmp_path / "adobe.jpg").read_bytes()
    cmyk.save(tmp_path / "print.tif")
    for name in ("adobe.jpg", "print.tif"):
        assert_quarters(load_image(tmp_path / name), pictures.quarters(), within=12)


def deep_png(pixels: np.ndarray) -> bytes:
    """A PNG of 16 bits per channel, which Pillow cannot write in colour."""
    height, width, channels = pixels.shape
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]

    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_sixteen_bits_per_colour_are_scaled():
    deep = np.array([[[0, 32_896, 65_535], [65_535, 257, 25_700]]], dtype=np.uint16)
    assert np.asarray(load_image(deep_png(deep))).tolist() == [[[0, 128, 255], [255, 1, 100]]]
    clear = np.array([[[0, 0, 0, 0], [65_535, 257, 25_700, 65_535]]], dtype=np.uint16)
    assert np.asarray(load_image(deep_png(clear))).tolist() == [[[255] * 3, [255, 1, 100]]]


@pytest.mark.parametrize("name", ["IMG_1.CR2", "b.nef", "c.ARW", "d.dng", "e.cr3"])
def test_raw_files_are_skipped_with_what_to_do(tmp_path, pictures, name):
    # Some raw files are TIFF files whose first image is a thumbnail.
    pictures.quarters().save(tmp_path / name, "TIFF")
    with pytest.raises(UnreadableImage, match=r"raw file of a camera.*export it as JPEG"):
        load_image(tmp_path / name)


EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 8 8
%%EndComments
(touched) (w) file closefile
showpage
%%EOF
"""


@pytest.mark.parametrize(
    "data", [EPS, b"\xc5\xd0\xd3\xc6" + struct.pack("<6I", 30, len(EPS), *[0] * 4) + EPS]
)
def test_postscript_is_never_given_to_ghostscript(tmp_path, monkeypatch, data):
    """A fake interpreter on the path would leave a trace."""
    trace = tmp_path / "started"
    for name in ("gs", "gswin64c", "gswin32c"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho x >> '{trace}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    (tmp_path / "photo.jpg").write_bytes(data)
    for source in (tmp_path / "photo.jpg", data, io.BytesIO(data)):
        with pytest.raises(UnreadableImage, match="not an image"):
            load_image(source)
    assert not trace.exists()


def test_no_format_is_open_that_is_not_listed():
    """Every format that Pillow can open and that is not on the list stays closed."""
    Image.init()
    for name in ("EPS", "WMF", "FITS", "XBM", "XPM", "IM", "MSP", "PCD", "SPIDER"):
        assert name not in formats.FORMATS
    picture, unlisted = Image.new("L", (4, 4)), 0
    for name in sorted(Image.SAVE.keys() & Image.OPEN.keys() - {*formats.FORMATS, "AVIF", "HEIF"}):
        file = io.BytesIO()
        try:
            picture.convert("1" if name in ("XBM", "MSP") else "L").save(file, name)
        except Exception:
            continue
        unlisted += 1
        with pytest.raises(UnreadableImage):
            load_image(file.getvalue())
    assert unlisted >= 3


def test_only_one_place_opens_images():
    source = Path(images.__file__).parents[1]
    users = [
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if "Image.open(" in path.read_text(encoding="utf-8")
    ]
    # The sample is part of the package.
    assert sorted(users) == ["data/cifar.py", "data/formats.py"]


def test_files_and_bytes_are_images(tmp_path, pictures):
    expected = np.asarray(pictures.quarters())
    file = io.BytesIO()
    pictures.quarters().save(file, "PNG")
    # At its end, as after writing it.
    data = file.getvalue()
    (tmp_path / "a.png").write_bytes(data)

    class Stream:
        """Can only be read."""

        def read(self, count=-1):
            return data

    with (tmp_path / "a.png").open("rb") as opened:
        for source in (file, opened, data, bytearray(data), memoryview(data), Stream()):
            assert is_one_image(source)
            assert np.array_equal(np.asarray(load_image(source)), expected)
    with pytest.raises(UnreadableImage, match="closed file"):
        load_image(opened)
    with (
        (tmp_path / "a.png").open(errors="replace") as text,
        pytest.raises(UsageError, match="binary"),
    ):
        load_image(text)
    for wrong in (7, 2.5, None, object()):
        assert is_one_image(wrong)
        with pytest.raises(UsageError, match="cannot read an image from"):
            load_image(wrong)
    assert not any(map(is_one_image, ([data], (), iter([data]), {1})))


@pytest.fixture
def limits(monkeypatch):
    """Limits that a test sets end with it."""
    for name in (images.PIXELS_VARIABLE, images.BYTES_VARIABLE):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    return set_limits


def test_a_jpeg_above_the_limit_is_decoded_at_half_its_size(limits, pictures):
    file = io.BytesIO()
    pictures.quarters(400, 240).save(file, "JPEG", quality=95)
    whole = load_image(file.getvalue())
    assert whole.size == (400, 240)
    limits(pixels=50_000)
    half = load_image(file.getvalue())
    assert half.size == (200, 120)
    wanted = np.asarray(whole.reduce(2)).astype(int)
    for place in ((30, 50), (30, 150), (90, 50), (90, 150)):
        assert np.abs(np.asarray(half)[place] - wanted[place]).max() <= 1
    limits(pixels=20_000)
    with pytest.raises(UnreadableImage, match=r"400 x 240 pixels, above the limit of 80,000"):
        load_image(file.getvalue())


def test_a_photo_of_108_megapixels_is_read(limits):
    """Pillow warns about the first and refuses the second, whose size is only claimed."""
    file = io.BytesIO()
    # Grey, which is quick.
    Image.new("L", (12_000, 9_000), 77).save(file, "JPEG", quality=30)
    image = load_image(file.getvalue())
    assert image.size == (6_000, 4_500)
    assert image.getpixel((100, 100)) == (77, 77, 77)
    data = bytearray(file.getvalue())
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", 12_240, 16_320)
    assert load_image(bytes(data)).size == (8_160, 6_120)
    data[at + 5 : at + 9] = struct.pack(">HH", 30_000, 30_000)
    with pytest.raises(UnreadableImage, match=r"30000 x 30000 pixels, above the limit"):
        load_image(bytes(data))


def test_limits_can_be_raised_and_are_for_every_format(limits, pictures):
    large = pictures.png_header(10_000, 10_000)
    with pytest.raises(UnreadableImage, match=r"limit of 89,478,485.*--max-pixels") as caught:
        load_image(large)
    assert caught.value.passing
    limits(pixels=100_000_000)
    # Opened and decoded now, which shows that it holds next to nothing.
    with pytest.raises(UnreadableImage, match="truncated"):
        load_image(large)
    assert Image.MAX_IMAGE_PIXELS == 89_478_485
    with pytest.raises(UsageError, match="at least 1"):
        limits(bytes=0)
    os.environ[images.BYTES_VARIABLE] = "plenty"
    with pytest.raises(UsageError, match="FISHERHASH_MAX_BYTES must be a whole number"):
        load_image(large)


def test_bytes_of_a_file_are_bounded(tmp_path, limits, pictures):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    size = (tmp_path / "a.png").stat().st_size
    limits(bytes=size - 1)
    message = rf"{size:,} bytes, above the limit of {size - 1:,}.*--max-bytes"
    with pytest.raises(UnreadableImage, match=message) as caught:
        load_image(tmp_path / "a.png")
    assert caught.value.passing
    with (tmp_path / "a.png").open("rb") as file, pytest.raises(UnreadableImage, match="more than"):
        load_image(file)
    limits(bytes=size)
    assert load_image(tmp_path / "a.png").size == (64, 64)


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_huge_sparse_files_are_skipped_in_little_memory(tmp_path, pictures):
    """40 GB and 5 GB of holes that begin like a JPEG, in a process that may have 4 GB."""
    good = io.BytesIO()
    pictures.quarters().save(good, "JPEG")
    for name, size in (("40 GB.jpg", 40 << 30), ("5 GB.jpg", 5 << 30)):
        with (tmp_path / name).open("wb") as file:
            file.write(good.getvalue())
            file.truncate(size)
    pictures.quarters().save(tmp_path / "good.jpg")
    script = """
        import resource, sys
        from fisherhash.data.computing import decode
        from fisherhash.data.preprocessing import Preprocessing
        from fisherhash.data.sources import open_data
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        (block,) = decode(open_data(sys.argv[1]), None, Preprocessing(size=16), workers=0)
        for skip in block.skipped:
            print(skip.name, "|", skip.reason)
        print(block.indices.tolist())
        # Not ru_maxrss, which a process inherits from the one that started it.
        with open("/proc/self/status") as status:
            peak = next(line for line in status if line.startswith("VmHWM")).split()[1]
        print(int(peak) < 1 << 20)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *skipped, read, little = done.stdout.splitlines()
    assert [line.split(" | ")[0] for line in skipped] == ["40 GB.jpg", "5 GB.jpg"]
    assert all("above the limit of 268,435,456" in line for line in skipped)
    assert (read, little) == ("[2]", "True")
