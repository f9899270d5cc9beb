"""How this process was started: as a command, by a launcher, or by Lightning from another rank.

This module imports nothing outside the standard library, as `startup` needs it before torch is imported.
"""

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

STARTER = "NESTMODEL_STARTER"
"""Environment variable with the process id of the launching process, which starts the other ranks through Lightning.
Remove it from the environment of ranks that this process starts in any other way."""


class _Origin(NamedTuple):
    run_id: str
    is_started_by_lightning: bool


@cache
def _origin() -> _Origin:
    """Returns how this process was started. Cached at the first call, because Lightning later sets LOCAL_RANK here."""
    if "LOCAL_RANK" not in os.environ:
        os.environ[STARTER] = str(os.getpid())  # inherited by the ranks that Lightning starts from here
        return _Origin(str(os.getpid()), False)
    # torchrun may itself run under a process that once started ranks through Lightning.
    starter = None if "TORCHELASTIC_RUN_ID" in os.environ else os.environ.get(STARTER)
    if starter is not None and (int(starter) == os.getppid() or not _is_running(int(starter))):
        return _Origin(starter, True)
    return _Origin(f"{os.getppid()}-{os.environ.get('MASTER_PORT', '')}", False)


def record_launcher() -> None:
    """Records how this process was started. Must be called before any `fit`, which changes the environment."""
    _origin()


def is_started_by_lightning() -> bool:
    """Returns whether another rank on this machine started this process through Lightning."""
    return _origin().is_started_by_lightning


def local_run_id() -> str:
    """Returns a name shared by all ranks that the same process or launcher started on this machine."""
    return _origin().run_id


def is_first_rank() -> bool:
    """Returns whether this process is rank 0, as far as the environment tells before the ranks connect.

    Ranks are numbered by torchrun (RANK), by SLURM, by MPI, or by Lightning within a node.
    """
    if (rank := os.environ.get("RANK")) is not None:
        return rank == "0"
    names = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
    return all(os.environ.get(name, "0") == "0" for name in names)


def _is_running(pid: int) -> bool:
    """Returns whether a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user, or a system without /proc
        return True
    return stat.rpartition(")")[2].split()[0] != "Z"
