"""Filters: which keyed items a search may find, by their columns or the user's metadata.

``label=cat`` holds for an item with that label, ``key``, ``path``, ``id``, ``size`` and
``mtime_ns`` are the item's own, and any other name is a field of its metadata (``exif.camera``
looks inside an object; ``metadata.label`` is a field that is called like a column). ``!=`` is the
opposite of ``=``: it also holds for items without the field. ``label=`` holds for items without a
label. A field that no item has is an error. Codes added in bulk have no row in the catalogue, so no
filter finds them.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fisherhash.errors import UsageError
from fisherhash.index.local.rows import encode_text

OPERATORS = ("=", "!=", "<", "<=", ">", ">=")
MOST_VALUES = 10_000
"""Values of one condition; SQLite takes about three times as many in all."""
_NAMED = 20
"""Metadata fields that an error names."""
_TEXT_COLUMNS = ("key", "path")
_NUMBER_COLUMNS = ("id", "size", "mtime_ns")
_FORM = re.compile(r"\s*([^=!<>]+?)\s*(!=|<=|>=|==|=|<|>)(.*)", re.DOTALL)

Where = str | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Condition:
    """One condition on a field.

    Attributes:
        field: a column or a field of the metadata.
        operator: one of :data:`OPERATORS`.
        values: what to compare with; several stand for any of them.
        typed: the values have types; False: they are texts from a command line, and a text that
            looks like a number also equals that number.
    """

    field: str
    operator: str
    values: tuple[Any, ...]
    typed: bool = False


def parse_where(texts: str | Iterable[str]) -> tuple[Condition, ...]:
    """Conditions from texts like ``label=cat`` or ``year>=2020``; all of them must hold.

    >>> parse_where(["year >= 2020"])
    (Condition(field='year', operator='>=', values=('2020',), typed=False),)
    """
    found = []
    for text in [texts] if isinstance(texts, str) else texts:
        match = _FORM.fullmatch(text)
        if match is None:
            raise UsageError(
                f"the filter {text!r} is not understood; write FIELD=VALUE, for example label=cat "
                f"(or one of {' '.join(OPERATORS)})"
            )
        field, operator, value = match.groups()
        operator = "=" if operator == "==" else operator
        found.append(_checked(Condition(field, operator, (value.strip(),))))
    return tuple(found)


def conditions(where: Where) -> tuple[Condition, ...]:
    """Conditions from what a caller gave: texts, conditions, or a mapping.

    A mapping's key may end in an operator, a list of values stands for any of them.

    >>> conditions({"label": ["cat", "dog"], "year >=": 2020})[1].operator
    '>='
    """
    if isinstance(where, str):
        return parse_where(where)
    if not isinstance(where, Mapping):
        found: list[Condition] = []
        for one in where:
            found += [one] if isinstance(one, Condition) else parse_where(one)
        return tuple(found)
    found = []
    for name, value in where.items():
        match = re.fullmatch(r"\s*([^=!<>]+?)\s*(!=|<=|>=|==|=|<|>|)\s*", str(name))
        if match is None:
            raise UsageError(f"the filter field {name!r} is not understood")
        several = isinstance(value, list | tuple | set | frozenset)
        values = tuple(value) if several else (value,)
        field, operator = match.groups()
        operator = {"": "=", "==": "="}.get(operator, operator)
        found.append(_checked(Condition(field, operator, values, typed=True)))
    return tuple(found)


def _checked(condition: Condition) -> Condition:
    field, operator = condition.field, condition.operator
    if field == "label" and operator not in ("=", "!="):
        raise UsageError(f"labels have no order; use label= or label!=, not label{operator}")
    if '"' in field:
        raise UsageError(f'a filter field cannot hold the character ", got {field!r}')
    most = MOST_VALUES if operator in ("=", "!=") else 100
    if len(condition.values) > most:
        raise UsageError(
            f"the filter on {field} has {len(condition.values):,} values, the most is {most:,}"
        )
    for value in condition.values:
        if not isinstance(value, str | int | float | bool | None):
            raise UsageError(f"the filter on {field} cannot compare with {value!r}")
        if field == "label" and not isinstance(value, str):
            raise UsageError(f"labels are texts; the filter compares with {value!r}")
        if field in _NUMBER_COLUMNS and _number(value) is None:
            raise UsageError(f"{field} is a number; the filter compares with {value!r}")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise UsageError(f"the filter on {field} compares with too large a number: {value}")
        if operator not in ("=", "!=") and (value is None or isinstance(value, bool)):
            raise UsageError(f"the filter {field}{operator} needs a number or a text")
    return condition


def to_sql(found: Sequence[Condition]) -> tuple[str, list[Any]]:
    """The conditions as one SQL expression with its values."""
    parts, values = ["1"], []
    for condition in found:
        text, own = _one(condition)
        parts.append(text)
        values += own
    if len(values) > 3 * MOST_VALUES:
        raise UsageError(f"the filters have {len(values):,} values in all, too many for one search")
    return " AND ".join(parts), values


def metadata_paths(field: str) -> list[str]:
    """Where a field may be in the metadata, as SQLite's JSON paths."""
    name = field.removeprefix("metadata.")
    nested = "$" + "".join(f'."{part}"' for part in name.split("."))
    return [f'$."{name}"', nested] if "." in name else [nested]


def is_metadata(field: str) -> bool:
    """Whether a filter's field is looked up in the metadata."""
    return field != "label" and field not in _TEXT_COLUMNS + _NUMBER_COLUMNS


def unknown_field(path: Path, field: str, metadata: Iterable[str]) -> UsageError:
    """An error for a field that no item has, with the nearest ones that there are."""
    own, others = ("label", *_TEXT_COLUMNS, *_NUMBER_COLUMNS), sorted(metadata)
    near = difflib.get_close_matches(field, [*own, *others], n=2)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    more = ", …" if len(others) > _NAMED else ""
    listed = ", ".join([*own, *others[:_NAMED]]) + more
    return UsageError(f"no item of {path} has the field {field!r}.{hint} There are: {listed}")


def _one(condition: Condition) -> tuple[str, list[Any]]:
    if condition.operator in ("=", "!="):
        parts, values = _equal(condition)
    else:
        parts, values = [], []
        for value in condition.values:
            text, own = _compare(condition, value)
            parts.append(text)
            values += own
    joined = f"({' OR '.join(parts) or '0'})"
    if condition.operator == "!=":
        return f"NOT coalesce({joined}, 0)", values
    return f"coalesce({joined}, 0)", values


def _equal(condition: Condition) -> tuple[list[str], list[Any]]:
    """Tests of which one must hold; many values are one list, as SQLite nests 1,000 ORs at most."""
    field, wanted = condition.field, condition.values
    if field in _TEXT_COLUMNS:
        return [f"{field} IN ({_marks(wanted)})"], [encode_text(str(value)) for value in wanted]
    if field in _NUMBER_COLUMNS:
        return [f"{field} IN ({_marks(wanted)})"], [_number(value) for value in wanted]
    if field == "label":
        text = json.dumps(wanted)
        if "" in wanted:
            return ["labels = '[]'", "has_label(labels, ?)"], [text]
        if len(wanted) != 1:
            return ["has_label(labels, ?)"], [text]
        # The quick test first; the exact one tells '","' apart from the end of a label.
        return ["(instr(labels, ?) AND has_label(labels, ?))"], [text[1:-1], text]
    lists: dict[str, list[Any]] = {}
    for value in wanted:
        for types, one in _kinds(value, condition.typed):
            lists.setdefault(types, []).append(one)
    parts, values = [], []
    for path in metadata_paths(field):
        for types, some in lists.items():
            test = f"json_type(metadata, ?) IN ({types})"
            if some[0] is None:
                parts.append(test)
                values.append(path)
            else:
                parts.append(f"({test} AND json_extract(metadata, ?) IN ({_marks(some)}))")
                values += [path, path, *some]
    return parts, values


def _compare(condition: Condition, value: Any) -> tuple[str, list[Any]]:
    field, operator = condition.field, condition.operator
    if field in _TEXT_COLUMNS:
        return f"{field} {operator} ?", [encode_text(str(value))]
    if field in _NUMBER_COLUMNS:
        return f"{field} {operator} ?", [_number(value)]
    parts, values = [], []
    for path in metadata_paths(field):
        for types, one in _kinds(value, condition.typed):
            if one is not None:
                test = f"json_type(metadata, ?) IN ({types})"
                parts.append(f"({test} AND json_extract(metadata, ?) {operator} ?)")
                values += [path, path, one]
    return f"({' OR '.join(parts)})", values


def _marks(values: Sequence[Any]) -> str:
    return ",".join("?" * len(values))


def _kinds(value: Any, typed: bool) -> list[tuple[str, Any]]:
    """JSON types to compare with, each with the value to compare (None: the type is enough)."""
    if isinstance(value, bool):
        return [("'true'" if value else "'false'", None)]
    if value is None:
        return [("'null'", None)]
    if not isinstance(value, str):
        return [("'integer','real'", value)]
    kinds: list[tuple[str, Any]] = [("'text'", encode_text(value))]
    if not typed:
        number = _number(value)
        if number is not None:
            kinds.append(("'integer','real'", number))
        elif value in ("true", "false", "null"):
            kinds.append((f"'{value}'", None))
    return kinds


def _number(value: Any) -> int | float | None:
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


def has_label(labels: str, wanted: str) -> bool:
    """Whether a JSON list of labels holds any of those in another one."""
    return not _parsed(wanted).isdisjoint(json.loads(labels))


@functools.lru_cache(maxsize=8)
def _parsed(labels: str) -> frozenset[str]:
    return frozenset(json.loads(labels))
