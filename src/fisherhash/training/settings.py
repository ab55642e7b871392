"""How a method is trained: every setting and shared option, with its default, range and help.

Imports no torch: the command line is generated from these classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from fisherhash.errors import UsageError, unknown_name
from fisherhash.system.options import check_options, option, option_types, parse_value


@dataclass(frozen=True)
class Settings:
    """How a method is trained; the same for every method."""

    epochs: int = option(40, text="Passes over the training images.", low=1, high=100_000)
    batch_size: int = option(
        128,
        text="Images per step. The last, smaller batch of an epoch is dropped.",
        low=1,
        high=1_000_000,
    )
    optimizer: Literal["sgd", "adamw"] = option("sgd", text="SGD with momentum 0.9, or AdamW.")
    learning_rate: float = option(
        0.01, text="The highest learning rate of the head.", low=1e-12, high=1e3
    )
    backbone_rate: float = option(
        1.0,
        text="When fine-tuning: the backbone's learning rate as a share of the head's.",
        low=0.0,
        high=1e3,
    )
    weight_decay: float = option(
        5e-4,
        text="Weight decay of every weight matrix; biases and normalisation layers have none.",
        low=0.0,
        high=1e3,
    )
    schedule: Literal["one-cycle", "cosine", "step", "constant"] = option(
        "one-cycle",
        text="How the learning rate changes: warm-up and cosine decay; cosine decay; a tenth "
        "after 60 % of the steps and again after 85 %; not at all.",
    )
    dropout: float = option(
        0.3, text="Share of the standardised features dropped in each step.", low=0.0, high=0.99
    )
    head_epochs: int = option(
        20,
        text="When fine-tuning: epochs of the head alone on frozen features, before the whole "
        "network is trained.",
        low=0,
        high=100_000,
    )
    fixed_layers: int = option(
        -1,
        text="When fine-tuning: how many of the network's first layers keep their weights; -1 "
        "chooses what suits the network (4 of the 18 of efficientnet-lite0).",
        low=-1,
        high=1000,
    )
    validation: float = option(
        0.0,
        text="Share of the training images held out to measure mAP during training, each "
        "queried against the others.",
        low=0.0,
        high=0.9,
    )
    validation_every: int = option(
        1,
        text="Epochs between two measurements of that mAP; the last epoch is always measured.",
        low=1,
        high=100_000,
    )
    seed: int = option(
        0,
        text="Seed of initialisation, order, dropout and augmentation.",
        low=0,
        high=2**32 - 1,
    )

    def __post_init__(self) -> None:
        check_options(self)

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


@dataclass(frozen=True)
class NetworkOptions:
    """Which network is trained, how much of it, and where; shared by every training command."""

    backbone: str = option(
        "efficientnet-lite0",
        text="efficientnet-lite0, squeezenet1.0, alexnet, vgg-f, torchvision:NAME or timm:NAME.",
    )
    weights: str | None = option(None, text="The backbone's weights file.")
    image_size: int | None = option(
        None,
        text="Side of the images in pixels; by default the backbone's own, 128 in reproduce.",
        low=1,
    )
    finetune: bool | None = option(
        None,
        text="Train the whole network, or with --frozen only the head on frozen features. By "
        "default train and reproduce fine-tune on CUDA; compare never does.",
    )
    device: str | None = option(None, text="cpu, cuda, …; by default CUDA where there is one.")

    def __post_init__(self) -> None:
        check_options(self)


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE texts into values of :class:`Settings`; the seed is not among them.

    >>> parse_settings(["epochs=30", "dropout=0.5"])
    {'epochs': 30, 'dropout': 0.5}
    """
    known = [one.name for one in fields(Settings) if one.name != "seed"]
    types = option_types(Settings)
    values: dict[str, Any] = {}
    for pair in pairs:
        name, mark, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not mark:
            raise UsageError(f"--set takes NAME=VALUE, got '{pair}'")
        if name not in known:
            raise unknown_name("setting", name, known)
        kind = types[name][0]
        values[name] = parse_value(name, kind if kind in (int, float) else str, text)
    Settings(**values)
    return values
