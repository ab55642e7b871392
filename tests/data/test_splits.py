"""Splits by class: nothing of a held-out class is trained on."""

import dataclasses

import numpy as np
import pytest

from fisherhash.data.protocols import resolve
from fisherhash.data.sources import open_data
from fisherhash.data.splits import hold_out_classes
from fisherhash.errors import UsageError


@pytest.fixture
def sample():
    return open_data("sample")


def test_classes_are_apart(sample):
    split = resolve(sample)
    parts = hold_out_classes(sample, split)
    assert len(parts.unseen.classes) == 3
    assert len(parts.seen.classes) == 7
    assert {*parts.unseen.classes, *parts.seen.classes} == set(sample.classes)
    assert parts.seen.labels[parts.split.train].sum(axis=1).min() == 1
    assert not parts.unseen.labels[parts.split.train].any()
    for part in (parts.split.query, parts.split.database):
        assert parts.unseen.labels[part].any(axis=1).all()
        assert not parts.seen.labels[part].any()
    assert set(parts.split.query) <= set(split.query)
    assert parts.split.protocol == "custom+unseen"
    assert parts.split.checksum != split.checksum
    assert "3 of 10 classes are held out" in parts.split.notes[-1]
    again = hold_out_classes(sample, split)
    assert again.split.checksum == parts.split.checksum
    other = hold_out_classes(sample, split, seed=1)
    assert other.unseen.classes != parts.unseen.classes


def test_an_image_of_a_held_out_class_is_not_trained_on_for_its_other_label(sample):
    split = resolve(sample)
    held = hold_out_classes(sample, split).unseen.classes
    labels = sample.labels.copy()
    labels[:, [name not in held for name in sample.classes].index(True)] = 1
    both = dataclasses.replace(sample, labels=labels)
    parts = hold_out_classes(both, split)
    assert not both.labels[parts.split.train][:, [c in held for c in both.classes]].any()
    assert parts.unseen.labels.shape[1] == len(held)


def test_the_metric_keeps_its_share_of_the_database(sample):
    split = dataclasses.replace(resolve(sample), top=180)
    assert len(split.database) == 1800
    parts = hold_out_classes(sample, split)
    assert parts.split.top == pytest.approx(len(parts.split.database) / 10, abs=1)


def test_too_few_classes(sample):
    few = dataclasses.replace(sample, labels=sample.labels[:, :3], classes=sample.classes[:3])
    with pytest.raises(UsageError, match="3 classes; four are needed"):
        hold_out_classes(few, resolve(sample))
    lonely = dataclasses.replace(resolve(sample), query=np.array([], dtype=np.int64))
    with pytest.raises(UsageError, match="no query image"):
        hold_out_classes(sample, lonely)
