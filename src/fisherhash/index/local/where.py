"""Filters as SQL expressions over the table of items."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from fisherhash.errors import UsageError
from fisherhash.index.filters import (
    MAX_VALUES,
    NUMBER_FIELDS,
    OWN_FIELDS,
    All,
    Condition,
    alternatives,
    as_number,
    is_date_part,
    unknown_field,
)
from fisherhash.index.local.rows import encode_text

_FEW_LABELS = 100
_JSON_TYPES = {"number": "'integer','real'"}
_DATE = "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9][T ]"


def to_sql(where: All) -> tuple[str, list[Any]]:
    """A filter as one SQL expression with its values."""
    parts, values = ["1"], []
    for condition in where.conditions:
        text, own = _condition(condition)
        parts.append(text)
        values += own
    # SQLite takes 32,766 values at most.
    if len(values) > 3 * MAX_VALUES:
        raise UsageError(f"the filters have {len(values):,} values in all, too many for one search")
    return " AND ".join(parts), values


def refuse_unknown(db: sqlite3.Connection, where: All, uri: str) -> None:
    """Refuse a field that no item has: it would match no item, and with != every one.

    Raises:
        UsageError: there is such a field.
    """
    query = "SELECT 1 FROM items WHERE json_type(metadata, ?) IS NOT NULL LIMIT 1"
    for condition in where.conditions:
        paths = [(json_path(path),) for path in condition.paths]
        if paths and not any(db.execute(query, path).fetchone() for path in paths):
            fields = "SELECT DISTINCT own.key FROM items, json_each(metadata) AS own LIMIT 1000"
            known = [name.decode(errors="replace") for (name,) in db.execute(fields)]
            raise unknown_field(uri, condition.field, known)


def json_path(path: Sequence[str]) -> str:
    """Where a field is in the metadata, as SQLite writes it."""
    return "$" + "".join(f'."{part}"' for part in path)


def _condition(condition: Condition) -> tuple[str, list[Any]]:
    if condition.field == "label":
        parts, values = _labels(condition.values)
    elif condition.field in OWN_FIELDS:
        parts, values = _own_field(condition)
    else:
        parts, values = _metadata(condition)
    negated = "NOT " if condition.operator == "!=" else ""
    return f"{negated}coalesce(({' OR '.join(parts) or '0'}), 0)", values


def _labels(wanted: Sequence[str]) -> tuple[list[str], list[Any]]:
    """Whether the JSON list of labels has one of those wanted; "" is an item without labels.

    A label begins after '[' or a space. Inside a label there is a backslash before a quote, so the
    text of a label with its quotes and the character before it is found nowhere else.
    """
    parts = ["labels = '[]'"] if "" in wanted else []
    texts = [json.dumps(label) for label in wanted]
    if len(texts) <= _FEW_LABELS:
        one = "instr(labels, ?) OR instr(labels, ?)"
        values = [before + text for text in texts for before in "[ "]
        return [*parts, *[one] * len(texts)], values
    each = "SELECT 1 FROM json_each(?) AS w WHERE instr(labels, '[' || w.value)"
    return [*parts, f"EXISTS ({each} OR instr(labels, ' ' || w.value))"], [json.dumps(texts)]


def _own_field(condition: Condition) -> tuple[list[str], list[Any]]:
    is_number = condition.field in NUMBER_FIELDS
    values = [as_number(v) if is_number else encode_text(str(v)) for v in condition.values]
    return [f"{condition.field} {test}" for test in _tests(condition.operator, len(values))], values


def _metadata(condition: Condition) -> tuple[list[str], list[Any]]:
    by_kind: dict[tuple[str, int], list[Any]] = {}
    for value in condition.values:
        for kind, one in alternatives(value, typed=condition.typed):
            part = len(one) if kind == "text" and is_date_part(one) else 0
            own = by_kind.setdefault((kind, part), [])
            own += [] if one is None else [encode_text(one) if kind == "text" else one]
    parts: list[str] = []
    values: list[Any] = []
    for path in map(json_path, condition.paths):
        for (kind, part), some in by_kind.items():
            is_kind = f"json_type(metadata, ?) IN ({_JSON_TYPES.get(kind, repr(kind))})"
            if some:
                tests = _tests(condition.operator, len(some))
                stored, uses = _stored(part)
                joined = " OR ".join(f"{stored} {test}" for test in tests)
                parts.append(f"({is_kind} AND ({joined}))")
                # One list of values for equality, else one test per value.
                groups = [some] if len(tests) == 1 else [[value] for value in some]
                values += [path, *(one for group in groups for one in (*[path] * uses, *group))]
            elif condition.operator in ("=", "!="):
                parts.append(is_kind)
                values.append(path)
    return parts, values


def _stored(part: int) -> tuple[str, int]:
    """The stored value, of a date only its first ``part`` characters; how often it takes a path."""
    value = "json_extract(metadata, ?)"
    if not part:
        return value, 1
    is_date = f"substr({value} || ' ', 1, 11) GLOB '{_DATE}'"
    return f"CASE WHEN {is_date} THEN substr({value}, 1, {part}) ELSE {value} END", 3


def _tests(operator: str, count: int) -> list[str]:
    """Comparisons of which one must hold; equality is one list, as SQLite nests 1,000 ORs at most.

    >>> _tests("!=", 3), _tests("<", 2)
    (['IN (?,?,?)'], ['< ?', '< ?'])
    """
    if operator in ("=", "!="):
        return [f"IN ({','.join('?' * count)})"]
    return [f"{operator} ?"] * count
