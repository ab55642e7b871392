"""The date, the camera and the position of a photo, from every format that has them."""

from __future__ import annotations

import pytest
from PIL import ExifTags, Image

from fisherhash.data import formats
from fisherhash.data.photo_fields import photo_fields


def exif(*, taken="2021:06:15 14:03:22", make="Canon", model="EOS 5D", gps=True) -> Image.Exif:
    found = Image.Exif()
    if make is not None:
        found[ExifTags.Base.Make] = make
    if model is not None:
        found[ExifTags.Base.Model] = model
    if taken is not None:
        found.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = taken
    if gps:
        place = found.get_ifd(ExifTags.IFD.GPSInfo)
        place[ExifTags.GPS.GPSLatitudeRef] = "S"
        place[ExifTags.GPS.GPSLatitude] = (33.0, 51.0, 24.84)
        place[ExifTags.GPS.GPSLongitudeRef] = "E"
        place[ExifTags.GPS.GPSLongitude] = (151.0, 12.0, 54.0)
    return found


def saved(tmp_path, data: Image.Exif, kind="jpg"):
    path = tmp_path / f"a.{kind}"
    if kind == "tif":
        # Pillow's writer takes the inner tables only in this form.
        for table in (ExifTags.IFD.Exif, ExifTags.IFD.GPSInfo):
            data[table] = dict(data.get_ifd(table))
    Image.new("RGB", (64, 64), (9, 99, 199)).save(path, exif=data)
    return path


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tif", "avif", "heic"])
def test_every_format_of_cameras(tmp_path, kind):
    if kind == "heic":
        pytest.importorskip("pillow_heif")
        assert formats.register_heif()
    assert photo_fields(saved(tmp_path, exif(), kind)) == {
        "taken": "2021-06-15T14:03:22",
        "camera": "Canon EOS 5D",
        "latitude": -33.8569,
        "longitude": 151.215,
    }


@pytest.mark.parametrize(
    ("make", "model", "camera"),
    [
        ("NIKON CORPORATION", "NIKON D70\0\0", "NIKON D70"),
        ("Apple", "iPhone 15", "Apple iPhone 15"),
        (" Canon ", None, "Canon"),
        (None, "X100", "X100"),
        ("\0\0", "  ", None),
        ("M" * 500, None, "M" * 100),
    ],
)
def test_the_name_of_a_camera(tmp_path, make, model, camera):
    found = photo_fields(saved(tmp_path, exif(make=make, model=model, taken=None, gps=False)))
    assert found == ({} if camera is None else {"camera": camera})


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("2021:06:15 14:03:22", "2021-06-15T14:03:22"),
        ("2021-06-15T14:03:22+02:00", "2021-06-15T14:03:22"),
        ("0000:00:00 00:00:00", None),
        ("2021:13:45 99:00:00", None),
        ("    :  :     :  :  ", None),
        ("yesterday", None),
    ],
)
def test_dates(tmp_path, text, taken):
    found = photo_fields(saved(tmp_path, exif(taken=text, make=None, model=None, gps=False)))
    assert found == ({} if taken is None else {"taken": taken})


@pytest.mark.parametrize("degrees", [(0, 0, 0), (200, 0, 0), (1,), (1, 2, 3, 4)])
def test_positions_that_are_none(tmp_path, degrees):
    data = exif(taken=None, make=None, model=None, gps=False)
    place = data.get_ifd(ExifTags.IFD.GPSInfo)
    place[ExifTags.GPS.GPSLatitude] = degrees
    place[ExifTags.GPS.GPSLongitude] = (0.0, 0.0, 0.0)
    assert photo_fields(saved(tmp_path, data)) == {}


def test_files_without_fields(tmp_path):
    path = tmp_path / "a.jpg"
    Image.new("RGB", (8, 8)).save(path, exif=b"Exif\0\0garbage that is no tiff")
    assert photo_fields(path) == {}
    path.write_bytes(b"no image")
    assert photo_fields(path) == {}
    assert photo_fields(tmp_path / "gone.jpg") == {}
    assert photo_fields(tmp_path) == {}


def test_exif_data_behind_other_segments(tmp_path):
    path = saved(tmp_path, exif())
    data = path.read_bytes()
    for kind in (b"\xff\xe0", b"\xff\xe1", b"\xff\xfe"):
        path.write_bytes(data[:2] + kind + b"\x10\x02" + bytes(4096) + data[2:])
        assert photo_fields(path)["camera"] == "Canon EOS 5D"
    for cut in range(0, 600, 7):
        path.write_bytes(data[:cut])
        photo_fields(path)
