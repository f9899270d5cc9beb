"""Runs the programs in examples/."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from nestcli.nestmodel import main
from nestmodel import ClassConfig, NestConfig, NestNetwork, RunConfig, load_network, save_network
from tests.extras import needs
from tests.scripts import load_example, load_script
from tests.synthesis import read_audio

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").rglob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_use_only_public_names(path: Path) -> None:
    imported = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    modules = {node.module for node in imported if str(node.module).startswith("nest")}
    assert modules <= {"nestdata", "nestmodel", "nestguard"}


@pytest.mark.slow
def test_the_training_loop_example_lowers_the_loss() -> None:
    torch.manual_seed(0)
    losses = load_example("training_loop").main(num_steps=12)
    assert len(losses) == 12
    assert sum(losses[-3:]) < sum(losses[:3])


def test_the_live_example_gives_the_frames_of_the_whole_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = NestNetwork(NestConfig.preset("demo", "streaming")).eval()
    save_network(network, tmp_path / "live.ckpt")
    audio = 0.1 * torch.randn(30000)
    soundfile.write(tmp_path / "a.wav", audio.numpy(), 16000, subtype="FLOAT")
    num_frames = load_example("live_frames").main(
        [str(tmp_path / "live.ckpt"), str(tmp_path / "a.wav"), "--context", "70,1"]
    )
    whole = network.encoder(*network.features(audio.unsqueeze(0), torch.tensor([30000])))
    assert num_frames == whole.lens.item()


EXAMPLES = Path(__file__).parents[1] / "examples"
SPEECH = sorted((EXAMPLES.parent / "manifests/demo/speech").glob("*.flac"))[:4]

needs_transformers = needs("finetune", "transformers")


def padded(signals: list[np.ndarray[Any, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns signals as a batch with zeros behind the shorter ones, and their lengths."""
    lens = torch.tensor([len(signal) for signal in signals])
    audio = torch.zeros(len(signals), int(lens.max()))
    for row, signal in zip(audio, signals, strict=True):
        row[: len(signal)] = torch.from_numpy(signal)
    return audio, lens


@pytest.fixture
def speech() -> list[np.ndarray[Any, Any]]:
    return [read_audio(path) for path in SPEECH]


@pytest.fixture
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("own_encoder", "continue_w2v_bert"):
        monkeypatch.syspath_prepend(EXAMPLES / name)


@pytest.fixture
def small_models(tmp_path: Path) -> dict[str, Path]:
    """Returns folders of small models of transformers, by the class of the example that reads them."""
    from transformers import Wav2Vec2BertConfig, Wav2Vec2BertModel, Wav2Vec2Config, Wav2Vec2Model

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "conv_dim": (16,) * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    }
    torch.manual_seed(0)
    Wav2Vec2BertModel(Wav2Vec2BertConfig(**sizes)).save_pretrained(tmp_path / "W2vBert")
    Wav2Vec2Model(Wav2Vec2Config(**sizes)).save_pretrained(tmp_path / "Wav2Vec2")
    return {name: tmp_path / name for name in ("W2vBert", "Wav2Vec2")}


def settings_of(folder: str, file: str) -> NestConfig:
    """Returns the model of the demo preset with the settings of an example."""
    return RunConfig.read(["demo", EXAMPLES / folder / file]).model.config


@pytest.mark.usefixtures("examples_on_path")
def test_the_frames_of_the_transformer_do_not_depend_on_padding(speech: list[np.ndarray[Any, Any]]) -> None:
    network = NestNetwork(settings_of("own_encoder", "own_encoder.yaml")).eval()
    with torch.no_grad():
        states, lens = network.encoder.hidden_states(*network.read_features(*padded(speech)))
        assert len(states) == network.encoder.num_layers + 1
        for row, signal in enumerate(speech):
            alone, (length,) = network.encoder.hidden_states(*network.read_features(*padded([signal])))
            assert length == lens[row]
            for state, of_signal in zip(states, alone, strict=True):
                torch.testing.assert_close(state[row, :length], of_signal[0, :length], atol=1e-4, rtol=1e-4)


@needs_transformers
@pytest.mark.usefixtures("examples_on_path")
@pytest.mark.parametrize("name", ["W2vBert", "Wav2Vec2"])
def test_an_encoder_of_transformers_computes_what_transformers_computes(
    name: str, small_models: dict[str, Path], speech: list[np.ndarray[Any, Any]], tmp_path: Path
) -> None:
    from transformers import AutoModel, SeamlessM4TFeatureExtractor, Wav2Vec2FeatureExtractor

    encoder = ClassConfig(class_path=f"encoders.{name}", init_args={"name": str(small_models[name])})
    network = NestNetwork(replace(settings_of("continue_w2v_bert", "continue.yaml"), encoder=encoder))
    with torch.no_grad():
        for parameter in network.encoder.parameters():  # as after training
            parameter += 0.01 * torch.randn_like(parameter)
    checkpoint = save_network(network.eval(), tmp_path / "model.ckpt")
    saved = load_script(EXAMPLES / "continue_w2v_bert" / "save.py").main([str(checkpoint), str(tmp_path / "saved")])
    extractors = {
        "W2vBert": SeamlessM4TFeatureExtractor(),
        "Wav2Vec2": Wav2Vec2FeatureExtractor(return_attention_mask=True),
    }
    inputs = extractors[name](speech, sampling_rate=16000, return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = AutoModel.from_pretrained(saved).eval()(**inputs).last_hidden_state
        frames, lens = load_network(checkpoint).encoder(*network.read_features(*padded(speech)))
    for row, length in enumerate(lens.tolist()):
        torch.testing.assert_close(frames[row, :length], expected[row, :length], atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("examples_on_path")
def test_every_command_takes_a_model_with_an_encoder_of_ones_own(
    demo_speech: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ["--config", "demo", "--config", str(EXAMPLES / "own_encoder" / "own_encoder.yaml")]
    run = [str(demo_speech), *config, "--accelerator", "cpu", "-o", "run"]
    assert main(["fit", *run, "--max-steps", "2", "--val-corpus", str(demo_speech)]) == 0
    checkpoint = "run/version_0/checkpoints/last.ckpt"
    assert main(["fit", *run, "--max-steps", "3", "--val-corpus", str(demo_speech), "--resume"]) == 0
    assert main(["validate", *run, "--val-corpus", str(demo_speech), "--ckpt-path", checkpoint]) == 0
    assert main(["preflight", *run]) == 0
    assert main(["preflight", *run, "--find-budget", "--memory-limit", "2GiB"]) == 0
    assert main(["features", checkpoint, str(demo_speech), "-o", "all.features", "--layers", "all"]) == 0
    assert np.load(next(Path("all.features/features").rglob("*.npy"))).shape[::2] == (5, 144)
    assert main(["export", checkpoint, "--to", "safetensors", "-o", "model.safetensors"]) == 0
    assert main(["average", checkpoint, "-o", "mean.ckpt"]) == 0
    capsys.readouterr()
    assert main(["export", checkpoint, "--to", "huggingface"]) == 2
    assert "SmallTransformer" in capsys.readouterr().err
