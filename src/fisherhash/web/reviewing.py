"""Duplicates: groups at a threshold, which of each to keep, and a list or a script of the rest."""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fisherhash.errors import UsageError, counted
from fisherhash.index.images.results import Match, image_path, synced_folder
from fisherhash.web.cards import Card, card_of
from fisherhash.web.gallery import MOST_DUPLICATE_BITS, Gallery, MissingError
from fisherhash.web.queries import parse_number_of
from fisherhash.web.serving import in_thread, render_page, sentence, threaded

GROUPS_ON_PAGE = 40
GROUP_SHOWN = 24
"""Images of one group that are shown."""
MOST_EXPORTED = 100_000
DEFAULT_RADIUS = 2
_WAIT = 2.0


@dataclass(frozen=True)
class Copy:
    """One image of a group, with what helps to decide whether to keep it."""

    card: Card
    pixels: tuple[int, int] | None
    best: bool


class DuplicatePages:
    """The endpoints of the duplicates page."""

    def __init__(self, gallery: Gallery) -> None:
        self.gallery = gallery

    @threaded
    def page(self, request: Request) -> Response:
        """The whole page."""
        return render_page("duplicates.html", self.gallery, "duplicates", **self._groups(request))

    @threaded
    def groups(self, request: Request) -> Response:
        """Only the groups, for the slider."""
        return render_page("_groups.html", self.gallery, "duplicates", **self._groups(request))

    def _groups(self, request: Request) -> dict[str, Any]:
        most = min(MOST_DUPLICATE_BITS, self.gallery.index.bits)
        params = request.query_params
        radius = parse_number_of(params, "radius", min(DEFAULT_RADIUS, most), 0, most)
        start = parse_number_of(params, "start", 0, 0, 10**9)
        problem = ""
        try:
            found = self.gallery.duplicates(radius).get(_WAIT)
        except UsageError as error:
            # A radius so wide that everything would be a duplicate.
            found, problem = None, sentence(str(error))
        groups = [] if found is None else found.groups
        part = groups[start : start + GROUPS_ON_PAGE]
        return {
            "radius": radius,
            "most": most,
            "start": start,
            "step": GROUPS_ON_PAGE,
            "ready": found is not None or bool(problem),
            "problem": problem,
            "total": len(groups),
            "items": sum(map(len, groups)),
            "groups": [
                {"size": len(group), "copies": self._copies(group[:GROUP_SHOWN])} for group in part
            ],
        }

    def _copies(self, group: Sequence[Match]) -> list[Copy]:
        pixels = [self.gallery.pixels(match.item) for match in group]
        best = _best(group, pixels)
        return [
            Copy(card_of(self.gallery, match.item, match.distance), size, number == best)
            for number, (match, size) in enumerate(zip(group, pixels, strict=True))
        ]

    async def export(self, request: Request) -> Response:
        """The files that were marked: as a list, as CSV, or as a script that moves them away."""
        async with request.form(max_files=0, max_fields=MOST_EXPORTED) as form:
            numbers = [text for text in form.getlist("remove") if isinstance(text, str)]
            kind = form.get("format")
        if not all(n.isascii() and n.isdecimal() and len(n) < 20 for n in numbers):
            raise HTTPException(400, "An id is a whole number")
        if not numbers:
            raise HTTPException(400, "No image is marked: choose those not to keep")
        if kind not in _WRITERS:
            raise HTTPException(400, f"The format must be one of {', '.join(_WRITERS)}")
        paths = await in_thread(request, lambda: self._paths([int(n) for n in numbers]))
        writer, name, media = _WRITERS[str(kind)]
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        body = writer(paths).encode(errors="surrogateescape")
        return Response(body, media_type=media, headers=headers)

    def _paths(self, numbers: list[int]) -> list[str]:
        folder = synced_folder(self.gallery.index)
        paths = []
        for number in dict.fromkeys(numbers):
            path = image_path(self.gallery.item(number), folder)
            if path is None:
                raise MissingError(f"the item with the id {number} has no file")
            paths.append(os.path.abspath(path))
        return paths


def _best(group: Sequence[Match], pixels: list[tuple[int, int] | None]) -> int:
    """Which image of a group to keep: most pixels, then most bytes, then the shortest name."""
    ranks = [
        (-(size[0] * size[1]) if size else 0, -(match.item.size or 0), len(match.name), match.name)
        for match, size in zip(group, pixels, strict=True)
    ]
    return min(range(len(group)), key=ranks.__getitem__)


def removal_script(paths: list[str]) -> str:
    """A shell script that moves files into a folder; the user runs it, and may read it before."""
    lines = [
        "#!/bin/sh",
        f"# {counted(len(paths), 'file')} that you marked as duplicates. This script moves them to",
        "# a folder, and deletes nothing. Look at it, then run it: sh duplicates.sh [FOLDER]",
        "set -eu",
        'to="${1:-./duplicates-removed}"',
        'mkdir -p -- "$to"',
        "move() {",
        '    name="$(basename -- "$1")" number=0 target="$to/$name"',
        '    while [ -e "$target" ]; do number=$((number + 1)) target="$to/$number-$name"; done',
        '    mv -- "$1" "$target"',
        "}",
    ]
    lines += [f"move {shlex.quote(path)}" for path in paths]
    return "\n".join([*lines, ""])


def _as_list(paths: list[str]) -> str:
    return "".join(f"{path}\n" for path in paths)


def _as_csv(paths: list[str]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["path"])
    writer.writerows([path] for path in paths)
    return file.getvalue()


_WRITERS = {
    "list": (_as_list, "duplicates.txt", "text/plain; charset=utf-8"),
    "csv": (_as_csv, "duplicates.csv", "text/csv; charset=utf-8"),
    "script": (removal_script, "duplicates.sh", "text/x-shellscript; charset=utf-8"),
}
