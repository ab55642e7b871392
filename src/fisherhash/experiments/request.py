"""What ``reproduce`` is asked to do: its options, declared once, and the one parser for them.

A bare machine has argparse only, and ``--help`` must be quick: no torch here.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

from fisherhash.errors import FisherhashError, UsageError
from fisherhash.system.options import Range, options_of, unknown_option
from fisherhash.training.settings import NetworkOptions, parse_settings

Round = Literal["numbers", "cuts", "classifier"]
ROUNDS: tuple[Round, ...] = get_args(Round)
"""The rounds of a search, in order: those that look for numbers, and two more."""
ABOUT = """Run a table or the figures of the DFH paper on the data of this machine.

After an interruption the same command continues where it stopped. Where NUS-WIDE or ImageNet100
is missing, the stand-ins coco21 and tiny100 are used."""


@dataclass(frozen=True, kw_only=True)
class Request(NetworkOptions):
    """One request to reproduce a table; plain values, so that it travels as JSON.

    Attributes:
        target: table1 (the parts of DFH), table2 (CIFAR-10 and NUS-WIDE), table3 (ImageNet100),
            figures, ablation (each addition to DFH), or unseen (trained on some classes, measured
            on others).
        out: Folder for the runs, the table and the page; by default reproduce-TARGET.
        quick: Frozen features at 128 px, the shortest and the longest codes, one seed, few epochs:
            under 20 minutes on two cores.
        seeds: Number of seeds; by default 3, or 1 with --quick.
        first_seeds: Number of seeds for the best row of a column and the rows that a test cannot
            tell from it; by default 5, or as many as --seeds where that is given.
        split_seed: Seed of the split into queries and database, where it is drawn; the tables that
            were published first have 0.
        only: Run only these data sets, methods or rows, and code lengths, joined by commas.
        jobs: Processes that share the work; by default 2 on a CPU with two cores or more and frozen
            features, otherwise 1.
        minutes: Start no run after this many minutes.
        tune: First search each row's hyper-parameters on held-out training images.
        tune_only: Search, and run nothing of the table.
        points: Points that are searched for each row; by default 16.
        last_round: The last round of a search: numbers, cuts (all ways to make bits of outputs) or
            classifier (one beside the head).
        trial_epochs: Epochs of the longest trials; by default as many as in the table.
        tuning: A tuning.json of an earlier search: its winners are used or, with --tune, its trials
            are not repeated.
        settings: A training setting, the same for all methods, such as epochs=30; may be repeated.
        rehearse: Use a tiny network on few images, to check that everything works.
    """

    target: str
    out: str = ""
    quick: bool = False
    seeds: Annotated[int | None, Range(1)] = None
    first_seeds: Annotated[int | None, Range(1)] = None
    split_seed: Annotated[int, Range(0)] = 1
    only: Sequence[str] = ()
    jobs: Annotated[int | None, Range(1)] = None
    minutes: Annotated[float | None, Range(0)] = None
    tune: bool = False
    tune_only: bool = False
    points: Annotated[int | None, Range(4, 4096)] = None
    last_round: Round = "classifier"
    trial_epochs: int | None = None
    tuning: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    rehearse: bool = False

    @property
    def folder(self) -> Path:
        """The folder for all results."""
        return Path(self.out or f"reproduce-{self.target}")


def parse_request(words: Sequence[str], *, command: str) -> tuple[Request, bool]:
    """Parse the words of a command line.

    Args:
        words: what follows the command.
        command: how the user calls it, for the help text.

    Returns:
        The request, and whether to print its results as JSON.
    """
    parser = _Parser(
        usage=f"{command} [OPTIONS] TARGET",
        description=ABOUT,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for one in sorted(options_of(Request), key=lambda one: one.name != "target"):
        if one.name == "target":
            parser.add_argument(one.name, metavar="TARGET", help=one.help)
        elif one.name == "settings":
            parser.add_argument(
                "--set", dest=one.name, action="append", metavar="NAME=VALUE", help=one.help
            )
        elif one.kind is bool:
            either = parser.add_mutually_exclusive_group()
            either.add_argument(one.flag, action="store_true", help=one.help)
            if one.name == "finetune":
                text = f"See {one.flag}."
                either.add_argument("--frozen", dest=one.name, action="store_false", help=text)
        else:
            parse = _words if one.name == "only" else one.parse
            parser.add_argument(
                one.flag, type=parse, metavar=one.kind.__name__.upper(), help=one.help
            )
    parser.add_argument(
        "--json", action="store_true", help="Print the results as JSON instead of the table."
    )
    given, unknown = parser.parse_known_args(words)
    for word in unknown:
        if word.startswith("-"):
            raise unknown_option(word.split("=")[0], parser._option_string_actions)
        raise UsageError(f"one TARGET is expected, got also '{word}'")
    values: dict[str, Any] = vars(given)
    as_json = values.pop("json", False)
    values["settings"] = parse_settings(values.get("settings", []))
    return Request(**values), as_json


def exit_code(task: Callable[[], object]) -> int:
    """Carry out a task with its log on stderr; returns the exit code of its process."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        task()
    except FisherhashError as error:
        say_line(f"fisherhash: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say_line("fisherhash: interrupted; the same command continues where it stopped")
        return 130
    return 0


def say_line(line: str) -> None:
    """Write a line to stderr, in one piece: other processes write there too."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
