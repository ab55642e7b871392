"""The field's protocols as data: sizes, metric, source, and what readers should know."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Protocol:
    """A named way to split a data set, with the metric that goes with it.

    Attributes:
        name: what the user writes.
        title: one line for people.
        source: where the images and lists come from.
        top: the K of mean average precision; None for the whole database.
        sizes: the usual numbers of (train, query, database) images; None if they vary.
        classes: number of classes the data must have; 0 if it varies.
        lists: whether the images come with list files that are used as they are.
        checksum: of the agreed lists; empty if there are none.
        fresh: queries per class that a seed other than 0 draws instead of the listed ones; 0 if
            only the listed ones exist.
        notes: what a reader of a number should know. Runs store these sentences and compare them
            when they resume, so an edit here ends old runs.
    """

    name: str
    title: str
    source: str
    top: int | None = None
    sizes: tuple[int, int, int] | None = None
    classes: int = 0
    lists: bool = False
    checksum: str = ""
    fresh: int = 0
    notes: tuple[str, ...] = ()


_CIFAR = "CIFAR-10, Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html"
_NUS = "NUS-WIDE, Chua et al. 2009, its 21 most frequent concepts, 195,834 images"
_IMAGENET = "ImageNet ILSVRC 2012, 100 classes, lists of HashNet (Cao et al. 2017)"
_cifar10 = partial(Protocol, source=_CIFAR, classes=10)
_nuswide21 = partial(Protocol, source=_NUS, classes=21)
_imagenet100 = partial(Protocol, source=_IMAGENET, top=1_000, classes=100, lists=True)
_SEEN = "the 100 classes are among those an ImageNet backbone was trained on, database included"

PROTOCOLS: dict[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        _cifar10(
            "cifar10-small",
            "500 per class to train, 100 per class as queries, the other 59,000 to search",
            sizes=(5_000, 1_000, 59_000),
            notes=("the training images are in the database, as in DPSH, DSDH and DFH",),
        ),
        _cifar10(
            "cifar10-small-54k",
            "as cifar10-small, but without the training images in the database",
            sizes=(5_000, 1_000, 54_000),
            notes=("the split of the code that thulab publishes for DHN, DCH and others",),
        ),
        _cifar10(
            "cifar10-large",
            "the official 50,000 training images to train and to search, the test images to query",
            sizes=(50_000, 10_000, 50_000),
            notes=("not drawn: the same for every seed",),
        ),
        _nuswide21(
            "nuswide21-small",
            "500 per class to train, 100 per class as queries, all others to search; mAP@5000",
            top=5_000,
            sizes=(10_500, 2_100, 193_734),
            notes=("there is no canonical list: numbers of different papers differ by their draw",),
        ),
        _nuswide21(
            "nuswide21-large",
            "100 per class as queries, all others to train and to search; mAP@50000",
            top=50_000,
            sizes=(193_734, 2_100, 193_734),
        ),
        _imagenet100(
            "imagenet100",
            "100 per class to train, 50 per class as queries, 128,503 to search; mAP@1000",
            sizes=(10_000, 5_000, 128_503),
            notes=(_SEEN, "the public list has 130 a class to train; 100 of them are drawn"),
        ),
        _imagenet100(
            "imagenet100-13k",
            "as imagenet100, with the 130 training images per class of the public list; mAP@1000",
            sizes=(13_000, 5_000, 128_503),
            notes=(_SEEN,),
        ),
        Protocol(
            "coco80",
            "10,000 to train, 5,000 queries, all others to search; mAP@5000",
            "COCO 2014, Lin et al. 2014, 80 classes, lists of HashNet (Cao et al. 2017)",
            5_000,
            (10_000, 5_000, 117_218),
            80,
            lists=True,
            notes=(
                "the public database holds the queries and lacks the training images; we mend both",
            ),
        ),
        Protocol(
            "tiny100",
            "Tiny-ImageNet, 100 classes, 64 x 64: replaces imagenet100; mAP@1000",
            "Tiny-ImageNet (Stanford CS231n); docs/data.md describes how to build it",
            1_000,
            (10_000, 5_000, 30_000),
            100,
            lists=True,
            checksum="41385440043b2df121e1b161627d7e4d27d51613b142bd3ad41ab8b7638fc25e",
            fresh=50,
            notes=(_SEEN,),
        ),
        Protocol(
            "coco21",
            "COCO, its 21 most frequent classes, 96 x 96: replaces nuswide21; mAP@5000",
            "COCO, Lin et al. 2014; docs/data.md describes how to build it",
            5_000,
            (5_250, 1_050, 13_950),
            21,
            lists=True,
            checksum="b9fc34bfe10d743c874190101f2dbf98f016eee3cbff4d3f233581347d74f7c4",
            fresh=50,
        ),
        Protocol("lists", "the three lists of the folder, unchanged", "the user", lists=True),
        Protocol(
            "custom",
            "a tenth of each class (1 to 100 images) as queries, the rest to train and to search",
            "the user",
        ),
    )
}
