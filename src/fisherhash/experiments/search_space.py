"""What is searched for a row: ranges that the hyper-parameters declare, settings, and the rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import product
from typing import Any

from fisherhash import methods
from fisherhash.experiments.specs import Options, Row
from fisherhash.system.options import Option, Tuned, options_of
from fisherhash.training.settings import Settings

# By whether the network is trained. Wide, because a loss that is a mean over pairs has gradients
# ten times smaller than a cross-entropy: rates from 0.0005 to 0.2 won in results/tuning-seed1, the
# lowest where a network that knew the classes was best left alone, which backbone_rate does now.
LEARNING_RATES = {False: Tuned(0.001, 1.0, "log"), True: Tuned(0.0005, 0.2, "log")}

# A factor of the whole loss is a second learning rate. With 1, the rate means the same in all rows.
EQUAL_FOR_ALL: Options = {"loss_scale": 1.0}
OF_HAMMING_CODES = ("outputs", "cut")
"""The ways to make bits: the settings that a late round tries in every combination."""
SETTINGS = {one.name: one for one in options_of(Settings)}


def search_space(row: Row, *, finetune: bool) -> tuple[Option, ...]:
    """Return what is searched for a row: what its method and the settings declare, and the rate.

    Without what the row fixes or does not use. A method with a closed form has no settings to
    search, and codes without a Hamming distance are not cut.
    """
    kind = methods.find(row.method)
    own = [one for one in options_of(kind) if one.tuned]
    shared: list[Option] = []
    if issubclass(kind, methods.HashMethod):
        rate = dataclasses.replace(SETTINGS["learning_rate"], tuned=LEARNING_RATES[finetune])
        others = [one for one in SETTINGS.values() if one.tuned and one.name != rate.name]
        if not finetune:
            others = [one for one in others if one.name != "backbone_rate"]
        if not kind(bits=8, classes=2).head(1).hamming:
            others = [one for one in others if one.name not in OF_HAMMING_CODES]
        shared = [rate, *others]
    found = [one for one in [*shared, *own] if one.name not in {*row.base, *row.idle}]
    return tuple(found)


def parted(values: Options) -> dict[str, dict[str, Any]]:
    """Split values into options of a method and settings of the training.

    >>> parted({"margin": 2.0, "learning_rate": 0.1})
    {'options': {'margin': 2.0}, 'settings': {'learning_rate': 0.1}}
    """
    return {
        "options": {key: value for key, value in values.items() if key not in SETTINGS},
        "settings": {key: value for key, value in values.items() if key in SETTINGS},
    }


def other_ways(space: Sequence[Option], point: Options) -> list[dict[str, Any]]:
    """Return a point with every other combination of the settings that make bits of outputs.

    >>> space = search_space(Row("", "dpsh"), finetune=True)
    >>> for other in other_ways(space, {"outputs": 0, "cut": "first"}):
    ...     print(other)
    {'outputs': 64, 'cut': 'between'}
    {'outputs': 64, 'cut': 'first'}
    {'outputs': 128, 'cut': 'between'}
    {'outputs': 128, 'cut': 'first'}
    """
    ways = [one for one in space if one.name in OF_HAMMING_CODES and one.tuned]
    names = [one.name for one in ways]
    combined = product(*(one.tuned.choices for one in ways if one.tuned))
    others = [{**point, **dict(zip(names, values, strict=True))} for values in combined]
    # Bits that are the outputs themselves are not cut, whatever the cut.
    uncut = [other for other in others if other.get("outputs") == 0]
    cut = [other for other in others if other.get("outputs") != 0 and other != dict(point)]
    return [*([] if point.get("outputs") == 0 else uncut[:1]), *cut]


def is_tried(option: Option, value: Any) -> bool:
    """Return whether a search may try a value: any number, or one of the choices."""
    choices = option.tuned.choices if option.tuned else ()
    return not choices or value in choices


def is_further(option: Option, point: Options, other: Options) -> bool:
    """Return whether another point lies beyond a point at an edge of an option's range."""
    if option.tuned is None:
        return False
    share, beyond = (option.tuned.share(one[option.name]) for one in (point, other))
    return beyond > share if share > 0.5 else beyond < share
