"""The verb dedup: groups of images that are likely copies of each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from fisherhash.cli.base import (
    DEFAULT_LIMITS,
    Flag,
    Json,
    LimitFlags,
    Workers,
    app,
    check_output,
    parse_workers,
    print_json,
    say,
)
from fisherhash.cli.index import Several, open_images, shown_folders
from fisherhash.errors import UsageError
from fisherhash.system.storage import write_file


@app.command
def dedup(
    index: str,
    *,
    radius: int | None = None,
    code: Literal["auto", "copy", "own"] = "auto",
    pairs: Flag = False,
    keep: Literal["first", "best"] = "best",
    confirm: bool = True,
    compare_files: Flag = False,
    csv: Path | None = None,
    moves: Path | None = None,
    move_to: Path | None = None,
    html: Path | None = None,
    show_from: Several = None,
    workers: Workers = "auto",
    limits: LimitFlags = DEFAULT_LIMITS,
    json: Json = False,
) -> None:
    """List groups of images that are likely copies of each other, the surest first.

    Any two images of a group have codes within the radius. Where the files are there, their codes
    are made for copies, and thumbnails confirm each group. Nothing is moved or deleted.

    Args:
        index: The index: a folder, or the URI of another kind of index.
        radius: Bits in which any two images of a group may differ; by default as many as give about
            one false pair per thousand images, and one in a million comparisons.
        code: copy compares codes that are made for copies, computed once from the files; own
            compares the codes of the index; auto takes copy where the files are there.
        pairs: List pairs instead of groups.
        keep: Which image of a group comes first and is kept: best has the most pixels, then the
            oldest file, and is no symbolic link; first was added first.
        confirm: Compare thumbnails; groups that show the same image come first.
        compare_files: Also read the files of each group, and mark those that are the same byte for
            byte.
        csv: Also write the groups to a file that ends in .csv.
        moves: Also write a shell script, a file that ends in .sh, that moves all but the first
            image of each group.
        move_to: With --moves: the folder to move to, by default FOLDER-duplicates beside the synced
            FOLDER.
        html: Also write a page with thumbnails, a file that ends in .html.
        show_from: A folder whose images may be on the page, beside those that the index was filled
            from on this machine; may be given several times.
        json: Print JSON instead of text.
    """
    from fisherhash.index.images.results import synced_folder

    if move_to is not None and moves is None:
        raise UsageError("--move-to goes with --moves FILE, which names the script")
    check_output("--html", html, ".html")
    check_output("--csv", csv, ".csv")
    check_output("--moves", moves, ".sh")
    limits.apply()
    with open_images(index) as opened:
        found = opened.duplicates(
            radius=radius,
            compare_files=compare_files,
            pairs=pairs,
            keep=keep,
            confirm=confirm,
            code=code,
            workers=parse_workers(workers),
        )
        folder = synced_folder(opened.index)
    if html is not None:
        from fisherhash.pages import contact_sheet

        page = contact_sheet.duplicates_page(found, folders=shown_folders(index, show_from))
        contact_sheet.write_page(html, page)
        say(f"the page is {html}")
    if csv is not None:
        write_file(csv, found.to_csv())
        say(f"the list is {csv}")
    if moves is not None:
        from fisherhash.index.images.moves import moves_script

        target = move_to or Path(f"{folder}-duplicates" if folder else "duplicates")
        write_file(moves, moves_script(found, target, script=str(moves)))
        say(f"the script is {moves}; it moves files to {target} when you run it")
    if json:
        print_json(found.to_json())
    else:
        print(found, end="")
    paths = {match.path for group in found.groups for match in group if match.path}
    if gone := sum(not os.path.exists(path) for path in paths):
        say(f"of these files {gone:,} are no longer there; index sync removes them from the index")
    if found.without_code:
        say(f"without a copy code, because their files cannot be read: {found.without_code:,}")
    if radius is None and not found.radius and found.distinct > 1:
        near = f"--radius {max(1, found.bits // 12)} lists nearer ones, too"
        say(f"many of these images are so alike that only equal codes are a sure sign; {near}")
    if expected := found.expectation():
        say(expected)
    say(found.summary())
