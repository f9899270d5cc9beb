import sys
from dataclasses import asdict
from pathlib import Path

import jaxtyping
import pytest
import torch
import yaml

from nestcli.nestmodel import main
from nestmodel import NestConfig, NestModel, load_network
from nestmodel.formats.nemo_archive import write_nemo
from tests.conftest import MessyCorpora
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


@pytest.mark.slow
def test_export_writes_an_onnx_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    # One layer: most of the time goes into tracing, and tests of the format export two.
    write_checkpoint(tmp_path / "last.ckpt", tiny_config(num_layers=1))
    # While a graph is traced, sizes are symbols, which the annotation checks of the tests reject.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        assert main(["export", "last.ckpt", "--to", "onnx", "-o", "out.onnx"]) == 0
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert capfd.readouterr() == ("out.onnx\n", "")
    assert (tmp_path / "out.onnx").is_file()


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
        (["import", "text.nemo"], 1, "text.nemo: neither a .nemo file"),
        (["import", "last.ckpt"], 1, "last.ckpt: exists already"),
        (["export", "last.ckpt"], 2, "--to {nemo"),
        (["export", "last.ckpt", "--to", "keras"], 2, "keras"),
        (["export", "text.nemo", "--to", "onnx"], 1, "text.nemo: neither a .nemo file"),
        (
            ["export", "last.ckpt", "--to", "nemo", "--parts", "encoder"],
            2,
            "parts is 'encoder': the format nemo can hold only 'all'",
        ),
        (["export", "last.ckpt", "--to", "nemo", "-o", "text.nemo"], 1, "text.nemo: exists already"),
    ],
)
def test_invalid_input_is_one_line_with_the_remedy(
    arguments: list[str], code: int, message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.nemo").write_text("text")
    before = checkpoint.read_bytes()
    assert main(arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert sorted(path.name for path in Path().iterdir()) == ["last.ckpt", "text.nemo"]
    assert checkpoint.read_bytes() == before


@pytest.mark.slow
def test_fit_starts_from_the_encoder_of_a_nemo_file_and_reports_the_loaded_weights(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    other = NestModel(tiny_config(num_layers=3))
    write_nemo(tmp_path / "start.nemo", other.config, other.state_dict())
    content = {
        "output": "run",
        "trainer": {"max_steps": 1, "accelerator": "cpu"},
        "model": {"config": {**asdict(CONFIG), "optimizer": {"lr": 1e-9, "warmup_steps": 10}}},
        "data": {"plan": {"max_batch_seconds": 10.0, "microbatches_per_step": 2}, "num_workers": 0},
    }
    del content["model"]["config"]["seed"]
    content["model"]["config"]["features"] = {}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(_plain(content)))
    corpora = (str(messy_corpora.speech), "--noise", str(messy_corpora.noise))
    start = ("--init-from", "start.nemo", "--model.init-parts", "encoder")
    with caplog.at_level("INFO", logger="pytorch_lightning.utilities.rank_zero"):
        assert main(["fit", *corpora, "--config", "tiny.yaml", *start]) == 0
    (line,) = [message for message in caplog.messages if "weights loaded" in message]
    assert line.startswith("start.nemo: ")
    assert "encoder.layers.2.* " in line
    assert " 0 missing" in line
    last = tmp_path / "run/version_0/checkpoints/last.ckpt"
    trained = load_network(last)
    assert set(torch.load(last, weights_only=True)) >= {"nest_config", "state_dict", "optimizer_states"}
    trained_state = {name: value for name, value in trained.state_dict().items() if "running" not in name}
    for name, value in trained_state.items():
        if name.startswith("encoder.") and value.is_floating_point():
            torch.testing.assert_close(value, other.state_dict()[name], rtol=0, atol=1e-6)
    same_decoder = torch.allclose(
        trained.decoder.decoder_layers[0].weight, other.decoder.decoder_layers[0].weight, rtol=0, atol=1e-6
    )
    assert not same_decoder


def test_fit_refuses_a_weight_file_that_does_not_exist(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    corpora = (str(messy_corpora.speech), "--noise", str(messy_corpora.noise))
    assert main(["fit", *corpora, "--config", "demo", "--init-from", "gone.nemo"]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors == ["error: gone.nemo: does not exist. Give a file that exists."]


def _plain(value: object) -> object:
    """Returns the value with tuples as lists, for YAML."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
