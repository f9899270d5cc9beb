import sys
from pathlib import Path

import pytest
import torch

from nestcli.nestmodel import main
from nestmodel import NestNetwork, load_network, save_network
from tests.training import tiny_config


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a checkpoint as `fit` writes it, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return save_network(NestNetwork(tiny_config()), tmp_path / "last.ckpt")


def states_are_equal(first: Path, second: Path) -> bool:
    one, other = (load_network(path).state_dict() for path in (first, second))
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_outputs_are_named_after_the_model_and_imports_keep_the_weights(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(checkpoint), "--to", "huggingface"]) == 0
    assert Path("last.huggingface/config.json").is_file()
    assert main(["export", "last.ckpt", "--to", "nemo"]) == 0
    assert main(["import", "last.nemo", "-o", "back.ckpt"]) == 0
    assert main(["export", "last.ckpt", "--to", "safetensors", "--parts", "all", "-o", "whole.safetensors"]) == 0
    assert main(["import", "whole.safetensors"]) == 0
    outputs = ["last.huggingface", "last.nemo", "back.ckpt", "whole.safetensors", "whole.ckpt"]
    assert capsys.readouterr().out.split() == outputs
    assert states_are_equal(checkpoint, Path("back.ckpt"))
    assert states_are_equal(checkpoint, Path("whole.ckpt"))


def test_export_to_onnx_without_its_extra_names_the_extra(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main(["export", "last.ckpt", "--to", "onnx"]) == 2
    assert "pip install 'nest-pretrain[export]'" in capsys.readouterr().err
    assert [path.name for path in checkpoint.parent.iterdir()] == ["last.ckpt"]
