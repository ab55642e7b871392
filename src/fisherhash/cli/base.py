"""What the verbs share: the app they register with, types of flags, talk and data.

A verb is a function with ``@app.command`` in a module of this package that ``__init__`` imports.
Data goes to stdout, talk to stderr. Heavy imports stay inside the verbs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from fisherhash import __version__
from fisherhash.errors import FisherhashError, UsageError

if TYPE_CHECKING:
    from fisherhash.data.sources import Collection

app = App(
    name="fisherhash",
    help="Tiny binary codes for images: learn them, measure them, search by Hamming distance.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # main says how to go on
)


def _integer(_: Any, tokens: Any) -> int:
    """A whole number, and nothing that would have to be rounded to one."""
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{tokens[0].keyword} must be a whole number, got '{text}'") from None


Whole = Annotated[int, Parameter(converter=_integer)]
Json = Annotated[bool, Parameter(negative="")]
Flag = Annotated[bool, Parameter(negative="")]


def say(sentence: str) -> None:
    """Tell the user one line, on stderr."""
    print(sentence, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print data on stdout as JSON."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # A file name that is not UTF-8: as escapes, which JSON reads back.
        text = json.dumps(value, indent=2)
    print(text)


def describe(collection: Collection) -> None:
    """Say how many images and classes there are, and what was left out or assumed."""
    labels = f"{len(collection.classes)} classes" if collection.classes else "no labels"
    say(f"{collection.name}: {len(collection):,} images, {labels}")
    notes(collection.notes)


def notes(sentences: tuple[str, ...]) -> None:
    """Say what was left out or assumed."""
    for note in sentences:
        say(f"note: {note}")


class writing:  # noqa: N801
    """Turns a failed write into an error that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FisherhashError(f"could not write {self.path}: {error.strerror}") from error

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            self.path.with_name(self.path.name + ".new.npz").unlink(missing_ok=True)
            reason = error.strerror or error
            raise FisherhashError(f"could not write {self.path}: {reason}") from error
