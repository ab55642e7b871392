"""What the verbs share: the app they register with, shared options, and output.

A verb is a function with ``@app.command`` in a module that ``__init__`` imports. Data goes to
stdout, messages go to stderr. Heavy imports stay inside the verbs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from cyclopts import App, Parameter, convert

from fisherhash.errors import UsageError, counted, printable, printable_text
from fisherhash.system.cores import check_workers
from fisherhash.system.options import parse_number
from fisherhash.system.storage import dump_json
from fisherhash.system.version import __version__
from fisherhash.training.settings import NetworkOptions

if TYPE_CHECKING:
    from fisherhash.data.sources import Collection


def _convert(kind: Any, tokens: Any) -> Any:
    """Convert words as cyclopts does, but never round a number to a whole one."""
    if int in (kind, *get_args(kind)):
        return parse_number(tokens[0].keyword, int, tokens[0].value)
    return convert(kind, tokens)


app = App(
    name="fisherhash",
    help="Tiny binary codes for images: learn them, measure them, search by Hamming distance.",
    version=__version__,
    help_format="markdown",
    default_parameter=Parameter(converter=_convert),
    suppress_keyboard_interrupt=False,  # main says how to continue
)

Flag = Annotated[bool, Parameter(negative="")]
Json = Flag
Data = Annotated[
    str,
    Parameter(
        help="A folder of class sub-folders, a CSV (path,label[;label…]), a folder with train.txt, "
        "query.txt and database.txt, or a named data set (sample, cifar10, tiny100, coco21)."
    ),
]
Workers = Annotated[
    str,
    Parameter(
        help="Processes that read and encode images: auto, or a number; 0 for none besides this "
        "one. The codes do not depend on it."
    ),
]
ProtocolName = Annotated[
    str | None,
    Parameter(name="--protocol", help="Name of the split; by default the one the data suggests."),
]


@Parameter(name="*")
@dataclass(frozen=True)
class NetworkFlags(NetworkOptions):
    """The options about the network as flags: the opposite of --finetune is --frozen."""

    finetune: Annotated[bool | None, Parameter(negative="--frozen")] = None


DEFAULT_NETWORK = NetworkFlags()


@Parameter(name="*")
@dataclass(frozen=True)
class LimitFlags:
    """Other limits on what is read of one image file.

    Attributes:
        max_pixels: The most pixels of an image; a JPEG may have four times as many. By default
            89,478,485, or what FISHERHASH_MAX_PIXELS says.
        max_bytes: The most bytes of a file; by default 268,435,456, or what FISHERHASH_MAX_BYTES
            says.
    """

    max_pixels: int | None = None
    max_bytes: int | None = None

    def apply(self) -> None:
        """Set them for this process and its workers."""
        if self.max_pixels is not None or self.max_bytes is not None:
            from fisherhash.data.images import set_limits

            set_limits(pixels=self.max_pixels, bytes=self.max_bytes)


DEFAULT_LIMITS = LimitFlags()


def parse_workers(text: str) -> int | None:
    """The value of --workers; None for auto."""
    if text == "auto":
        return None
    if not text.isdecimal():
        raise UsageError(f"--workers must be auto or a whole number, got '{text}'")
    check_workers(int(text))
    return int(text)


def check_output(flag: str, path: Path | None, ending: str) -> None:
    """Refuse a file to write whose name has another ending: it may be one of the user's.

    Whoever forgets the value of a flag gives it the next word, such as a photo or an index.
    """
    if path is not None and path.suffix.lower() != ending:
        raise UsageError(
            f"{flag} writes a file that ends in {ending}, got '{printable(str(path))}'; "
            "nothing was written"
        )


def say(sentence: str) -> None:
    """Print one line for the user on stderr; nothing in it can control the terminal."""
    print(printable(sentence), file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print data on stdout as JSON, with escapes for what could control a terminal."""
    text = dump_json(value)
    if not text.replace("\n", "").isprintable():
        # Such characters occur only inside texts, where JSON reads these escapes back.
        text = "".join(c if c == "\n" or c.isprintable() else dumps(c)[1:-1] for c in text)
    print(text, end="")


def print_data(value: Any, lines: Iterable[object], *, json: bool) -> None:
    """Print data on stdout: ``value`` as JSON, or the same as lines of text."""
    if json:
        print_json(value)
        return
    for line in lines:
        print(printable_text(str(line)))


def describe(collection: Collection) -> None:
    """Print the number of images and classes, and what was left out or assumed."""
    classes = len(collection.classes)
    labels = counted(classes, "class", "classes") if classes else "no labels"
    say(f"{collection.name}: {counted(len(collection), 'image')}, {labels}")
    notes(collection.notes)


def notes(sentences: Iterable[str]) -> None:
    """Print what was left out or assumed."""
    for note in sentences:
        say(f"note: {note}")
