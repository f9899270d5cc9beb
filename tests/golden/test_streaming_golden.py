"""Comparison of limited attention, causal convolutions and features without normalisation with NeMo 3.0.0.

`nemo_streaming.npz` was written by NeMo (`benchmarks/peers/nemo_streaming_golden.py`), in double precision for the
encoder. In double precision, the inputs of ReLUs have the same signs on every CPU, so outputs and gradients differ from
the stored ones by their rounding to single precision (6e-8), and by that of the position encodings, which both sides
compute in single precision. The tolerances, 1e-5 for outputs and 1e-4 for gradients, are relative to the largest
magnitude of the array.
"""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nestmodel import EncoderConfig, FeatureConfig, NestConfig, config_from_nemo
from nestmodel.formats.nemo_config import config_to_nemo
from nestmodel.nn.attention import visible_keys
from nestmodel.nn.backend import TORCH
from nestmodel.nn.encoder import ConformerEncoder
from nestmodel.nn.features import LogMelFeatures
from tests.kernel_definitions import code_for_gpus

OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
NUM_GRADIENTS = 32
CASES = (
    "layer_norm/0",
    "regular/0",
    "regular_left_only/0",
    "chunked/0",
    "causal/0",
    "causal_layer_norm/0",
    "conv_context/0",
    "causal_downsampling/0",
    "two_contexts/0",
    "two_contexts/1",
)
"""Variants of NeMo's encoder, each with the number of an attention context."""


@pytest.fixture(scope="module")
def golden() -> Mapping[str, Any]:
    with np.load(Path(__file__).parent / "nemo_streaming.npz") as arrays:
        return dict(arrays)


def config_of(golden: Mapping[str, Any], case: str) -> EncoderConfig:
    """Translates the arguments of NeMo's encoder."""
    base = NestConfig(encoder=EncoderConfig(d_model=16, num_heads=2, num_layers=2), features=FeatureConfig(num_mels=20))
    encoder = json.loads(str(golden["variants"]))[case.split("/")[0]]
    section = config_to_nemo(base) | {"encoder": encoder}
    section["decoder"]["feat_in"] = section["optim"]["sched"]["d_model"] = 16
    return config_from_nemo(section).encoder


def encoder_of(golden: Mapping[str, Any], case: str) -> ConformerEncoder:
    encoder = ConformerEncoder(config_of(golden, case), num_mels=20)
    state = {
        name: torch.from_numpy(golden[f"state/{name}/{'x'.join(map(str, value.shape))}"])
        for name, value in encoder.state_dict().items()
        if value.is_floating_point()
    }
    missing = encoder.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in missing.missing_keys)
    return encoder


def encode(encoder: ConformerEncoder, golden: Mapping[str, Any], case: str) -> Tensor:
    """Returns the encoder frames in the type of the encoder; checks the lengths."""
    dtype = encoder.pre_encode.out.weight.dtype
    context = encoder.config.att_context_size[int(case.split("/")[1])]
    feats, feat_lens = torch.from_numpy(golden["feats"]).to(dtype), torch.from_numpy(golden["feat_lens"])
    frames, enc_lens = encoder(feats, feat_lens, None, context)
    assert enc_lens.tolist() == golden[f"{case}/enc_lens"].tolist()
    return frames


def is_valid(golden: Mapping[str, Any], case: str) -> Tensor:
    num_frames = golden[f"{case}/eval"].shape[1]
    return torch.arange(num_frames) < torch.from_numpy(golden[f"{case}/enc_lens"]).unsqueeze(1)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours.detach() - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_valid_encoder_frames_are_equal(golden: Mapping[str, Any], case: str, mode: str, dtype: torch.dtype) -> None:
    encoder = encoder_of(golden, case).to(dtype).train(mode == "train")
    valid, theirs = is_valid(golden, case), torch.from_numpy(golden[f"{case}/{mode}"])
    with torch.no_grad():  # in eval mode, this takes torch's fused attention
        assert relative_error(encode(encoder, golden, case)[valid], theirs[valid]) < OUTPUT_TOLERANCE


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gpu", [False, True], ids=["code for a CPU", "code for a GPU"])
def test_gradients_are_equal(golden: Mapping[str, Any], case: str, gpu: bool) -> None:
    encoder = encoder_of(golden, case).double().train()
    encoder.pre_encode.backend = TORCH
    with code_for_gpus() if gpu else nullcontext():
        frames, valid = encode(encoder, golden, case), is_valid(golden, case)
        factors = torch.from_numpy(golden["factors"])[:, : frames.shape[1]]
        (frames * factors * valid.unsqueeze(2)).sum().backward()
    ours = dict(encoder.named_parameters())
    assert sorted(ours) == golden[f"{case}/names"].tolist()
    kept, largest = golden[f"{case}/gradients"], golden[f"{case}/largest"]
    zero_gradients = ("linear_k.bias",)  # zero in exact arithmetic, as is that of a bias in front of batch norm
    if encoder.config.conv_norm == "batch_norm":
        zero_gradients += ("depthwise_conv.bias",)
    start = 0
    for name, magnitude in zip(sorted(ours), largest, strict=True):
        gradient = ours[name].grad
        assert gradient is not None
        rows = np.linspace(0, gradient.numel() - 1, min(gradient.numel(), NUM_GRADIENTS)).astype(int)
        theirs = torch.from_numpy(kept[start : start + len(rows)])
        start += len(rows)
        if name.endswith(zero_gradients):
            assert gradient.abs().max() < 1e-10 * largest.max(), name
        else:
            assert gradient.abs().max() == pytest.approx(magnitude, rel=GRADIENT_TOLERANCE), name
            difference = (gradient.flatten()[rows] - theirs).abs().max()
            assert difference < GRADIENT_TOLERANCE * magnitude, name
    assert start == len(kept)


@pytest.mark.parametrize("case", CASES)
def test_visible_keys_are_equal(golden: Mapping[str, Any], case: str) -> None:
    config, expected = config_of(golden, case), golden[f"{case}/visible"]
    context = config.att_context_size[int(case.split("/")[1])]
    found = visible_keys(len(expected), context, config.att_context_style)
    assert np.array_equal(found.numpy(), expected)


def test_features_without_normalisation_are_equal(golden: Mapping[str, Any]) -> None:
    config = FeatureConfig(num_mels=20, normalize="NA", dither=0.0)
    audio = torch.from_numpy(golden["audio"].astype(np.float32) / 32768)
    feats, feat_lens = LogMelFeatures(config).eval()(audio, torch.from_numpy(golden["audio_lens"]))
    theirs = torch.from_numpy(golden["na_feats"])
    assert feat_lens.tolist() == golden["na_feat_lens"].tolist()
    assert feats.shape == theirs.shape
    # Logarithms of energies, so the error is absolute; rounding is that of `test_golden.py`.
    assert (feats - theirs).abs().max() < 2e-4
    normalised, _ = LogMelFeatures(replace(config, normalize="per_feature")).eval()(
        audio, torch.from_numpy(golden["audio_lens"])
    )
    assert (normalised - theirs).abs().max() > 1.0
