"""Hyper-parameters: their ranges, declared in their annotations, and checks against them."""

from __future__ import annotations

import functools
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from fisherhash.errors import UsageError, unknown_name
from fisherhash.system.options import Range, parse_number

Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(least=0)]
PositiveInt = Annotated[int, Range(above=0)]
NotNegativeInt = Annotated[int, Range(least=0)]


class CheckedOptions:
    """Checks the options that a method is constructed with against their annotations."""

    info: ClassVar[Any]

    def __new__(cls, **options: Any) -> Self:
        hints = _option_hints(cls)
        for key in options.keys() & hints.keys():
            value, hint = options[key], hints[key]
            if get_origin(hint) is Literal and value not in get_args(hint):
                kind = f"value of {cls.info.name}'s option {key}"
                raise unknown_name(kind, str(value), get_args(hint))
            for limit in getattr(hint, "__metadata__", ()):
                fault = limit.fault(value)
                if fault is not None:
                    raise UsageError(f"{cls.info.name}: {key} {fault}, got {value}")
        return super().__new__(cls)


@functools.cache
def _option_hints(method: type[CheckedOptions]) -> dict[str, Any]:
    return get_type_hints(method.__init__, include_extras=True)


def convert_option(method: str, key: str, value: Any, kind: Any) -> Any:
    """Return an option's value, converted from text to the type ``kind`` where it is text."""
    if not isinstance(value, str) or kind is str or get_origin(kind) is Literal:
        return value
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if value.lower() not in words:
            raise UsageError(f"{method}: {key} must be true or false, got '{value}'")
        return words[value.lower()]
    return parse_number(f"{method}: {key}", int if kind is int else float, value)
