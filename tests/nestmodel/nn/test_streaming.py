"""A stream of audio, cut anywhere, gives the frames of the whole."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nestmodel import ConfigError, ExtractError, FeatureConfig, NestNetwork, StreamingEncoder
from nestmodel.attention_context import Context
from tests.nestmodel.networks import CAUSAL, with_statistics
from tests.training import tiny_config

CONTEXTS = ((6, 2), (2, 0), (0, 1))
FRAME = 1280  # samples of an encoder frame


def noise(size: int) -> Tensor:
    return 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(size))


@cache
def network(normalize: Literal["per_feature", "NA"] = "NA", hop_length: int = 160, **encoder: Any) -> NestNetwork:
    """A network in eval mode whose running statistics are not the initial ones."""
    settings = {**CAUSAL, "att_context_size": CONTEXTS, **encoder}
    features = FeatureConfig(normalize=normalize, hop_length=hop_length)
    return with_statistics(NestNetwork(replace(tiny_config(**settings), features=features)))


def whole(model: NestNetwork, audio: Tensor, context: Context) -> Tensor:
    """The frames of the whole audio, as the encoder gives them for an utterance."""
    with torch.no_grad():
        feats, feat_lens = model.features(audio.unsqueeze(0), torch.tensor([len(audio)]))
        frames, lens = model.encoder(feats, feat_lens, context=context)
    return frames[0, : lens[0]]


def assert_streamed(model: NestNetwork, parts: Sequence[Tensor], context: Context | None = None) -> None:
    """Asserts that a stream of parts gives the frames of the whole."""
    stream = StreamingEncoder(model, context)
    streamed = torch.cat([*map(stream.feed, parts), stream.close()])
    torch.testing.assert_close(streamed, whole(model, torch.cat(parts), stream.context), rtol=0.0, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(1, 40000) | st.integers(1, 700),
    ends=st.lists(st.integers(0, 40000), max_size=12),
    context=st.sampled_from(CONTEXTS),
    conv_norm=st.sampled_from(["batch_norm", "layer_norm"]),
    is_causal=st.booleans(),
    factor=st.sampled_from([4, 8]),
)
def test_the_frames_of_all_parts_are_those_of_the_whole(
    num_samples: int, ends: list[int], context: Context, conv_norm: str, is_causal: bool, factor: int
) -> None:
    model = network(conv_norm=conv_norm, causal_downsampling=is_causal, subsampling_factor=factor)
    parts = noise(num_samples).tensor_split(sorted(min(end, num_samples) for end in ends))
    assert_streamed(model, parts, context)


@pytest.mark.parametrize("hop_length", [100, 400])
def test_feature_frames_may_be_far_apart(hop_length: int) -> None:
    assert_streamed(network(hop_length=hop_length), noise(30000).split(150))


def test_features_are_computed_in_float32_in_mixed_precision() -> None:
    model, audio = network(), noise(20000)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stream = StreamingEncoder(model)
        streamed = torch.cat([stream.feed(audio), stream.close()])
        expected = whole(model, audio, CONTEXTS[0])
    assert streamed.dtype == expected.dtype
    torch.testing.assert_close(streamed, expected, rtol=0.0, atol=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        feats, _ = model.features.extend(audio.unsqueeze(0), model.features.start())
    assert torch.equal(feats, model.features.extend(audio.unsqueeze(0), model.features.start())[0])


def test_a_network_that_was_switched_to_training_is_refused() -> None:
    model = NestNetwork(network().config).eval()
    stream = StreamingEncoder(model)
    model.train()
    with pytest.raises(ExtractError, match=r"The network is in training mode, with dropout: call its method eval\(\)"):
        stream.feed(noise(100))


@pytest.mark.parametrize("context", [(5, 0), (0, 0)])
def test_frames_that_see_none_to_the_right_are_streamed_without_chunks(context: Context) -> None:
    assert_streamed(network(att_context_style="regular", att_context_size=(context,)), noise(30000).split(777), context)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("hop_length", "factor"), [(160, 8), (160, 4), (400, 8)])
def test_a_chunk_is_returned_with_the_last_sample_of_its_delay(
    context: Context, is_causal: bool, hop_length: int, factor: int
) -> None:
    model = network(hop_length=hop_length, causal_downsampling=is_causal, subsampling_factor=factor)
    stream = StreamingEncoder(model, context)
    delay_s = model.config.delay_s(context)
    assert delay_s is not None
    delay, chunk = round(16000 * delay_s), context[1] + 1
    ends = [delay, delay + chunk * factor * hop_length]  # of the first two chunks
    audio = noise(ends[-1])
    heard = 0
    for end in ends:
        assert len(stream.feed(audio[heard : end - 1])) == 0
        assert len(stream.feed(audio[end - 1 : end])) == chunk
        heard = end


def test_what_is_kept_does_not_grow() -> None:
    stream = StreamingEncoder(network())

    def kept() -> int:
        tensors = tree_leaves([value for name, value in vars(stream).items() if name != "_model"])
        return sum(value.untyped_storage().nbytes() for value in tensors if isinstance(value, Tensor))

    audio = noise(3 * FRAME)  # one chunk
    sizes = []
    for _ in range(30):
        stream.feed(audio)
        sizes.append(kept())
    assert len(set(sizes[10:])) == 1
    stream.feed(noise(100 * len(audio)))
    assert kept() <= 2 * sizes[-1]


def test_silence_long_parts_and_streams_without_audio_are_streamed() -> None:
    assert_streamed(network(), [torch.zeros(20000)])
    assert_streamed(network(), [noise(25 * 16000)])
    empty = StreamingEncoder(network())
    assert empty.feed(np.zeros(0, np.float32)).shape == empty.close().shape == (0, network().config.encoder.d_model)


@pytest.mark.parametrize(
    ("audio", "rate", "message"),
    [
        (np.zeros(10, np.int16), None, r"The audio is int16 with the shape \(10,\): give float32"),
        (np.zeros((1, 10), np.float32), None, r"float32 with the shape \(1, 10\)"),
        (np.zeros(10, np.float32), 8000, "The audio has 8000 Hz, and the model 16000 Hz: resample it"),
        (np.array([0.0, np.nan], np.float32)[::-1], 16000, "infinite or not a number; none of it was encoded"),
    ],
)
def test_bad_audio_is_refused_and_the_stream_goes_on(audio: Any, rate: int | None, message: str) -> None:
    good = noise(20000)
    stream = StreamingEncoder(network())
    frames = [stream.feed(good[:7000])]
    with pytest.raises(ExtractError, match=message):
        stream.feed(audio, rate)
    frames += [stream.feed(good[7000:]), stream.close()]
    torch.testing.assert_close(torch.cat(frames), whole(network(), good, CONTEXTS[0]), rtol=0.0, atol=1e-5)
    with pytest.raises(ExtractError, match="The stream is closed"):
        stream.feed(good)


@pytest.mark.parametrize(
    ("normalize", "encoder", "context", "message"),
    [
        ("per_feature", {}, None, "features.normalize is per_feature, which needs the whole utterance"),
        ("NA", {"conv_context_size": None}, None, "conv_context_size makes each block read 4 frames to the right"),
        ("NA", {}, (4, 1), "att_context_size has no 4,1: choose one of 6,2; 2,0; 0,1"),
        ("NA", {"att_context_size": ((-1, 2),)}, None, "cannot be streamed: the left side must be limited"),
        ("NA", {"att_context_style": "regular", "att_context_size": ((4, 1),)}, (4, 1), "right side must be 0"),
    ],
)
def test_encoders_that_need_audio_that_has_not_arrived_are_refused(
    normalize: Any, encoder: dict[str, Any], context: Context | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamingEncoder(network(normalize, **encoder), context)


def test_the_first_context_that_can_be_streamed_is_the_default() -> None:
    model = network(att_context_size=((-1, -1), (4, 1)))
    assert StreamingEncoder(model).context == (4, 1)
