"""Every command applies the rule of ranks, with environment variables of launchers."""

import os
from pathlib import Path

import pytest
import yaml

from nestcli import program
from nestcli.nestmodel import main
from nestmodel import NestNetwork, save_network
from nestmodel.errors import ConfigError
from nestmodel.training.module import check_precision
from tests.cli.commands import error_of
from tests.conftest import MessyCorpora
from tests.training import TINY, tiny_config

TASK = {"SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}
TASK |= {f"SLURM_{name}": "0" for name in ("PROCID", "LOCALID", "NODEID")}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of this process, without a launcher."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in names and not name.startswith("SLURM")}
    monkeypatch.setattr(os, "environ", kept)
    return kept


def arguments(corpora: MessyCorpora, directory: Path) -> list[str]:
    (directory / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return [str(corpora.speech), "--config", "tiny.yaml", "-o", "run", "--val-corpus", str(corpora.windows)]


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_other_ranks_than_those_of_the_launcher_are_one_line_before_anything_is_written(
    command: str,
    messy_corpora: MessyCorpora,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    environment |= TASK
    save_network(NestNetwork(tiny_config()), tmp_path / "last.ckpt")
    start = ["--ckpt-path", "last.ckpt"] if command == "validate" else []
    assert main([command, *arguments(messy_corpora, tmp_path), "--devices", "2", *start]) == 2
    line = error_of(capsys)
    assert "SLURM_NTASKS is 1 on 1 node, but --devices 2 x --num-nodes 1 is 2 ranks" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "tiny.yaml"]


def test_of_a_mistake_of_all_ranks_the_first_says_so_first(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(program.time, "sleep", waits.append)
    monkeypatch.chdir(tmp_path)
    environment |= {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    environment["RANK"] = "0"
    command = ["features", "last.ckpt", "talks", "-o", "talks.features", "--devices", "2"]
    assert main(command) == 2
    assert error_of(capsys).startswith("error: --devices is 2, but a launcher has started 2 processes")
    environment["RANK"] = "1"
    assert main(command) == 2
    assert error_of(capsys).startswith("error: another rank than the first: --devices is 2")
    assert waits == [10.0]  # in which a launcher ends it, after the first one
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("devices", "variables", "message"),
    [
        ("0", {}, "devices is 0"),
        ("1", {"WORLD_SIZE": "4", "LOCAL_RANK": "1"}, "the environment variable RANK is not set"),
        ("1", {"OMPI_COMM_WORLD_SIZE": "4"}, "use torchrun or srun"),
    ],
)
def test_ranks_that_features_cannot_use_are_one_line(
    devices: str,
    variables: dict[str, str],
    message: str,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(program.time, "sleep", lambda _: None)
    environment |= variables
    assert main(["features", "model.ckpt", "speech", "-o", str(tmp_path / "f"), "--devices", devices]) == 2
    assert message in error_of(capsys)
    assert list(tmp_path.iterdir()) == []


PRECISIONS = {"32-true": True, "bf16-mixed": True, "16": True, "bf16-true": False, "64": False}


@pytest.mark.parametrize(("precision", "is_supported"), PRECISIONS.items())
def test_a_precision_is_supported_if_its_weights_are_float32(precision: str, is_supported: bool) -> None:
    for value in [precision, *([int(precision)] if precision.isdigit() else [])]:
        if is_supported:
            check_precision(value)
            continue
        with pytest.raises(ConfigError, match=f"trainer.precision is {precision}, .* bf16-mixed or 16-mixed.*32-true"):
            check_precision(value)
    check_precision(None)


@pytest.mark.parametrize("command", ["fit", "preflight"])
def test_a_precision_that_is_not_supported_is_one_line_before_anything_is_written(
    command: str,
    messy_corpora: MessyCorpora,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, *arguments(messy_corpora, tmp_path), "--precision", "bf16-true"]) == 2
    assert "trainer.precision is bf16-true, " in error_of(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]
