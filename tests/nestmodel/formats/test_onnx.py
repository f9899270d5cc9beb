import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch

from nestmodel import ConfigError, FeatureConfig, NestConfig, NestNetwork, export_model
from tests.training import tiny_config

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.slow
TINY = tiny_config()
ONE_LAYER = tiny_config(num_layers=1)  # most of the time goes into tracing layers
CONFIGS = {
    "tiny": TINY,
    "no biases, no scaling, layer norm, by four, checkpoints": replace(
        ONE_LAYER,
        encoder=replace(
            ONE_LAYER.encoder,
            use_bias=False,
            xscaling=False,
            conv_norm="layer_norm",
            subsampling_factor=4,
            checkpoint_activations=True,
        ),
    ),
    "chunks, causal": replace(
        ONE_LAYER,
        encoder=replace(
            ONE_LAYER.encoder,
            att_context_size=((6, 2),),
            att_context_style="chunked_limited",
            conv_context_size="causal",
            causal_downsampling=True,
        ),
    ),
}


def network_of(config: NestConfig) -> NestNetwork:
    """A network in eval mode whose running statistics are not the initial ones."""
    model = NestNetwork(config).eval()
    for value in model.encoder.buffers():
        if value.is_floating_point():
            value += torch.rand(value.shape, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The exported graph of each configuration."""
    directory = tmp_path_factory.mktemp("graphs")
    # While a graph is traced, sizes are symbols, which the annotation checks of the tests reject.
    jaxtyping.config.update("jaxtyping_disable", True)
    for name, config in CONFIGS.items():
        network = network_of(config).train()
        export_model(network, "onnx", directory / f"{name}.onnx")
        assert network.training
    jaxtyping.config.update("jaxtyping_disable", False)
    return {name: directory / f"{name}.onnx" for name in CONFIGS}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_graph_computes_encoder_frames_at_sizes_that_were_not_traced(name: str, graphs: Mapping[str, Path]) -> None:
    model = network_of(CONFIGS[name])
    session = onnxruntime.InferenceSession(str(graphs[name]), providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(2)
    for batch, num_frames in ((2, 96), (1, 48), (5, 333), (1, 1), (3, 8), (1, 9), (1, 1601)):
        feats = torch.randn(batch, 80, num_frames, generator=generator)
        feat_lens = torch.randint(1, num_frames + 1, (batch,), generator=generator)
        feat_lens[0] = num_frames
        with torch.no_grad():
            expected, expected_lens = model.encoder(feats, feat_lens)
        found, found_lens = session.run(None, {"feats": feats.numpy(), "feat_lens": feat_lens.numpy()})
        assert found.shape == expected.shape
        assert found_lens.tolist() == expected_lens.tolist()
        is_valid = torch.arange(expected.shape[1]) < expected_lens.unsqueeze(1)
        assert (torch.from_numpy(found) - expected)[is_valid].abs().max() < 1e-4


STREAMED = replace(
    ONE_LAYER,
    features=FeatureConfig(normalize="NA"),
    encoder=replace(
        ONE_LAYER.encoder,
        num_layers=2,
        att_context_size=((-1, -1), (6, 2)),
        att_context_style="chunked_limited",
        conv_context_size="causal",
        causal_downsampling=True,
    ),
)


def test_a_graph_of_chunks_gives_the_frames_of_the_whole(tmp_path: Path) -> None:
    model = network_of(STREAMED)
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        export_model(model, "onnx-streaming", tmp_path / "chunk.onnx")
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    metadata = {prop.key: prop.value for prop in onnx.load(tmp_path / "chunk.onnx").metadata_props}
    assert NestConfig.from_dict(json.loads(metadata["nest_config"])).encoder.att_context_size == ((6, 2),)
    session = onnxruntime.InferenceSession(str(tmp_path / "chunk.onnx"), providers=["CPUExecutionProvider"])
    shapes = {value.name: value.shape for value in session.get_inputs()}
    size = shapes.pop("feats")[2]
    del shapes["feat_lens"]
    assert size == 3 * 8
    lens = torch.arange(1, 2 * size + 2)  # all places in a chunk at which a stream can end
    num_streams, num_frames = len(lens), 3 * size
    feats = torch.randn(num_streams, 80, num_frames, generator=torch.Generator().manual_seed(3))
    kept = {
        name: np.zeros(
            [num_streams if axis == "batch" else axis for axis in shape],
            np.int64 if name == "cache_len" else np.float32,
        )
        for name, shape in shapes.items()
    }
    parts: list[list[torch.Tensor]] = [[] for _ in lens]
    for start in range(0, num_frames, size):
        chunk_lens = (lens - start).clamp(max=size)
        found = session.run(
            None, {"feats": feats[:, :, start : start + size].numpy(), "feat_lens": chunk_lens.numpy(), **kept}
        )
        kept = dict(zip(kept, found[2:], strict=True))
        for row, part in enumerate(parts):
            part.append(torch.from_numpy(found[0][row, : found[1][row]]))
    with torch.no_grad():
        expected, enc_lens = model.encoder(feats, lens, context=(6, 2))
    for row, part in enumerate(parts):
        torch.testing.assert_close(torch.cat(part), expected[row, : enc_lens[row]], rtol=0.0, atol=1e-4)


def test_a_graph_of_chunks_needs_a_causal_subsampling(tmp_path: Path) -> None:
    config = replace(STREAMED, encoder=replace(STREAMED.encoder, causal_downsampling=False))
    with pytest.raises(ConfigError, match="causal_downsampling is off: a chunk of the graph would need frames"):
        export_model(NestNetwork(config), "onnx-streaming", tmp_path / "chunk.onnx")
