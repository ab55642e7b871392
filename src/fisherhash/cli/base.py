"""What the verbs share: the app they register with, shared options, and output.

A verb is a function with ``@app.command`` in a module that ``__init__`` imports. Data goes to
stdout, messages go to stderr. Heavy imports stay inside the verbs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args

from cyclopts import App, Parameter, convert

from fisherhash.errors import UsageError
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


def parse_workers(text: str) -> int | None:
    """The value of --workers; None for auto."""
    if text == "auto":
        return None
    if not text.isdecimal():
        raise UsageError(f"--workers must be auto or a whole number, got '{text}'")
    return int(text)


def say(sentence: str) -> None:
    """Print one line for the user on stderr."""
    print(sentence, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print data on stdout as JSON."""
    print(dump_json(value), end="")


def print_data(value: Any, lines: Iterable[object], *, json: bool) -> None:
    """Print data on stdout: ``value`` as JSON, or the same as lines of text."""
    if json:
        print_json(value)
        return
    for line in lines:
        print(line)


def describe(collection: Collection) -> None:
    """Print the number of images and classes, and what was left out or assumed."""
    labels = f"{len(collection.classes)} classes" if collection.classes else "no labels"
    say(f"{collection.name}: {len(collection):,} images, {labels}")
    notes(collection.notes)


def notes(sentences: Iterable[str]) -> None:
    """Print what was left out or assumed."""
    for note in sentences:
        say(f"note: {note}")
