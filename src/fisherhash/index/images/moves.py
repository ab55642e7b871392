"""A shell script that moves duplicates out of a folder. Nothing here moves or deletes a file."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from fisherhash.errors import counted, printable
from fisherhash.index.images.duplicates import DuplicateGroup, Duplicates

_HEAD = """\
#!/bin/sh
# Moves duplicates to {target}
# The first image of each group stays. No file is deleted, and none is overwritten.
# Groups that are not confirmed are commented out. Read this file, then run it: sh {script}
set -eu
"""


def moves_script(found: Duplicates, target: str | os.PathLike[str], *, script: str = "FILE") -> str:
    """The moves as a POSIX shell script: all but the first image of each group.

    A file keeps its path inside the synced folder; one from elsewhere keeps its name and gets its
    id in front. An image that is in several groups is moved once. Groups that are not confirmed are
    commented out. Symbolic links stay, and so does the file that a kept one points to.

    Args:
        found: the groups.
        target: the folder to move to; the script creates it.
        script: the name of the script, for its own first lines.
    """
    root = Path(os.path.abspath(target))
    lines = [_HEAD.format(target=printable(str(root)), script=shlex.quote(printable(script)))]
    # What one group keeps, no other one may move.
    kept = {group[0].item.id for group in found.groups}
    shown = {os.path.realpath(group[0].path) for group in found.groups if group[0].path}
    moved: set[int] = set()
    for number, group in enumerate(found.groups, start=1):
        sure = not isinstance(group, DuplicateGroup) or group.confirmed is not False
        state = "" if sure else ", not confirmed"
        lines.append(
            f"\n# group {number}: {counted(len(group), 'image')} within "
            f"{counted(int(max(m.distance for m in group)), 'bit')}{state}\n"
            f"# keep {printable(group[0].path or group[0].name)}\n"
        )
        for match in group[1:]:
            if match.path is None or match.item.id in kept or match.item.id in moved:
                continue
            if os.path.islink(match.path) or os.path.realpath(match.path) in shown:
                what = "a link, or what the kept link points to"
                lines.append(f"# not moved, {what}: {printable(match.path)}\n")
                continue
            if sure:
                moved.add(match.item.id)
            place = root / _inside(match.path, match.folder, match.item.id)
            here, there, above = map(shlex.quote, (match.path, str(place), str(place.parent)))
            command = f"mkdir -p -- {above} && mv -n -- {here} {there}\n"
            # A name may hold a line break, which would end the comment.
            lines.append(command if sure else "".join(_commented(command)))
    return "".join(lines)


def _inside(path: str, folder: str | None, number: int) -> str:
    """Where a file goes inside the target folder."""
    if folder is not None:
        inside = os.path.relpath(path, folder)
        if not inside.startswith(os.pardir) and not os.path.isabs(inside):
            return inside
    return f"{number}-{os.path.basename(path)}"


def _commented(command: str) -> list[str]:
    return [f"# {line}\n" for line in command.splitlines()]
