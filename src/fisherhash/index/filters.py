"""Filters: which items a search may find, by their own fields or by the user's metadata.

``label=cat`` matches items with that label. ``key``, ``path``, ``id``, ``size`` and ``mtime_ns``
are fields of the item itself. Any other name is a field of its metadata: ``exif.camera`` looks
inside an object, and ``metadata.label`` is a metadata field with the name of an item's own field.
``!=`` is the opposite of ``=``, so it also matches items without the field. ``label=`` matches
items without a label. A field that no item has is an error. Codes that were added in bulk have no
key, and no filter matches them.

Dates in the metadata are texts, ``2021-06-15`` or ``2021-06-15T14:03:22``. A filter may name a part
of one, and compares only that part: ``taken=2021-06`` matches all of June, ``taken<=2021`` matches
the whole year, and ``taken>2021-06`` begins with July.

A filter is parsed once into :class:`All`. A back-end translates that tree into its own language,
or evaluates it with :meth:`All.matches`, which defines what every translation must return.
"""

from __future__ import annotations

import difflib
import functools
import operator as operators
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fisherhash.errors import UsageError
from fisherhash.index.items import Item

TEXT_FIELDS = ("key", "path")
NUMBER_FIELDS = ("id", "size", "mtime_ns")
OWN_FIELDS = ("label", *TEXT_FIELDS, *NUMBER_FIELDS)
MAX_VALUES = 10_000
"""Values of one equality condition."""
_MAX_ORDERED_VALUES = 100
_MAX_LISTED = 20
"""Metadata fields that an error message lists."""

_COMPARE = {
    "=": operators.eq,
    "!=": operators.eq,
    "<": operators.lt,
    "<=": operators.le,
    ">": operators.gt,
    ">=": operators.ge,
}
OPERATORS = tuple(_COMPARE)
_FORM = re.compile(r"\s*([^=!<>]+?)\s*(!=|<=|>=|==|=|<|>|$)(.*)", re.DOTALL)
_DATE_PART = re.compile(r"\d{4}(-\d\d(-\d\d([T ]\d\d(:\d\d(:\d\d)?)?)?)?)?", re.ASCII)
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ].*)?", re.ASCII | re.DOTALL)
_MISSING = object()


@dataclass(frozen=True)
class Condition:
    """One condition on a field.

    Attributes:
        field: a field of the item or of its metadata.
        operator: one of :data:`OPERATORS`.
        values: what to compare with; one match is enough.
        typed: whether the values have types. Without types they are texts from a command line, and
            a text that looks like a number also equals that number.
    """

    field: str
    operator: str
    values: tuple[Any, ...]
    typed: bool = False

    def __post_init__(self) -> None:
        field, operator = self.field, self.operator
        if operator not in OPERATORS:
            raise UsageError(f"unknown operator {operator!r}; use one of {' '.join(OPERATORS)}")
        ordered = operator not in ("=", "!=")
        if field == "label" and ordered:
            raise UsageError(f"labels have no order; use label= or label!=, not label{operator}")
        if '"' in field:
            raise UsageError(f'a filter field cannot contain the character ", got {field!r}')
        most = _MAX_ORDERED_VALUES if ordered else MAX_VALUES
        if len(self.values) > most:
            raise UsageError(
                f"the filter on {field} has {len(self.values):,} values, the most is {most:,}"
            )
        for value in self.values:
            _check_value(field, operator, value, ordered=ordered)

    @property
    def paths(self) -> list[tuple[str, ...]]:
        """Where the field may be in the metadata; empty for a field of the item itself.

        >>> Condition("exif.camera", "=", ("Nikon",)).paths
        [('exif.camera',), ('exif', 'camera')]
        """
        if self.field in OWN_FIELDS:
            return []
        name = self.field.removeprefix("metadata.")
        return [(name,), tuple(name.split("."))] if "." in name else [(name,)]

    def matches(self, item: Item) -> bool:
        """Whether the condition holds for an item."""
        return item.key is not None and self._holds(item) != (self.operator == "!=")

    def _holds(self, item: Item) -> bool:
        compare = _COMPARE[self.operator]
        if self.field == "label":
            return any(v in item.labels or (not v and not item.labels) for v in self.values)
        if self.field in OWN_FIELDS:
            stored = getattr(item, self.field)
            if stored is None:
                return False
            if self.field in NUMBER_FIELDS:
                return any(compare(stored, as_number(value)) for value in self.values)
            return any(compare(_order(stored), _order(str(value))) for value in self.values)
        return any(map(self._compare, self._stored(item)))

    @functools.cached_property
    def _alternatives(self) -> list[tuple[str, Any]]:
        return [one for value in self.values for one in alternatives(value, typed=self.typed)]

    def _compare(self, stored: Any) -> bool:
        kind, compare = _kind(stored), _COMPARE[self.operator]
        values = [value for other, value in self._alternatives if other == kind]
        if kind == "text":
            parts = ((_part(stored, value), value) for value in values)
            return any(
                compare((0, part.encode(errors="surrogatepass")), _order(value))
                for part, value in parts
            )
        if kind != "number":
            return bool(values) and self.operator in ("=", "!=")
        return any(compare(stored, value) for value in values)

    def _stored(self, item: Item) -> list[Any]:
        """The values of the field in an item's metadata; empty where it has none."""
        found = []
        for path in self.paths:
            value: Any = item.metadata
            for part in path:
                value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
            if value is not _MISSING:
                found.append(value)
        return found

    def is_known(self, item: Item) -> bool:
        """Whether an item has the field, whatever its value."""
        return self.field in OWN_FIELDS or bool(self._stored(item))


@dataclass(frozen=True)
class All:
    """Conditions that must all hold; without conditions it matches every item with a key."""

    conditions: tuple[Condition, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.conditions)

    def matches(self, item: Item) -> bool:
        """Whether all conditions hold for an item."""
        return item.key is not None and all(one.matches(item) for one in self.conditions)


Where = str | Sequence[str | Condition] | Mapping[str, Any] | All
"""What callers pass as a filter: texts, conditions, a mapping, or a parsed filter."""


def parse_filter(where: Where | None) -> All:
    """Parse a filter; None is a filter without conditions.

    In a mapping a key may end in an operator, and a list of values matches any of them.

    >>> parse_filter("year >= 2020").conditions
    (Condition(field='year', operator='>=', values=('2020',), typed=False),)
    >>> parse_filter({"label": ["cat", "dog"], "year >=": 2020}).conditions[1].operator
    '>='
    """
    if where is None:
        return All()
    if isinstance(where, All):
        return where
    if isinstance(where, Mapping):
        return All(tuple(_from_pair(str(name), value) for name, value in where.items()))
    several = [where] if isinstance(where, str | Condition) else where
    return All(tuple(one if isinstance(one, Condition) else _from_text(one) for one in several))


def _from_text(text: str) -> Condition:
    match = _FORM.fullmatch(text)
    if match is None or not match[2]:
        raise UsageError(
            f"the filter {text!r} cannot be parsed; write FIELD=VALUE, for example label=cat "
            f"(or one of {' '.join(OPERATORS)})"
        )
    field, operator, value = match.groups()
    return Condition(field, "=" if operator == "==" else operator, (value.strip(),))


def _from_pair(name: str, value: Any) -> Condition:
    match = _FORM.fullmatch(name)
    if match is None or match[3].strip():
        raise UsageError(f"the filter field {name!r} cannot be parsed")
    operator = {"": "=", "==": "="}.get(match[2], match[2])
    several = isinstance(value, list | tuple | set | frozenset)
    return Condition(match[1], operator, tuple(value) if several else (value,), typed=True)


def select(items: Iterable[Item], where: Where | None, uri: str) -> list[Item]:
    """The items that match a filter; all of them without one.

    Raises:
        UsageError: a field of the filter is in the metadata of no item.
    """
    found, everything = parse_filter(where), list(items)
    if not found:
        return everything
    keyed = [item for item in everything if item.key is not None]
    for one in found.conditions:
        if keyed and not any(map(one.is_known, keyed)):
            raise unknown_field(uri, one.field, {name for item in keyed for name in item.metadata})
    return [item for item in keyed if found.matches(item)]


def unknown_field(uri: str, field: str, metadata: Iterable[str]) -> UsageError:
    """The error for a field that no item has; it suggests the nearest fields that exist."""
    others = sorted(metadata)
    near = difflib.get_close_matches(field, [*OWN_FIELDS, *others], n=2)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    more = ", …" if len(others) > _MAX_LISTED else ""
    listed = ", ".join([*OWN_FIELDS, *others[:_MAX_LISTED]]) + more
    return UsageError(f"no item of {uri} has the field {field!r}.{hint} Known: {listed}")


def alternatives(value: Any, *, typed: bool) -> list[tuple[str, Any]]:
    """What a value may equal in the metadata: JSON kinds, each with the value to compare.

    The kinds are ``text``, ``number``, ``true``, ``false`` and ``null``; for the last three the
    kind alone decides, and the value is None.

    >>> alternatives("7", typed=False)
    [('text', '7'), ('number', 7)]
    """
    if not isinstance(value, str):
        kind = _kind(value)
        return [(kind, value if kind == "number" else None)]
    found: list[tuple[str, Any]] = [("text", value)]
    if not typed:
        number = as_number(value)
        if number is not None:
            found.append(("number", number))
        elif value in ("true", "false", "null"):
            found.append((value, None))
    return found


def is_date_part(value: str) -> bool:
    """Whether a value of a filter is a date or the beginning of one.

    >>> is_date_part("2021-06"), is_date_part("2021-06-15T14"), is_date_part("2021-6")
    (True, True, False)
    """
    return _DATE_PART.fullmatch(value) is not None


def _part(stored: str, value: str) -> str:
    """What to compare with a value: of a date the part that the value names."""
    is_date = is_date_part(value) and _DATE.fullmatch(stored)
    return stored[: len(value)] if is_date else stored


def as_number(value: Any) -> int | float | None:
    """A value, or a text that looks like a number, as a number; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return value
    for kind in (int, float):
        try:
            number = kind(value)
        except ValueError:
            continue
        return number if abs(number) < 2**63 else None
    return None


def _check_value(field: str, operator: str, value: Any, *, ordered: bool) -> None:
    if not isinstance(value, str | int | float | bool | None):
        raise UsageError(f"the filter on {field} cannot compare with {value!r}")
    if field == "label" and not isinstance(value, str):
        raise UsageError(f"labels are texts; the filter compares with {value!r}")
    if field in NUMBER_FIELDS and as_number(value) is None:
        raise UsageError(f"{field} is a number; the filter compares with {value!r}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise UsageError(f"the number in the filter on {field} is too large: {value}")
    if ordered and (value is None or isinstance(value, bool)):
        raise UsageError(f"the filter {field}{operator} needs a number or a text")


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return "text"
    return "number" if isinstance(value, int | float) else "other"


def _order(text: str) -> tuple[int, bytes]:
    """Sorts texts by code point, and names of files that are not UTF-8 after all of them."""
    try:
        return 0, text.encode()
    except UnicodeEncodeError:
        return 1, text.encode(errors="surrogateescape")
