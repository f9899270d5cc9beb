"""How this process was started: by Lightning from another rank, or in another way; and whether it is the first rank.

This module imports nothing outside the standard library: a command asks before torch is imported.
"""

import os
from functools import cache

STARTER = "NESTMODEL_STARTER"
"""Environment variable with the process id of the process that starts the other ranks through Lightning. Remove it from
the environment of ranks that this process starts in any other way."""


@cache
def record_launcher() -> str | None:
    """Returns the id of the process that has started this one through Lightning; None if it was started otherwise.

    It must be called before any `fit`, which sets LOCAL_RANK here.
    """
    if "LOCAL_RANK" not in os.environ:
        os.environ[STARTER] = str(os.getpid())  # inherited by the ranks that Lightning starts from here
        return None
    # torchrun may itself run under a process that once started ranks through Lightning.
    is_own = "TORCHELASTIC_RUN_ID" not in os.environ and os.environ.get(STARTER) == str(os.getppid())
    return os.environ[STARTER] if is_own else None


def is_started_by_lightning() -> bool:
    """Returns whether another rank on this machine started this process through Lightning."""
    return record_launcher() is not None


@cache
def local_run_id() -> str:
    """Returns a name shared by all ranks that the same process or launcher started on this machine."""
    starter = record_launcher()
    if starter is not None or os.environ.get(STARTER) == str(os.getpid()):
        return starter or str(os.getpid())
    return f"{os.getppid()}-{os.environ.get('MASTER_PORT', '')}"


def is_first_rank() -> bool:
    """Returns whether this process is rank 0, as far as the environment tells before the ranks connect.

    Ranks are numbered by torchrun (RANK), by SLURM, by MPI, or by Lightning within a node.
    """
    if (rank := os.environ.get("RANK")) is not None:
        return rank == "0"
    names = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
    return all(os.environ.get(name, "0") == "0" for name in names)
