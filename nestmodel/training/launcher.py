"""Names of runs and nodes, and the end of the process group."""

import atexit
import os
from functools import cache
from typing import Any

import torch
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from nestmodel.training.startup import local_run_id


@cache
def destroy_process_group_at_exit() -> None:
    """Destroys the process group when the process exits; call it once all collectives of this rank are done.

    Without it, a thread of gloo may outlive the interpreter, and a run that ended well exits with SIGABRT
    (pytorch#179291). It would block in a collective that is still running, so it is not called on a rank that failed.
    """
    atexit.register(_destroy_process_group)


def _destroy_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def node_run_id(cluster_environment: Any) -> str:
    """Returns a name that is shared by the ranks of a run on this node, and by no other run on it at the same time.

    Args:
        cluster_environment: Lightning's, or None without one.
    """
    known = os.environ
    if isinstance(cluster_environment, TorchElasticEnvironment):
        return "-".join(
            known.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        )
    if isinstance(cluster_environment, SLURMEnvironment):
        return "-".join(known.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    return local_run_id()
