"""Duplicates: groups at a threshold, which of each to keep, and a list or a script of the rest."""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from fisherhash.errors import FisherhashError, UsageError, counted
from fisherhash.index.images.duplicates import confirmed
from fisherhash.index.images.results import Match, image_path, synced_folder
from fisherhash.web.cards import Card, card_of
from fisherhash.web.duplicates import WIDEST_RADIUS, ComparedCode, FoundDuplicates
from fisherhash.web.gallery import Gallery, MissingError
from fisherhash.web.queries import parse_number_of
from fisherhash.web.serving import in_thread, render_page, sentence, threaded

GROUPS_ON_PAGE = 40
GROUP_SHOWN = 24
"""Images of one group that are shown."""
MOST_EXPORTED = 100_000
_WAIT = 2.0
_FAILED = "The codes could not be computed; the server's log says why."


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

    @threaded
    def compute(self, request: Request) -> Response:
        """Begin to compute the copy codes of a large collection."""
        self.gallery.duplicates.allow()
        return RedirectResponse("/duplicates", 303)

    def _groups(self, request: Request) -> dict[str, Any]:
        params = request.query_params
        radius, code = parse_duplicates(params)
        start = parse_number_of(params, "start", 0, 0, 10**9)
        problem = ""
        try:
            state = self.gallery.duplicates.at(radius, code=code, wait=_WAIT)
        except FisherhashError as error:
            choices = self.gallery.duplicates.choices()
            state = FoundDuplicates(code if code in choices else choices[0], choices)
            # A radius so wide that everything would be a duplicate; or a disk that is full, say,
            # whose place is nobody's business.
            problem = _FAILED if not isinstance(error, UsageError) else sentence(str(error))
        found = state.found
        groups = [] if found is None else found.groups
        part = groups[start : start + GROUPS_ON_PAGE]
        radius = found.radius if found is not None else radius
        expected = None if found is None else found.expectation()
        return {
            "state": state,
            "found": found,
            "radius": radius,
            "most": state.most or max(radius or 0, 1),
            "start": start,
            "step": GROUPS_ON_PAGE,
            "problem": problem,
            "expected": expected and sentence(expected),
            "total": len(groups),
            "sure": sum(confirmed(group) is True for group in groups),
            "items": len({match.item.id for group in groups for match in group}),
            "groups": [self._group(group) for group in part],
        }

    def _group(self, group: Sequence[Match]) -> dict[str, Any]:
        copies = [
            Copy(
                card_of(self.gallery, match.item, match.distance),
                self.gallery.pixels(match.item),
                number == 0,
            )
            for number, match in enumerate(group[:GROUP_SHOWN])
        ]
        return {"size": len(group), "confirmed": confirmed(group), "copies": copies}

    async def export(self, request: Request) -> Response:
        """The files that were marked: as a list, as CSV, or as a script that moves them away."""
        async with request.form(max_files=0, max_fields=MOST_EXPORTED) as form:
            numbers = [text for text in form.getlist("remove") if isinstance(text, str)]
            kind, every = form.get("format"), form.get("every")
        if not all(n.isascii() and n.isdecimal() and len(n) < 20 for n in numbers):
            raise HTTPException(400, "An id is a whole number")
        if not numbers and not every:
            raise HTTPException(400, "No image is marked: choose those not to keep")
        if kind not in _WRITERS:
            raise HTTPException(400, f"The format must be one of {', '.join(_WRITERS)}")
        marked = [int(number) for number in numbers]
        more = await in_thread(request, lambda: self._worse(request)) if every else []
        paths = await in_thread(request, lambda: self._paths([*marked, *more]))
        writer, name, media = _WRITERS[str(kind)]
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        body = writer(paths).encode(errors="surrogateescape")
        return Response(body, media_type=media, headers=headers)

    def _worse(self, request: Request) -> list[int]:
        """All but the best image of each confirmed group, on whatever page it is."""
        radius, code = parse_duplicates(request.query_params)
        found = self.gallery.duplicates.at(radius, code=code, wait=_WAIT).found
        if found is None:
            raise HTTPException(503, "The duplicates are still being searched for; try again")
        return [m.item.id for group in found.groups if confirmed(group) for m in group[1:]]

    def _paths(self, numbers: list[int]) -> list[str]:
        folder = synced_folder(self.gallery.index)
        paths = []
        for number in dict.fromkeys(numbers):
            path = image_path(self.gallery.item(number), folder)
            if path is None:
                raise MissingError(f"the item with the id {number} has no file")
            paths.append(os.path.abspath(path))
        return paths


def parse_duplicates(params: QueryParams) -> tuple[int | None, ComparedCode | None]:
    """The radius and the kind of code of an address; None where it names none.

    Raises:
        UsageError: they are not as they must be.
    """
    code = params.get("code") or None
    if code not in (None, "copy", "own"):
        raise UsageError(f"code must be copy or own, got {code!r}")
    radius = parse_number_of(params, "radius", -1, 0, WIDEST_RADIUS)
    return None if radius < 0 else radius, code


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
