import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy

from nestmodel.errors import TrainingError
from nestmodel.training import launcher
from nestmodel.training.launcher import check_main_address
from tests.training import trainer

REPOSITORY = Path(__file__).parents[3]


class Resolver:
    """Replaces the resolver by one that knows a name only from its last call on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_failures: float) -> None:
        self.names: list[str] = []
        self.num_failures = num_failures
        monkeypatch.setattr(socket, "getaddrinfo", self.resolve)
        monkeypatch.setattr(launcher, "_RETRY_S", 0.0)

    def resolve(self, name: str, *_: Any) -> list[Any]:
        self.names.append(name)
        if len(self.names) <= self.num_failures:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []


def check(directory: Path, environment: ClusterEnvironment, num_ranks: int = 2) -> None:
    strategy = DDPStrategy(process_group_backend="gloo", cluster_environment=environment) if num_ranks > 1 else "auto"
    check_main_address(trainer(directory, devices=num_ranks, strategy=strategy))


@pytest.mark.parametrize(
    ("environment", "variable", "value"),
    [
        (LightningEnvironment(), "MASTER_ADDR", "gpu-a"),
        (TorchElasticEnvironment(), "MASTER_ADDR", "gpu-a"),
        (SLURMEnvironment(), "SLURM_NODELIST", "gpu-[a,b]"),
    ],
)
def test_an_unknown_name_of_node_0_is_one_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: ClusterEnvironment,
    variable: str,
    value: str,
) -> None:
    monkeypatch.setattr(launcher, "_RESOLVE_S", 0.0)
    Resolver(monkeypatch, num_failures=float("inf"))
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "")
    monkeypatch.delenv("MASTER_ADDR")  # restored at the end: Lightning sets it
    monkeypatch.setenv(variable, value)
    with pytest.raises(TrainingError) as raised:
        check(tmp_path, environment)
    message = str(raised.value)
    assert message.startswith(f"the name of node 0, 'gpu-a', cannot be resolved on {socket.gethostname()} within 0 s (")
    assert "Give a name that every node can resolve, or the address of node 0" in message


def test_a_name_that_becomes_known_soon_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "gpu-a")
    resolver = Resolver(monkeypatch, num_failures=3)
    check(tmp_path, LightningEnvironment())
    assert resolver.names == ["gpu-a"] * 4


def test_a_single_rank_needs_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "gpu-a")
    resolver = Resolver(monkeypatch, num_failures=1)
    check(tmp_path, LightningEnvironment(), num_ranks=1)
    assert resolver.names == []


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_rank_that_has_finished_destroys_the_process_group_at_exit(tmp_path: Path) -> None:
    code = f"""
import atexit, torch
from nestmodel import NestModel
from tests.training import tiny_config
atexit.register(lambda: print(torch.distributed.is_initialized()))  # runs after all that is registered later
torch.distributed.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
NestModel(tiny_config()).teardown("fit")
"""
    output = subprocess.check_output([sys.executable, "-c", code], cwd=REPOSITORY, text=True)
    assert output == "False\n"
