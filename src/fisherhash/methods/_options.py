"""Ranges of hyper-parameters, for their annotations, and values that come as text."""

from __future__ import annotations

from typing import Annotated, Any

from fisherhash.errors import UsageError
from fisherhash.system.options import Option, Range, Tuned, parse_number

__all__ = [
    "NotNegative",
    "NotNegativeInt",
    "Positive",
    "PositiveInt",
    "Range",
    "Tuned",
    "convert_option",
]

Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(least=0)]
PositiveInt = Annotated[int, Range(above=0)]
NotNegativeInt = Annotated[int, Range(least=0)]


def convert_option(method: str, option: Option, value: Any) -> Any:
    """Return an option's value, converted to the option's type where it is text."""
    if not isinstance(value, str) or option.kind is str:
        return value
    if option.kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if value.lower() not in words:
            raise UsageError(f"{method}: {option.name} must be true or false, got '{value}'")
        return words[value.lower()]
    return parse_number(f"{method}: {option.name}", option.kind, value)
