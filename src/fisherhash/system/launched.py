"""Which of several processes this one is, where torchrun started them; imports no torch."""

from __future__ import annotations

import os

from fisherhash.errors import UsageError


def launched_rank() -> tuple[int, int]:
    """Return the number of this process and how many ``torchrun`` started; (0, 1) without it."""
    # SLURM and MPI set some of these variables too, but not this one.
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0, 1
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def check_alone(command: str) -> None:
    """Refuse a command that several processes at once would only repeat or disturb."""
    size = launched_rank()[1]
    if size > 1:
        raise UsageError(
            f"torchrun started {size} processes, which only 'fisherhash train' can use; run "
            f"'{command}' without torchrun"
        )
