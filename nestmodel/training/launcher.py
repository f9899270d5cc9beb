"""The process group of a run: the name of node 0, what a deterministic run sets before it starts, and its end at exit.

Lightning's `trainer.deterministic: true` makes torch use deterministic kernels, or raise an error where there is none.
It does not select the algorithm of NCCL, and it makes torch fill every new tensor, which costs time:
`prepare_deterministic` does the rest. Environment variables have to be set before CUDA and the process group start;
ranks that are started from this process inherit them.
"""

import atexit
import os
import socket
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from nestmodel.errors import ConfigError, TrainingError
from nestmodel.training.lightning_private import finds_launcher
from nestmodel.training.ranks import check_ranks, find_launch, is_started_by_lightning, launch_id, local_run_id

_RESOLVE_S = 10.0
"""Time for which the name of node 0 may be unknown, in seconds.

A machine of a cloud starts programs before its network and its name server are ready, or before the name server knows
a new node. A misspelled name should not take longer than a misspelled path.
"""

_RETRY_S = 1.0


class AgreedExit(SystemExit):
    """The run exits on all ranks after the same step, as they have agreed."""

    def __init__(self, code: int) -> None:
        destroy_process_group_at_exit()
        # Lightning kills the rank that started the others as soon as one of them exits with another code than 0.
        super().__init__(0 if is_started_by_lightning() else code)


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
        return launch_id()
    if isinstance(cluster_environment, SLURMEnvironment):
        return f"{launch_id()}/{os.environ.get('SLURM_STEP_ID', '')}"  # two steps of a job may share a node
    # A container that shares /dev/shm may have the same process id in its own namespace.
    namespace = Path("/proc/self/ns/pid")
    return f"{local_run_id()}-{namespace.stat().st_ino if namespace.exists() else ''}"


def check_launcher(trainer: pl.Trainer) -> None:
    """Checks that a trainer computes with the ranks that a launcher has started, if Lightning detects the launcher.

    Raises:
        ConfigError: It computes with other ranks.
    """
    if finds_launcher(trainer):
        check_ranks(find_launch(os.environ), trainer.num_devices, trainer.num_nodes)


def check_main_address(trainer: pl.Trainer) -> None:
    """Waits until the name of node 0 can be resolved, before several ranks connect to each other there.

    torch itself would try for the timeout of the process group, and print a warning and a traceback for each try.

    Raises:
        TrainingError: The name cannot be resolved for ten seconds.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None or trainer.num_devices * trainer.num_nodes == 1:
        return
    name, deadline = environment.main_address, time.monotonic() + _RESOLVE_S
    while True:
        try:
            socket.getaddrinfo(name, None)
            return
        except (OSError, UnicodeError) as error:  # UnicodeError: for example, a part of the name is too long
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"the name of node 0, {name!r}, cannot be resolved on {socket.gethostname()} within {_RESOLVE_S:g} "
                    f"s ({getattr(error, 'strerror', error)}). Give a name that every node can resolve, or the address "
                    "of node 0, by MASTER_ADDR or torchrun's --master-addr and --local-addr."
                ) from error
        time.sleep(_RETRY_S)


_CUBLAS, _NCCL = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"

REQUIRED = {_CUBLAS: ":4096:8", _NCCL: "Ring"}
"""Environment variables of the deterministic mode and the values that Lightning and this module set.

Sources: the documentation of reproducible results in cuBLAS, and of NCCL_ALGO in NCCL. If several algorithms are
allowed, NCCL may reduce within switches (NVLS), in an order of its own."""


def prepare_deterministic() -> None:
    """Sets the environment of the deterministic mode, and keeps torch from filling new tensors.

    Call it before a trainer with `deterministic=True` is built; `nestmodel fit` does. It changes nothing on a CPU.

    Raises:
        ConfigError: A variable has another value, which would be overwritten or might not give equal bits.
    """
    for name, required in REQUIRED.items():
        if os.environ.get(name, required).casefold() != required.casefold():
            raise ConfigError(
                f"trainer.deterministic needs {name}={required}, but the environment sets it to "
                f"{os.environ[name]!r}. Unset {name}, or turn trainer.deterministic off."
            )
    for name, required in REQUIRED.items():
        os.environ.setdefault(name, required)
    # All our results are written before they are read, so there is no uninitialised memory whose value could matter.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by a property


def determinism() -> bool:
    """Returns whether torch uses deterministic algorithms, and fails where there is none."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
