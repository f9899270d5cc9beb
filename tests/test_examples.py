"""Runs the programs in examples/."""

import ast
from pathlib import Path

import pytest
import soundfile
import torch

from nestmodel import NestConfig, NestNetwork, save_network
from tests.scripts import load_example

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
