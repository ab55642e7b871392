"""What ``reproduce`` is asked to do: its options, declared once, and the one parser for them.

A bare machine has argparse only, and ``--help`` must be quick: no torch here.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from fisherhash.errors import UsageError
from fisherhash.system.options import option, option_types, parse_value, unknown_option
from fisherhash.training.settings import NetworkOptions, parse_settings

ABOUT = """Run a table or the figures of the DFH paper on the data of this machine.

After an interruption the same command continues where it stopped. Where NUS-WIDE or ImageNet100
is missing, the stand-ins coco21 and tiny100 are used."""


@dataclass(frozen=True, kw_only=True)
class Request(NetworkOptions):
    """One request to reproduce a table; plain values, so that it travels as JSON."""

    target: str = option(
        text="table1 (the parts of DFH), table2 (CIFAR-10 and NUS-WIDE), table3 (ImageNet100), "
        "figures, or large (CIFAR-10 with 50,000 training images)."
    )
    out: str = option(
        "", text="Folder for the runs, the table and the page; by default reproduce-TARGET."
    )
    quick: bool = option(
        False,
        text="Frozen features at 128 px, one seed, few epochs: under 20 minutes on two cores.",
    )
    seeds: int | None = option(
        None, text="Number of seeds; by default 3, or 1 with --quick.", low=1
    )
    only: Sequence[str] = option(
        (), text="Run only these data sets, methods or rows, and code lengths, joined by commas."
    )
    jobs: int | None = option(
        None,
        text="Processes that share the work; by default 2 on a CPU with two cores or more and "
        "frozen features, otherwise 1.",
        low=1,
    )
    minutes: float | None = option(None, text="Start no run after this many minutes.", low=0.0)
    tune: bool = option(
        False, text="First search each method's hyper-parameters on held-out training images."
    )
    trial_epochs: int | None = option(
        None, text="Epochs of the search's trials; by default as many as in the table."
    )
    tuning: str | None = option(None, text="A tuning.json of an earlier search.")
    settings: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "A training setting, the same for all methods, such as epochs=30; may be "
            "repeated."
        },
    )
    rehearse: bool = option(
        False, text="Use a tiny network on few images, to check that everything works."
    )

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
        formatter_class=_Help,
    )
    types = option_types(Request)
    for one in sorted(fields(Request), key=lambda one: one.name != "target"):
        name, text, kind = one.name, one.metadata["help"], types[one.name][0]
        flag = f"--{name.replace('_', '-')}"
        if name == "target":
            parser.add_argument(name, metavar="TARGET", help=text)
        elif name == "settings":
            parser.add_argument(
                "--set", dest=name, action="append", metavar="NAME=VALUE", help=text
            )
        elif name == "finetune":
            either = parser.add_mutually_exclusive_group()
            either.add_argument(flag, action="store_true", help=text)
            either.add_argument("--frozen", dest=name, action="store_false", help="See --finetune.")
        elif kind is bool:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parse = _words if name == "only" else partial(parse_value, flag, kind)
            parser.add_argument(flag, type=parse, metavar=kind.__name__.upper(), help=text)
    parser.add_argument(
        "--json", action="store_true", help="Print the results as JSON instead of the table."
    )
    given, unknown = parser.parse_known_args(words)
    for word in unknown:
        if word.startswith("-"):
            raise unknown_option(word.split("=")[0], parser._option_string_actions)
        raise UsageError(f"one TARGET is expected, got also '{word}'")
    values = vars(given)
    as_json = values.pop("json", False)
    return Request(**values | {"settings": parse_settings(values.get("settings", []))}), as_json


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _Help(argparse.RawDescriptionHelpFormatter):
    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, prefix or "Usage: ")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
