"""How a method is trained: every setting and shared option, with its default, range and help.

Imports no torch: the command line is generated from these classes.
"""

# Annotations stay types, not strings: the command line subclasses these classes elsewhere.
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from fisherhash.errors import unknown_name
from fisherhash.system.options import Range, Tuned, check_options, options_of, parse_pairs

AFTERWARDS = ("cut", "step_weight", "step_sharpness")
"""Settings that the training does not depend on, only what is made of its outputs."""
MOST_OUTPUTS = 1024
"""As many as bits, see codes.py, which imports numpy: the command line must start without it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a method is trained; the same for every method.

    An instance also knows which settings it was ``given``, whatever their values: a recipe changes
    only the others. ``dataclasses.replace`` gives all of them, and :meth:`but` those it changes.

    Attributes:
        epochs: Passes over the training images.
        batch_size: Images per step. The last, smaller batch of an epoch is dropped.
        optimizer: SGD with momentum 0.9, or AdamW.
        learning_rate: The highest learning rate of the head.
        backbone_rate: When fine-tuning: the backbone's learning rate as a share of the head's.
        weight_decay: Weight decay of every weight matrix; biases and normalisation layers have
            none.
        schedule: How the learning rate changes: warm-up and cosine decay; cosine decay; a tenth
            after 60 % of the steps and again after 85 %; not at all.
        dropout: Share of the standardised features dropped in each step.
        head_epochs: When fine-tuning: epochs of the head alone on frozen features, before the whole
            network is trained.
        fixed_layers: When fine-tuning: how many of the network's first layers keep their weights;
            -1 chooses what suits the network (4 of the 18 of efficientnet-lite0).
        validation: Share of the training images held out to measure mAP during training, each
            queried against the others.
        validation_every: Epochs between two measurements of that mAP; the last epoch is always
            measured.
        outputs: Outputs that a method trained by gradient learns, as if they were its bits; the
            bits are then cut from them. 0 for as many as bits.
        cut: How bits are cut from more outputs: so that images between two classes get codes
            between those of the classes, or as the first outputs' signs.
        classifier_weight: When fine-tuning: weight of the loss of a linear classifier of the same
            features, in units of the method's loss in the first step. It is trained with the
            network, so that the features tell classes apart, and dropped in the end. 0 for none.
        step_weight: Weight mu of the class step b = sgn(u + mu s C p), with which a classifier's
            estimate p of an image's classes pulls its logits u to the class centres C; s is the
            mean of |u|. 0 for none.
        step_sharpness: Factor of the scores that p is computed from; a lower one leaves more
            doubt.
        seed: Seed of initialisation, order, dropout and augmentation.
    """

    epochs: Annotated[int, Range(1, 100_000)] = 40
    batch_size: Annotated[int, Range(1, 1_000_000)] = 128
    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: Annotated[float, Range(1e-12, 1e3), Tuned(3e-4, 0.3, "log")] = 0.01
    backbone_rate: Annotated[float, Range(0, 1e3), Tuned(0.03, 2.0, "log")] = 1.0
    weight_decay: Annotated[float, Range(0, 1e3)] = 5e-4
    schedule: Literal["one-cycle", "cosine", "step", "constant"] = "one-cycle"
    dropout: Annotated[float, Range(0, 0.99)] = 0.3
    head_epochs: Annotated[int, Range(0, 100_000)] = 20
    fixed_layers: Annotated[int, Range(-1, 1000)] = -1
    validation: Annotated[float, Range(0, 0.9)] = 0.0
    validation_every: Annotated[int, Range(1, 100_000)] = 1
    outputs: Annotated[int, Range(0, MOST_OUTPUTS), Tuned(choices=(0, 64, 128))] = 0
    cut: Annotated[Literal["between", "first"], Tuned(choices=("between", "first"))] = "between"
    classifier_weight: Annotated[float, Range(0, 1e3)] = 0.0
    step_weight: Annotated[float, Range(0, 1e3)] = 0.0
    step_sharpness: Annotated[float, Range(0, 1e3)] = 1.0
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0

    given: ClassVar[frozenset[str]] = frozenset()
    """Names of the settings that this instance was made with."""

    def __new__(cls, **values: Any) -> Self:
        """Note which settings are given, before they are filled up with the defaults."""
        made = super().__new__(cls)
        made.__dict__["given"] = frozenset(values)
        return made

    def __post_init__(self) -> None:
        check_options(self)

    def to_json(self) -> dict[str, Any]:
        """Return every value by its name."""
        return asdict(self)

    def but(self, **changes: Any) -> Self:
        """Return the same settings with some of them given anew.

        >>> Settings(epochs=3).but(dropout=0.3).given == {"epochs", "dropout"}
        True
        """
        own = {name: getattr(self, name) for name in self.given}
        return type(self)(**{**own, **changes})

    def filled(self, values: Mapping[str, Any]) -> Self:
        """Return the same settings with other values for those that were not given.

        >>> found = Settings(learning_rate=0.01).filled({"learning_rate": 0.1, "epochs": 3})
        >>> found.learning_rate, found.epochs
        (0.01, 3)
        """
        return replace(self, **{k: v for k, v in values.items() if k not in self.given})

    @property
    def of_training(self) -> "Settings":
        """The same without what is made of the trained outputs afterwards: cut and class step."""
        return replace(self, **{name: _DEFAULTS[name] for name in AFTERWARDS})

    def rate(self, done: float) -> float:
        """The learning rate as a share of the highest, after a share ``done`` of all steps.

        >>> [round(Settings().rate(x), 2) for x in (0.0, 0.25, 1.0)]
        [0.04, 1.0, 0.0]
        """
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "step":
            return 1.0 if done < 0.6 else 0.1 if done < 0.85 else 0.01
        warm = 0.25 if self.schedule == "one-cycle" else 0.0
        if done < warm:
            return 0.04 + 0.96 * (1 - math.cos(math.pi * done / warm)) / 2
        return (1 + math.cos(math.pi * (done - warm) / (1 - warm))) / 2


_DEFAULTS = {one.name: one.default for one in fields(Settings)}


@dataclass(frozen=True)
class NetworkOptions:
    """Which network is trained, how much of it, and where; shared by every training command.

    Attributes:
        backbone: efficientnet-lite0, squeezenet1.0, alexnet, vgg-f, torchvision:NAME,
            timm:NAME or hf:NAME.
        weights: The backbone's weights file.
        image_size: Side of the images in pixels; by default the backbone's own, 128 in reproduce.
        finetune: Train the whole network, or with --frozen only the head on frozen features. By
            default train and reproduce fine-tune on CUDA; compare never does.
        device: cpu, cuda, …; by default CUDA where there is one.
    """

    backbone: str = "efficientnet-lite0"
    weights: str | None = None
    image_size: Annotated[int | None, Range(1)] = None
    finetune: bool | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        check_options(self)


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE texts into values of :class:`Settings`; the seed is not among them.

    >>> parse_settings(["epochs=30", "dropout=0.5"])
    {'epochs': 30, 'dropout': 0.5}
    """
    known = {one.name: one for one in options_of(Settings) if one.name != "seed"}
    values: dict[str, Any] = {}
    for word, text in parse_pairs("--set", pairs).items():
        name = word.strip().replace("-", "_")
        if name not in known:
            raise unknown_name("setting", name, known)
        values[name] = known[name].parse(text)
    Settings(**values)
    return values
