from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestmodel import ConfigError, FeatureConfig, NestConfig
from nestmodel.attention_context import Style, context_name, draw_context, look_ahead, parse_context
from tests.training import tiny_config

CONTEXTS = ((6, 2), (-1, 0), (-1, -1))
LAST_SEED = 2**63 - 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"att_context_size": ()}, r"att_context_size is \(\): expected one or more pairs"),
        ({"att_context_size": ((-2, 2),)}, r"att_context_size is \(\(-2, 2\),\): expected one or more pairs"),
        ({"att_context_style": "chunked_limited"}, r"att_context_size is .*: expected limited right contexts"),
        (
            {"att_context_size": ((6, 2), (7, 2)), "att_context_style": "chunked_limited"},
            r"a left context that is a multiple of the chunk of right \+ 1 = 3 frames, not 7",
        ),
        ({"att_context_size": ((8, 2), (8, 1)), "att_context_probs": (0.5, 0.4)}, "with the sum 1"),
        ({"att_context_size": ((8, 2), (8, 1)), "att_context_probs": (1.5, -0.5)}, "expected one probability"),
        ({"conv_context_size": (5, 2)}, r"conv_context_size is \(5, 2\): expected causal, null, or"),
    ],
)
def test_invalid_contexts_are_rejected_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^encoder\..*{message}"):
        tiny_config(**settings)


@pytest.mark.parametrize(("size", "expected"), [(None, (4, 4)), ("causal", (8, 0)), ((5, 3), (5, 3)), ((0, 8), (0, 8))])
def test_the_convolution_reads_kernel_size_minus_one_other_frames(size: object, expected: tuple[int, int]) -> None:
    assert tiny_config(conv_context_size=size).encoder.conv_context == expected


def test_the_drawn_context_follows_the_bits_of_the_seed() -> None:
    probs = (0.25, 0.5, 0.25)
    limits = [(0, 0), (2**61 - 1, 0), (2**61, 1), (3 * 2**61 - 1, 1), (3 * 2**61, 2), (LAST_SEED, 2)]
    for seed, expected in limits:
        assert draw_context(CONTEXTS, probs, seed) == CONTEXTS[expected]
    assert draw_context(CONTEXTS, None, 2**63 // 3) == CONTEXTS[0]
    assert draw_context(CONTEXTS, None, 2**63 // 3 + 2**11) == CONTEXTS[1]


@given(seed=st.integers(0, LAST_SEED), zero=st.integers(0, 2))
def test_a_context_of_probability_zero_is_never_drawn(seed: int, zero: int) -> None:
    probs = tuple(0.0 if place == zero else 0.5 for place in range(3))
    drawn = draw_context(CONTEXTS, probs, seed)
    assert drawn == draw_context(CONTEXTS, probs, seed)
    assert drawn in CONTEXTS
    assert drawn != CONTEXTS[zero]


def test_a_context_is_parsed_and_named() -> None:
    assert parse_context("70,13") == (70, 13)
    assert parse_context("-1,-1") == (-1, -1)
    for text in ("70", "70,13,1", "a,b", ""):
        with pytest.raises(ConfigError, match="give two numbers of encoder frames, such as 70,13"):
            parse_context(text)
    names = [context_name(context) for context in ((70, 13), (-1, 13), (-1, -1))]
    assert names == ["70_13", "all_13", "full"]


@pytest.mark.parametrize(
    ("context", "style", "conv_right", "frames"),
    [
        ((70, 13), "regular", 0, 24 * 13),
        ((70, 13), "chunked_limited", 0, 13),
        ((70, 0), "regular", 4, 24 * 4),
        ((6, 2), "chunked_limited", 4, 2 + 23 * 6 + 4),
        ((-1, -1), "chunked_limited", 0, None),
        ((4, -1), "regular", 0, None),
    ],
)
def test_the_look_ahead_adds_up_over_blocks_unless_there_are_chunks(
    context: tuple[int, int], style: Style, conv_right: int, frames: int | None
) -> None:
    assert look_ahead(context, style, num_layers=24, conv_right=conv_right) == frames


def live(config: NestConfig) -> NestConfig:
    return replace(config, features=FeatureConfig(normalize="NA"))


def test_the_look_ahead_in_seconds_contains_subsampling_and_window() -> None:
    contexts = {"att_context_size": ((70, 13), (70, 0), (-1, -1)), "att_context_style": "chunked_limited"}
    causal = live(tiny_config(**contexts, conv_context_size="causal", causal_downsampling=True))
    assert causal.look_ahead_s() == 13 * 0.08 + 0.0125
    assert causal.look_ahead_s((70, 0)) == 0.0125
    assert causal.look_ahead_s((-1, -1)) is None
    assert (
        causal.describe_contexts()
        == "70,13: 1.05 s, delay 1.06 s; 70,0: 0.0125 s, delay 0.016 s; -1,-1: the whole utterance"
    )
    centred = live(tiny_config(**contexts, conv_context_size="causal"))
    assert centred.look_ahead_s((70, 0)) == pytest.approx(0.07 + 0.0125)
    normalised = replace(causal, features=FeatureConfig())
    assert normalised.look_ahead_s((70, 0)) is None


def test_the_delay_contains_a_half_of_the_fourier_transform_and_seven_frames_of_a_centred_subsampling() -> None:
    config = NestConfig.preset("small", "unified")
    delays = [config.delay_s(context) for context in config.encoder.att_context_size]
    assert delays == [None, 1.056, 0.496, 0.096, 0.016]
    assert config.delay_s() is None
    centred = replace(config, encoder=replace(config.encoder, causal_downsampling=False))
    assert centred.delay_s((70, 6)) == pytest.approx(0.496 + 0.07)
    wide = replace(config, features=replace(config.features, n_fft=1024))
    assert wide.delay_s((70, 0)) == 0.032
    rare = replace(config, features=replace(config.features, hop_length=320))  # a frame of 320 samples needs them all
    assert rare.delay_s((70, 0)) == 0.02
    assert config.look_ahead_s((70, 0)) == 0.0125  # the window is shorter than the transform


@pytest.mark.parametrize("name", ["streaming", "unified"])
def test_presets_for_live_speech_are_given_after_a_size(name: str) -> None:
    small, streaming = NestConfig.preset("small"), NestConfig.preset("small", name)
    assert streaming.encoder.d_model == small.encoder.d_model
    assert streaming.optimizer == small.optimizer
    assert streaming.features.normalize == "NA"
    *others, last = (streaming.look_ahead_s(context) for context in streaming.encoder.att_context_size)
    assert last == 0.0125
    assert (others[0] is None) == (name == "unified")
    with pytest.raises(ConfigError, match=r"model\.config\.encoder is incomplete: .*d_model"):
        NestConfig.preset(name)
