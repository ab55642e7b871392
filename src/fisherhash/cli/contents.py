"""Verbs that print what an index holds: index list, index labels."""

from __future__ import annotations

import itertools

from fisherhash.cli.base import Json, print_data, print_json, say
from fisherhash.cli.index import Several, index_app, open_images
from fisherhash.errors import UsageError, printable


@index_app.command(name="list")
def list_items(
    index: str, *, where: Several = None, limit: int | None = None, json: Json = False
) -> None:
    """List the items of an index: one line per item, its key and its labels.

    Args:
        index: The index: a folder, or the URI of another kind of index.
        where: Only items that match this filter, label=cat or year>=2020; may be given several
            times, all must match.
        limit: The most items to list; by default all.
        json: Print JSON instead of text: with id, file, code and fields.
    """
    from fisherhash.index.images.labels import near_label, where_labels
    from fisherhash.index.images.results import image_path, synced_folder

    if limit is not None and limit < 1:
        raise UsageError(f"--limit must be at least 1, got {limit}")
    with open_images(index) as images:
        folder = synced_folder(images.index)
        items = itertools.islice(images.index.items(where_labels(images.index, where)), limit)
        if not json:
            count = 0
            for item in items:
                print("\t".join([printable(item.name), *map(printable, item.labels)]))
                count += 1
            if where and not count:
                say(f"no item matches {' and '.join(where)}{near_label(images.index, where)}")
            return
        rows = [
            {
                "id": item.id,
                "key": item.key,
                "path": image_path(item, folder),
                "labels": list(item.labels),
                "metadata": item.metadata,
                "code": item.code.hex(),
            }
            for item in items
        ]
    print_json(rows)


@index_app.command
def labels(
    index: str, *, where: Several = None, limit: int | None = None, json: Json = False
) -> None:
    """List the labels of an index, the most frequent first: how many items, and the label.

    Args:
        index: The index: a folder, or the URI of another kind of index.
        where: Count only items that match this filter, year>=2020; may be given several times, all
            must match.
        limit: The most labels to list; by default all.
        json: Print JSON instead of text.
    """
    from fisherhash.index.images.labels import count_labels

    if limit is not None and limit < 1:
        raise UsageError(f"--limit must be at least 1, got {limit}")
    with open_images(index) as images:
        counts = count_labels(images.index, where)
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:limit]
    rows = [{"label": label or None, "count": count} for label, count in ordered]
    lines = (f"{count:>9,}  {printable(label) or '(no label)'}" for label, count in ordered)
    print_data(rows, lines, json=json)
