"""Labels of an index: how often each occurs, and filters that match them without case."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter

from fisherhash.errors import UsageError
from fisherhash.index.base import Index
from fisherhash.index.filters import All, Condition, Where, parse_filter

MOST_COMPARED = 5_000
"""Labels that a mistyped one is compared with; more would take longer than people wait."""


def count_labels(index: Index, where: Where | None = None) -> Counter[str]:
    """How many items have each label; the empty text counts items without one.

    Args:
        index: the index.
        where: count only items that match this filter.
    """
    counts: Counter[str] = Counter()
    for item in index.items(where_labels(index, where)):
        counts.update(item.labels or ("",))
    return counts


def where_labels(index: Index, where: Where | None) -> All:
    """A filter whose labels are spelled as in the index: ``label=cat`` finds ``Cat``.

    A label that some item has exactly as written means that one. Any other means the one label
    that differs in case only; a label that no item has stays as it is.

    Raises:
        UsageError: several labels differ from the one given in case only.
    """
    parsed = parse_filter(where)
    known: list[str] | None = None
    conditions = []
    for one in parsed.conditions:
        if one.field == "label":
            values = []
            for value in one.values:
                if value and not index.count(All((Condition("label", "=", (value,)),))):
                    known = list(count_labels(index)) if known is None else known
                    value = _spelled(str(value), known)
                values.append(value)
            one = dataclasses.replace(one, values=tuple(values))
        conditions.append(one)
    return All(tuple(conditions))


def near_label(index: Index, where: Where | None) -> str:
    """A hint at the label that is most like the first one of a filter that no item has, or none.

    Args:
        index: the index.
        where: a filter that no item matches.
    """
    parsed = parse_filter(where)
    asked = [
        v for c in parsed.conditions if (c.field, c.operator) == ("label", "=") for v in c.values
    ]
    known = {label.casefold(): label for label in count_labels(index)} if asked else {}
    if len(known) > MOST_COMPARED:
        return ""
    for value in asked:
        name = str(value).casefold()
        if name not in known:
            near = [known[one] for one in difflib.get_close_matches(name, known, n=1) if one]
            return f". Did you mean label={near[0]}?" if near else ""
    return ""


def _spelled(label: str, known: list[str]) -> str:
    same = sorted(other for other in known if other.casefold() == label.casefold())
    if len(same) > 1:
        names = " or ".join(f"label={other}" for other in same)
        raise UsageError(f"no item has the label '{label}', but there are several: {names}?")
    return same[0] if same else label
