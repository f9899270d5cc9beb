"""The process of a rank: its exit codes, its signals before training, and the launcher that has started it.

A run computes with exactly the ranks that a launcher has started.

Lightning computes the number of ranks as devices x nodes, and takes the rank of a process and, in some of its parts,
the number of ranks from the launcher. If the two differ, it trains with batches that no rank has loaded, or trains one
model several times. The functions here read environment variables only, so that every rank finds the same mistake.
"""

import contextlib
import ctypes
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

from nestmodel.errors import ConfigError

EXIT_INTERRUPTED = 130
"""Ctrl-C has ended the run."""

EXIT_NOT_SAVED = 74
"""The last checkpoint could not be written: make space, then resume from the one before."""

EXIT_PREEMPTED = 75
"""A scheduler has ended the run: start it again with `--resume`."""

PREEMPTING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals after which a run writes a checkpoint and exits with `EXIT_PREEMPTED`."""

_PR_SET_PDEATHSIG = 1
"""Of Linux's `prctl`."""

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


def launch_id() -> str:
    """Returns what the ranks of one start have in common, by the variables of torchrun and SLURM.

    The step of SLURM is not part of it: torchrun may be started on each node by an srun of its own.
    """
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "MASTER_PORT")
    return "/".join(os.environ.get(name, "") for name in names)


def is_first_rank() -> bool:
    """Returns whether this process is rank 0, as far as the environment tells before the ranks connect.

    Ranks are numbered by torchrun (RANK), by SLURM, or by Lightning within a node.
    """
    if (rank := os.environ.get("RANK")) is not None:
        return rank == "0"
    names = ("SLURM_PROCID", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
    return all(os.environ.get(name, "0") == "0" for name in names)


def leave_on_signals() -> None:
    """Makes `PREEMPTING_SIGNALS` end this process with `EXIT_PREEMPTED`, until training handles them.

    A signal that was ignored before stays ignored. Python runs the handler between two of its own instructions, so a
    process that waits in C++ code exits when that code returns. The system ends a rank that Lightning has started when
    the process that started it has ended.
    """
    if is_started_by_lightning():
        end_with_parent(is_on=True)
    for number in PREEMPTING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave_before_training)


def end_with_parent(*, is_on: bool) -> None:
    """Sets whether the system kills this process when its parent ends; only on Linux.

    The stall guard turns it off when it watches the ranks.
    """
    with contextlib.suppress(AttributeError):  # another system
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if is_on else 0)


def leave_before_training(number: int, _frame: FrameType | None) -> None:
    """Handles a signal that has come before training."""
    if is_first_rank():
        print(f"error: {signal.Signals(number).name} before training; there is nothing to save.", file=sys.stderr)  # noqa: T201
    raise SystemExit(EXIT_PREEMPTED)


Environment = Mapping[str, str]

_INTERACTIVE = ("bash", "interactive")
"""Names of SLURM jobs in which Lightning starts the ranks itself."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Processes that a launcher has started."""

    source: str
    """The environment variable with their number, as messages name it."""

    num_ranks: int
    """Number of processes on all nodes."""

    num_nodes: int | None = None
    """Nodes with equal numbers of processes; None if the launcher does not tell."""

    command: str = ""
    """How to start as many ranks as a run computes with; a format with `devices`, `nodes` and `ranks`."""

    problem: str = ""
    """Why no run can use these processes."""

    own_rank: tuple[str, str] = ("RANK", "LOCAL_RANK")
    """The environment variables with the number of this process among all of them, and on its node."""

    for_lightning: Mapping[str, str] = field(default_factory=dict)
    """Environment variables without which Lightning refuses or overlooks the launcher."""


def find_launch(environment: Environment) -> Launch | None:
    """Returns what a launcher has started, in the order in which Lightning looks for one.

    None if Lightning starts the ranks of this node itself, or if their number is unknown.

    Raises:
        ConfigError: A variable that has to be a number is not a number.
    """
    return _by_torchrun(environment) or _by_slurm(environment) or _by_mpi(environment) or _by_hand(environment)


def take_ranks(launch: Launch, devices: Any, num_nodes: int) -> tuple[Any, int]:
    """Returns `devices` and `num_nodes` of a trainer under a launcher, which replaces a value of `auto`.

    Also sets environment variables that Lightning needs to recognise the launcher.

    Args:
        launch: Result of `find_launch`.
        devices: As the user has given it.
        num_nodes: As the user has given it; 1 is the default, which the launcher replaces.

    Raises:
        ConfigError: No run can use the ranks of the launcher.
    """
    if launch.problem:
        raise ConfigError(launch.problem)
    os.environ.update(launch.for_lightning)
    if devices != "auto" or launch.num_nodes is None:
        return devices, num_nodes
    return launch.num_ranks // launch.num_nodes, launch.num_nodes if num_nodes == 1 else num_nodes


def check_ranks(launch: Launch | None, devices: int, num_nodes: int) -> None:
    """Checks that a run computes with the ranks that a launcher has started.

    Args:
        launch: Result of `find_launch`.
        devices: Ranks on each node with which the run computes.
        num_nodes: Nodes with which the run computes.

    Raises:
        ConfigError: It computes with other ranks.
    """
    if launch is None:
        return
    if launch.problem:
        raise ConfigError(launch.problem)
    num_ranks = devices * num_nodes
    if launch.num_ranks == num_ranks and launch.num_nodes in (None, num_nodes):
        return
    on_nodes = f" on {_counted(launch.num_nodes, 'node')}" if launch.num_nodes is not None else ""
    start = launch.command.format(devices=devices, nodes=num_nodes, ranks=num_ranks)
    raise ConfigError(
        f"{launch.source} is {launch.num_ranks}{on_nodes}, but --devices {devices} x --num-nodes {num_nodes} is "
        f"{_counted(num_ranks, 'rank')}. Leave out trainer.devices and trainer.num_nodes to run on "
        f"{_counted(launch.num_ranks, 'rank')}, or {start}."
    )


def check_start(launch: Launch | None, environment: Environment, devices: int, num_nodes: int) -> None:
    """Makes the check of `check_ranks`, and checks that Lightning can start the ranks if no launcher has.

    Call it before Lightning has started ranks, which changes the environment.

    Args:
        launch: Result of `find_launch`.
        environment: Environment variables.
        devices: Ranks on each node with which the run computes.
        num_nodes: Nodes with which the run computes.

    Raises:
        ConfigError: The run computes with other ranks, or would wait for ranks that nobody starts.
    """
    check_ranks(launch, devices, num_nodes)
    if launch is not None:
        return
    if "LOCAL_RANK" in environment:
        if devices * num_nodes > 1:
            raise ConfigError(
                f"LOCAL_RANK is {environment['LOCAL_RANK']}, so that the run starts no ranks itself, but WORLD_SIZE is "
                f"not set: set it to {devices * num_nodes} if as many ranks are started, or unset LOCAL_RANK."
            )
    elif num_nodes > 1 and {"NODE_RANK", "GROUP_RANK"}.isdisjoint(environment):
        raise ConfigError(
            f"--num-nodes is {num_nodes}, but no launcher has started this process, and NODE_RANK is not set: start it "
            f"by torchrun or srun on {num_nodes} nodes, or set NODE_RANK (0 to {num_nodes - 1}), MASTER_ADDR and "
            "MASTER_PORT on each."
        )


class OwnRank(NamedTuple):
    """Which of the processes of a command this one is."""

    rank: int
    num_ranks: int
    local_rank: int
    """Number of the process among those on its machine."""


def find_own_rank(environment: Environment) -> OwnRank:
    """Returns which of the processes of a launcher this one is; without a launcher, it is the only one.

    Raises:
        ConfigError: The processes do not know their ranks, or a variable that has to be a number is not a number.
    """
    launch = find_launch(environment)
    if launch is None or launch.num_ranks == 1:
        return OwnRank(0, 1, 0)
    if launch.problem:
        raise ConfigError(launch.problem)
    rank, local_rank = (_number(environment, name, least=0) for name in launch.own_rank)
    return OwnRank(rank, launch.num_ranks, local_rank)


def _by_torchrun(environment: Environment) -> Launch | None:
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    num_ranks = _number(environment, "WORLD_SIZE")
    here = _number(environment, "LOCAL_WORLD_SIZE", num_ranks)
    num_nodes = _number(environment, "GROUP_WORLD_SIZE", max(1, num_ranks // here))
    problem = f"WORLD_SIZE of torchrun is {num_ranks}: give torchrun the same --nproc-per-node on all nodes."
    return Launch(
        source="WORLD_SIZE of torchrun",
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        command="start torchrun with --nnodes {nodes} --nproc-per-node {devices}",
        problem=problem if here * num_nodes != num_ranks else "",
    )


def _by_slurm(environment: Environment) -> Launch | None:
    # An interactive step keeps the number of tasks of its job, and runs one.
    name = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environment), None)
    if name is None:
        return None
    num_tasks = _number(environment, name)
    # The batch script of a job also has SLURM_PROCID; a shell of salloc does not.
    by_srun = "SLURM_STEP_ID" in environment or (
        "SLURM_PROCID" in environment and environment.get("ENVIRONMENT") != "BATCH"
    )
    is_interactive = "SLURM_NTASKS" not in environment or environment.get("SLURM_JOB_NAME") in _INTERACTIVE
    if is_interactive and (num_tasks == 1 or not by_srun):
        return None
    unset = "unset SLURM_NTASKS, so that the run starts its ranks itself"
    if not by_srun:
        problem = (
            f"SLURM_NTASKS is {num_tasks}, but srun has not started this process (SLURM_STEP_ID is not set): start it "
            f"by srun, or {unset}."
        )
        command = f"start it by srun --nodes {{nodes}} --ntasks-per-node {{devices}}, or {unset}"
        problem = problem if num_tasks > 1 else ""
        return Launch(source="SLURM_NTASKS", num_ranks=1, num_nodes=1, command=command, problem=problem)
    num_nodes = _number(environment, "SLURM_NNODES", 1)
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    is_uneven = num_tasks % num_nodes > 0 or "," in per_node
    problem = (
        f"SLURM_NTASKS is {num_tasks} on {num_nodes} nodes{f' ({per_node})' if per_node else ''}, which differ: give "
        "srun --ntasks-per-node, so that all nodes have the same number."
    )
    variables = {"SLURM_NTASKS": str(num_tasks), "SLURM_NTASKS_PER_NODE": str(num_tasks // num_nodes)}
    if is_interactive:
        variables["SLURM_JOB_NAME"] = "nestmodel"
    one = f", or {unset}" if num_tasks == 1 else ""
    return Launch(
        source="SLURM_NTASKS",
        num_ranks=num_tasks,
        num_nodes=num_nodes,
        command=f"start srun with --nodes {{nodes}} --ntasks-per-node {{devices}}{one}",
        problem=problem if is_uneven else "",
        own_rank=("SLURM_PROCID", "SLURM_LOCALID"),
        for_lightning=variables,
    )


def _by_mpi(environment: Environment) -> Launch | None:
    """Returns the processes of mpirun or jsrun, each of which would train on its own."""
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE")
    name = next((name for name in names if name in environment), None)
    if name is None or "LOCAL_RANK" in environment or (num_ranks := _number(environment, name)) == 1:
        return None
    problem = f"{name} is {num_ranks}, but ranks are not started by mpirun or jsrun: use torchrun or srun."
    return Launch(source=name, num_ranks=num_ranks, problem=problem)


def _by_hand(environment: Environment) -> Launch | None:
    """Returns ranks that a person or an unknown launcher has started, or Lightning from another rank."""
    if "WORLD_SIZE" not in environment:
        return None
    if "LOCAL_RANK" in environment:
        command = "set WORLD_SIZE to {ranks}, or unset LOCAL_RANK, so that the run starts its ranks itself"
        return Launch(source="WORLD_SIZE", num_ranks=_number(environment, "WORLD_SIZE"), command=command)
    # Without RANK, WORLD_SIZE was left over, and Lightning ignores it. With NODE_RANK, Lightning starts the ranks.
    if "RANK" not in environment or "NODE_RANK" in environment:
        return None
    num_ranks = _number(environment, "WORLD_SIZE")
    problem = (
        f"WORLD_SIZE is {num_ranks} and RANK is {environment['RANK']}, but LOCAL_RANK is not set, so that this process "
        "would train on its own: start it by torchrun, or unset WORLD_SIZE and RANK."
    )
    return Launch(source="WORLD_SIZE", num_ranks=num_ranks, problem=problem) if num_ranks > 1 else None


def _number(environment: Environment, name: str, default: int | None = None, *, least: int = 1) -> int:
    value = environment.get(name)
    if value is None and default is not None:
        return default
    if value is None or not re.fullmatch("0|[1-9][0-9]{0,8}", value) or int(value) < least:
        raise ConfigError(
            f"the environment variable {name} is {'not set' if value is None else repr(value)}, and a launcher sets it "
            f"to a number from {least}: unset the variables of launchers that have not started this process."
        )
    return int(value)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
