"""``python -m fisherhash.experiments table2 …``: ``fisherhash reproduce`` on a bare machine.

Needs torch, numpy, Pillow and safetensors only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fisherhash.errors import FisherhashError
from fisherhash.experiments.request import exit_code, parse_request, say_line
from fisherhash.system.launched import check_alone

if TYPE_CHECKING:
    from fisherhash.experiments.reproduce import Outcome


def run_command(words: Sequence[str], *, command: str) -> None:
    """Parse a request, carry it out and print its table."""
    check_alone(command)
    request, as_json = parse_request(words, command=command)
    from fisherhash.experiments.reproduce import reproduce

    print_outcome(reproduce(request, say=say_line), as_json=as_json)


def print_outcome(outcome: Outcome, *, as_json: bool) -> None:
    """Print the table or the JSON on stdout, and on stderr where it is and what is missing.

    Raises:
        FisherhashError: some runs failed.
    """
    text = json.dumps(outcome.results, indent=2, ensure_ascii=False) + "\n"
    print(text if as_json else outcome.table, end="")
    say_line(str(outcome.page))
    for title, error in outcome.failed.items():
        say_line(f"failed: {title}: {error}")
    if outcome.failed:
        raise FisherhashError(f"{len(outcome.failed)} runs failed; the same command retries them")
    if outcome.left:
        say_line(f"{outcome.left} runs are left; the same command continues")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    # Before torch is loaded: threads that spin while they wait slow each other down.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words = sys.argv[1:] if words is None else words
    return exit_code(lambda: run_command(words, command="python -m fisherhash.experiments"))


if __name__ == "__main__":
    sys.exit(main())
