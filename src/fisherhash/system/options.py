"""Options declared once, as fields of a dataclass: name, type, default, range and help.

Both command lines are generated from such classes, so this module imports nothing heavy.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from dataclasses import MISSING, field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from fisherhash.errors import UsageError, unknown_name

T = TypeVar("T", int, float, str)


def option(
    default: Any = MISSING, *, text: str, low: float | None = None, high: float | None = None
) -> Any:
    """Declare a dataclass field that is also a command-line option.

    Args:
        default: its default value; without one the option is required.
        text: its help text.
        low: the smallest value allowed.
        high: the largest value allowed.
    """
    return field(default=default, metadata={"help": text, "low": low, "high": high})


@functools.cache
def option_types(options: type) -> dict[str, tuple[Any, ...]]:
    """Return the types each option of a dataclass accepts, ``None`` left out."""
    hints = get_type_hints(options)
    return {
        name: tuple(kind for kind in get_args(hint) or (hint,) if kind is not type(None))
        if get_origin(hint) is not Literal
        else (hint,)
        for name, hint in hints.items()
    }


def check_options(options: Any) -> None:
    """Check every declared range and choice of a dataclass instance.

    Raises:
        UsageError: names the option, its range and the value found.
    """
    types = option_types(type(options))
    for one in fields(options):
        value, (kind, *_) = getattr(options, one.name), types[one.name]
        low, high = one.metadata.get("low"), one.metadata.get("high")
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise unknown_name(one.name, str(value), get_args(kind))
        if value is None or low is None:
            continue
        if kind is int and (isinstance(value, bool) or not isinstance(value, int)):
            raise UsageError(f"{one.name} must be a whole number, got {value!r}")
        if high is None and not value >= low:
            raise UsageError(f"{one.name} must be at least {low:g}, got {value}")
        if high is not None and not low <= value <= high:
            raise UsageError(f"{one.name} must be between {low:g} and {high:g}, got {value}")


def parse_value(name: str, kind: type[T], text: str) -> T:
    """Parse one value.

    >>> parse_value("--epochs", int, "30")
    30

    Raises:
        UsageError: names the option and the text that is not a number.
    """
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name} must be {what}, got '{text}'") from None


def unknown_option(flag: str, known: Iterable[str]) -> UsageError:
    """Return the error for an option that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(flag, list(known), n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]}?" if near else ""
    return UsageError(f"Unknown option: {flag}.{hint}")
