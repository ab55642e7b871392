"""The paper's tables and figures as data: rows, columns, and the paper's own numbers.

The paper is Deep Fisher Hashing (BMVC 2019). Its networks are VGG-F (CIFAR-10, NUS-WIDE) and
AlexNet (ImageNet100), fine-tuned; it copies its competitors' numbers from their papers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fisherhash.errors import unknown_name

Options = Mapping[str, Any]

# Search spaces that start from other options than the method's defaults. The parts of DFH are tuned
# separately: what suits all of them may ruin one. DFH (ours) extends the paper within its ideas.
BASES: dict[str, Options] = {
    "dfh-p": {"parts": "pair"},
    "dfh-pm": {"parts": "pair,margin"},
    "dfh-pmi": {"parts": "pair,margin,intra"},
    "dfh-c": {"parts": "intra,inter"},
    "dfh-pc": {"parts": "pair,intra,inter"},
    "dfh-ours": {"initial_centers": "graded", "positive_weight": 0.0},
}


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
        tuned_as: its search space, and with it the options that space starts from; by default the
            method's.
        paper: the paper's numbers, one per code length; None where it has none.
        real_queries: whether a second row measures it with real-valued queries.
    """

    name: str
    method: str
    options: Options = field(default_factory=dict)
    tuned_as: str = ""
    paper: tuple[float | None, ...] = ()
    real_queries: bool = False

    @property
    def space(self) -> str:
        """The name of its search space, under which its winner is stored."""
        return self.tuned_as or self.method

    @property
    def base(self) -> Options:
        """The options that search space starts from."""
        return BASES.get(self.space, {})


@dataclass(frozen=True)
class Part:
    """One data set's columns of a table or figure.

    Attributes:
        sources: the original, then its stand-in; the first one on this machine is used.
        bits: the code lengths.
        rows: the methods compared.
        tuning_bits: the code length at which hyper-parameters are searched; 0 for no search.
    """

    sources: tuple[Source, ...]
    bits: tuple[int, ...]
    rows: tuple[Row, ...]
    tuning_bits: int = 0


@dataclass(frozen=True)
class Spec:
    """A table or figure.

    Attributes:
        name: what the user types.
        title: what it shows.
        parts: its data sets.
        of: the source of the numbers beside ours.
        kind: ``table`` or ``figures``.
        notes: sentences for the top of the report.
    """

    name: str
    title: str
    parts: tuple[Part, ...]
    of: str = "paper"
    kind: str = "table"
    notes: tuple[str, ...] = ()


CIFAR10 = (Source("cifar10", "cifar10-small", "CIFAR-10"),)
CIFAR10_LARGE = (Source("cifar10", "cifar10-large", "CIFAR-10, setting II"),)
NUS_WIDE = (
    Source("nuswide21", "nuswide21-small", "NUS-WIDE", epochs=10),
    Source("coco21", "coco21", "coco21 (stands in for NUS-WIDE)", stands_in=True),
)
IMAGENET100 = (
    Source("imagenet100", "imagenet100", "ImageNet100", epochs=10),
    Source("tiny100", "tiny100", "tiny100 (stands in for ImageNet100)", stands_in=True, epochs=10),
)


def _dfh(name: str, space: str, *paper: float, real_queries: bool = False) -> Row:
    """Return a row of DFH, or of some of its parts, tuned in a search space of its own."""
    return Row(name, "dfh", tuned_as=f"dfh-{space}", paper=paper, real_queries=real_queries)


def _both(*paper: float, real_queries: bool = False) -> tuple[Row, Row]:
    """Return DFH as in the paper, and as extended here."""
    ours = _dfh("DFH (ours)", "ours", *paper, real_queries=real_queries)
    return _dfh("DFH (paper)", "paper", *paper), ours


def _table1(*paper: tuple[float, ...]) -> tuple[Row, ...]:
    """Return DFH without its centres, without their distance, and whole."""
    names = {"pair": "pm", "pair + intra": "pmi", "pair + intra + inter (DFH)": "paper"}
    return tuple(_dfh(*row, *own) for row, own in zip(names.items(), paper, strict=True))


BITS = (12, 24, 32, 48)
IMAGENET_BITS = (16, 32, 48, 64)

TABLE2_CIFAR10 = (
    *_both(0.803, 0.825, 0.831, 0.844, real_queries=True),
    Row("DSDH", "dsdh", paper=(0.740, 0.786, 0.801, 0.820)),
    Row("Greedy Hash", "greedyhash", paper=(0.774, 0.795, 0.810, 0.822)),
    Row("DPSH", "dpsh", paper=(0.713, 0.727, 0.744, 0.757)),
    Row("DQN", "dqn", paper=(0.554, 0.558, 0.564, 0.580)),
    Row("DTSH", "dtsh", paper=(0.710, 0.750, 0.765, 0.774)),
    Row("NINH", "ninh", paper=(0.552, 0.566, 0.558, 0.581)),
    Row("CNNH", "cnnh", paper=(0.439, 0.511, 0.509, 0.522)),
)
TABLE2_NUS_WIDE = (
    *_both(0.795, 0.823, 0.833, 0.842, real_queries=True),
    Row("DSDH", "dsdh", paper=(0.776, 0.808, 0.820, 0.829)),
    Row("DPSH", "dpsh", paper=(0.752, 0.790, 0.794, 0.812)),
    Row("DQN", "dqn", paper=(0.768, 0.776, 0.783, 0.792)),
    Row("DTSH", "dtsh", paper=(0.773, 0.808, 0.812, 0.824)),
    Row("NINH", "ninh", paper=(0.674, 0.697, 0.713, 0.715)),
    Row("CNNH", "cnnh", paper=(0.611, 0.618, 0.625, 0.608)),
)
TABLE3_ROWS = (
    *_both(0.590, 0.697, 0.726, 0.747),
    Row("Greedy Hash", "greedyhash", paper=(0.625, 0.662, 0.682, 0.688)),
    Row("HashNet", "hashnet", paper=(0.506, 0.630, 0.663, 0.683)),
    Row("DHN", "dhn", paper=(0.311, 0.472, 0.542, 0.573)),
    Row("NINH", "ninh", paper=(0.290, 0.461, 0.530, 0.565)),
    Row("CNNH", "cnnh", paper=(0.281, 0.450, 0.525, 0.554)),
)
LARGE_ROWS = (
    *_both(),
    Row("DSDH", "dsdh"),
    Row("Greedy Hash", "greedyhash", paper=(None, None, None, 0.944)),
    Row("DTSH", "dtsh", paper=(0.916, 0.924, 0.927, 0.934)),
    Row("DPSH", "dpsh", paper=(0.908, 0.909, 0.917, 0.932)),
    Row("MIHash", "mihash", paper=(0.922, 0.931, 0.940, 0.942)),
)
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

TABLE1 = Spec(
    "table1",
    "Table 1: the parts of the quantised centre module",
    (
        Part(CIFAR10, (12, 24), _table1((0.730, 0.787), (0.746, 0.802), (0.772, 0.809)), 24),
        Part(IMAGENET100, (16, 48), _table1((0.431, 0.572), (0.543, 0.696), (0.576, 0.726)), 32),
    ),
)
TABLE2 = Spec(
    "table2",
    "Table 2: CIFAR-10 and NUS-WIDE, small-data setting",
    (Part(CIFAR10, BITS, TABLE2_CIFAR10, 24), Part(NUS_WIDE, BITS, TABLE2_NUS_WIDE, 24)),
    notes=("The paper has no numbers of Greedy Hash for NUS-WIDE, so it is not run there.",),
)
TABLE3 = Spec(
    "table3", "Table 3: ImageNet100", (Part(IMAGENET100, IMAGENET_BITS, TABLE3_ROWS, 32),)
)
LARGE = Spec(
    "large",
    "CIFAR-10, large-data setting (50,000 images to train)",
    (Part(CIFAR10_LARGE, (16, 24, 32, 48), LARGE_ROWS, 24),),
    of="published",
    notes=(
        "The paper names this setting but prints no numbers. The numbers beside ours: Greedy Hash "
        "as reported by its authors; the others as reported by the authors of MIHash with VGG-F.",
    ),
)

MODULE_PARTS = (
    Part(CIFAR10, BITS, MODULES, 24),
    Part(IMAGENET100, IMAGENET_BITS, MODULES, 32),
)
MARGIN_PART = Part(CIFAR10, (12, 48), MARGIN_ROWS, 24)
CURVE_PART = Part(CIFAR10, (48,), tuple(replace(r, paper=r.paper[3:]) for r in TABLE2_CIFAR10), 24)
FIGURES = Spec(
    "figures",
    "Figures: the modules against bits, the margin, and precision-recall curves",
    (*MODULE_PARTS, MARGIN_PART, CURVE_PART),
    kind="figures",
)

SPECS = {spec.name: spec for spec in (TABLE1, TABLE2, TABLE3, FIGURES, LARGE)}


def find_spec(name: str) -> Spec:
    """Return the table or figures of that name."""
    if name not in SPECS:
        raise unknown_name("experiment", name, SPECS)
    return SPECS[name]
