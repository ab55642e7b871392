"""The verb serve: a page and an API over an index."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fisherhash.cli.base import DEFAULT_LIMITS, Flag, LimitFlags, app, say
from fisherhash.cli.index import IndexName
from fisherhash.cli.searching import ShowFrom, shown_folders
from fisherhash.errors import UsageError

TOKEN_VARIABLE = "FISHERHASH_TOKEN"


@app.command
def serve(
    index: IndexName,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: str | None = None,
    writable: Flag = False,
    uploads: Path | None = None,
    show_from: ShowFrom = None,
    workers: int = 1,
    open: Annotated[bool | None, Parameter(negative="--no-open")] = None,
    device: str = "cpu",
    skip_damaged: Flag = False,
    max_upload: int = 32,
    seconds: float = 30.0,
    cache: int = 512,
    limits: LimitFlags = DEFAULT_LIMITS,
) -> None:
    """Show an index as a page on this machine: drop an image, see its neighbours.

    There is a map, a timeline, a page for duplicates, and a JSON API that /openapi.json describes.
    The page changes nothing. Items that are added meanwhile appear without a restart.

    Args:
        host: The address to listen on. Any other than this machine's own needs a token.
        port: The port; 0 takes a free one.
        token: Needed for changes and, where other machines can connect, to see anything; by default
            what FISHERHASH_TOKEN says, or a new one.
        writable: Let the API add and remove images; this needs the token.
        uploads: The folder for images that the API adds; by default the one that the index is in
            sync with.
        workers: Processes that answer; they share the index.
        open: Open the page in a browser; by default if you start it from a terminal.
        device: cpu, cuda, … or auto.
        skip_damaged: Serve a damaged index without the items whose codes are damaged.
        max_upload: The most megabytes of an uploaded image; it may have 50 million pixels, or what
            --max-pixels says.
        seconds: The most seconds that an answer may take, and an upload to arrive.
        cache: The most megabytes of thumbnails on disk.
    """
    limits.apply()
    from fisherhash.index.base import Index
    from fisherhash.system.extras import require_package
    from fisherhash.web.options import ServeOptions, is_loopback

    for package in ("fastapi", "uvicorn", "python_multipart"):
        require_package(package, "web", "fisherhash serve")
    if os.path.isdir(index):
        name = os.path.basename(os.path.abspath(index))
        raise UsageError(
            f"{index} is a folder, not an index. Create one with: fisherhash index sync "
            f"{name}.index {index}; then: fisherhash serve {name}.index"
        )
    if token is None and (writable or not is_loopback(host)):
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    options = ServeOptions(
        index,
        host=host,
        port=port,
        token=token,
        writable=writable,
        uploads=None if uploads is None else os.path.abspath(uploads),
        show_from=tuple(map(os.path.abspath, show_from or ())),
        device=device,
        skip_damaged=skip_damaged,
        max_upload=max_upload << 20,
        max_pixels=limits.max_pixels or ServeOptions.max_pixels,
        seconds=seconds,
        cache_bytes=cache << 20,
    )
    from fisherhash.web.server import run_server

    if Index.exists(index):
        shown_folders(index, show_from)
    browse = sys.stderr.isatty() if open is None else open
    run_server(options, workers=workers, browse=browse, say=say)
