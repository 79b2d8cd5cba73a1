"""What one process does alone is refused in several: a fit of a table, a choice, a comparison."""

import os
import sys


def told_of_others() -> bool:
    """Whether there are others, by what torchrun puts into the environment."""
    told = [os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK")]
    size, rank = (int(number) if number.isdecimal() else 0 for number in told)
    return size > 1 or rank > 0


def refuse_several_processes() -> None:
    """RuntimeError in a process that is one of several, by torch.distributed or by torchrun."""
    several = told_of_others()
    distributed = sys.modules.get("torch.distributed")  # a fit of a table needs no torch
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        several = several or distributed.get_world_size() > 1
    if several:
        raise RuntimeError(
            "This is one of several processes (torch.distributed, or WORLD_SIZE and RANK as "
            "torchrun sets them), and this works in one: each would release something of its own "
            "from all records, and its ledger would leave the others out. Start one process "
            "without torchrun (make_private and `dpspan train` take several). For several runs "
            "that are released one by one, start each by itself, with WORLD_SIZE and RANK unset."
        )
