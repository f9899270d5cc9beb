"""Id of a run on one node, and destruction of the process group at exit."""

import atexit
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from nestmodel.training.startup import local_run_id


@cache
def destroy_process_group_at_exit() -> None:
    """Destroys the process group when the process exits; call it once all collectives of this rank are done.

    Without this call, a thread of gloo may outlive the interpreter, and a successful run ends with SIGABRT
    (pytorch#179291). Destruction blocks while a collective is still running, so do not call it on a rank that failed.
    """
    atexit.register(_destroy_process_group)


def _destroy_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def node_run_id(cluster_environment: Any) -> str:
    """Returns an id of this run that its ranks on this node share, and that no concurrent run on the node has.

    Args:
        cluster_environment: Lightning's cluster environment; None if the strategy has none.
    """
    if isinstance(cluster_environment, TorchElasticEnvironment):
        return "-".join(
            os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        )
    if isinstance(cluster_environment, SLURMEnvironment):
        return "-".join(os.environ.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    # A container that shares /dev/shm may have the same process id in its own namespace.
    namespace = Path("/proc/self/ns/pid")
    return f"{local_run_id()}-{namespace.stat().st_ino if namespace.exists() else ''}"
