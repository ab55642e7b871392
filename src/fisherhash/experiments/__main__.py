"""``python -m fisherhash.experiments table2 …``: the same as ``fisherhash reproduce``, bare.

For machines that have torch, numpy, Pillow and safetensors and nothing else.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from fisherhash.errors import FisherhashError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    from fisherhash.experiments.specs import SPECS

    made = argparse.ArgumentParser(prog="python -m fisherhash.experiments")
    made.add_argument("target", choices=list(SPECS))
    made.add_argument("--quick", action="store_true", help="frozen features, one seed")
    made.add_argument("--backbone", default="efficientnet-lite0")
    made.add_argument("--weights", help="the backbone's weights file")
    made.add_argument("--image-size", type=int)
    made.add_argument("--out", help="folder for all results")
    made.add_argument("--jobs", type=int, help="processes that share the work")
    made.add_argument("--seeds", type=int)
    made.add_argument("--only", default="", help="data sets, methods, bits, joined by commas")
    made.add_argument("--minutes", type=float, help="start no run after so many")
    made.add_argument("--tune", action="store_true", help="search the hyper-parameters first")
    made.add_argument("--trial-epochs", type=int, help="epochs of a search's trials")
    made.add_argument("--tuning", help="a tuning.json of an earlier search")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the training, equal for all",
    )
    made.add_argument("--rehearse", action="store_true", help="a tiny network on few images")
    made.add_argument("--device")
    way = made.add_mutually_exclusive_group()
    way.add_argument("--finetune", action="store_true", default=None)
    way.add_argument("--frozen", action="store_false", dest="finetune")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run it; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    given = parser().parse_args(arguments)
    # Before torch is loaded: threads that spin while they wait slow each other down.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from fisherhash.experiments.planning import Request, parse_settings
    from fisherhash.experiments.reproduce import reproduce, table_text

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        request = Request(
            target=given.target,
            out=given.out or f"reproduce-{given.target}",
            quick=given.quick,
            backbone=given.backbone,
            weights=given.weights,
            image_size=given.image_size,
            finetune=given.finetune,
            seeds=given.seeds,
            only=[word.strip() for word in given.only.split(",") if word.strip()],
            settings=parse_settings(given.set),
            tune=given.tune,
            trial_epochs=given.trial_epochs,
            tuning_file=given.tuning,
            rehearse=given.rehearse,
            device=given.device,
        )
        outcome = reproduce(request, jobs=given.jobs, minutes=given.minutes, say=say)
    except FisherhashError as error:
        say(f"fisherhash: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted; the same command continues where it stopped")
        return 130
    print(table_text(outcome), end="")
    say(f"{outcome.page}")
    for title, error in outcome.failed.items():
        say(f"failed: {title}: {error}")
    if outcome.left:
        say(f"{outcome.left} runs are left; the same command continues")
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
