import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from nestcli.nestmodel import main
from nestmodel import NestConfig, NestModel, load_network
from tests.cli.commands import mistake_of
from tests.training import tiny_config

CONFIG = tiny_config()


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a checkpoint as `fit` writes it, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return write_checkpoint(tmp_path / "last.ckpt", CONFIG)


def write_checkpoint(path: Path, config: NestConfig) -> Path:
    torch.save({"nest_config": asdict(config), "state_dict": NestModel(config).state_dict()}, path)
    return path


def states_are_equal(first: Path, second: Path) -> bool:
    one, other = (load_network(path).state_dict() for path in (first, second))
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_export_to_nemo_and_import_keep_the_weights(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "last.ckpt", "--to", "nemo"]) == 0
    assert main(["import", "last.nemo", "-o", "back.ckpt"]) == 0
    assert capsys.readouterr().out.splitlines() == ["last.nemo", "back.ckpt"]
    assert states_are_equal(checkpoint, Path("back.ckpt"))


def test_outputs_are_named_after_the_model(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for to in ("safetensors", "huggingface"):
        assert main(["export", str(checkpoint), "--to", to]) == 0
    assert main(["export", "last.ckpt", "--to", "safetensors", "--parts", "all", "-o", "whole.safetensors"]) == 0
    assert main(["import", "whole.safetensors"]) == 0
    assert capsys.readouterr().out.split() == [
        "last.safetensors",
        "last.huggingface",
        "whole.safetensors",
        "whole.ckpt",
    ]
    assert Path("last.huggingface/config.json").is_file()
    assert states_are_equal(checkpoint, Path("whole.ckpt"))


def test_export_to_onnx_without_its_extra_names_the_extra(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main(["export", "last.ckpt", "--to", "onnx"]) == 2
    assert "pip install 'nest-pretrain[export]'" in capsys.readouterr().err
    assert [path.name for path in checkpoint.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["import", "gone.nemo"], 1, "gone.nemo: does not exist"),
        (["import", "last.ckpt"], 1, "last.ckpt: is the input, and would be replaced"),
        (["export", "last.ckpt", "--to", "keras"], 2, "keras"),
        (
            ["export", "last.ckpt", "--to", "nemo", "--parts", "encoder"],
            2,
            "parts is 'encoder': the format nemo can hold only 'all'",
        ),
        (["export", "last.ckpt", "--to", "nemo", "-o", "text.nemo"], 1, "text.nemo: exists already"),
    ],
)
def test_invalid_input_is_explained(
    arguments: list[str], code: int, message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.nemo").write_text("text")
    before = checkpoint.read_bytes()
    assert main(arguments) == code
    assert message in mistake_of(capsys)
    assert sorted(path.name for path in Path().iterdir()) == ["last.ckpt", "text.nemo"]
    assert checkpoint.read_bytes() == before
