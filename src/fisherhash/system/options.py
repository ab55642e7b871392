"""Options declared once, as fields of a dataclass: name, type, default, range and help.

A field's range is a :class:`Range` in its annotation; its help text is its line among the class's
attributes. Both command lines are generated from such classes, so nothing heavy is imported here.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from fisherhash.errors import UsageError, unknown_name


@dataclass(frozen=True)
class Range:
    """The numbers that an option accepts; part of its type annotation.

    Attributes:
        least: The smallest one.
        most: The largest one.
        above: What every one must exceed.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf

    def fault(self, value: float) -> str | None:
        """Return what is wrong with a value; None if nothing is.

        >>> Range(above=0).fault(-1.0), Range(0, 1).fault(1.5), Range(0, 1).fault(0.5)
        ('must be greater than 0', 'must be between 0 and 1', None)
        """
        # A chain of "<=" refuses NaN.
        if self.least <= value <= self.most and (value > self.above or self.above == -math.inf):
            return None
        if self.above > -math.inf and not value > self.above:
            return f"must be greater than {self.above:g}"
        if -math.inf < self.least and self.most < math.inf:
            return f"must be between {self.least:g} and {self.most:g}"
        if self.most < math.inf:
            return f"must be at most {self.most:g}"
        return f"must be at least {self.least:g}" if self.least else "must not be negative"


@dataclass(frozen=True)
class Tuned:
    """Where the tuner searches an option; part of its type annotation, beside its :class:`Range`.

    Attributes:
        least: The smallest number it tries.
        most: The largest one.
        scale: Whether numbers are spread evenly, or their logarithms are.
        choices: What it tries instead of numbers.
    """

    least: float = 0.0
    most: float = 0.0
    scale: Literal["linear", "log"] = "linear"
    choices: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if self.choices:
            return
        if not self.least < self.most or (self.scale == "log" and self.least <= 0):
            raise ValueError(f"cannot search from {self.least} to {self.most} ({self.scale})")

    def at(self, share: float) -> Any:
        """Return the value a share of the way through the range, 0 <= share < 1.

        >>> round(Tuned(0.01, 1.0, "log").at(0.5), 9), Tuned(choices=("a", "b")).at(0.5)
        (0.1, 'b')
        """
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        if self.scale == "log":
            return math.exp(math.log(self.least) * (1 - share) + math.log(self.most) * share)
        return self.least + (self.most - self.least) * share

    def share(self, value: float) -> float:
        """Return how far through the range a number is: 0 at one end, 1 at the other.

        >>> Tuned(0.01, 1.0, "log").share(0.1), Tuned(0, 4).share(1)
        (0.5, 0.25)
        """
        if self.scale == "log":
            return math.log(value / self.least) / math.log(self.most / self.least)
        return (value - self.least) / (self.most - self.least)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Tuned:
        """Return what :meth:`to_json` described.

        >>> one = Tuned(choices=(0, 64))
        >>> Tuned.from_json(one.to_json()) == one
        True
        """
        return cls(**{**values, "choices": tuple(values.get("choices", ()))})

    def to_json(self) -> dict[str, Any]:
        """Return the choices, or both ends and the scale."""
        if self.choices:
            return {"choices": list(self.choices)}
        return {"least": self.least, "most": self.most, "scale": self.scale}


@dataclass(frozen=True)
class Option:
    """One option of a dataclass.

    Attributes:
        name: the field's name.
        kind: its type, without ``None``.
        choices: the values it accepts; empty for any.
        range: the numbers it accepts.
        help: its help text.
        tuned: where the tuner searches it; None where it stays as it is.
    """

    name: str
    kind: type
    choices: tuple[str, ...]
    range: Range
    help: str
    tuned: Tuned | None = None

    @property
    def flag(self) -> str:
        """Its name on a command line."""
        return f"--{self.name.replace('_', '-')}"

    def drawn(self, share: float) -> Any:
        """Return the value a share of the way through its search range, to three digits.

        Raises:
            ValueError: it is not searched.
        """
        if self.tuned is None:
            raise ValueError(f"{self.name} declares no range to search")
        value = self.tuned.at(share)
        if self.tuned.choices:
            return value
        return round(value) if self.kind is int else float(f"{value:.3g}")

    def moved(self, value: Any, by: float) -> Any:
        """Return a value moved by a share of its search range, within what the option accepts.

        It may leave the range; a value at an edge moves outwards. A choice stays as it is.
        """
        if self.tuned is None or self.tuned.choices:
            return value
        share = self.tuned.share(value)
        if self.edge(value):
            by = abs(by) if share > 0.5 else -abs(by)
        moved = self.drawn(share + by)
        return value if self.range.fault(moved) else moved

    def edge(self, value: Any, *, within: float = 0.05) -> bool:
        """Return whether a value is near an end of its search range that could be moved outwards.

        An end that is also the end of what the option accepts is none.
        """
        if self.tuned is None or self.tuned.choices:
            return False
        share = self.tuned.share(value)
        low = share < within and self.tuned.least > self.range.least
        return low or (share > 1 - within and self.tuned.most < self.range.most)

    def parse(self, text: str) -> Any:
        """Parse a text from a command line."""
        return parse_number(self.flag, self.kind, text) if self.kind in (int, float) else text


@functools.cache
def options_of(options: type) -> tuple[Option, ...]:
    """Return the options that a dataclass declares."""
    hints, texts = get_type_hints(options, include_extras=True), _help(options)
    found = []
    for one in fields(options):
        kind, limits, tuned = hints[one.name], Range(), None
        if get_origin(kind) is Annotated:
            kind, *extras = get_args(kind)
            limits = next((extra for extra in extras if isinstance(extra, Range)), limits)
            tuned = next((extra for extra in extras if isinstance(extra, Tuned)), None)
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        kinds = [part for part in get_args(kind) or (kind,) if isinstance(part, type)]
        kind = str if choices else next(part for part in kinds if part is not type(None))
        found.append(Option(one.name, kind, choices, limits, texts.get(one.name, ""), tuned))
    return tuple(found)


def check_options(options: Any) -> None:
    """Check every declared range and choice of a dataclass instance.

    Raises:
        UsageError: names the option, its range and the value found.
    """
    for one in options_of(type(options)):
        value = getattr(options, one.name)
        if one.choices and value not in one.choices:
            raise unknown_name(one.name, str(value), one.choices)
        if value is None or one.range == Range():
            continue
        if one.kind is int and (isinstance(value, bool) or not isinstance(value, int)):
            raise UsageError(f"{one.name} must be a whole number, got {value!r}")
        if fault := one.range.fault(value):
            raise UsageError(f"{one.name} {fault}, got {value}")


def parse_number(name: str, kind: type, text: str) -> Any:
    """Parse a number; a whole one is never rounded.

    >>> parse_number("--epochs", int, "30")
    30

    Raises:
        UsageError: names the option and the text that is not such a number.
    """
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name} must be {what}, got '{text}'") from None


def parse_pairs(flag: str, pairs: Iterable[str]) -> dict[str, str]:
    """Parse NAME=VALUE texts.

    >>> parse_pairs("--set", ["margin=30"])
    {'margin': '30'}

    Raises:
        UsageError: a text is not of this form.
    """
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"{flag} takes NAME=VALUE, got '{pair}'")
        values[name] = text
    return values


def unknown_option(flag: str, known: Iterable[str]) -> UsageError:
    """Return the error for an option that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(flag, list(known), n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]}?" if near else ""
    return UsageError(f"Unknown option: {flag}.{hint}")


def _help(options: type) -> dict[str, str]:
    """The text of each attribute or argument in the docstrings of a class and of its bases."""
    texts: dict[str, str] = {}
    for owner in reversed(options.__mro__):
        docstring = inspect.cleandoc(owner.__doc__ or "")
        for section in re.split(r"^(?:Attributes|Args):\n", docstring, flags=re.MULTILINE)[1:]:
            for name, text in re.findall(r"^    (\w+): (.*(?:\n     .*)*)", section, re.MULTILINE):
                texts[name] = " ".join(text.split())
    return texts
