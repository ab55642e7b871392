"""Protocols: sizes, checksums, draws that never change, and what happens to the public lists."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fisherhash.data.collection import FileReader, one_hot
from fisherhash.data.protocols import Split, hash_order, resolve, suggest_protocol
from fisherhash.data.sources import Collection, open_data
from fisherhash.errors import FisherhashError, UsageError


def collection(labels, names=None, *, splits=None, kind="folder", name="made") -> Collection:
    labels = np.asarray(labels, dtype=np.uint8)
    names = names or [f"x/{number:06d}.jpg" for number in range(len(labels))]
    classes = tuple(f"c{number}" for number in range(labels.shape[1]))
    parts = {part: np.asarray(items, np.int64) for part, items in (splits or {}).items()}
    return Collection(name, names, labels, classes, FileReader(".", names), parts, kind)


@pytest.fixture(scope="module")
def cifar() -> Collection:
    batches = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    names = [f"{batch}/{number:05d}" for batch in batches for number in range(10_000)]
    return collection(one_hot(np.arange(60_000) % 10, 10), names, kind="cifar10", name="cifar10")


def fails(words: str, *arguments: object, **options: object) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(*arguments, **options)


def per_class(data: Collection, items: np.ndarray) -> set[int]:
    return set(data.labels[items].sum(axis=0).tolist())


def test_cifar10_small(cifar):
    split = resolve(cifar)
    assert split.protocol == "cifar10-small"
    assert (len(split.train), len(split.query), len(split.database)) == (5_000, 1_000, 59_000)
    assert per_class(cifar, split.train) == {500}
    assert per_class(cifar, split.query) == {100}
    assert not set(split.query) & set(split.database)
    assert set(split.train) <= set(split.database)
    assert split.train.dtype == split.query.dtype == split.database.dtype == np.int64
    assert split.top is None


def test_cifar10_small_54k_draws_the_same_images(cifar):
    split, small = resolve(cifar, "cifar10-small-54k"), resolve(cifar)
    assert len(split.database) == 54_000
    assert not set(split.train) & set(split.database)
    assert split.query.tolist() == small.query.tolist()
    assert split.train.tolist() == small.train.tolist()
    assert split.checksum != small.checksum


def test_cifar10_large_does_not_depend_on_the_seed(cifar):
    split = resolve(cifar, "cifar10-large", 3)
    assert split.seed is None
    assert (len(split.train), len(split.query), len(split.database)) == (50_000, 10_000, 50_000)
    assert per_class(cifar, split.query) == {1_000}
    assert split.checksum == resolve(cifar, "cifar10-large").checksum


def test_cifar_protocols_refuse_other_data(cifar):
    fails("60,000 images in their official", open_data("sample"), "cifar10-small")
    part = collection(cifar.labels[:100], list(cifar.names[:100]), kind="cifar10")
    fails("has 100 images", part)


def test_a_draw_is_written_in_stone(cifar):
    """These values may never change: every published number hangs on them."""
    assert resolve(open_data("sample")).checksum == (
        "135e7cd93190f66311eff542739168ad25ee74b8fd2e307276df5c14d1b50236"
    )
    assert hash_order(["a", "b", "c", "d", "é"], range(5), 7) == [0, 4, 2, 3, 1]
    by_hand = sorted("abc", key=lambda name: hashlib.sha256(f"1\0{name}".encode()).digest())
    assert [("a", "b", "c")[item] for item in hash_order(["a", "b", "c"], range(3), 1)] == by_hand


def test_both_spellings_of_an_accent_are_one_name():
    composed, decomposed = ["\u00e9", "a", "b"], ["e\u0301", "a", "b"]
    for seed in range(5):
        assert hash_order(composed, range(3), seed) == hash_order(decomposed, range(3), seed)


def test_checksum_is_over_names_in_order(tmp_path):
    data = collection([[1, 0]] * 4 + [[0, 1]] * 4)
    split = resolve(data)
    text = b"custom\x000\n"
    for part in ("train", "query", "database"):
        text += part.encode() + b"\n"
        text += b"".join(data.names[item].encode() + b"\n" for item in getattr(split, part))
    assert split.checksum == hashlib.sha256(text).hexdigest()
    assert resolve(data, seed=1).checksum != split.checksum


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=2, max_size=5), st.integers(0, 3))
def test_custom_single_label(sizes, seed):
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    data = collection(one_hot(numbers, len(sizes)))
    split = resolve(data, "custom", seed)
    assert not set(split.query) & set(split.database)
    assert sorted([*split.query, *split.database]) == list(range(len(data)))
    assert np.array_equal(split.train, split.database)
    asked = data.labels[split.query].sum(axis=0).tolist()
    assert asked == [min(max(1, round(size / 10)), 100) for size in sizes]
    assert (data.labels[split.database].sum(axis=0) > 0).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_custom_multi_label(data):
    rows = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=8))
    labels = np.array(rows, np.uint8)
    sizes = labels.sum(axis=0)
    assume((sizes > 1).sum() >= 2)
    made = collection(labels)
    if (labels[:, sizes == 1].any(axis=1) & (labels.sum(axis=1) == 1)).any():
        fails("one image only", made, "custom")
        return
    split = resolve(made, "custom")
    assert not set(split.query) & set(split.database)
    labelled = set(np.flatnonzero(labels.any(axis=1)))
    assert set(split.query) | set(split.database) == labelled
    # No class lost its last image to the queries.
    assert ((labels[split.database].sum(axis=0) > 0) == (sizes > 0)).all()


def test_unlabelled_rows_are_left_out_and_counted():
    data = collection([[1, 0]] * 5 + [[0, 1]] * 5 + [[0, 0]] * 3)
    split = resolve(data)
    assert max([*split.query, *split.database]) < 10
    assert "3 images without a label left out" in split.notes


SPLITS = {"train": [0], "query": [1], "database": [0]}


def test_too_little_data():
    fails("only one class, 'c0'", collection([[1]] * 5))
    fails("only one class, 'c1'", collection([[0, 1]] * 5))
    fails("no class", collection([[0, 0]] * 5))
    fails("has no labels", collection(np.zeros((5, 0))))
    fails(
        "2 classes of 'made' with one image only: 'c1', 'c2'", collection(one_hot([0, 0, 1, 2], 3))
    )
    many = collection(one_hot([0, 0, *range(1, 9)], 9))
    fails("8 classes .* and 3 more", many)


def test_unknown_protocol():
    fails("Did you mean 'cifar10-small'", open_data("sample"), "cifar-small")


def test_protocols_with_lists_need_lists():
    fails("train.txt", collection(one_hot(np.arange(400) % 100, 100)), "imagenet100")
    fails("train.txt", open_data("sample"), "lists")
    fails("has 21 classes, 'sample' has 10", open_data("sample"), "nuswide21-small")


def test_lists_as_they_are():
    labels = [[1, 0], [0, 1], [1, 1], [1, 0]]
    data = collection(labels, splits={"train": [2, 0], "query": [3], "database": [2, 1, 0]})
    split = resolve(data)
    assert split.protocol == "lists"
    assert split.seed is None
    assert split.train.tolist() == [2, 0]
    assert split.database.tolist() == [2, 1, 0]
    assert split.notes == ()
    assert resolve(data, seed=5).checksum == split.checksum


def test_faults_of_public_lists_are_mended_and_counted():
    labels = [[1, 0], [0, 1], [1, 1], [0, 0], [1, 0], [0, 0]]
    splits = {"train": [0, 1, 2], "query": [2, 3, 4], "database": [0, 1, 2, 4, 5]}
    split = resolve(collection(labels, splits=splits))
    assert split.query.tolist() == [2, 4]
    assert split.database.tolist() == [0, 1]
    assert split.train.tolist() == [0, 1]
    assert set(split.notes) == {
        "1 query image without a label left out",
        "1 database image without a label left out",
        "2 queries were taken out of the database list",
        "1 query was taken out of the train list",
    }


def test_lists_of_which_nothing_is_left():
    everything = {"train": [0], "query": [0, 1], "database": [0, 1]}
    fails("every image of the database list", collection([[1, 0], [0, 1]], splits=everything))
    unlabelled = {"train": [0], "query": [1], "database": [0]}
    fails("no image of the query list", collection([[1, 0], [0, 0]], splits=unlabelled))


def imagenet(train_a_class: int) -> Collection:
    """The public ImageNet100 lists in small: 140 a class in the database, 50 a class to ask."""
    numbers = np.repeat(np.arange(100), 190)
    within = np.tile(np.arange(190), 100)
    splits = {
        "train": np.flatnonzero(within < train_a_class),
        "query": np.flatnonzero(within >= 140),
        "database": np.flatnonzero(within < 140),
    }
    return collection(one_hot(numbers, 100), splits=splits, kind="lists")


def test_imagenet100_keeps_a_hundred_a_class_of_the_public_list():
    data = imagenet(130)
    assert suggest_protocol(data) == "imagenet100-13k"
    public = resolve(data)
    assert len(public.train) == 13_000
    assert public.seed is None
    assert any("database images, the protocol is known with 128,503" in n for n in public.notes)
    paper = resolve(data, "imagenet100", seed=2)
    assert per_class(data, paper.train) == {100}
    assert set(paper.train) < set(public.train)
    assert paper.seed == 2
    assert suggest_protocol(imagenet(100)) == "imagenet100"
    assert resolve(imagenet(100)).seed is None


def test_coco80_of_the_public_lists():
    """All queries inside the database, no training image inside: as counted in the public lists."""
    numbers = np.arange(20_000) % 80
    splits = {
        "train": np.arange(10_000),
        "query": np.arange(10_000, 15_000),
        "database": np.arange(10_000, 20_000),
    }
    data = collection(one_hot(numbers, 80), splits=splits, kind="lists")
    split = resolve(data)
    assert split.protocol == "coco80"
    assert len(split.query) == 5_000
    assert len(split.database) == 15_000
    assert not set(split.query) & set(split.database)
    assert set(split.train) < set(split.database)
    assert "5,000 queries were taken out of the database list" in split.notes


def test_nuswide21_is_drawn_where_there_are_no_lists():
    rng = np.random.default_rng(0)
    labels = (rng.random((24_000, 21)) < 0.1).astype(np.uint8)
    data = collection(labels)
    small, large = resolve(data, "nuswide21-small"), resolve(data, "nuswide21-large")
    assert (len(small.train), len(small.query)) == (10_500, 2_100)
    assert small.query.tolist() == large.query.tolist()
    assert set(small.train) <= set(small.database)
    assert large.train.tolist() == large.database.tolist() == small.database.tolist()
    assert len(large.database) == int(labels.any(axis=1).sum()) - 2_100
    assert (small.top, large.top) == (5_000, 50_000)
    fails("too few images", collection(labels[:500]), "nuswide21-small")


def test_another_seed_exchanges_the_queries_of_a_stand_in():
    """Fresh queries were neither queries nor training images before; all sizes stay."""
    numbers, within = np.repeat(np.arange(100), 170), np.tile(np.arange(170), 100)
    splits = {
        "train": np.flatnonzero(within < 60),
        "query": np.flatnonzero(within >= 120),
        "database": np.flatnonzero(within < 120),
    }
    data = collection(one_hot(numbers, 100), splits=splits, kind="lists", name="tiny100")
    listed, fresh, other = (resolve(data, "tiny100", seed) for seed in (0, 1, 2))
    assert (listed.seed, fresh.seed) == (None, 1)
    assert fresh.agreed is None
    assert any("fresh queries were drawn with seed 1, 50 per class" in note for note in fresh.notes)
    assert np.array_equal(fresh.train, listed.train)
    for part in ("query", "database"):
        assert len(getattr(fresh, part)) == len(getattr(listed, part))
    assert per_class(data, fresh.query) == {50}
    assert not {*fresh.query} & {*listed.query, *listed.train, *fresh.database}
    assert {*listed.query} < {*fresh.database}
    assert {*fresh.query} != {*other.query}
    assert len({split.checksum for split in (listed, fresh, other)}) == 3
    few = collection(
        one_hot(numbers[within < 140], 100),
        splits={
            "train": np.arange(60),
            "query": np.arange(60, 120),
            "database": np.arange(120, 200),
        },
        kind="lists",
        name="tiny100",
    )
    fails("no fresh queries can be drawn from 'tiny100'.*Seed 0 has the listed", few, "tiny100", 1)


def test_save_and_load(tmp_path):
    names = [f"ü {number}/写真.jpg" for number in range(60)]
    data = collection(one_hot(np.arange(60) % 3, 3), names)
    for split in (resolve(data, seed=4), resolve(data, seed=5)):
        split.save(tmp_path / "split.json")
        back = Split.load(tmp_path / "split.json", data)
        for part in ("train", "query", "database"):
            assert np.array_equal(getattr(back, part), getattr(split, part))
        assert back.to_json() == split.to_json()
    assert not list(tmp_path.glob("*.part"))


def test_a_split_of_other_data_or_a_changed_one(tmp_path):
    data = collection(one_hot(np.arange(40) % 2, 2))
    path = tmp_path / "split.json"
    resolve(data).save(path)
    other = collection(one_hot(np.arange(40) % 2, 2), [f"y{number}" for number in range(40)])
    with pytest.raises(UsageError, match="are not in 'made'"):
        Split.load(path, other)
    content = json.loads(path.read_text())
    content["query"].pop()
    path.write_text(json.dumps(content))
    with pytest.raises(FisherhashError, match="was changed"):
        Split.load(path, data)
    path.write_text("{")
    with pytest.raises(FisherhashError, match="damaged"):
        Split.load(path, data)
    with pytest.raises(UsageError, match="cannot be read"):
        Split.load(tmp_path / "none.json", data)
