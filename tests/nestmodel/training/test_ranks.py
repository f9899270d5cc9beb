import os
from pathlib import Path
from typing import Any

import pytest
from lightning_fabric.plugins.environments.kubeflow import KubeflowEnvironment
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.strategies import DDPStrategy

from nestmodel.errors import ConfigError
from nestmodel.training.launcher import check_launcher, node_run_id
from nestmodel.training.ranks import check_start, find_launch, find_own_rank, launch_id, take_ranks
from tests.training import trainer

Variables = dict[str, str]
LAUNCHERS = ("SLURM", "TORCHELASTIC", "OMPI", "PMI", "JSM")
OTHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")


def torchrun(world: int, here: int, nodes: int = 1) -> Variables:
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_WORLD_SIZE": str(nodes),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
    }


def job(tasks: int | None, nodes: int = 1, *, name: str = "train", **more: str) -> Variables:
    """Variables of the script of a SLURM job; None is a job without --ntasks."""
    script = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": name, "SLURM_NNODES": str(nodes), "ENVIRONMENT": "BATCH"}
    script |= {f"SLURM_{name}": "0" for name in ("PROCID", "LOCALID", "NODEID")}
    return {**script, **({} if tasks is None else {"SLURM_NTASKS": str(tasks)}), **more}


def srun(tasks: int, nodes: int = 1, per_node: str = "", **more: str) -> Variables:
    """Variables of a task, as srun sets them in SLURM 22.05."""
    per_node = per_node or f"{tasks // nodes}" + (f"(x{nodes})" if nodes > 1 else "")
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_TASKS_PER_NODE": per_node}
    return {**job(tasks, nodes), **step, **more}


def shell(tasks: int, name: str) -> Variables:
    """Variables of a shell that salloc has started: it is no task."""
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": name, "SLURM_NTASKS": str(tasks), "SLURM_NNODES": "1"}


NTASKS_1 = {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train"}

TABLE: list[tuple[str, Variables, int, int, str]] = [
    # launcher, its variables, devices, nodes, and the start of the error, or "" if the run may start
    ("none", {}, 1, 1, ""),
    ("none", {}, 2, 2, "--num-nodes is 2, but no launcher has started this process, and NODE_RANK is not set"),
    ("none", {"NODE_RANK": "1"}, 2, 2, ""),
    ("a left WORLD_SIZE", {"WORLD_SIZE": "4"}, 1, 1, ""),
    ("pods", {"WORLD_SIZE": "2", "RANK": "0"}, 1, 1, "WORLD_SIZE is 2 and RANK is 0, but LOCAL_RANK is not set"),
    ("pods with numbers", {"WORLD_SIZE": "2", "RANK": "1", "NODE_RANK": "1"}, 8, 2, ""),
    ("by hand", {"WORLD_SIZE": "4", "LOCAL_RANK": "0", "NODE_RANK": "0"}, 2, 2, ""),
    ("by hand", {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, 1, 1, "WORLD_SIZE is 2, but --devices 1 x --num-nodes 1 is 1"),
    ("by hand", {"WORLD_SIZE": "two", "LOCAL_RANK": "0"}, 2, 1, "the environment variable WORLD_SIZE is 'two'"),
    ("by hand", {"LOCAL_RANK": "0"}, 1, 1, ""),
    ("by hand", {"LOCAL_RANK": "0"}, 2, 1, "LOCAL_RANK is 0, so that the run starts no ranks itself, but WORLD_SIZE"),
    ("torchrun", torchrun(16, 8, 2), 8, 2, ""),
    ("torchrun", torchrun(2, 2), 1, 1, "WORLD_SIZE of torchrun is 2 on 1 node, but --devices 1 x --num-nodes 1 is 1"),
    ("torchrun", torchrun(16, 8, 2), 8, 1, "WORLD_SIZE of torchrun is 16 on 2 nodes, but --devices 8 x --num-nodes 1"),
    ("torchrun", torchrun(3, 1, 2), 1, 3, "WORLD_SIZE of torchrun is 3: give torchrun the same"),
    ("torchrun", {"TORCHELASTIC_RUN_ID": "none"}, 1, 1, "the environment variable WORLD_SIZE is not set"),
    ("torchrun in a job", {**job(1), **torchrun(2, 2)}, 2, 1, ""),
    ("torchrun in a job", {**job(4, 2), **torchrun(2, 2)}, 4, 2, "WORLD_SIZE of torchrun is 2 on 1 node"),
    ("torchrun in a task", {**srun(2, 2), **torchrun(16, 8, 2)}, 8, 2, ""),
    ("srun", srun(2), 2, 1, ""),
    ("srun", srun(4, 2), 2, 2, ""),
    ("srun", srun(1), 2, 1, "SLURM_NTASKS is 1 on 1 node, but --devices 2 x --num-nodes 1 is 2 ranks"),
    ("srun", srun(1, SLURM_NTASKS_PER_NODE="8"), 8, 1, "SLURM_NTASKS is 1 on 1 node, but --devices 8 x --num-nodes 1"),
    ("srun", srun(4, 2), 4, 1, "SLURM_NTASKS is 4 on 2 nodes, but --devices 4 x --num-nodes 1 is 4 ranks"),
    ("srun", srun(3, 2, "2,1"), 2, 2, "SLURM_NTASKS is 3 on 2 nodes (2,1), which differ: give srun --ntasks-per-node"),
    ("srun bash", srun(2, SLURM_JOB_NAME="bash"), 2, 1, ""),
    ("srun --pty bash", srun(1, SLURM_JOB_NAME="bash"), 8, 1, ""),
    ("without a step id", NTASKS_1, 2, 1, "SLURM_NTASKS is 1 on 1 node, but --devices 2 x --num-nodes 1 is 2 ranks"),
    ("sbatch", job(None), 8, 1, ""),
    ("sbatch", job(None, 2), 8, 2, "--num-nodes is 2, but no launcher has started this process"),
    ("sbatch", job(1), 2, 1, "SLURM_NTASKS is 1 on 1 node, but --devices 2 x --num-nodes 1 is 2 ranks"),
    ("sbatch", job(2), 2, 1, "SLURM_NTASKS is 2, but srun has not started this process (SLURM_STEP_ID is not set)"),
    ("sbatch", job(2, name="interactive"), 2, 1, ""),
    ("mpirun", {"OMPI_COMM_WORLD_SIZE": "2"}, 1, 1, "OMPI_COMM_WORLD_SIZE is 2, but ranks are not started by mpirun"),
    ("mpirun -n 1", {"OMPI_COMM_WORLD_SIZE": "1"}, 2, 1, ""),
    ("torchrun by mpirun", torchrun(2, 2) | {"OMPI_COMM_WORLD_SIZE": "4"}, 2, 1, ""),
    ("salloc", shell(2, "interactive"), 2, 1, ""),
    ("salloc", shell(2, "train"), 2, 1, "SLURM_NTASKS is 2, but srun has not started this process"),
]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(LAUNCHERS) or name in OTHERS:
            monkeypatch.delenv(name)


@pytest.mark.parametrize(("launcher", "variables", "devices", "nodes", "error"), TABLE)
def test_a_run_starts_only_with_the_ranks_that_were_started(
    launcher: str, variables: Variables, devices: int, nodes: int, error: str
) -> None:
    if not error:
        check_start(find_launch(variables), variables, devices, nodes)
        return
    with pytest.raises(ConfigError) as raised:
        check_start(find_launch(variables), variables, devices, nodes)
    assert str(raised.value).startswith(error), launcher
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("variables", "given", "taken"),
    [
        (torchrun(16, 8, 2), ("auto", 1), (8, 2)),
        (torchrun(16, 8, 2), ("auto", 3), (8, 3)),
        (torchrun(2, 2), (4, 1), (4, 1)),
        (srun(4, 2), ("auto", 1), (2, 2)),
        (srun(2, SLURM_JOB_NAME="bash"), ("auto", 1), (2, 1)),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, ("auto", 1), ("auto", 1)),
    ],
)
def test_a_run_takes_the_ranks_of_its_launcher_unless_devices_are_given(
    variables: Variables, given: tuple[Any, int], taken: tuple[Any, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, **variables})
    launch = find_launch(os.environ)
    assert launch is not None
    assert take_ranks(launch, *given) == taken


@pytest.mark.parametrize(
    ("variables", "changed"),
    [
        (srun(4, 2), {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}),
        (srun(1, SLURM_NTASKS_PER_NODE="8"), {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"}),
        (
            srun(2, SLURM_JOB_NAME="bash"),
            {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "nestmodel"},
        ),
    ],
)
def test_lightning_finds_the_tasks_of_srun(
    variables: Variables, changed: Variables, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**os.environ, **variables}
    monkeypatch.setattr(os, "environ", environment)
    launch = find_launch(environment)
    assert launch is not None
    take_ranks(launch, "auto", 1)
    assert {name: value for name, value in environment.items() if variables.get(name, value) != value} | {
        name: environment[name] for name in changed
    } == changed


@pytest.mark.parametrize(
    ("variables", "own"),
    [
        ({}, (0, 1, 0)),
        ({"WORLD_SIZE": "4"}, (0, 1, 0)),
        (job(8), (0, 1, 0)),
        (srun(1), (0, 1, 0)),
        ({**torchrun(4, 2, 2), "RANK": "3", "LOCAL_RANK": "1"}, (3, 4, 1)),
        ({**srun(8, 2), "SLURM_PROCID": "6", "SLURM_LOCALID": "2"}, (6, 8, 2)),
        ({"WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "0"}, (2, 3, 0)),
    ],
)
def test_a_process_knows_its_rank_from_its_launcher(variables: Variables, own: tuple[int, int, int]) -> None:
    assert find_own_rank(variables) == own


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "3", "LOCAL_RANK": "0"}, "RANK is not set"),
        (
            {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "RANK": "-1"},
            "RANK is '-1', and a .* number from 0",
        ),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is 2"),
    ],
)
def test_processes_that_do_not_know_their_ranks_are_refused(variables: Variables, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_own_rank(variables)


def test_a_trainer_of_another_number_of_ranks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path, devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
    check_launcher(made)
    for name, value in torchrun(4, 4).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="WORLD_SIZE of torchrun is 4 on 1 node, but --devices 2"):
        check_launcher(made)


def test_a_launcher_that_the_user_has_given_to_lightning_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    made = trainer(tmp_path, num_nodes=2, strategy="ddp", plugins=[KubeflowEnvironment()])
    check_launcher(made)


def test_nodes_of_one_start_agree_whatever_step_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found, of_node = set(), set()
    for step in ("0", "1"):  # torchrun may be started on each node by an srun of its own
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_STEP_ID", step)
        found.add(launch_id())
        of_node.add(node_run_id(SLURMEnvironment()))
    assert (len(found), len(of_node)) == (1, 2)
