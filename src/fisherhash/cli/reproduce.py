"""The verb reproduce: the paper's tables and figures from one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from fisherhash.cli.base import Flag, Json, Whole, app, print_json, say
from fisherhash.errors import FisherhashError


@app.command
def reproduce(
    target: Literal["table1", "table2", "table3", "figures", "large"],
    *,
    out: Path | None = None,
    quick: Flag = False,
    backbone: str = "efficientnet-lite0",
    weights: Path | None = None,
    image_size: Whole | None = None,
    finetune: Annotated[bool | None, Parameter(negative="--frozen")] = None,
    seeds: Whole | None = None,
    only: str = "",
    jobs: Whole | None = None,
    minutes: float | None = None,
    tune: Flag = False,
    trial_epochs: Whole | None = None,
    tuning: Path | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    rehearse: Flag = False,
    device: str | None = None,
    json: Json = False,
) -> None:
    """Run a table or the figures of the DFH paper on the data that is here.

    Interrupted, the same command continues where it stopped. Where NUS-WIDE or ImageNet100 is not
    on this machine, their stand-ins coco21 and tiny100 are used.

    Parameters
    ----------
    target
        table1 (the parts of DFH), table2 (CIFAR-10 and NUS-WIDE), table3 (ImageNet100), figures, or
        large (CIFAR-10 with 50,000 training images).
    out
        Folder for the runs, the table and the page; by default reproduce-TARGET.
    quick
        Frozen features at 128 px, one seed, few epochs: under 20 minutes on two cores.
    backbone
        As for train; one for all methods.
    weights
        The backbone's weights file.
    image_size
        Side of the images in pixels; 128 by default.
    finetune
        Train the network with the head (the default on CUDA), or only the head on frozen features.
    seeds
        How many; 3 by default, 1 with --quick.
    only
        What to run of it: data sets, methods or rows, and code lengths, joined by commas.
    jobs
        Processes that share the work; by default the number of cores, at most 2, on a CPU with
        frozen features, and 1 otherwise.
    minutes
        Start no run after so many minutes.
    tune
        First search each method's hyper-parameters on held-out training images.
    trial_epochs
        Epochs of the search's trials; by default as many as in the table.
    tuning
        A tuning.json of an earlier search.
    set_
        A setting of the training, NAME=VALUE, equal for all methods; may be given several times.
    rehearse
        A tiny network on few images, to see that everything works.
    device
        cpu, cuda, …
    json
        Print the results as JSON on stdout instead of the table.
    """
    from fisherhash.experiments import reproduce as library
    from fisherhash.experiments.planning import Request, parse_settings

    request = Request(
        target=target,
        out=str(out or f"reproduce-{target}"),
        quick=quick,
        backbone=backbone,
        weights=None if weights is None else str(weights),
        image_size=image_size,
        finetune=finetune,
        seeds=seeds,
        only=[word.strip() for word in only.split(",") if word.strip()],
        settings=parse_settings(set_ or []),
        tune=tune,
        trial_epochs=trial_epochs,
        tuning_file=None if tuning is None else str(tuning),
        rehearse=rehearse,
        device=device,
    )
    outcome = library.reproduce(request, jobs=jobs, minutes=minutes, say=say)
    if json:
        print_json(outcome.results)
    else:
        print(library.table_text(outcome), end="")
    say(f"{outcome.page}")
    if outcome.failed:
        for title, error in outcome.failed.items():
            say(f"failed: {title}: {error}")
        raise FisherhashError(f"{len(outcome.failed)} runs failed; the same command tries again")
    if outcome.left:
        say(f"{outcome.left} runs are left; the same command continues")
