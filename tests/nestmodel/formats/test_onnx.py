import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F

from nestmodel import ConfigError, FeatureConfig, NestConfig, NestNetwork, export_model
from nestmodel.formats.onnx import _TracedFeatures
from nestmodel.nn.features import LogMelFeatures
from tests.nestmodel.networks import CAUSAL, with_statistics
from tests.training import tiny_config

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.slow
DEMO = Path(__file__).parents[3] / "manifests" / "demo"
TINY = tiny_config()
CONFIGS = {  # of one layer if that is enough: most of the time goes into tracing layers
    "tiny": TINY,
    "no biases, no scaling, layer norm, by four, checkpoints": tiny_config(
        num_layers=1,
        use_bias=False,
        xscaling=False,
        conv_norm="layer_norm",
        subsampling_factor=4,
        checkpoint_activations=True,
    ),
    "chunks, causal": tiny_config(num_layers=1, att_context_size=((6, 2),), **CAUSAL),
}


@pytest.fixture(scope="module", autouse=True)
def _without_checks_of_annotations() -> Iterator[None]:
    """While a graph is traced, sizes are symbols, which the annotation checks of the tests reject."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The exported graph of each configuration."""
    directory = tmp_path_factory.mktemp("graphs")
    for name, config in CONFIGS.items():
        network = with_statistics(NestNetwork(config)).train()
        export_model(network, "onnx", directory / f"{name}.onnx")
        assert network.training
    return {name: directory / f"{name}.onnx" for name in CONFIGS}


def speech(*audio_lens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Utterances of the demo corpus, cut to these numbers of samples; what follows in a batch is noise, not zeros."""
    paths = sorted((DEMO / "speech").glob("*_04.flac"))  # of 4 to 14 s
    lens = torch.tensor(audio_lens)
    audio = torch.rand(len(lens), int(lens.max()), generator=torch.Generator().manual_seed(2)) - 0.5
    for row, path, num_samples in zip(audio, paths, audio_lens, strict=False):
        samples = torch.from_numpy(soundfile.read(path, dtype="float32")[0])
        assert len(samples) >= num_samples
        row[:num_samples] = samples[:num_samples]
    return audio, lens


def encoded_exactly(model: NestNetwork, audio: torch.Tensor, lens: torch.Tensor) -> list[torch.Tensor]:
    """The encoder frames of each utterance, computed by PyTorch in float64."""
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        frames, enc_lens = exact.encoder(*exact.features(audio, lens))
    return [row[:num_frames] for row, num_frames in zip(frames, enc_lens.tolist(), strict=True)]


def assert_exact(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Compares with a tolerance of 1e-5 of the largest magnitude; float32 in PyTorch differs by up to 2e-6."""
    assert [len(frames) for frames in found] == [len(frames) for frames in expected]
    difference = torch.cat(found) - torch.cat(expected)
    assert difference.abs().max() < 1e-5 * torch.cat(expected).abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_graph_computes_encoder_frames_of_audio_at_sizes_that_were_not_traced(
    name: str, graphs: Mapping[str, Path]
) -> None:
    session = onnxruntime.InferenceSession(str(graphs[name]), providers=["CPUExecutionProvider"])
    # A frame, less than one more, several encoder frames and one more, and utterances of several lengths.
    for audio_lens in ((160,), (479,), (1280, 1280), (1440, 160), (60000, 1279, 47012, 16000, 33333)):
        audio, lens = speech(*audio_lens)
        found, found_lens = session.run(None, {"audio": audio.numpy(), "audio_lens": lens.numpy()})
        rows = [torch.from_numpy(row[:num_frames]) for row, num_frames in zip(found, found_lens, strict=True)]
        assert_exact(rows, encoded_exactly(with_statistics(NestNetwork(CONFIGS[name])), audio, lens))
        assert found.shape[1] == found_lens.max()


@pytest.mark.parametrize(
    "config",
    [
        FeatureConfig(),
        FeatureConfig(normalize="NA"),
        FeatureConfig(num_mels=31, window_length=320, hop_length=128, preemphasis=0.9, n_fft=400),
        FeatureConfig(window_length=401, n_fft=512),
        FeatureConfig(window_length=400, n_fft=513, preemphasis=0.0),
        FeatureConfig(window_length=512, hop_length=512, n_fft=512),
    ],
)
def test_the_features_of_the_graph_are_as_exact_as_those_of_training(config: FeatureConfig) -> None:
    features = LogMelFeatures(config).eval()
    exact = copy.deepcopy(features).double()
    traced = _TracedFeatures(features)
    audio, lens = speech(60000, 1279, 47012, 16000, 33333)
    padded = F.pad(audio, (traced.in_front, config.window_length))
    found, feat_lens = traced(padded, lens)
    expected, expected_lens = exact(audio, lens)
    assert feat_lens.tolist() == expected_lens.tolist()
    size = int(feat_lens.max())
    errors = [(feats[..., :size] - expected[..., :size]).abs() for feats in (found, features(audio, lens)[0])]
    assert errors[0].mean() < 1.5 * errors[1].mean()
    assert errors[0].max() < 1e-3  # in bins with hardly any energy, where that of training is up to 1e-4


STREAMED = replace(tiny_config(att_context_size=((-1, -1), (6, 2)), **CAUSAL), features=FeatureConfig(normalize="NA"))


@pytest.fixture(scope="module")
def chunk_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(
        with_statistics(NestNetwork(STREAMED)), "onnx-streaming", tmp_path_factory.mktemp("chunk") / "chunk.onnx"
    )


def test_a_graph_of_chunks_gives_the_frames_of_the_whole(chunk_graph: Path) -> None:
    metadata = {prop.key: prop.value for prop in onnx.load(chunk_graph).metadata_props}
    assert NestConfig.from_dict(json.loads(metadata["nest_config"])).encoder.att_context_size == ((6, 2),)
    session = onnxruntime.InferenceSession(str(chunk_graph), providers=["CPUExecutionProvider"])
    shapes = {value.name: value.shape for value in session.get_inputs()}
    size = shapes.pop("audio")[1]
    del shapes["audio_lens"]
    step, in_front = 3 * 8 * 160, 201
    assert size == step - 160 + 401
    lens = torch.arange(step // 7, 2 * step + 200, step // 7)  # places in a chunk at which a stream can end
    num_streams = len(lens)
    audio = speech(3 * step)[0].expand(num_streams, -1)
    padded = F.pad(audio, (in_front, size)).numpy()
    kept = {
        name: np.zeros(
            [num_streams if axis == "batch" else axis for axis in shape],
            np.int64 if name == "cache_len" else np.float32,
        )
        for name, shape in shapes.items()
    }
    parts: list[list[torch.Tensor]] = [[] for _ in lens]
    for start in range(0, 3 * step, step):
        inputs = {"audio": padded[:, start : start + size], "audio_lens": (lens - start).numpy()}
        found = session.run(None, {**inputs, **kept})
        kept = dict(zip(kept, found[2:], strict=True))
        for row, part in enumerate(parts):
            part.append(torch.from_numpy(found[0][row, : found[1][row]]))
    model = with_statistics(NestNetwork(STREAMED))
    model.use_context((6, 2))
    assert_exact([torch.cat(part) for part in parts], encoded_exactly(model, audio, lens))


@pytest.mark.parametrize("kind", ["whole", "chunk"])
def test_the_lines_of_the_card_need_onnxruntime_and_numpy_alone(
    kind: str, graphs: Mapping[str, Path], chunk_graph: Path, tmp_path: Path
) -> None:
    graph, model = (
        (graphs["tiny"], with_statistics(NestNetwork(TINY)))
        if kind == "whole"
        else (chunk_graph, with_statistics(NestNetwork(STREAMED)))
    )
    model.use_context(model.config.encoder.att_context_size[-1])
    (code,) = re.findall(r"```python\n(.*?)```", graph.with_name(f"{graph.name}.md").read_text(), re.DOTALL)
    audio, lens = speech(47012)
    soundfile.write(tmp_path / "talk.wav", audio[0].numpy(), 16000, subtype="FLOAT")
    (tmp_path / graph.name).symlink_to(graph)
    absent = "import sys\nfor name in ('torch', 'nestdata', 'nestmodel', 'onnx'):\n    sys.modules[name] = None\n"
    program = f"{absent}{code}\nnp.save('frames.npy', frames.reshape(-1, frames.shape[-1]))"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
    assert_exact([torch.from_numpy(np.load(tmp_path / "frames.npy"))], encoded_exactly(model, audio, lens))


def test_a_graph_of_chunks_needs_a_causal_subsampling(tmp_path: Path) -> None:
    config = replace(STREAMED, encoder=replace(STREAMED.encoder, causal_downsampling=False))
    with pytest.raises(ConfigError, match="causal_downsampling is off: a chunk of the graph would need frames"):
        export_model(NestNetwork(config), "onnx-streaming", tmp_path / "chunk.onnx")
