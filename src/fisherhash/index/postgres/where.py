"""Filters as SQL expressions over the table of an index; every value is a parameter."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from fisherhash.index.filters import (
    NUMBER_FIELDS,
    OWN_FIELDS,
    All,
    Condition,
    alternatives,
    as_number,
    is_date_part,
)
from fisherhash.index.postgres.texts import escaped_text, stored_json, stored_text

_DATE = "'^[0-9]{4}-[0-9]{2}-[0-9]{2}([T ]|$)'"

Sql = tuple[str, list[Any]]
"""An expression and its parameters."""


def where_sql(where: All) -> Sql:
    """A filter as one expression; without conditions it is true for every item."""
    if not where:
        return "true", []
    parts, values = ["key IS NOT NULL"], []
    for condition in where.conditions:
        text, own = _any_of(_condition(condition))
        parts.append(f"NOT {text}" if condition.operator == "!=" else text)
        values += own
    return " AND ".join(parts), values


def has_field_sql(condition: Condition) -> Sql:
    """Whether an item has the field of a condition in its metadata."""
    return _any_of((f"{_at(path)} IS NOT NULL", _names(path)) for path in condition.paths)


def _any_of(parts: Iterable[Sql]) -> Sql:
    found = list(parts)
    text = " OR ".join(f"({part})" for part, _ in found) or "false"
    return f"coalesce(({text}), false)", [value for _, values in found for value in values]


def _condition(condition: Condition) -> Iterable[Sql]:
    operator = "=" if condition.operator == "!=" else condition.operator
    if condition.field == "label":
        yield "labels && %s::text[]", [list(map(stored_text, condition.values))]
        if "" in condition.values:
            yield "labels = '{}'", []
    elif condition.field in NUMBER_FIELDS:
        yield _number_test(condition.field, operator, map(as_number, condition.values))
    elif condition.field in OWN_FIELDS:
        texts = [stored_text(str(value)) for value in condition.values]
        yield f"{condition.field} {operator} ANY(%s::text[])", [texts]
    else:
        for path in condition.paths:
            yield from _metadata(condition, operator, path)


def _number_test(expression: str, operator: str, values: Iterable[int | float | None]) -> Sql:
    # NaN is equal to nothing and beside nothing; in SQL it is the largest number.
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    kind = "bigint" if all(isinstance(value, int) for value in numbers) else "numeric"
    return f"{expression} {operator} ANY(%s::text[]::{kind}[])", [list(map(repr, numbers))]


def _metadata(condition: Condition, operator: str, path: Sequence[str]) -> Iterable[Sql]:
    """Tests of one place in the metadata, one of which must hold."""
    documents: list[str] = []
    numbers: list[int | float] = []
    texts: dict[int, list[str]] = {}
    for value in condition.values:
        for kind, one in alternatives(value, typed=condition.typed):
            if kind == "text":
                texts.setdefault(len(one) if is_date_part(one) else 0, []).append(stored_text(one))
            elif kind == "number":
                numbers.append(one)
                documents += [stored_json(json.dumps(one))] if math.isfinite(one) else []
            elif kind != "other":
                documents.append(kind)
    at, names = _at(path), _names(path)
    if operator == "=":
        yield f"{at} = ANY(%s::text[]::jsonb[])", [*names, documents]
    elif numbers:
        test, values = _number_test(f"({at})::numeric", operator, numbers)
        yield _of_kind("number", at, test), [*names, *names, *values]
    for length, some in texts.items():
        stored, uses = f"({at} #>> '{{}}')", 1
        if length:
            # Of a date only the part that the value names.
            stored = f"CASE WHEN {stored} ~ {_DATE} THEN left({stored}, {length}) ELSE {stored} END"
            uses = 3
        test = f'({stored}) COLLATE "C" {operator} ANY(%s::text[])'
        yield _of_kind("string", at, test), [*names, *names * uses, some]


def _of_kind(kind: str, at: str, test: str) -> str:
    """A test of values of one kind; a CASE, as the parts of AND are computed in any order."""
    return f"CASE WHEN jsonb_typeof({at}) = '{kind}' THEN {test} END"


def _at(path: Sequence[str]) -> str:
    return "(metadata" + " -> %s::text" * len(path) + ")"


def _names(path: Sequence[str]) -> list[str]:
    return list(map(escaped_text, path))
