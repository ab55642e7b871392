"""The page of duplicates: groups at a threshold, and a list or a script of those not to keep."""

from __future__ import annotations

import os
import shlex
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, HTTPException, Query, Response

from fisherhash.errors import FisherhashError, UsageError, counted
from fisherhash.web.derived import FoundDuplicates
from fisherhash.web.files import MissingError
from fisherhash.web.queries import LARGEST_ID, DuplicatesQuery, GroupsQuery
from fisherhash.web.rendering import WAIT, Served, render_page, sentence
from fisherhash.web.served import ServedIndex

GROUPS_ON_PAGE = 40
GROUP_SHOWN = 24
"""Images of one group that are shown."""
_FAILED = "The codes could not be computed; the server's log says why."
router = APIRouter(prefix="/duplicates", include_in_schema=False)


@router.get("")
def page(served: Served, query: Annotated[GroupsQuery, Query()]) -> Response:
    """The whole page."""
    return render_page("duplicates.html", served, "duplicates", **_groups(served, query))


@router.get("/groups")
def groups(served: Served, query: Annotated[GroupsQuery, Query()]) -> Response:
    """Only the groups, for the slider."""
    return render_page("_groups.html", served, "duplicates", **_groups(served, query))


def _groups(served: ServedIndex, query: GroupsQuery) -> dict[str, Any]:
    problem = ""
    try:
        state = served.duplicates.at(query.radius, code=query.code, wait=WAIT)
    except FisherhashError as error:
        choices = served.duplicates.choices()
        state = FoundDuplicates(query.code if query.code in choices else choices[0], choices)
        # A radius so wide that everything would be a duplicate; or a disk that is full, say,
        # whose path is nobody's business.
        problem = _FAILED if not isinstance(error, UsageError) else sentence(str(error))
    found, start = state.found, query.start
    every = [] if found is None else found.groups
    radius = query.radius if found is None else found.radius
    expected = None if found is None else found.expectation()
    return {
        "state": state,
        "found": found,
        "radius": radius,
        "most": state.most or max(radius or 0, 1),
        "start": start,
        "step": GROUPS_ON_PAGE,
        "shown": GROUP_SHOWN,
        "problem": problem,
        "expected": expected and sentence(expected),
        "total": len(every),
        "sure": sum(group.confirmed is True for group in every),
        "items": len({hit.id for group in every for hit in group}),
        "groups": every[start : start + GROUPS_ON_PAGE],
    }


@router.post("/export")
def export(
    served: Served,
    query: Annotated[DuplicatesQuery, Query()],
    format: Annotated[Literal["list", "script"], Form()],
    remove: Annotated[list[Annotated[int, Form(ge=0, le=LARGEST_ID)]] | None, Form()] = None,
    every: Annotated[bool, Form()] = False,
) -> Response:
    """The files that were marked: as a list, or as a script that moves them away."""
    marked = list(remove or ())
    if every:
        # All but the best image of each confirmed group, on whatever page it is.
        found = served.duplicates.at(query.radius, code=query.code, wait=WAIT).found
        if found is None:
            raise HTTPException(503, "The duplicates are still being searched for; try again")
        marked += [hit.id for group in found.groups if group.confirmed for hit in group.hits[1:]]
    if not marked:
        raise HTTPException(400, "No image is marked: choose those not to keep")
    paths = []
    for number in dict.fromkeys(marked):
        hit = served.item(number)
        if hit.path is None:
            raise MissingError(f"the item with the id {number} has no file")
        paths.append(os.path.abspath(hit.path))
    if format == "script":
        body, ending, kind = removal_script(paths), "sh", "text/x-shellscript"
    else:
        body, ending, kind = "".join(f"{path}\n" for path in paths), "txt", "text/plain"
    return Response(
        body.encode(errors="surrogateescape"),
        media_type=f"{kind}; charset=utf-8",
        headers={"content-disposition": f'attachment; filename="duplicates.{ending}"'},
    )


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
