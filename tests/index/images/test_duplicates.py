"""Groups of likely duplicates: their order, what is kept, what confirms them."""

import csv
import io
import os
import subprocess

import numpy as np
import pytest
from PIL import Image, ImageFilter

from fisherhash import ImageIndex, codes
from fisherhash.errors import UsageError
from fisherhash.index import Entry, Index, Item
from fisherhash.index.images import confirming
from fisherhash.index.images.duplicate_search import (
    DuplicateSearch,
    best_first,
    false_pairs_of,
    same_bytes,
)
from fisherhash.index.images.duplicates import Duplicates, moves_script
from fisherhash.index.images.options import DuplicateOptions
from fisherhash.index.images.results import Hit
from fisherhash.model import builtin


def search(index, **options):
    """What is found with the options that are plain: the index's own codes, all as they are."""
    plain = {"radius": 0, "keep": "first", "confirm": False}
    return DuplicateSearch(index).find(DuplicateOptions(**(plain | options)))


def names(found):
    return [[hit.name for hit in group] for group in found.groups]


def photo(seed, size=(64, 48)):
    """A smooth random image, as unlike another one as two photos are."""
    rng = np.random.default_rng(seed)
    noise = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return noise.resize(size, Image.Resampling.BICUBIC)


def scene(seed, size=24):
    """Bright above and darker below, as many photos are, with details of its own."""
    details = np.random.default_rng(seed).normal(0, 12, (size, size))
    light = np.linspace(200.0, 80.0, size)[:, None]
    return (light + details).astype(np.float32)


def test_details_keep_two_scenes_in_one_light_apart(monkeypatch):
    """Their light correlates by far enough; a copy has the same details, too."""
    one, other = scene(0), scene(1)
    assert confirming.likeness(one, other) < confirming.ALIKE
    assert confirming.likeness(one, 0.6 * one + 30) >= confirming.ALIKE
    noise = np.random.default_rng(2).normal(0, 4, one.shape).astype(np.float32)
    assert confirming.likeness(one, one + noise) >= confirming.ALIKE
    monkeypatch.setattr(confirming, "DETAIL", 1e-9)
    assert confirming.likeness(one, other) >= confirming.ALIKE


def finder(index, ids, rows):
    """A search of an index that holds these codes under these ids."""
    order = np.argsort(ids)
    index.load([Item(int(ids[i]), rows[i].tobytes()) for i in order])
    return DuplicateSearch(index)


def test_a_chain_is_several_groups_and_ids_need_not_be_positions(new_index):
    ids = np.array([90, 5, 70, 11, 3, 1, 2, 40, 1000])
    found = finder(new_index, ids, codes.pack(np.tri(9, 8, -1)))
    assert [(len(group.ids), group.span) for group in found.groups(1)] == [(2, 1)] * 4
    assert found.groups(0) == []


def test_the_surest_groups_come_first(new_index):
    rows = np.repeat(np.array([[0], [0x0F], [0xF0], [0xF1]], np.uint8), [4, 2, 1, 1], axis=0)
    found = finder(new_index, np.arange(8), rows).groups(1)
    assert [(group.ids.tolist(), group.span) for group in found] == [
        ([4, 5], 0),
        ([0, 1, 2, 3], 0),
        ([6, 7], 1),
    ]


def test_thousands_of_copies_are_one_group_at_once(tmp_path):
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.integers(0, 256, (3, 8), dtype=np.uint8), 40_000, axis=0)
    with Index.create(tmp_path / "i", bits=64) as index:
        index.add_codes(rows)
        found = DuplicateSearch(index)
        assert [len(group.ids) for group in found.groups(4)] == [40_000] * 3


@pytest.mark.parametrize("radius", [-1, 9])
def test_a_radius_that_no_code_has(new_index, radius):
    with pytest.raises(UsageError, match="radius must be between 0 and"):
        search(new_index, radius=radius)


def test_a_report_from_an_index(new_index, tmp_path):
    rows = [[1], [1], [2], [2], [2], [255]]
    for name in "abc":
        (tmp_path / name).write_bytes(b"same")
    new_index.add(
        [
            Entry(key, row, path=tmp_path / file)
            for key, row, file in zip("abxcyz", rows, "abxcyz", strict=True)
        ]
    )
    new_index.add_codes(np.array(rows[2:3], np.uint8))
    found = search(new_index, compare_files=True)
    assert names(found) == [["a", "b"], ["x", "c", "y", "id 6"]]
    assert [[m.same_bytes for m in group] for group in found.groups] == [[0, 0], [None] * 4]
    assert "4 items\n     0  x\n" in str(found)
    assert "     0  b  same bytes (1)\n" in str(found)
    assert (
        "2 groups of equal codes, 6 of 7 items; byte for byte copies of another file: 1"
        in found.summary()
    )
    assert "not a proof" in found.summary()
    listed = found.to_json()
    assert [group["size"] for group in listed["groups"]] == [2, 4]
    assert listed["groups"][0]["items"][1]["same_bytes"] == 0
    assert listed["groups"][0]["keep"] == "a"
    near = search(new_index, radius=2)
    assert [[m.distance for m in group] for group in near.groups] == [[0, 0, 2, 2, 2, 2]]
    assert "Equal or near codes are candidates" in near.summary()
    assert near.to_json()["groups"][0]["items"][0]["same_bytes"] is None
    table = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [(row["group"], row["keep"], row["key"]) for row in table[:3]] == [
        ("1", "yes", "a"),
        ("1", "", "b"),
        ("2", "yes", "x"),
    ]
    assert table[1]["same_bytes"] == "1"
    assert table[1]["path"] == str(tmp_path / "b")


def test_items_that_vanish_meanwhile_are_left_out(new_index, monkeypatch):
    rows = [[0], [0], [1], [255], [254], [15], [15]]
    new_index.add([Entry(key, row) for key, row in zip("abcdefg", rows, strict=True)])
    find = DuplicateSearch.groups

    def late(*arguments):
        found = find(*arguments)
        new_index.remove(["a", "e"])
        return found

    monkeypatch.setattr(DuplicateSearch, "groups", late)
    found = search(new_index, radius=1)
    assert [[(m.name, m.distance) for m in group] for group in found.groups] == [
        [("f", 0), ("g", 0)],
        [("b", 0), ("c", 1)],
    ]


def test_another_radius_only_groups_again(new_index, tmp_path, monkeypatch):
    rows = [[0], [0], [1], [0xF0], [0xF3]]
    paths = [tmp_path / f"{name}.png" for name in "abcde"]
    for path in paths:
        photo(1).save(path)
    new_index.add([Entry(p.stem, row, path=p) for p, row in zip(paths, rows, strict=True)])
    found = DuplicateSearch(new_index)
    read = []
    load = confirming.load_thumbnail
    monkeypatch.setattr(confirming, "load_thumbnail", lambda path: read.append(path) or load(path))

    def at(radius, **options):
        return names(found.find(DuplicateOptions(radius=radius, keep="first", **options)))

    wide = at(2)
    assert sorted(wide) == [["a", "b", "c"], ["d", "e"]]
    assert len(read) == 5
    read.clear()
    known = "fisherhash.index.images.duplicate_search.remembered_pairs"
    monkeypatch.setattr(known, lambda *_: pytest.fail("the pairs are known"))
    assert (at(0), len(read)) == ([["a", "b"]], 2)
    assert at(1) == [["a", "b", "c"]]
    assert (at(2), len(read)) == (wide, 2)


def test_files_of_the_same_bytes_are_marked_and_devices_never_read(tmp_path):
    """It would wait forever for the pipes, and never come to the end of the devices."""
    files = {"a": b"one", "b": b"two", "c": b"one", "d": b"longer", "e": b"two", "f": b"six"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    paths = [str(tmp_path / name) for name in files] + [None, str(tmp_path / "missing")]
    assert same_bytes(paths) == [0, 1, 0, None, 1, None, None, None]
    os.mkfifo(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes(b"")
    paths = [tmp_path / "a.png", tmp_path / "b.png", tmp_path / "c.png", tmp_path / "c.png"]
    marks = same_bytes([*map(str, paths), "/dev/zero", "/dev/zero", "a\0b"])
    assert marks == [None, None, 0, 0, None, None, None]


@pytest.fixture
def changed(new_index, tmp_path):
    """Two photos of equal codes, with changed copies, and files that cannot be read."""
    one, two = photo(1), photo(2)
    images = {
        "one.png": one,
        "grey.png": one.convert("L"),
        "large.png": one.resize((128, 96)),
        "two.png": two,
        "blurred.png": two.filter(ImageFilter.GaussianBlur(1)),
        "other.png": photo(3),
    }
    for age, (name, image) in enumerate(images.items()):
        image.save(tmp_path / name)
        os.utime(tmp_path / name, ns=(age, age))
    (tmp_path / "bad.png").write_bytes(b"no image")
    new_index.add(
        [
            Entry(name, [7], path=tmp_path / name, mtime_ns=age)
            for age, name in enumerate([*images, "bad.png"])
        ]
    )
    return new_index


def test_thumbnails_split_a_group_into_what_they_show(changed):
    found = search(changed, confirm=True)
    assert [group.confirmed for group in found.groups] == [True, True, False]
    assert [set(group) for group in names(found)] == [
        {"two.png", "blurred.png"},
        {"one.png", "grey.png", "large.png"},
        {"one.png", "other.png", "bad.png"},
    ]
    assert "confirmed by their pixels: 2" in found.summary()
    assert "3 items, not confirmed\n" in str(found)
    # Each part keeps its best image: the largest, then the oldest.
    best = search(changed, keep="best", confirm=True)
    assert [group[0].name for group in best.groups] == ["two.png", "large.png", "large.png"]
    (whole,) = search(changed).groups
    assert whole.confirmed is None
    assert len(whole) == 7


def test_the_best_image_is_the_largest_then_the_oldest(changed):
    (group,) = search(changed, keep="best").groups
    assert group[0].name == "large.png"
    two = [Hit.of(item) for item in changed.get(["two.png", "one.png"])]
    assert [hit.key for hit in best_first(two)] == ["one.png", "two.png"]
    with pytest.raises(UsageError, match="unknown keep 'worst'"):
        search(changed, keep="worst")


def test_the_script_moves_what_is_confirmed_and_deletes_nothing(changed, tmp_path):
    found = search(changed, keep="best", confirm=True)
    target = tmp_path / "to 'move'"
    script = tmp_path / "move.sh"
    script.write_text(moves_script(found, target, script="move.sh"))
    subprocess.run(["sh", script], check=True)
    moved = sorted(path.name.split("-", 1)[1] for path in target.iterdir())
    left = sorted(path.name for path in tmp_path.glob("*.png"))
    assert moved == ["blurred.png", "grey.png", "one.png"]
    assert left == ["bad.png", "large.png", "other.png", "two.png"]


@pytest.mark.filterwarnings("error")
def test_a_plain_image_in_a_frame_is_like_no_other():
    """Without its edge it has no structure to compare."""
    frame = np.full((confirming.SIDE, confirming.SIDE), 255, dtype=np.float32)
    frame[0] = frame[-1] = 0
    other = np.random.default_rng(0).normal(128, 40, frame.shape).astype(np.float32)
    assert confirming.likeness(frame, other) < confirming.ALIKE


@pytest.mark.parametrize("keep", ["first", "best"])
def test_a_link_is_not_kept_in_place_of_its_photo(new_index, tmp_path, keep):
    """The link was added first; to move its photo would lose both."""
    photo(1).save(tmp_path / "photo.png")
    photo(1).resize((40, 40)).save(tmp_path / "small.png")
    (tmp_path / "link.png").symlink_to("photo.png")
    files = [tmp_path / name for name in ("link.png", "small.png", "photo.png")]
    new_index.add([Entry(path.name, [1], path=path) for path in files])
    found = search(new_index, keep=keep, confirm=True)
    assert found.groups[0][0].name == ("photo.png" if keep == "best" else "link.png")
    script = tmp_path / "move.sh"
    script.write_text(moves_script(found, tmp_path / "out"))
    subprocess.run(["sh", script], check=True, cwd=tmp_path)
    assert [path.name.split("-", 1)[1] for path in (tmp_path / "out").iterdir()] == ["small.png"]
    assert (tmp_path / "link.png").exists()


def test_no_name_escapes_from_the_script(new_index, tmp_path):
    evil = tmp_path / "a'; touch pwned; '\ntouch pwned #.png"
    for path in (tmp_path / "b.png", evil):
        photo(1).save(path)
    photo(2).save(tmp_path / "c\ntouch pwned", "png")
    files = [tmp_path / "b.png", evil, tmp_path / "c\ntouch pwned"]
    new_index.add([Entry(str(path), [1], path=path) for path in files])
    found = search(new_index, confirm=True)
    assert [group.confirmed for group in found.groups] == [True, False]
    script = tmp_path / "move.sh"
    script.write_text(moves_script(found, tmp_path / "out\ntouch pwned"))
    subprocess.run(["sh", script], check=True, cwd=tmp_path)
    assert not (tmp_path / "pwned").exists()
    assert not evil.exists()
    assert files[2].exists()


def test_what_to_expect_of_a_radius():
    found = Duplicates("i", 64, 12_000, 6, [], comparisons=12_345_678.0, distinct=10_000)
    assert found.expectation() == (
        "Within 6 bits of 64, expect one false pair in about 12,000,000 comparisons: about 4 among "
        "the 49,995,000 pairs of different codes here"
    )
    assert Duplicates("i", 64, 10_000, 6, []).expectation() is None


def test_copy_codes_are_computed_once_and_follow_the_index(tmp_path, monkeypatch):
    monkeypatch.setenv("FISHERHASH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(4):
        photo(number).save(folder / f"{number}.png")
    photo(0).save(folder / "copy.png")
    with Index.create(tmp_path / "i", bits=8) as index:
        index.add([Entry(p.name, [0], path=p, size=1, mtime_ns=1) for p in folder.iterdir()])
        index.add([Entry("gone.png", [0], path=folder / "gone.png")])
    with ImageIndex.open(tmp_path / "i") as images:
        found = images.duplicates(radius=0, code="copy")
        assert [set(group) for group in names(found)] == [{"0.png", "copy.png"}]
        assert (found.bits, found.count, found.code) == (256, 5, "copy-256")
        assert found.without_code == 1
        ids = {hit.id for hit in found.groups[0]}
        assert ids == {item.id for item in images.index.get(["0.png", "copy.png"])}
        expected = builtin.false_pairs("copy-256").radius(per_million=1)
        assert images.duplicates(radius=None, code="auto").radius == expected
        # Nothing has changed: no image is read again.
        with monkeypatch.context() as patched:
            patched.setattr("fisherhash.model.hasher.Hasher.encode_blocks", None)
            assert len(images.duplicates(radius=0, code="copy").groups) == 1
    photo(9).save(folder / "copy.png")
    photo(2).save(folder / "1.png")
    with Index.open(tmp_path / "i", write=True) as index:
        index.remove(["3.png"])
    with ImageIndex.open(tmp_path / "i") as images:
        found = images.duplicates(radius=0, code="copy")
        assert [set(group) for group in names(found)] == [{"1.png", "2.png"}]
        assert found.count == 4
        with pytest.raises(UsageError, match="unknown code 'best'"):
            images.duplicates(code="best")


@pytest.mark.parametrize("current", [True, False])
def test_codes_of_an_earlier_copy_hasher_are_not_judged_by_the_numbers_of_this_one(
    tmp_path, current
):
    made = builtin.fingerprint("copy-128") if current else "0" * 64
    about = {"builtin": "copy-128"}
    with Index.create(tmp_path / "i", bits=128, fingerprint=made, model=about) as index:
        assert (false_pairs_of(index) == builtin.false_pairs("copy-128")) is current
