"""The paper's tables and figures as data: rows, columns, and the paper's own numbers.

The paper is Deep Fisher Hashing (BMVC 2019). Its networks are VGG-F (CIFAR-10, NUS-WIDE) and
AlexNet (ImageNet100), fine-tuned; it copies its competitors' numbers from their papers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fisherhash.data.splits import UNSEEN
from fisherhash.errors import unknown_name

Options = Mapping[str, Any]

# What a search fixes: options and settings that define the row and are not searched. The parts of
# DFH are tuned separately: what suits all of them may ruin one. DFH (ours) extends the paper by
# what helped on held-out training images.
PRINTED: Options = {"initial_centers": "means", "positive_weight": 1.0}
SIGNS: Options = {"outputs": 0}
BASES: dict[str, Options] = {
    "dfh-paper": PRINTED,
    "dfh-p": {**PRINTED, "parts": "pair"},
    "dfh-pm": {**PRINTED, "parts": "pair,margin"},
    "dfh-pmi": {**PRINTED, "parts": "pair,margin,intra"},
    "dfh-c": {**PRINTED, "parts": "intra,inter"},
    "dfh-pc": {**PRINTED, "parts": "pair,intra,inter"},
    "dfh-ours": {"positive_weight": 0.0, "center_step": "exact", "margin": 1.0},
    "dfh-printed": {**PRINTED, **SIGNS},
    "dfh-graded": {**PRINTED, **SIGNS, "initial_centers": "graded"},
    "dfh-balanced": {**PRINTED, **SIGNS, "positive_weight": 0.0},
    "dfh-separated": {**PRINTED, **SIGNS},
}
SEPARATION = ("separation", "separation_margin")
# Options that the search of a row leaves alone: without effect, or not part of the row.
IDLE: dict[str, tuple[str, ...]] = {
    "dfh-paper": ("affinity", *SEPARATION),
    "dfh-ours": ("relaxation",),
    "dfh-p": ("affinity", *SEPARATION, "margin", "intra", "inter", "relaxation", "center_step"),
    "dfh-pm": ("affinity", *SEPARATION, "intra", "inter", "relaxation", "center_step"),
    "dfh-pmi": ("affinity", *SEPARATION, "inter"),
    "dfh-c": ("affinity", *SEPARATION, "margin", "quantization"),
    "dfh-pc": ("affinity", *SEPARATION, "margin"),
    "dfh-printed": ("affinity", *SEPARATION, "cut"),
    "dfh-graded": ("cut", *SEPARATION),
    "dfh-balanced": ("affinity", *SEPARATION, "cut"),
    "dfh-separated": ("affinity", "cut", "separation_margin"),
}

# What a search takes for the authors' values where the method's defaults are not meant for the row:
# without centres the loss is that of DPSH, and wants its psi.
GUESSES: dict[str, Options] = {"dfh-p": {"quantization": 0.01}, "dfh-pm": {"quantization": 0.01}}


@dataclass(frozen=True)
class Source:
    """A data set an experiment may use.

    Attributes:
        data: its name, its path, or a folder with list files beside the named data sets.
        protocol: name of the split; None for the one the data suggests.
        title: what people read.
        stands_in: whether it replaces the paper's data set, whose numbers then do not apply.
        epochs: passes when the network is trained; half as many where there are twice the images.
    """

    data: str
    protocol: str | None
    title: str
    stands_in: bool = False
    epochs: int = 20


@dataclass(frozen=True)
class Row:
    """One line of a table: a method with options.

    Attributes:
        name: what people read.
        method: name of the method.
        options: the hyper-parameters that define this row; they override tuned ones.
        tuned_as: its search, and with it what that search fixes; by default the method's.
        paper: the paper's numbers, one per code length; None where it has none.
        class_step: whether it is measured with the class step.
        quick: whether a quick run includes it where ``--only`` names no rows.
    """

    name: str
    method: str
    options: Options = field(default_factory=dict)
    tuned_as: str = ""
    paper: tuple[float | None, ...] = ()
    class_step: bool = False
    quick: bool = True

    @property
    def space(self) -> str:
        """The name of its search, under which its winner is stored."""
        return self.tuned_as or self.method

    @property
    def base(self) -> Options:
        """What its search fixes, options and settings."""
        return BASES.get(self.space, {})

    @property
    def idle(self) -> tuple[str, ...]:
        """Options that have no effect in this row."""
        return IDLE.get(self.space, ())

    @property
    def guess(self) -> Options:
        """What its search takes for its authors' values, where the defaults are not meant."""
        return GUESSES.get(self.space, {})

    def stepped(self) -> Row:
        """Return the row that adds the class step to this one."""
        return replace(self, name=f"{self.name} + class step", paper=(), class_step=True)


@dataclass(frozen=True)
class Part:
    """One data set's columns of a table or figure.

    Attributes:
        sources: the original, then its stand-in; the first one on this machine is used.
        bits: the code lengths.
        rows: the methods compared.
        tuning_bits: the code lengths at which hyper-parameters are searched; none for no search.
    """

    sources: tuple[Source, ...]
    bits: tuple[int, ...]
    rows: tuple[Row, ...]
    tuning_bits: tuple[int, ...] = ()


@dataclass(frozen=True)
class Spec:
    """A table or figure.

    Attributes:
        name: what the user types.
        title: what it shows.
        parts: its data sets.
        kind: ``table`` or ``figures``.
        notes: sentences for the top of the report.
    """

    name: str
    title: str
    parts: tuple[Part, ...]
    kind: str = "table"
    notes: tuple[str, ...] = ()


CIFAR10 = (Source("cifar10", "cifar10-small", "CIFAR-10"),)
NUS_WIDE = (
    Source("nuswide21", "nuswide21-small", "NUS-WIDE", epochs=10),
    Source("coco21", "coco21", "coco21 (stands in for NUS-WIDE)", stands_in=True),
)
IMAGENET100 = (
    Source("imagenet100", "imagenet100", "ImageNet100", epochs=10),
    Source("tiny100", "tiny100", "tiny100 (stands in for ImageNet100)", stands_in=True, epochs=10),
)

# The shortest and a long code length, the same ones in every table, so that tables share a search.
TUNED_AT, IMAGENET_TUNED_AT = (12, 48), (16, 48)
BITS = (12, 24, 32, 48)
IMAGENET_BITS = (16, 32, 48, 64)

# The paper's numbers; a row without one is run all the same.
Numbers = tuple[float | None, ...]
CIFAR10_NUMBERS: dict[str, Numbers] = {
    "dfh": (0.803, 0.825, 0.831, 0.844),
    "dsdh": (0.740, 0.786, 0.801, 0.820),
    "greedyhash": (0.774, 0.795, 0.810, 0.822),
    "dpsh": (0.713, 0.727, 0.744, 0.757),
    "dqn": (0.554, 0.558, 0.564, 0.580),
    "dtsh": (0.710, 0.750, 0.765, 0.774),
    "ninh": (0.552, 0.566, 0.558, 0.581),
    "cnnh": (0.439, 0.511, 0.509, 0.522),
}
NUS_WIDE_NUMBERS: dict[str, Numbers] = {
    "dfh": (0.795, 0.823, 0.833, 0.842),
    "dsdh": (0.776, 0.808, 0.820, 0.829),
    "dpsh": (0.752, 0.790, 0.794, 0.812),
    "dqn": (0.768, 0.776, 0.783, 0.792),
    "dtsh": (0.773, 0.808, 0.812, 0.824),
    "ninh": (0.674, 0.697, 0.713, 0.715),
    "cnnh": (0.611, 0.618, 0.625, 0.608),
}
IMAGENET100_NUMBERS: dict[str, Numbers] = {
    "dfh": (0.590, 0.697, 0.726, 0.747),
    "greedyhash": (0.625, 0.662, 0.682, 0.688),
    "hashnet": (0.506, 0.630, 0.663, 0.683),
    "dhn": (0.311, 0.472, 0.542, 0.573),
    "ninh": (0.290, 0.461, 0.530, 0.565),
    "cnnh": (0.281, 0.450, 0.525, 0.554),
}
NAMES = {
    "dsdh": "DSDH",
    "greedyhash": "Greedy Hash",
    "dpsh": "DPSH",
    "dqn": "DQN",
    "dtsh": "DTSH",
    "ninh": "NINH",
    "cnnh": "CNNH",
    "hashnet": "HashNet",
    "dhn": "DHN",
    "csq": "CSQ",
    "orthohash": "OrthoHash",
    "dpn": "DPN",
    "mihash": "MIHash",
    "classifier": "Classifier",
}
# Methods since the paper, and one that it cites without numbers.
SINCE = {
    "hyp2": "HyP²",
    "dhd": "DHD",
    "crh": "CRH",
    "mdsh": "MDSH",
    "crovca": "CroVCA",
    "cibhash": "CIBHash (no labels)",
    "drsch": "DRSCH",
}
# Codes that are no signs of logits, which the class step could change.
WITHOUT_STEP = frozenset({"dqn"})


def _dfh(name: str, space: str, *paper: float | None) -> Row:
    """Return a row of DFH, or of some of its parts, with a search of its own."""
    return Row(name, "dfh", tuned_as=f"dfh-{space}", paper=paper)


def _stepped(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return rows, each followed by the same with the class step where there is one."""
    pairs = ((row,) if row.method in WITHOUT_STEP else (row, row.stepped()) for row in rows)
    return tuple(one for pair in pairs for one in pair)


def _everybody(paper: Mapping[str, Numbers]) -> tuple[Row, ...]:
    """Return every row of a table, with and without the class step.

    What one row is given, every row is given.
    """
    own = paper.get("dfh", ())
    ours = _dfh("DFH (paper)", "paper", *own), _dfh("DFH (ours)", "ours", *own)
    others = [Row(title, name, paper=paper.get(name, ())) for name, title in NAMES.items()]
    return _stepped([*ours, *others])


def _since() -> tuple[Row, ...]:
    """Return the rows of the methods since the paper, with and without the class step."""
    return _stepped([Row(title, name, quick=False) for name, title in SINCE.items()])


def _unseen(source: Source) -> Source:
    """The same data set with some classes held out."""
    return replace(source, protocol=f"{source.protocol}{UNSEEN}")


def _table1(*paper: tuple[float, ...]) -> tuple[Row, ...]:
    """Return DFH without its centres, without their distance, and whole."""
    names = {"pair": "pm", "pair + intra": "pmi", "pair + intra + inter (DFH)": "paper"}
    return tuple(_dfh(*row, *own) for row, own in zip(names.items(), paper, strict=True))


MODULES = (
    _dfh("P", "p"),
    _dfh("C", "c"),
    _dfh("P+C", "pc"),
    _dfh("P+M", "pm"),
    _dfh("P+M+C", "paper"),
)
MARGIN_ROWS = tuple(
    Row(f"m = {m:g}", "dfh", {"margin": m}, tuned_as="dfh-paper") for m in (0, 0.5, 1, 1.5, 2, 3)
)
ADDITIONS = (
    _dfh("DFH (as printed)", "printed"),
    _dfh("+ outputs and cut", "paper"),
    _dfh("+ graded centres", "graded"),
    _dfh("+ balanced pairs", "balanced"),
    _dfh("+ separation", "separated"),
    replace(_dfh("+ class step", "printed"), class_step=True),
    _dfh("DFH (ours)", "ours"),
    _dfh("DFH (ours)", "ours").stepped(),
)

TABLE1 = Spec(
    "table1",
    "Table 1: the parts of the quantised centre module",
    (
        Part(CIFAR10, (12, 24), _table1((0.730, 0.787), (0.746, 0.802), (0.772, 0.809)), TUNED_AT),
        Part(
            IMAGENET100,
            (16, 48),
            _table1((0.431, 0.572), (0.543, 0.696), (0.576, 0.726)),
            IMAGENET_TUNED_AT,
        ),
    ),
)
TABLE2 = Spec(
    "table2",
    "Table 2: CIFAR-10 and NUS-WIDE, small-data setting",
    (
        Part(CIFAR10, BITS, _everybody(CIFAR10_NUMBERS) + _since(), TUNED_AT),
        Part(NUS_WIDE, BITS, _everybody(NUS_WIDE_NUMBERS), TUNED_AT),
    ),
)
TABLE3 = Spec(
    "table3",
    "Table 3: ImageNet100",
    (
        Part(
            IMAGENET100,
            IMAGENET_BITS,
            _everybody(IMAGENET100_NUMBERS) + _since(),
            IMAGENET_TUNED_AT,
        ),
    ),
)
ABLATION = Spec(
    "ablation",
    "What each addition to DFH does, one at a time",
    (
        Part(CIFAR10, (12, 48), ADDITIONS, TUNED_AT),
        Part(NUS_WIDE, (12, 48), ADDITIONS, TUNED_AT),
        Part(IMAGENET100, (16, 48), ADDITIONS, IMAGENET_TUNED_AT),
    ),
    notes=(
        "Every row adds one thing to the first row. DFH (ours) has the outputs and the cut, "
        "balanced pairs, separation, and centres that start graded or far apart.",
    ),
)

UNSEEN_CLASSES = Spec(
    "unseen",
    "Unseen classes: trained on three quarters of the classes, measured on the others",
    tuple(
        Part(tuple(_unseen(source) for source in sources), bits, _everybody({}) + more, bits)
        for sources, bits, more in (
            (CIFAR10, TUNED_AT, _since()),
            (NUS_WIDE, TUNED_AT, ()),
            (IMAGENET100, IMAGENET_TUNED_AT, _since()),
        )
    ),
    notes=(
        "Queries and database are of classes that no run was trained on. Hyper-parameters are "
        "those of the searches with all classes.",
        "Agreement: inside the class of a query, the share of its 10 nearest images by the float "
        "features of the initial network that are among its 10 nearest by codes, in expectation "
        "over ties.",
    ),
)

MODULE_PARTS = (
    Part(CIFAR10, BITS, MODULES, TUNED_AT),
    Part(IMAGENET100, IMAGENET_BITS, MODULES, IMAGENET_TUNED_AT),
)
MARGIN_PART = Part(CIFAR10, (12, 48), MARGIN_ROWS, TUNED_AT)
CURVE_PART = Part(
    CIFAR10,
    (48,),
    tuple(
        replace(row, paper=row.paper[3:])
        for row in _everybody(CIFAR10_NUMBERS)
        if not row.class_step
    ),
    TUNED_AT,
)
FIGURES = Spec(
    "figures",
    "Figures: the modules against bits, the margin, and precision-recall curves",
    (*MODULE_PARTS, MARGIN_PART, CURVE_PART),
    kind="figures",
)

_ALL = (TABLE1, TABLE2, TABLE3, FIGURES, ABLATION, UNSEEN_CLASSES)
SPECS = {spec.name: spec for spec in _ALL}


def find_spec(name: str) -> Spec:
    """Return the table or figures of that name."""
    if name not in SPECS:
        raise unknown_name("experiment", name, SPECS)
    return SPECS[name]
